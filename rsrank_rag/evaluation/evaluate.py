"""Run a reranker over a labelled set, and summarise what it ranks and keeps."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import ScoringError
from ..passages.rule import Rule
from ..reranker import Reranker
from .datasets import LabelledQuery
from .metrics import (
    ScoredQuery,
    apply_rule,
    best_threshold,
    present_means,
    ranking_measures,
    rules,
    selection_measures,
)
from .unanswerable import auroc, best_scores, false_accepts

# A rule is advised only if it leaves at most this share of the answerable queries with nothing.
TOLERATED_LOSS = 0.1

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


def summarise(scored: Sequence[ScoredQuery], *, threshold: float = 0.0) -> dict[str, Any]:
    """All metrics of one scored set, under the names of ``rsrank evaluate --json``.

    Args:
        scored: Scored queries, at least one.
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
        where at least 90% of those with one are; both count absent twins (see `best_scores`). For
        every other rule of `rules`, such as ``top1``: ``top1_f1``, ``top1_left_with_nothing`` and
        ``top1_kept_per_query``.

    Raises:
        MissingDependencyError: ir-measures is not installed.
    """
    values = selection_measures(scored, Rule(threshold))
    unanswerable = np.isnan(values["recall"])
    false_keeps = np.where(unanswerable, values["kept"], np.nan)
    means = present_means({**values, **ranking_measures(scored), "false_keeps": false_keeps})
    tau_best, f1_best = best_threshold(scored)
    best = best_scores(scored)
    summary: dict[str, Any] = {
        "queries": len(scored),
        "ndcg@5": means["ndcg@5"],
        "recall@5": means["recall@5"],
        "f1@tau": means["f1"],
        "kept_per_query": means["kept"],
        "f1@best": f1_best,
        "precision@tau": means.get("precision"),
        "recall@tau": means.get("recall"),
        "tau_best": tau_best,
        "empty": float(np.mean(values["kept"] == 0)),
        "answerable": int(np.sum(~unanswerable)),
        "left_with_nothing": int(np.nansum(values["left_with_nothing"])),
        "false_keeps": means.get("false_keeps"),
        "auroc": auroc(*best),
        "false_accepts@90": false_accepts(*best),
    }
    for name, rule in rules(Rule(threshold)).items():
        if name not in ("rule", "tau"):
            for key, value in apply_rule(scored, rule)._asdict().items():
                summary[f"{name}_{key}"] = value
    return summary


def recommend(scored: Sequence[ScoredQuery], *, threshold: float = 0.0) -> str:
    """Say in a sentence which rule suits the queries, with the numbers that speak for it.

    An answer is lost if a query has a relevant document and no relevant one is kept. Among the
    rules by score that lose at most `TOLERATED_LOSS` of the answers, the one with the highest F1 is
    recommended; without such a rule, the one that loses fewest. The file's own order is no
    candidate, because a file of labels may list the relevant documents first. A last sentence says
    if the rule may lose more of the answers to other queries.
    """
    answerable = sum(any(query.relevant) for query in scored)
    if not answerable:
        return "No query has a relevant passage, so no answer can be lost and no rule is advised."
    candidates = rules(Rule(threshold))
    by_score = [rule for rule in candidates.values() if isinstance(rule, Rule)]
    results = {rule: apply_rule(scored, rule) for rule in by_score}
    fewest = min(result.left_with_nothing for result in results.values())
    limit = max(TOLERATED_LOSS * answerable, fewest)
    tolerated = [rule for rule, result in results.items() if result.left_with_nothing <= limit]
    best = max(tolerated, key=lambda rule: results[rule].f1)
    lost = results[best].left_with_nothing
    # The threshold alone is compared with its safest alternative.
    other = Rule(threshold)
    if best == other:
        other = Rule(top_n=5)
    reason = f"lose at most {TOLERATED_LOSS:.0%} of the answers"
    if fewest > TOLERATED_LOSS * answerable:
        reason = f"lose fewest answers (every one loses more than {TOLERATED_LOSS:.0%})"
    advice = (
        f"On these queries {best} loses {lost} of {answerable} answers "
        f"and keeps {results[best].kept_per_query:.2f} passages a query, with F1 "
        f"{results[best].f1:.3f}; {other} loses {results[other].left_with_nothing} and keeps "
        f"{results[other].kept_per_query:.2f}, with F1 {results[other].f1:.3f}. Recommended: "
        f"{best}. Of the rules by score that {reason}, none has a better F1."
    )
    # Documents with equal scores and different labels.
    if any(
        len({*query.scores}) < len({*zip(query.scores, query.relevant, strict=True)})
        for query in scored
    ):
        advice += " Documents with equal scores were taken in the file's order."
    if lost <= TOLERATED_LOSS * answerable:
        draws = np.random.default_rng(0).binomial(answerable, TOLERATED_LOSS, 100_000)
        if np.mean(draws <= lost) > CHANCE:
            advice += (
                f" It may lose more answers to other queries: {lost} of {answerable} does not "
                f"prove that at most {TOLERATED_LOSS:.0%} are lost."
            )
    return advice


def shared_threshold(sets: Sequence[Sequence[ScoredQuery]]) -> float:
    """The single threshold with the highest F1 averaged over sets, each set counting the same.

    Systems without a native threshold, such as BM25, are measured at this threshold. No other
    threshold for all sets together has a higher F1 on these labels.
    """
    queries = [query for scored in sets for query in scored]
    weights = [1.0 / len(scored) for scored in sets for _ in scored]
    return best_threshold(queries, np.array(weights))[0]
