"""How long a call takes, against plain transformers code and a cross-encoder of the same size.

    python -m benchmarks.latency --size mini
    python -m benchmarks.latency --size qwen3-0.6b --documents 10 --turns 3
    python -m benchmarks.latency --size qwen3-8b --weights int8 --json h200.json  # a CUDA GPU
    python -m benchmarks.latency --size qwen3-8b --paper  # the paper's table

"warm 84%" finds the prefixes of 84% of the documents. All systems take turns in random order in one
process; times are medians, ratios medians over turns. Weights of the Qwen3 sizes are random: time
and memory only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rsrank_rag import RSRank
from rsrank_rag.backends.torch.attention import NAME
from rsrank_rag.method.batches import Batches, Ids

from .timing import Measured, System, machine, matmul_ceiling, measure
from .workload import (
    QUERY,
    SIZES,
    WEIGHTS,
    Plain,
    SameSizeCrossEncoder,
    by_hidden_states,
    by_hooks,
    keep_share,
    load,
    passages,
    question,
)

BASE, OURS = "plain, hidden states", "ours, cold"


def systems(ranker: RSRank, query: str, documents: list[str], keep: int) -> list[System]:
    """Everything that is compared on one set of documents."""
    model, core = ranker.backbone.model, ranker.backbone
    tokens = max(len(p.ids) for p in ranker.prompts.documents(documents, 0)) + len(
        ranker.prompts.query(query).ids
    )
    rows = max(1, ranker.token_budget // tokens)  # as many padded tokens at once as ours
    kept = RSRank(core, ranker.prompts, ranker.projection, ranker.config, cache_size=keep)
    own = model.config.get_text_config()._attn_implementation

    def attend(name: str) -> Callable[[], None]:
        """The plain systems get transformers' own attention."""

        def prepare() -> None:
            if own == NAME:
                model.set_attn_implementation(name)

        return prepare

    def warm(share: float) -> Callable[[], None]:
        def prepare() -> None:
            attend(own)()
            keep_share(kept, documents, share, query)

        return prepare

    found = [
        System(
            BASE,
            lambda: Plain(ranker, by_hidden_states(ranker), rows).score(query, documents),
            attend("sdpa"),
        ),
        System(
            "plain, hooks",
            lambda: Plain(ranker, by_hooks(ranker), rows).score(query, documents),
            attend("sdpa"),
        ),
        System(OURS, lambda: ranker.score(query, documents), attend(own)),
        *[
            System(f"ours, warm {share:.0%}", lambda: kept.score(query, documents), warm(share))
            for share in (0.5, 0.84, 1.0)
        ],
    ]
    if ranker.backbone.bits == 16:
        cross = SameSizeCrossEncoder(ranker)
        found.append(System("CrossEncoder", lambda: cross.score(query, documents), attend("sdpa")))
    return found


def largest_difference(ranker: RSRank, query: str, documents: list[str]) -> float:
    """Between our scores and the plain code's."""
    ours = ranker.score(query, documents)
    plain = Plain(ranker, by_hooks(ranker), 8).score(query, documents)
    return max(abs(a - b) for a, b in zip(ours, plain, strict=True))


def compare(ranker: RSRank, options: argparse.Namespace, ceiling: float) -> list[dict[str, Any]]:
    """All systems at every number of documents and length."""
    cells = [(count, words, 0.0) for count in options.documents for words in options.words]
    cells.append(
        (max(options.documents), max(options.words) // 2, 0.95)
    )  # lengths from almost nothing to twice that
    records = []
    for count, words, spread in cells:
        documents = passages(count, words, spread)
        prefixes = [p.ids for p in ranker.prompts.documents(documents, 0)]
        length = (
            f"{words}" if not spread else f"{words * (1 - spread):.0f}-{words * (1 + spread):.0f}"
        )
        tokens = sum(map(len, prefixes)) + count * len(ranker.prompts.query(QUERY).ids)
        print(f"\n{count} documents of {length} words, {tokens:,} tokens")
        found = measure(systems(ranker, QUERY, documents, options.keep), options.turns)
        base = next(m for m in found if m.name == BASE)
        cold = next(m for m in found if m.name == OURS)
        print(
            f"{'':24}{'time':>11}{'x plain':>9}{'x cold':>8}{'tokens/s':>12}"
            f"{'TFLOP':>9}{'of ceiling':>12}{'peak':>10}"
        )
        for m in found:
            print(row(m, base, cold, tokens, ceiling))
            records.append(
                {
                    "documents": count,
                    "words": length,
                    "tokens": tokens,
                    "system": m.name,
                    "seconds": m.median,
                    "faster_than_plain": m.times_faster_than(base),
                    "faster_than_cold": m.times_faster_than(cold),
                    "flops": m.flops,
                    "peak_bytes": m.peak,
                }
            )
    return records


def row(m: Measured, base: Measured, cold: Measured, tokens: int, ceiling: float) -> str:
    """One system's line."""
    return (
        f"{m.name:24}{m.median * 1e3:9.1f}ms{m.times_faster_than(base):9.2f}"
        f"{m.times_faster_than(cold):8.2f}{tokens / m.median:12,.0f}{m.flops / 1e12:9.3f}"
        f"{m.flops / m.median / ceiling:12.0%}{m.peak / 1e6:8.0f}MB"
    )


def paper_table(ranker: RSRank, turns: int) -> list[dict[str, Any]]:
    """The paper's table of inference cost: 100 documents; 229 tokens, 82 of them the query's."""
    template = len(ranker.prompts.null_prefix)
    query, documents = question(82), passages(100, 229 - 82 - template)
    tokens = ranker.prompts.query(query)
    prefixes = [p.ids for p in ranker.prompts.documents(documents, len(tokens.ids))]
    core, count = ranker.backbone, len(tokens.ids)

    @torch.inference_mode()
    def forward(alone: bool) -> None:
        """The passes through the language model, whose values nobody reads."""

        def batch(ids: list[Ids]) -> None:
            core.query_values([tokens.ids], core.prefill(ids, count), lambda layer, value: None)

        if alone:
            batch([ranker.prompts.null_prefix])
        batches = Batches(prefixes, ranker.token_budget, extra=count)
        for some in batches:
            with batches.attempt():
                batch(some)

    kept = RSRank(core, ranker.prompts, ranker.projection, ranker.config, cache_size=10**11)
    found = measure(
        [
            System("100 forwards", lambda: forward(alone=False)),
            System("101 forwards", lambda: forward(alone=True)),
            System("101 forwards + scoring", lambda: ranker.score(query, documents)),
            System("the same, documents kept", lambda: kept.score(query, documents)),
        ],
        turns,
    )
    print(f"\n100 documents, {len(prefixes[0]) + count} tokens each, {count} of them the query's")
    for m in found:
        print(
            f"{m.name:28}{m.median * 1e3:10.1f} ms"
            f"{100 * found[0].times_faster_than(m) - 100:+9.2f} %"
        )
    return [
        {"stage": m.name, "seconds": m.median, "relative": found[0].times_faster_than(m)}
        for m in found
    ]


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="mini")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--weights", choices=WEIGHTS, default="bf16", help="bf16: in --dtype")
    parser.add_argument(
        "--layers", type=int, help="fewer layers of a random model, to try things out"
    )
    parser.add_argument("--toy", action="store_true", help="a tiny random model, likewise")
    parser.add_argument("--documents", type=int, nargs="+", default=[10, 50, 100])
    parser.add_argument("--words", type=int, nargs="+", default=[50, 100, 200])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--keep", type=int, default=4 * 10**9, help="bytes for prefixes")
    parser.add_argument("--paper", action="store_true", help="only the paper's table")
    parser.add_argument("--json", help="file to write the figures to")
    options = parser.parse_args(arguments)
    ranker = load(
        options.size,
        **{
            name: getattr(options, name) for name in ("device", "dtype", "weights", "layers", "toy")
        },
    )
    core = ranker.backbone
    ceiling = matmul_ceiling(core.device, core.dtype)
    kept = "" if options.weights == "bf16" else f"weights in {options.weights}, "
    head = f"{options.size}, {kept}{core.dtype}; {machine()}; {ceiling / 1e12:.2f} TFLOP/s"
    print(f"{head} in a large matrix product")
    print(
        "largest difference from the plain code's scores: "
        f"{largest_difference(ranker, QUERY, passages(8, 60)):.1e}"
    )
    records = (
        paper_table(ranker, options.turns) if options.paper else compare(ranker, options, ceiling)
    )
    if options.json:
        Path(options.json).write_text(
            json.dumps({"machine": head, "rows": records}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
