"""What 20, 50 or 100 labelled queries of a domain are worth: training near an artifact, and a tuned threshold.

    python -m benchmarks.few_queries --data data/dev --output docs/few-queries.json

Of each file, so many queries are drawn to train on (`rsrank train --base`) and to tune a threshold on (`rsrank tune`,
best F1); base, trained and tuned are measured on the file's other queries, which take no part in anything. Features
are read once a file, with at most 20 documents a query. A draw leaves at least a third of its size to measure on.
Features of an interrupted run are not read again. `python -m benchmarks.tables` puts them into the docs.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rsrank_rag import Projection
from rsrank_rag.artifact import hub
from rsrank_rag.evaluation.datasets import dataset_name
from rsrank_rag.partial_files import write_text
from rsrank_rag.training.batches import scored
from rsrank_rag.training.domain import DomainOptions, Verdict, judge, train_near
from rsrank_rag.training.recipe import Recipe
from rsrank_rag.training.run import TrainingRun
from rsrank_rag.training.store import FeatureSource, subset
from rsrank_rag.training.tune import Goal, find_threshold

SETS = (
    "nfcorpus",
    "fiqa",
    "fever.sentence",
    "hotpotqa.paragraph",
    "2wiki.paragraph",
    "musique.paragraph",
    "clapnq.sentence",
)


def draw(count: int, size: int, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of queries to learn from and of all others; the smaller draws of a seed are part of the larger ones."""
    order = random.Random(f"few-{seed}").sample(range(count), count)
    return order[:size], order[size:]


def measure(
    features: FeatureSource, base: Projection, numbers: tuple[list[int], list[int]]
) -> dict[str, Any]:
    """Verdicts on the other queries: of training, what the training itself said, and of a tuned threshold."""
    own, others = (subset(features, part) for part in numbers)
    trained = train_near(own, base, DomainOptions())
    before, after = scored(others, base), scored(others, trained.projection)
    threshold, interval = find_threshold(scored(own, base), Goal())
    verdicts = {
        "trained": judge(before, after),
        "said": judge(trained.base, trained.trained),
        "tuned": judge(before, before, (0.0, threshold)),
    }
    found = {name: verdict.model_dump(mode="json") for name, verdict in verdicts.items()}
    return {
        **found,
        "strength": str(trained.strength),
        "threshold": threshold,
        "interval": interval,
    }


def table(rows: Sequence[dict[str, Any]], name: str, metrics: Sequence[str]) -> str:
    """Base, and the difference with its interval, in points of 100."""
    heading = " | ".join(f"{metric} base | difference" for metric in metrics)
    lines = [
        f"| set | queries | measured on | {heading} | |",
        "|---|--:|--:|" + "--:|--:|" * len(metrics) + "---|",
    ]
    for row in rows:
        verdict = Verdict.model_validate(row[name])
        cells = []
        for metric in metrics:
            change = verdict.difference[metric]
            low, high = (100 * (end or 0.0) for end in (change.low, change.high))
            cells += [
                f"{100 * verdict.base[metric].mean:.1f}",
                f"{100 * change.mean:+.1f} ({low:+.1f} to {high:+.1f})",
            ]
        outcome = verdict.outcome.split(":")[0]
        lines.append(
            f"| {row['set']} | {row['queries']} | {verdict.queries} | {' | '.join(cells)} | {outcome} |"
        )
    return "\n".join(lines)


def outcomes(rows: Sequence[dict[str, Any]]) -> str:
    """How many draws ended how, all seeds, in Markdown."""
    lines = [
        "| queries | draws | trained: better | worse | tuned: better | worse |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for size in sorted({row["queries"] for row in rows}):
        own = [row for row in rows if row["queries"] == size]
        counts = [
            sum(row[name]["outcome"].startswith(outcome) for row in own)
            for name in ("trained", "tuned")
            for outcome in ("better", "worse")
        ]
        lines.append(f"| {size} | {len(own)} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def overview(found: dict[str, Any]) -> str:
    """Outcomes of all draws."""
    return outcomes(found["rows"])


def tables(found: dict[str, Any]) -> str:
    """Outcomes of all draws, and the first draw of each set in detail: trained, and tuned."""
    first = [row for row in found["rows"] if row["seed"] == 0]
    parts = [
        outcomes(found["rows"]),
        "The first draw of each set, trained:",
        table(first, "trained", ("ndcg@5", "f1")),
        "The same, tuned:",
        table(first, "tuned", ("f1",)),
    ]
    return "\n\n".join(parts)


def main() -> None:
    """Measure what is not there yet, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of labelled files")
    parser.add_argument("--base", default="mini", help="artifact to begin with")
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--sizes", nargs="+", type=int, default=[20, 50, 100])
    parser.add_argument("--seeds", type=int, default=1, help="draws of each size")
    parser.add_argument("--queries", type=int, help="at most so many of each file, for a try-out")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/few-queries"), help="folder for features"
    )
    parser.add_argument("--output", type=Path, default=Path("docs/few-queries.json"))
    chosen = parser.parse_args()
    folder = hub.resolve(chosen.base)
    base = hub.read_projection(folder, hub.read_config(folder))
    rows: list[dict[str, Any]] = []
    for path in sorted(chosen.data.glob("*.jsonl.gz"), key=lambda path: path.stat().st_size):
        name = dataset_name(path)
        if name not in chosen.sets:
            continue
        limit = "" if chosen.queries is None else f", queries={chosen.queries}"
        settings = [
            f'data=[{{file="{path}"{limit}}}]',
            "features.max_documents=20",
            "model.device=cpu",
        ]
        store = TrainingRun(
            Recipe.load("mini", settings, base=chosen.base), chosen.work / name, say=print
        ).extract()
        features = store.in_memory(torch.device("cpu"))
        for size in chosen.sizes:
            if len(store) * 3 < size * 4:
                continue
            for seed in range(chosen.seeds):
                numbers = draw(len(store), size, seed)
                found = measure(features, base, numbers)
                rows.append({"set": name, "queries": size, "seed": seed, **found})
                print(table(rows[-1:], "trained", ("ndcg@5", "f1")).splitlines()[-1], flush=True)
                record = {
                    "base": chosen.base,
                    "config": hub.read_config(folder).digest,
                    "rows": rows,
                }
                write_text(chosen.output, json.dumps(record, indent=1) + "\n")
    print(tables({"rows": rows}))


if __name__ == "__main__":
    main()
