"""Run a reranker over a labelled set, and summarise what it ranks and keeps."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import ScoringError
from ..ranking.rule import Rule
from ..reranker import Reranker
from .best_rule import ENOUGH_ANSWERS, Goal, best_rule
from .datasets import LabelledQuery
from .metrics import (
    ScoredQuery,
    apply_rule,
    present_means,
    ranking_measures,
    rules,
    selection_measures,
)


def score_dataset(reranker: Reranker, queries: Iterable[LabelledQuery]) -> list[ScoredQuery]:
    """Score the documents of one query after another, read as `Reranker.rank` reads them.

    Raises:
        ScoringError: A score is not finite; the message names the query.
    """
    scored = []
    for query in queries:
        texts = [document.content() for document in query.documents]
        labels = [document.relevant for document in query.documents]
        try:
            result = reranker.rank(query.query, texts, threshold=None)
        except ScoringError as error:
            error.query = repr(query.id)
            raise
        scored.append(ScoredQuery([document.score for document in result.in_order], labels))
    return scored


def summarise(scored: Sequence[ScoredQuery], rule: Rule) -> dict[str, Any]:
    """All measures of one scored set, under the names of ``rsrank evaluate --json``.

    Args:
        scored: Scored queries, at least one.
        rule: The rule in use.

    Returns:
        ``queries`` (number). ``answerable``: number of queries with a relevant document.
        ``ndcg@5``, ``recall@5``. ``rules``: for each of `rules` by its name, the rule in words
        (``rule``) and the fields of `RuleResult`.

    Raises:
        MissingDependencyError: ir-measures is not installed.
    """
    results = {}
    for name, one in rules(rule).items():
        results[name] = {"rule": str(one), **apply_rule(scored, one)._asdict()}
    return {
        "queries": len(scored),
        "answerable": sum(any(query.relevant) for query in scored),
        **present_means(ranking_measures(scored)),
        "rules": results,
    }


def lost_answers(
    queries: Sequence[LabelledQuery], scored: Sequence[ScoredQuery], rule: Rule
) -> list[str]:
    """Ids of the queries that have a relevant document, but keep no relevant one."""
    lost = selection_measures(scored, rule)["lost"]
    return [query.id for query, is_lost in zip(queries, lost, strict=True) if is_lost == 1]


def recommend(scored: Sequence[ScoredQuery], rule: Rule) -> str:
    """Say in a sentence which rule suits the queries, with the numbers that speak for it.

    An answer is lost if a query has a relevant document and no relevant one is kept. Among the
    rules by score that lose at most `Goal.lost` of the answers, the one with the highest F1 is
    recommended; without such a rule, the one that loses fewest. The file's own order is no
    candidate, because a file of labels may list the relevant documents first.

    Args:
        scored: Scored queries.
        rule: The rule in use.
    """
    answerable = sum(any(query.relevant) for query in scored)
    if not answerable:
        return "No query has a relevant passage, so no answer can be lost and no rule is advised."
    by_score = [one for one in rules(rule).values() if isinstance(one, Rule)]
    results = {one: apply_rule(scored, one) for one in by_score}
    fewest = min(result.lost for result in results.values())
    limit = Goal.lost * answerable
    reason = f"lose at most {Goal.lost:.0%} of the answers"
    if fewest > limit:
        limit = fewest
        reason = f"lose fewest answers (every one loses more than {Goal.lost:.0%})"
    tolerated = [one for one in by_score if results[one].lost <= limit]
    best = max(tolerated, key=lambda one: results[one].f1)
    result = results[best]
    advice = (
        f"On these queries this rule loses {result.lost} of {answerable} answers and keeps "
        f"{result.kept:.2f} passages a query, with F1 {result.f1:.3f}: {best}. Of the rules by "
        f"score that {reason}, none has a better F1."
    )
    if answerable < ENOUGH_ANSWERS:
        advice += (
            f" {answerable} queries with a relevant passage prove little about other queries: "
            f"label {ENOUGH_ANSWERS} or more."
        )
    return advice


def shared_rule(sets: Sequence[Sequence[ScoredQuery]]) -> Rule:
    """The best rule over sets that count the same whatever their size (see `best_rule`).

    Systems without a native threshold, such as BM25, are measured with this rule.

    Raises:
        InputError: No query has a relevant document.
    """
    queries = [query for scored in sets for query in scored]
    weights = [1.0 / len(scored) for scored in sets for _ in scored]
    return best_rule(queries, weights=np.array(weights))
