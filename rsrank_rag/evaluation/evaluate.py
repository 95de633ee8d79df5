"""Run a reranker over a labelled set, and summarise what it ranks and keeps."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import ScoringError
from ..ranking.rule import Rule
from ..reranker import Reranker
from .best_rule import best_rule
from .datasets import LabelledQuery
from .metrics import (
    ScoredQuery,
    apply_rule,
    present_means,
    ranking_measures,
    selection_measures,
)

# Numbers of passages that pipelines keep without a threshold.
LIST_LENGTHS = (1, 3, 5)


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
        ``ndcg@5``, ``recall@5``. ``rules``: the rule in use and what somebody would use instead, by
        name, each with the rule in words (``rule``) and the fields of `RuleResult`. ``threshold``
        is the threshold alone, which is the paper's rule. ``top1``, ``top3`` and ``top5`` are the
        best ones, whatever they score. ``first1``, ``first3`` and ``first5`` are the first ones of
        the file, whose order is the retriever's if the file was written so.

    Raises:
        MissingDependencyError: ir-measures is not installed.
    """
    rules = {"in_use": rule, "threshold": Rule(rule.threshold)}
    for count in LIST_LENGTHS:
        rules[f"top{count}"] = Rule(top_n=count)
    results = {}
    for name, one in rules.items():
        results[name] = {"rule": str(one), **apply_rule(scored, one)._asdict()}
    in_file_order = [query.in_file_order() for query in scored]
    for count in LIST_LENGTHS:
        result = apply_rule(in_file_order, Rule(top_n=count))
        words = f"first {count} in the file's order"
        results[f"first{count}"] = {"rule": words, **result._asdict()}
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


def shared_rule(sets: Sequence[Sequence[ScoredQuery]]) -> Rule:
    """The best rule over sets that count the same whatever their size (see `best_rule`).

    Systems without a native threshold, such as BM25, are measured with this rule.

    Raises:
        InputError: No query has a relevant document.
    """
    queries = [query for scored in sets for query in scored]
    weights = [1.0 / len(scored) for scored in sets for _ in scored]
    return best_rule(queries, weights=np.array(weights))
