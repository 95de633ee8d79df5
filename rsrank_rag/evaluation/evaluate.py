"""Run a reranker over a labelled set, and summarise what it ranks and keeps."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import InputError
from ..reranker import Reranker
from .datasets import LabelledQuery
from .metrics import (
    Rule,
    ScoredQuery,
    apply_rule,
    best_threshold,
    f1_at,
    mean,
    plain,
    present_means,
    ranking_by_query,
    rules,
    select,
    selection_measures,
)
from .unanswerable import auroc, best_scores, false_accepts

# A rule is advised only if it leaves at most this share of the answerable queries with nothing.
TOLERATED_LOSS = 0.1


def score_dataset(
    reranker: Reranker, queries: Iterable[LabelledQuery], *, titles: bool = True
) -> list[ScoredQuery]:
    """Score the documents of one query after another.

    Args:
        reranker: What scores.
        queries: Labelled queries.
        titles: Put a document's title, if it has one, in front of its text.

    Raises:
        InputError: A score is not finite; the message names the query.
    """
    scored = []
    for query in queries:
        texts = [document.content(titles=titles) for document in query.documents]
        scores = reranker.score(query.query, texts)
        try:
            scored.append(ScoredQuery(scores, [document.relevant for document in query.documents]))
        except InputError as error:
            raise InputError(f"Query {query.id!r}: {error}") from None
    return scored


def query_metrics(scored: Sequence[ScoredQuery], threshold: float) -> dict[str, list[float]]:
    """Metrics of each query: of the ranking, of what is above the threshold, of the best threshold.

    The best threshold is that of the set, for ``f1@best``.
    """
    selections = [select(query, Rule(threshold)) for query in scored]
    tau_best, _ = best_threshold(scored)
    return {
        **ranking_by_query(scored),
        "f1@tau": [one.f1 for one in selections],
        "kept_per_query": [one.kept for one in selections],
        "f1@best": [f1_at(query, tau_best) for query in scored],
    }


def summarise(scored: Sequence[ScoredQuery], *, threshold: float = 0.0) -> dict[str, Any]:
    """All metrics of one scored set, under the names of ``rsrank evaluate --json``.

    Args:
        scored: Scored queries.
        threshold: Documents are kept if they score above it.

    Returns:
        ``queries`` (number), ``ndcg@5``, ``recall@5``. For the documents that score above the
        threshold: ``f1@tau``, ``precision@tau`` of the queries that keep one, ``recall@tau`` of
        those with a relevant document (None if there are no such queries) and ``kept_per_query``.
        ``f1@best`` at the set's best threshold ``tau_best``. ``empty``: share of queries that keep
        nothing. ``answerable``: number of queries with a relevant document. ``left_with_nothing``:
        how many of these keep no relevant one. ``false_keeps``: documents kept of each other query
        (None if there are none). ``auroc`` of the best score for lists with against lists without a
        relevant passage, and ``false_accepts@90``, the share of lists without one that are accepted
        where 90% of those with one are; both count absent twins (see `best_scores`). For every
        other rule of `rules`, such as ``top1``: ``top1_f1``, ``top1_left_with_nothing`` and
        ``top1_kept_per_query``.
    """
    values = query_metrics(scored, threshold)
    kept = values["kept_per_query"]
    false_keeps = []
    for query, count in zip(scored, kept, strict=True):
        if not any(query.relevant):
            false_keeps.append(count)
    best = best_scores(scored)
    averages = present_means(selection_measures(scored, np.array([threshold])))
    summary: dict[str, Any] = {
        "queries": len(scored),
        **{name: mean(numbers) for name, numbers in values.items()},
        "precision@tau": averages.get("precision"),
        "recall@tau": averages.get("recall"),
        "tau_best": best_threshold(scored)[0],
        "empty": mean([count == 0 for count in kept]),
        "answerable": len(scored) - len(false_keeps),
        "left_with_nothing": apply_rule(scored, Rule(threshold)).left_with_nothing,
        "false_keeps": None,
        "auroc": auroc(*best),
        "false_accepts@90": false_accepts(*best),
    }
    if false_keeps:
        summary["false_keeps"] = mean(false_keeps)
    for name, rule in rules(threshold).items():
        if name != "tau":
            result = apply_rule(scored, rule)
            summary |= {f"{name}_{key}": value for key, value in result._asdict().items()}
    return summary


def describe_rule(rule: Rule) -> str:
    """A rule in words.

    >>> describe_rule(Rule(0.0)), describe_rule(Rule(0.0, top_n=3, min_docs=1))
    ('zero', 'top 3 above zero with min_docs=1')
    >>> describe_rule(Rule(top_n=3)), describe_rule(Rule(top_n=1, by_score=False))
    ('top 3', "first 1 in the file's order")
    """
    if not rule.by_score:
        return f"first {rule.top_n} in the file's order"
    if rule.threshold is None:
        return f"top {rule.top_n}"
    number = plain(rule.threshold)
    words = "zero"
    if number != "0":
        words = f"threshold {number}"
    if rule.top_n is not None:
        words = f"top {rule.top_n} above {words}"
    if rule.min_docs:
        words = f"{words} with min_docs={rule.min_docs}"
    return words


def recommend(scored: Sequence[ScoredQuery], *, threshold: float = 0.0) -> str:
    """Say in a sentence which rule suits the queries, with the numbers that speak for it.

    An answer is lost if a query has a relevant document and no relevant one is kept. Among the
    rules that lose at most `TOLERATED_LOSS` of the answers, the one with the highest F1 is
    recommended; without such a rule, the one that loses fewest. The file's own order is no
    candidate, because a file of labels may list the relevant documents first.
    """
    answerable = sum(any(query.relevant) for query in scored)
    if not answerable:
        return "No query has a relevant passage, so no answer can be lost and no rule is advised."
    candidates = {name: rule for name, rule in rules(threshold).items() if rule.by_score}
    results = {name: apply_rule(scored, rule) for name, rule in candidates.items()}
    fewest = min(result.left_with_nothing for result in results.values())
    limit = max(TOLERATED_LOSS * answerable, fewest)
    tolerated = [name for name, one in results.items() if one.left_with_nothing <= limit]
    best = max(tolerated, key=lambda name: results[name].f1)
    # The threshold alone is compared with its safest alternative.
    other = "tau_top5_min1" if best == "tau" else "tau"
    best_words = f"{describe_rule(candidates[best])} loses {results[best].left_with_nothing}"
    other_words = f"{describe_rule(candidates[other])} loses {results[other].left_with_nothing}"
    return (
        f"On these queries {best_words} of {answerable} answers and keeps "
        f"{results[best].kept_per_query:.2f} passages a query; {other_words} and keeps "
        f"{results[other].kept_per_query:.2f}."
    )


def shared_threshold(sets: Sequence[Sequence[ScoredQuery]]) -> float:
    """The single threshold with the highest F1 averaged over sets, each set counting the same.

    It serves scores without a natural zero, such as a cosine or BM25. It is the best threshold
    that could have been tuned for all sets together.
    """
    queries = [query for scored in sets for query in scored]
    weights = [1.0 / len(scored) for scored in sets for _ in scored]
    return best_threshold(queries, weights)[0]
