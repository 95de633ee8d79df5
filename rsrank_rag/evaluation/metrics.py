"""Ranking quality (through ir-measures) and selection quality (F1 of what a threshold keeps).

Per query first, then the mean over all queries: a query for which nothing relevant was kept counts 0, and so does one
without documents. (One with documents, none of them relevant, counts 1 where nothing is kept.)
A document is kept when its score is above the threshold. Equal scores rank by input order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InputError, required


@dataclass(frozen=True, slots=True)
class ScoredQuery:
    """Scores and labels of one query's documents, in input order; InputError if a score is not finite, or lacks."""

    scores: Sequence[float]
    relevant: Sequence[bool]

    def __post_init__(self) -> None:
        if len(self.scores) != len(self.relevant):
            raise InputError(
                f"A query needs a score a document, got {len(self.scores)} for {len(self.relevant)}."
            )
        for number, score in enumerate(self.scores):
            if not math.isfinite(score):
                raise InputError(
                    f"Document {number} scored {score}, which can be neither ranked nor measured."
                )


def best_first(scores: Sequence[float]) -> list[int]:
    """Positions of scores, the highest first."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return math.fsum(values) / max(len(values), 1)


def f1(kept_relevant: int, kept: int, relevant: int) -> float:
    """Harmonic mean of precision and recall; 1 where nothing is relevant and nothing was kept.

    >>> f1(kept_relevant=1, kept=2, relevant=2), f1(0, 0, 3), f1(0, 0, 0)
    (0.5, 0.0, 1.0)
    """
    return 2 * kept_relevant / (kept + relevant) if kept + relevant else 1.0


def selection(query: ScoredQuery, threshold: float) -> tuple[float, float, float, int]:
    """Precision, recall and F1 of the documents that score above the threshold, and how many these are.

    Where nothing is relevant and nothing was kept, all three are 1, without documents to choose from 0.
    """
    kept = [
        label
        for score, label in zip(query.scores, query.relevant, strict=True)
        if score > threshold
    ]
    hits, relevant = sum(kept), sum(query.relevant)
    rightly_none = float(bool(query.scores) and not kept and not relevant)
    precision, recall = (
        hits / len(kept) if kept else rightly_none,
        hits / relevant if relevant else rightly_none,
    )
    return precision, recall, f1(hits, len(kept), relevant) if query.scores else 0.0, len(kept)


def f1_at(query: ScoredQuery, threshold: float) -> float:
    """F1 of the documents that score above the threshold."""
    return selection(query, threshold)[2]


def best_threshold(
    queries: Sequence[ScoredQuery], weights: Sequence[float] | None = None
) -> tuple[float, float]:
    """The single threshold with the highest mean F1 over all queries, found exactly.

    Lowering the threshold past one document after another changes one query's F1 at a time.

    `weights`: of each query in the mean; None weighs all the same.

    Returns:
        The threshold and the mean F1 there. The threshold lies halfway between the last score kept and the first one
        not; on the highest score where nothing is best kept, and a hair below the lowest where everything is, so that
        it scales and moves with the scores. Of several equally good ones it is the highest.

    >>> best_threshold([ScoredQuery([3.0, 1.0], [True, False]), ScoredQuery([2.0, 0.0], [True, False])])
    (1.5, 1.0)
    """
    pairs = (
        (*pair, row)
        for row, q in enumerate(queries)
        for pair in zip(q.scores, q.relevant, strict=True)
    )
    documents = sorted(pairs, key=lambda item: -item[0])
    relevant = [sum(query.relevant) for query in queries]
    kept, hits = [0] * len(queries), [0] * len(queries)
    weights = [1.0] * len(queries) if weights is None else weights
    values = [
        f1_at(query, math.inf) * weight for query, weight in zip(queries, weights, strict=True)
    ]
    total = math.fsum(values)
    best_total, best = total, documents[0][0] if documents else 0.0
    for position, (score, label, row) in enumerate(documents):
        kept[row] += 1
        hits[row] += label
        value = f1(hits[row], kept[row], relevant[row]) * weights[row]
        total += value - values[row]
        values[row] = value
        following = (
            documents[position + 1][0]
            if position + 1 < len(documents)
            else math.nextafter(score, -math.inf)
        )
        if following < score and total > best_total + 1e-12:
            middle = (score + following) / 2
            best_total, best = total, middle if middle < score else following
    return best, best_total / math.fsum(weights) if queries else 0.0


def query_best_f1(query: ScoredQuery) -> float:
    """F1 at the query's own best threshold: what perfect calibration would give this ranking."""
    return best_threshold([query])[1]


def ranking_metrics(queries: Sequence[ScoredQuery]) -> dict[str, float]:
    """Mean nDCG@5 and Recall@5."""
    return {name: mean(values) for name, values in ranking_by_query(queries).items()}


def ranking_by_query(queries: Sequence[ScoredQuery]) -> dict[str, list[float]]:
    """nDCG@5 and Recall@5 of each query by ir-measures; 0 for a query without relevant documents."""
    ir_measures = required("ir_measures", "Ranking metrics need ir-measures.", "eval")
    qrels, run = {}, {}
    for number, query in enumerate(queries):
        order = best_first(query.scores)
        run[str(number)] = {str(i): float(len(order) - rank) for rank, i in enumerate(order)}
        qrels[str(number)] = {str(i): int(label) for i, label in enumerate(query.relevant)}
    measures = {"ndcg@5": ir_measures.nDCG @ 5, "recall@5": ir_measures.R @ 5}
    found = {
        (m.query_id, m.measure): float(m.value)
        for m in ir_measures.iter_calc(measures.values(), qrels, run)
    }
    return {
        name: [found.get((key, measure), 0.0) for key in qrels]
        for name, measure in measures.items()
    }
