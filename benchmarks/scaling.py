"""Time by documents, their length, batch and threads; without and with cached prefixes.

    python -m benchmarks.scaling --size mini --chart research/docs/images/scaling.png
    python -m benchmarks.scaling --size qwen3-0.6b --layers 7 --documents 4 8 16

One thing varies at a time, the others stay at their middle value. All points of a sweep take turns
in random order.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rsrank_rag import RSRank

from .timing import System, machine, measure
from .workload import QUERY, SIZES, WEIGHTS, load, passages

Sweep = dict[str, list[dict[str, Any]]]


def point(
    ranker: RSRank, kept: RSRank, value: int, documents: list[str], prepare: Callable[[], object]
) -> list[System]:
    """One value of a sweep, cold and warm."""

    def warm() -> None:
        prepare()
        kept.score(QUERY, documents)

    return [
        System(f"{value} cold", lambda: ranker.score(QUERY, documents), prepare),
        System(f"{value} warm", lambda: kept.score(QUERY, documents), warm),
    ]


def sweep(ranker: RSRank, options: argparse.Namespace) -> Sweep:
    """All four sweeps."""
    core, budget, threads = ranker.backbone, ranker.token_budget, torch.get_num_threads()
    kept = RSRank(core, ranker.prompts, ranker.projection, ranker.config, cache_size=options.keep)
    count, words = (
        options.documents[len(options.documents) // 2],
        options.words[len(options.words) // 2],
    )

    def at_rest() -> None:
        ranker.token_budget = kept.token_budget = budget
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

    def batch_of(tokens: int) -> Callable[[], None]:
        def prepare() -> None:
            at_rest()
            ranker.token_budget = kept.token_budget = tokens

        return prepare

    def threads_of(number: int) -> Callable[[], None]:
        def prepare() -> None:
            at_rest()
            torch.set_num_threads(number)

        return prepare

    middle = passages(count, words)
    sweeps: dict[str, list[tuple[int, list[str], Callable[[], object]]]] = {
        "documents": [(n, passages(n, words), at_rest) for n in options.documents],
        "words": [(n, passages(count, n), at_rest) for n in options.words],
        "token_budget": [(n, middle, batch_of(n)) for n in options.budgets],
    }
    if core.device.type == "cpu":
        sweeps["threads"] = [(n, middle, threads_of(n)) for n in range(1, threads + 1)]
    found: Sweep = {}
    for name, points in sweeps.items():
        print(f"\n{name:14}{'tokens':>10}{'cold':>12}{'warm':>12}{'ratio':>8}{'cold tokens/s':>16}")
        systems = [
            s
            for value, documents, prepare in points
            for s in point(ranker, kept, value, documents, prepare)
        ]
        times = measure(systems, options.turns)
        found[name] = []
        for (value, documents, _), cold, warm in zip(points, times[::2], times[1::2], strict=True):
            query = len(ranker.prompts.query(QUERY).ids)
            tokens = sum(len(p.ids) + query for p in ranker.prompts.documents(documents, query))
            ratio = warm.times_faster_than(cold)
            found[name].append(
                {
                    name: value,
                    "tokens": tokens,
                    "cold": cold.median,
                    "warm": warm.median,
                    "ratio": ratio,
                }
            )
            print(
                f"{value:<14}{tokens:10,}"
                f"{cold.median * 1e3:10.1f}ms{warm.median * 1e3:10.1f}ms{ratio:8.1f}"
                f"{tokens / cold.median:16,.0f}"
            )
        at_rest()
    return found


def chart(found: Sweep, path: Path) -> None:
    """Cold and warm times of all sweeps."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = {
        "documents": "documents",
        "words": "words a document",
        "token_budget": "tokens a batch",
        "threads": "threads",
    }
    figure, axes = plt.subplots(
        1, len(found), figsize=(3.1 * len(found), 2.9), layout="constrained", sharey=True
    )
    for axis, (name, rows) in zip(axes, found.items(), strict=True):
        values = [row[name] for row in rows]
        for kind, colour, marker in (("cold", "#b3552e", "o"), ("warm", "#2f6f8f", "s")):
            axis.plot(
                values,
                [1e3 * row[kind] for row in rows],
                color=colour,
                marker=marker,
                label=kind,
                lw=1.8,
            )
        axis.set(xlabel=names[name], yscale="log")
        axis.grid(axis="y", color="#dddddd", lw=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        if name in ("token_budget", "words"):
            axis.set_xscale("log", base=2)
            axis.set_xticks(values, [f"{value:,}" for value in values])
            axis.minorticks_off()
        elif name == "threads":
            axis.set_xticks(values)
    axes[0].set_ylabel("milliseconds a call")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="mini")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--weights", choices=WEIGHTS, default="bf16", help="bf16: in --dtype")
    parser.add_argument("--layers", type=int, help="fewer layers of a random model")
    parser.add_argument("--documents", type=int, nargs="+", default=[10, 25, 50, 100, 200])
    parser.add_argument("--words", type=int, nargs="+", default=[25, 50, 100, 200, 400])
    parser.add_argument(
        "--budgets", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192]
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--keep", type=int, default=4 * 10**9, help="bytes for prefixes")
    parser.add_argument("--chart", type=Path, help="PNG to draw")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    ranker = load(
        options.size,
        device=options.device,
        dtype=options.dtype,
        weights=options.weights,
        layers=options.layers,
    )
    head = f"{options.size}, {ranker.backbone.dtype}; {machine()}"
    print(head)
    found = sweep(ranker, options)
    if options.chart:
        chart(found, options.chart)
    if options.json:
        options.json.write_text(
            json.dumps({"machine": head, "sweeps": found}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
