"""What 20, 50 or 100 labelled queries of a domain are worth for fine-tuning.

    python -m benchmarks.few_queries --data data/dev --output docs/few-queries.json

The script draws so many queries of each file to train on (`rsrank train --base`). It measures base
and fine-tuned weights on the file's other queries, which take no part in the training. Features are
read once a file, with at most 20 documents a query. A draw leaves at least a third of its size to
measure on. The script writes the output after each draw. A run that was interrupted reads no
feature again and repeats no draw of the same weights.
`python -m benchmarks.tables` puts the figures into the docs.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from research import markdown
from research.features import ResearchRun
from research.recipe import ResearchRecipe
from rsrank_rag.artifact import hub
from rsrank_rag.backends.torch.projection import Projection
from rsrank_rag.evaluation.datasets import dataset_name
from rsrank_rag.partial_files import write_text
from rsrank_rag.ranking.rule import Rule
from rsrank_rag.training.feature_scores import scored
from rsrank_rag.training.fine_tuning import FineTuningOptions, fine_tune
from rsrank_rag.training.store import QueryFeatures
from rsrank_rag.training.verdict import Verdict, judge

SETS = (
    "nfcorpus",
    "fiqa",
    "fever.sentence",
    "hotpotqa.paragraph",
    "2wiki.paragraph",
    "musique.paragraph",
    "clapnq.sentence",
    "realdocs.passage",
)

TRAINED = ("ndcg@5", "recall", "f1", "lost")


def draw(count: int, size: int, seed: int) -> tuple[list[int], list[int]]:
    """Indices of queries to train on, and of the others; larger draws of a seed hold smaller."""
    order = random.Random(f"few-{seed}").sample(range(count), count)
    return order[:size], order[size:]


def measure(
    features: Sequence[QueryFeatures],
    base: Projection,
    rule: Rule,
    numbers: tuple[list[int], list[int]],
) -> dict[str, Any]:
    """Fine-tune on one part of the queries, and measure on the other part.

    Args:
        features: Features of all queries of a file.
        base: Weights to begin with.
        rule: The rule of the base.
        numbers: Indices of queries to train on, and of the others.

    Returns:
        Two verdicts: "trained" on the other queries, and "said" of cross-validation before.
    """
    training = [features[number] for number in numbers[0]]
    others = [features[number] for number in numbers[1]]
    threshold = rule.threshold or 0.0
    trained = fine_tune(training, base, FineTuningOptions(), threshold=threshold)
    at_zero = replace(rule, threshold=0.0)
    validated = judge(trained.before, trained.after, at_zero)
    before = [query.shifted(threshold) for query in scored(others, weights_of(base))]
    after = scored(others, weights_of(trained.projection))
    measured = judge(before, after, at_zero)
    return {
        "trained": measured.model_dump(mode="json"),
        "said": validated.model_dump(mode="json"),
    }


def weights_of(projection: Projection) -> dict[str, torch.Tensor]:
    """Parameters by name."""
    return dict(projection.named_parameters())


def rows_of(path: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Draws that an earlier run wrote for the same weights and settings; empty without any."""
    if not path.exists():
        return []
    record = json.loads(path.read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = record.pop("rows")
    if record != about:
        return []
    return rows


def table(rows: Sequence[dict[str, Any]], name: str, metrics: Sequence[str]) -> str:
    """Base, and the difference with its interval, in points of 100."""
    head = ["set", "queries", "measured on"]
    for metric in metrics:
        head += [f"{metric} base", "difference"]
    head.append("")
    lines = []
    for row in rows:
        verdict = Verdict.model_validate(row[name])
        cells = [row["set"], row["queries"], verdict.queries]
        for metric in metrics:
            change = verdict.difference[metric]
            low = 100 * (change.low or 0.0)
            high = 100 * (change.high or 0.0)
            cells += [
                f"{100 * verdict.before[metric].mean:.1f}",
                f"{100 * change.mean:+.1f} ({low:+.1f} to {high:+.1f})",
            ]
        lines.append([*cells, verdict.outcome])
    return markdown.table(head, lines)


def outcomes(rows: Sequence[dict[str, Any]]) -> str:
    """Number of draws with each outcome on the other queries, over all seeds, in Markdown."""
    # By number of queries: outcomes where `rsrank train` writes the fine-tuned weights, or not.
    written: dict[int, Counter[str]] = defaultdict(Counter)
    unwritten: dict[int, Counter[str]] = defaultdict(Counter)
    for row in rows:
        is_written = Verdict.model_validate(row["said"]).problem is None
        counts = written if is_written else unwritten
        counts[row["queries"]][Verdict.model_validate(row["trained"]).outcome] += 1
    lines = []
    for size in sorted(written.keys() | unwritten.keys()):
        count = sum(written[size].values())
        rest = sum(unwritten[size].values())
        cells = [size, count + rest, count, written[size]["better"], written[size]["worse"]]
        lines.append([*cells, rest, rest - unwritten[size]["better"]])
    head = ["queries", "draws", "fine-tuned weights written", "better", "worse"]
    return markdown.table([*head, "base kept", "rightly"], lines, texts=0)


def overview(figures: dict[str, Any]) -> str:
    """Outcomes of all draws."""
    return outcomes(figures["rows"])


def tables(figures: dict[str, Any]) -> str:
    """Outcomes of all draws, and the first draw of each set in detail."""
    first = [row for row in figures["rows"] if row["seed"] == 0]
    parts = [
        outcomes(figures["rows"]),
        "The first draw of each set, trained:",
        table(first, "trained", TRAINED),
    ]
    return "\n\n".join(parts)


def main() -> None:
    """Measure the draws that the output lacks, and print the tables."""
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
    arguments = parser.parse_args()
    folder = hub.resolve(arguments.base)
    config = hub.read_config(folder)
    base = Projection.of(hub.read_weights(folder, config))
    about = {"base": arguments.base, "config": config.digest, "limit": arguments.queries}
    rows = rows_of(arguments.output, about)
    done = {(row["set"], row["queries"], row["seed"]) for row in rows}
    for path in sorted(arguments.data.glob("*.jsonl.gz"), key=lambda path: path.stat().st_size):
        name = dataset_name(path)
        if name not in arguments.sets:
            continue
        limit = "" if arguments.queries is None else f", queries={arguments.queries}"
        settings = [
            f'data=[{{file="{path}"{limit}}}]',
            "features.max_documents=20",
            "model.device=cpu",
        ]
        recipe = ResearchRecipe.load("mini", settings, base=arguments.base)
        features = ResearchRun(recipe, arguments.work / name).extract()
        for size in arguments.sizes:
            # Too few would be left to measure on.
            if len(features) * 3 < size * 4:
                continue
            for seed in range(arguments.seeds):
                if (name, size, seed) in done:
                    continue
                numbers = draw(len(features), size, seed)
                record = measure(features, base, config.rule, numbers)
                rows.append({"set": name, "queries": size, "seed": seed, **record})
                print(table(rows[-1:], "trained", TRAINED).splitlines()[-1], flush=True)
                write_text(arguments.output, json.dumps(about | {"rows": rows}, indent=1) + "\n")
    print(tables({"rows": rows}))


if __name__ == "__main__":
    main()
