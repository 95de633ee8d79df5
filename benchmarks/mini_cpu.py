"""How long `mini` takes: loading, and 50 passages of 100 words, against plain transformers code.

    python benchmarks/mini_cpu.py

The plain code runs `document + query` in one pass, in input order, sixteen rows a batch, through all layers, and
reads the value vectors with hooks: the same scores for more work. "Warm" finds the passages' prefixes in memory, as a
second question does. Ratios are taken pair by pair in one process, so that they hold on a noisy machine; absolute times
are medians.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch

from rsrank_rag import RSRank
from rsrank_rag.shift import representational_shift

WORDS = """
river stone early market signal window quiet number garden engine letter summer copper valley reason method island
paper winter harbour doctor bridge season colour forest answer people travel yellow morning
""".split()  # noqa: SIM905 - words read better as words
QUERY = "Which harbour did the early copper market use in winter?"


def passages(count: int, words: int) -> list[str]:
    """Made-up passages of about ``words`` words, the lengths within a third of it."""
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randint(words * 2 // 3, words * 4 // 3))) for _ in range(count)]


@torch.inference_mode()
def plain_scores(ranker: RSRank, query: str, documents: list[str], rows: int = 16) -> list[float]:
    """The score by one full pass per batch and hooks on the value projections (an encoder with a block mask)."""
    model, prompts = ranker.backbone.model, ranker.prompts
    tokens = prompts.query(query)
    prefixes = [document.ids for document in prompts.documents(documents, len(tokens.ids))]
    alone = _values(model, [prompts.null_prefix], tokens.ids)
    scores: list[float] = []
    for start in range(0, len(prefixes), rows):
        values = _values(model, prefixes[start : start + rows], tokens.ids)
        total = torch.zeros(len(prefixes[start : start + rows]))
        for layer in ranker.projection.layers:
            shift = representational_shift(values[layer][:, :, tokens.scored], alone[layer][:, :, tokens.scored])
            total += ranker.projection.cosines(layer, shift).mean(-1).sum(-1)
        scores += total.tolist()
    return scores


def _values(model: torch.nn.Module, prefixes: list[tuple[int, ...]], query: tuple[int, ...]) -> list[torch.Tensor]:
    """Value vectors of the query's tokens in every layer, (N, H, T, D)."""
    width, count = max(map(len, prefixes)), len(query)
    ids = torch.tensor([[*p, *[0] * (width - len(p)), *query] for p in prefixes])
    positions = torch.tensor([[*range(width), *range(count)]] * len(prefixes))
    valid = torch.tensor([[True] * len(p) + [False] * (width - len(p)) + [True] * count for p in prefixes])
    allowed = valid[:, None].repeat(1, width + count, 1)
    allowed[:, :width, width:] = False
    found: list[torch.Tensor] = []
    projections = [layer.attention.self.value for layer in model.encoder.layer]
    hooks = [p.register_forward_hook(lambda _m, _i, out: found.append(out[:, width:])) for p in projections]
    try:
        model(input_ids=ids, attention_mask=allowed[:, None], position_ids=positions)
    finally:
        for hook in hooks:
            hook.remove()
    heads = model.config.num_attention_heads
    return [value.unflatten(-1, (heads, -1)).transpose(1, 2) for value in found]


def paired(ours: Callable[[], object], plain: Callable[[], object], runs: int) -> tuple[float, float, float]:
    """Median seconds of both, and the median of their ratio pair by pair."""
    times = []
    for _ in range(runs + 1):
        row = []
        for action in (ours, plain):
            start = time.perf_counter()
            action()
            row.append(time.perf_counter() - start)
        times.append(row)
    times = times[1:]  # the first pair warms up
    return (
        statistics.median(a for a, _ in times),
        statistics.median(b for _, b in times),
        statistics.median(b / a for a, b in times),
    )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--passages", type=int, default=50)
    parser.add_argument("--words", type=int, default=100)
    options = parser.parse_args()
    documents = passages(options.passages, options.words)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for dtype in ("float32", "bfloat16"):
        start = time.perf_counter()
        ranker = RSRank.from_pretrained("mini", device="cpu", dtype=dtype, prefix_cache=False)
        loaded = time.perf_counter() - start
        tokens = sum(len(p.ids) for p in ranker.prompts.documents(documents, 0))
        difference = max(
            abs(a - b)
            for a, b in zip(ranker.score(QUERY, documents), plain_scores(ranker, QUERY, documents), strict=True)
        )
        ours, plain, ratio = paired(
            lambda ranker=ranker: ranker.score(QUERY, documents),
            lambda ranker=ranker: plain_scores(ranker, QUERY, documents),
            options.runs,
        )
        print(
            f"{dtype}: load {loaded:.2f} s; {len(documents)} passages, {tokens} tokens: ours {ours:.2f} s, "
            f"plain {plain:.2f} s, ratio {ratio:.2f}; largest score difference {difference:.1e}"
        )
        parts = (ranker.backbone, ranker.prompts, ranker.projection, ranker.config)
        kept = RSRank(*parts, prefix_cache="2GB")
        expected = kept.score(QUERY, documents)
        difference = max(abs(a - b) for a, b in zip(kept.score(QUERY, documents), expected, strict=True))
        warm, cold, ratio = paired(
            lambda kept=kept: kept.score(QUERY, documents),
            lambda ranker=ranker: ranker.score(QUERY, documents),
            options.runs,
        )
        print(
            f"{dtype}: warm {warm:.3f} s, cold {cold:.2f} s, ratio {ratio:.1f}; largest score difference "
            f"{difference:.1e}; {kept.stats()['device_bytes'] / 1e6:.0f} MB kept"
        )


if __name__ == "__main__":
    main()
