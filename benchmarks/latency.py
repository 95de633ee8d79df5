"""How long a call takes, against plain transformers code and a cross-encoder of the same size.

    python -m benchmarks.latency --size mini
    python -m benchmarks.latency --size qwen3-0.6b --documents 10 --turns 3
    python -m benchmarks.latency --size qwen3-8b --weights int8 --json h200.json  # a CUDA GPU
    python -m benchmarks.latency --size qwen3-8b --paper  # the paper's table

"warm 84%" means that the prefixes of 84% of the documents are cached. All systems take turns in
random order in one process. Times are medians. Ratios are medians over turns. The Qwen3 sizes have
random weights, so only their time and memory mean something.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rsrank_rag import RSRank
from rsrank_rag.backends.options import ModelSource
from rsrank_rag.backends.torch.attention import NAME
from rsrank_rag.method.batches import Batches, Ids
from rsrank_rag.method.prefix import Prefixes

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

BASE = "plain, hidden states"
OURS = "ours, cold"

Score = Callable[[str, Sequence[str]], object]


def systems(ranker: RSRank, query: str, documents: list[str], keep: int) -> list[System]:
    """The systems that are compared on one set of documents.

    Args:
        ranker: The reranker, without a prefix cache.
        query: The query of all calls.
        documents: The documents of all calls.
        keep: Bytes of the prefix cache of the warm systems.
    """
    core = ranker.backbone
    model = core.model
    longest = max(len(document.ids) for document in ranker.prompts.documents(documents, 0))
    tokens = longest + len(ranker.prompts.query(query).ids)
    # The plain code gets as many padded tokens at once as the package.
    rows = max(1, ranker.token_budget // tokens)
    cached = RSRank(
        core, ranker.prompts, ranker.projection, ranker.config, ModelSource(cache_size=keep)
    )
    own = model.config.get_text_config()._attn_implementation
    hidden_states = Plain(ranker, by_hidden_states(ranker), rows)
    hooks = Plain(ranker, by_hooks(ranker), rows)

    def attend(name: str) -> Callable[[], None]:
        """The plain systems get transformers' own attention."""

        def prepare() -> None:
            if own == NAME:
                model.set_attn_implementation(name)

        return prepare

    def warm(share: float) -> Callable[[], None]:
        def prepare() -> None:
            attend(own)()
            keep_share(cached, documents, share, query)

        return prepare

    def system(name: str, score: Score, prepare: Callable[[], None]) -> System:
        return System(name, lambda: score(query, documents), prepare)

    compared = [
        system(BASE, hidden_states.score, attend("sdpa")),
        system("plain, hooks", hooks.score, attend("sdpa")),
        system(OURS, ranker.score, attend(own)),
    ]
    for share in (0.5, 0.84, 1.0):
        compared.append(system(f"ours, warm {share:.0%}", cached.score, warm(share)))
    if core.bits == 16:
        cross_encoder = SameSizeCrossEncoder(ranker)
        compared.append(system("CrossEncoder", cross_encoder.score, attend("sdpa")))
    return compared


def largest_difference(ranker: RSRank, query: str, documents: list[str]) -> float:
    """Between scores of the package and of the plain code."""
    ours = ranker.score(query, documents)
    plain = Plain(ranker, by_hooks(ranker), 8).score(query, documents)
    return max(abs(a - b) for a, b in zip(ours, plain, strict=True))


def compare(ranker: RSRank, options: argparse.Namespace, ceiling: float) -> list[dict[str, Any]]:
    """All systems at every number of documents and length."""
    cells = list(itertools.product(options.documents, options.words, [0.0]))
    # The last cell has lengths from almost nothing to twice the mean.
    cells.append((max(options.documents), max(options.words) // 2, 0.95))
    records = []
    for count, words, spread in cells:
        documents = passages(count, words, spread)
        tokens = count * len(ranker.prompts.query(QUERY).ids)
        for document in ranker.prompts.documents(documents, 0):
            tokens += len(document.ids)
        length = f"{words}"
        if spread:
            length = f"{words * (1 - spread):.0f}-{words * (1 + spread):.0f}"
        print(f"\n{count} documents of {length} words, {tokens:,} tokens")
        results = measure(systems(ranker, QUERY, documents, options.keep), options.turns)
        by_name = {result.name: result for result in results}
        base = by_name[BASE]
        cold = by_name[OURS]
        print(
            f"{'':24}{'time':>11}{'x plain':>9}{'x cold':>8}{'tokens/s':>12}"
            f"{'TFLOP':>9}{'of ceiling':>12}{'peak':>10}"
        )
        for result in results:
            print(line(result, base, cold, tokens, ceiling))
            records.append(
                {
                    "documents": count,
                    "words": length,
                    "tokens": tokens,
                    "system": result.name,
                    "seconds": result.median,
                    "faster_than_plain": result.times_faster_than(base),
                    "faster_than_cold": result.times_faster_than(cold),
                    "flops": result.flops,
                    "peak_bytes": result.peak,
                }
            )
    return records


def line(result: Measured, base: Measured, cold: Measured, tokens: int, ceiling: float) -> str:
    """One system's line."""
    rate = result.flops / result.median
    return (
        f"{result.name:24}{result.median * 1e3:9.1f}ms{result.times_faster_than(base):9.2f}"
        f"{result.times_faster_than(cold):8.2f}{tokens / result.median:12,.0f}"
        f"{result.flops / 1e12:9.3f}{rate / ceiling:12.0%}{result.peak / 1e6:8.0f}MB"
    )


def paper_table(ranker: RSRank, turns: int) -> list[dict[str, Any]]:
    """The paper's table of inference cost: 100 documents; 229 tokens, 82 of them the query's."""
    template = len(ranker.prompts.null_prefix)
    query = question(82)
    documents = passages(100, 229 - 82 - template)
    tokens = ranker.prompts.query(query)
    count = len(tokens.ids)
    prefixes = [document.ids for document in ranker.prompts.documents(documents, count)]
    core = ranker.backbone

    @torch.inference_mode()
    def forward(alone: bool) -> None:
        """The passes through the language model, whose values nobody reads."""

        def batch(ids: list[Ids]) -> None:
            joined = Prefixes.join(core.prefill(ids), count)
            core.query_values([tokens.ids], joined, lambda layer, value: None)

        if alone:
            batch([ranker.prompts.null_prefix])
        batches = Batches(prefixes, ranker.token_budget, extra=count)
        for ids in batches:
            with batches.attempt():
                batch(ids)

    cached = RSRank(
        core, ranker.prompts, ranker.projection, ranker.config, ModelSource(cache_size=10**11)
    )
    results = measure(
        [
            System("100 forwards", lambda: forward(alone=False)),
            System("101 forwards", lambda: forward(alone=True)),
            System("101 forwards + scoring", lambda: ranker.score(query, documents)),
            System("the same, documents kept", lambda: cached.score(query, documents)),
        ],
        turns,
    )
    print(f"\n100 documents, {len(prefixes[0]) + count} tokens each, {count} of them the query's")
    records = []
    for result in results:
        relative = results[0].times_faster_than(result)
        print(f"{result.name:28}{result.median * 1e3:10.1f} ms{100 * relative - 100:+9.2f} %")
        records.append({"stage": result.name, "seconds": result.median, "relative": relative})
    return records


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write JSON if `--json` names a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", choices=SIZES, default="mini")
    add("--device")
    add("--dtype")
    add("--weights", choices=WEIGHTS, default="bf16", help="bf16: in --dtype")
    add("--layers", type=int, help="fewer layers of a random model, to try things out")
    add("--toy", action="store_true", help="a tiny random model, likewise")
    add("--documents", type=int, nargs="+", default=[10, 50, 100])
    add("--words", type=int, nargs="+", default=[50, 100, 200])
    add("--turns", type=int, default=5)
    add("--keep", type=int, default=4 * 10**9, help="bytes for prefixes")
    add("--paper", action="store_true", help="only the paper's table")
    add("--json", help="file to write the figures to")
    options = parser.parse_args(arguments)
    ranker = load(
        options.size,
        device=options.device,
        dtype=options.dtype,
        weights=options.weights,
        layers=options.layers,
        toy=options.toy,
    )
    core = ranker.backbone
    ceiling = matmul_ceiling(core.device, core.dtype)
    weights = "" if options.weights == "bf16" else f"weights in {options.weights}, "
    head = f"{options.size}, {weights}{core.dtype}; {machine()}; {ceiling / 1e12:.2f} TFLOP/s"
    print(f"{head} in a large matrix product")
    difference = largest_difference(ranker, QUERY, passages(8, 60))
    print(f"largest difference from the plain code's scores: {difference:.1e}")
    if options.paper:
        records = paper_table(ranker, options.turns)
    else:
        records = compare(ranker, options, ceiling)
    if options.json:
        text = json.dumps({"machine": head, "rows": records}, indent=1) + "\n"
        Path(options.json).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
