"""A rule (threshold, gap, fallback) from labelled queries, and whether to write the rule."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..adapters import kinds as systems
from ..artifact import hub
from ..backends.options import ModelSource
from ..errors import InputError
from ..evaluation.best_rule import ENOUGH_ANSWERS, Goal, best_rule
from ..evaluation.datasets import dataset_name, read_labelled, warn_of_reuse
from ..evaluation.evaluate import score_dataset
from ..evaluation.metrics import RuleResult, ScoredQuery, apply_rule, selection_measures
from ..evaluation.statistics import folds
from ..partial_files import write_text
from ..ranking.rule import Rule, plain
from ..rsrank import RSRank
from .verdict import RULE_MEASURES, Verdict, verdict_on

FOLDS = 5


@dataclass(frozen=True)
class Tuned:
    """A rule from labelled queries, and how well it does on queries that did not choose it.

    Attributes:
        goal: What the rule should reach.
        before: The rule in use so far.
        rule: The new rule. It is the rule so far if both keep the same documents.
        result: What the new rule does to the queries that chose it.
        answerable: How many of these have a relevant document.
        verdict: The rule so far against rules that were chosen without the queries on which they
            are measured.
    """

    goal: Goal
    before: Rule
    rule: Rule
    result: RuleResult
    answerable: int
    verdict: Verdict

    @property
    def problem(self) -> str | None:
        """Why the rule should not be used; None if nothing speaks against it."""
        verdict = self.verdict
        if self.rule == self.before:
            return "the rule so far is the best one"
        if self.answerable < ENOUGH_ANSWERS and "lost" not in verdict.gains:
            return (
                f"{self.answerable} queries with a relevant document (fewer than "
                f"{ENOUGH_ANSWERS}) cannot rule out that answers are lost"
            )
        lost = verdict.after["lost"]
        # To keep everything loses nothing, so that every rule loses answers against it.
        if "lost" in verdict.losses and _is_selective(self.before):
            return f"answers would be lost beyond chance: their share is {lost}, {self._change}"
        if lost.mean > max(self.goal.lost, verdict.before["lost"].mean):
            return f"the goal is missed: the share of answers lost is {lost}, {self._change}"
        recall = verdict.after["recall"]
        if "recall" in verdict.losses and round(recall.mean, 9) < self.goal.recall:
            return f"the goal is missed: recall is {recall} on queries that were left out"
        gains = set(verdict.gains)
        # More recall than the goal asks for costs passages, and is no reason for another rule.
        if verdict.before["recall"].mean >= self.goal.recall:
            gains.discard("recall")
        if not gains:
            return "nothing is better beyond chance"
        return None

    @property
    def _change(self) -> str:
        return f"a change of {self.verdict.difference['lost']} on queries that were left out"

    @property
    def summary(self) -> str:
        """The rule, and what it does to the queries that chose it."""
        result = self.result
        return (
            f"The best rule for {self.goal}: {self.rule}. So far: {self.before}. On the "
            f"{self.verdict.queries} queries that chose it, the rule loses {result.lost} of "
            f"{self.answerable} answers and keeps {result.kept:.2f} passages a query, with recall "
            f"{plain(result.recall)} and F1 {result.f1:.3f}."
        )


def goal_for(
    queries: Sequence[ScoredQuery], before: Rule, lost: float | None, recall: float | None
) -> Goal:
    """A goal for scored queries, at least one.

    Where a part is None, the rule has to be as good as the rule so far, but not better than `Goal`
    asks for. If the rule so far keeps everything, it has to be as good as `Goal` asks for.
    """
    so_far = apply_rule(queries, before)
    answerable = sum(any(query.relevant) for query in queries)
    if lost is None:
        lost = Goal.lost
        if _is_selective(before) and answerable:
            lost = min(lost, math.ceil(100 * so_far.lost / answerable) / 100)
    if recall is None:
        recall = math.floor(100 * min(Goal.recall, so_far.recall or 0.0)) / 100
    return Goal(lost, recall)


def _is_selective(rule: Rule) -> bool:
    return rule.threshold is not None or rule.max_gap is not None


def find_rule(queries: Sequence[ScoredQuery], goal: Goal, before: Rule) -> Tuned:
    """The best rule for a goal on scored queries, and a verdict by cross-validation.

    The rule is chosen with a margin of one standard error of the share of answers lost, because it
    loses more answers to queries that did not choose it.

    Args:
        queries: At least two, with scores and labels.
        goal: What the rule should reach.
        before: The rule in use so far.

    Raises:
        InputError: There are fewer than two queries, or too few have a relevant document.
    """
    rule = _choose(queries, goal)
    old = selection_measures(queries, before)
    if np.array_equal(old["kept"], selection_measures(queries, rule)["kept"]):
        rule = before
    new = {name: np.zeros(len(queries)) for name in RULE_MEASURES}
    for numbers in folds(len(queries), FOLDS):
        others = [query for number, query in enumerate(queries) if number not in numbers]
        left_out = [queries[number] for number in numbers]
        values = selection_measures(left_out, _choose(others, goal))
        for name, column in new.items():
            column[numbers] = values[name]
    return Tuned(
        goal=goal,
        before=before,
        rule=rule,
        result=apply_rule(queries, rule),
        answerable=sum(any(query.relevant) for query in queries),
        verdict=verdict_on(old, new),
    )


def _choose(queries: Sequence[ScoredQuery], goal: Goal) -> Rule:
    """The best rule for a goal, with a margin for answers lost."""
    answerable = sum(any(query.relevant) for query in queries)
    margin = math.sqrt(goal.lost * (1 - goal.lost) / max(answerable, 1))
    return best_rule(queries, replace(goal, lost=max(goal.lost - margin, 0)))


def tune(
    source: ModelSource,
    data: Path,
    output: Path,
    *,
    lost: float | None = None,
    recall: float | None = None,
    force: bool = False,
    show: Callable[[Tuned], object] = str,
) -> Tuned:
    """Write a copy of an artifact with the best rule for a goal on labelled queries.

    Args:
        source: The artifact, or another system by its name, and how to load it.
        data: Labelled queries, ``.jsonl`` or ``.jsonl.gz``.
        output: Folder of the new artifact; for another system, a file that ends in ``.json``.
        lost: See `goal_for`.
        recall: See `goal_for`.
        force: Write the artifact even if there is a `Tuned.problem`.
        show: Receives the rule before it is written.

    Returns:
        The rule. If the rule has a problem and ``force`` is false, nothing was written.

    Raises:
        InputError: The data cannot be used, there are too few queries, or ``output`` does not fit
            the kind of the system.
        RSRankError: The system cannot be loaded.
        ScoringError: A document has no finite score.
    """
    is_artifact = systems.parse(source.name)[0] is None
    if is_artifact is (output.suffix == ".json"):
        raise InputError(
            f"--output {output} cannot hold {source.name}. Name a folder for an artifact, and a "
            "file that ends in .json for another system."
        )
    queries = read_labelled(data)
    ranker = systems.load(source)
    name = dataset_name(data)
    warn_of_reuse(source.name, ranker.labelled_data, [name])
    scored = score_dataset(ranker, queries)
    before = ranker.native_rule
    tuned = find_rule(scored, goal_for(scored, before, lost, recall), before)
    show(tuned)
    if tuned.problem and not force:
        return tuned
    note = (
        f"Rule for {tuned.goal}, on {len(queries)} labelled queries of {data.name}: {tuned.rule}."
    )
    if tuned.problem:
        note = f"{note} It was forced: {tuned.problem}."
    used = tuple(sorted({*ranker.labelled_data, name}))
    rule = tuned.rule
    parts: dict[str, Any] = {
        "threshold": rule.threshold,
        "max_gap": rule.max_gap,
        "fallback": rule.fallback,
    }
    if isinstance(ranker, RSRank):
        config = ranker.config
        training = {
            "notes": f"{config.training.notes} {note}".strip(),
            "data": used,
            # The recorded figures were measured with another rule.
            "metrics": {},
        }
        parts["training"] = config.training.model_copy(update=training)
        folder = hub.resolve(source.name, source.revision, source)
        config = config.model_copy(update=parts)
        hub.write_derived(output, config, ranker.projection, folder)
        return tuned
    system = systems.TunedRule(
        model=source.name, revision=source.revision, data=used, notes=note, **parts
    )
    # A file names the system itself, never another file.
    if source.name.endswith(".json"):
        known = systems.TunedRule.read(source.name)
        system.model = known.model
        system.revision = source.revision or known.revision
    write_text(output, system.model_dump_json(indent=2))
    return tuned
