"""Run a reranker over a labelled set, and summarise what it ranks and keeps."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import ScoringError
from ..ranking.rule import Rule
from ..reranker import Reranker
from .best_rule import Goal, best_rule
from .datasets import LabelledQuery
from .metrics import ScoredQuery, apply_rule, present_means, ranking_measures, rules
from .unanswerable import auroc, best_scores, false_accepts

# A rule is advised only if it leaves at most this share of the answerable queries with nothing.
TOLERATED_LOSS = Goal.lost

# A rule that loses the share TOLERATED_LOSS of all answers loses as few answers as were counted, or
# fewer, with some probability. Above this probability, the counted answers prove nothing.
CHANCE = 0.05


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
        ``ndcg@5``, ``recall@5``. ``auroc`` of the best score for lists with against lists without a
        relevant passage, and ``false_accepts@90``, the share of lists without one that are accepted
        where at least 90% of those with one are; both count absent twins (see `best_scores`).
        ``rules``: for each of `rules` by its name, the rule in words (``rule``) and the fields of
        `RuleResult`.

    Raises:
        MissingDependencyError: ir-measures is not installed.
    """
    best = best_scores(scored)
    results = {}
    for name, one in rules(rule).items():
        results[name] = {"rule": str(one), **apply_rule(scored, one)._asdict()}
    return {
        "queries": len(scored),
        "answerable": sum(any(query.relevant) for query in scored),
        **present_means(ranking_measures(scored)),
        "auroc": auroc(*best),
        "false_accepts@90": false_accepts(*best),
        "rules": results,
    }


def recommend(scored: Sequence[ScoredQuery], rule: Rule) -> str:
    """Say in a sentence which rule suits the queries, with the numbers that speak for it.

    An answer is lost if a query has a relevant document and no relevant one is kept. Among the
    rules by score that lose at most `TOLERATED_LOSS` of the answers, the one with the highest F1 is
    recommended; without such a rule, the one that loses fewest. The file's own order is no
    candidate, because a file of labels may list the relevant documents first. A last sentence says
    if the rule may lose more of the answers to other queries.

    Args:
        scored: Scored queries.
        rule: The rule in use.
    """
    answerable = sum(any(query.relevant) for query in scored)
    if not answerable:
        return "No query has a relevant passage, so no answer can be lost and no rule is advised."
    candidates = rules(rule)
    by_score = [one for one in candidates.values() if isinstance(one, Rule)]
    results = {one: apply_rule(scored, one) for one in by_score}
    fewest = min(result.lost for result in results.values())
    limit = max(TOLERATED_LOSS * answerable, fewest)
    tolerated = [one for one, result in results.items() if result.lost <= limit]
    best = max(tolerated, key=lambda one: results[one].f1)
    result = results[best]
    first = apply_rule(scored, candidates["first5"])
    reason = f"lose at most {TOLERATED_LOSS:.0%} of the answers"
    if fewest > TOLERATED_LOSS * answerable:
        reason = f"lose fewest answers (every one loses more than {TOLERATED_LOSS:.0%})"
    advice = (
        f"On these queries this rule loses {result.lost} of {answerable} answers and keeps "
        f"{result.kept:.2f} passages a query, with F1 {result.f1:.3f}: {best}. The first five in "
        f"the file's order lose {first.lost} and keep {first.kept:.2f}, with F1 {first.f1:.3f}. "
        f"Of the rules by score that {reason}, none has a better F1."
    )
    # Documents with equal scores and different labels.
    if any(
        len({*query.scores}) < len({*zip(query.scores, query.relevant, strict=True)})
        for query in scored
    ):
        advice += " Documents with equal scores were taken in the file's order."
    if result.lost <= TOLERATED_LOSS * answerable:
        draws = np.random.default_rng(0).binomial(answerable, TOLERATED_LOSS, 100_000)
        if np.mean(draws <= result.lost) > CHANCE:
            advice += (
                f" The rule may lose more answers to other queries: {result.lost} of {answerable} "
                f"does not prove that at most {TOLERATED_LOSS:.0%} are lost."
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
