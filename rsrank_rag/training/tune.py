"""A threshold for a wanted precision or recall, or the best F1, from labelled queries."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ..adapters import systems
from ..artifact import hub
from ..artifact.config import INSIDE
from ..errors import InputError, TrainingError
from ..evaluation.datasets import read_labelled
from ..evaluation.evaluate import score_dataset
from ..evaluation.metrics import (
    ROUNDING,
    Rule,
    ScoredQuery,
    ThresholdSweep,
    present_means,
    selection_measures,
)
from ..evaluation.statistics import Array, Estimate, estimate, resampled
from ..language_model.options import LoadOptions, ModelSource
from ..partial_files import write_text
from ..rsrank import RSRank
from .batches import folds
from .run import write_artifact
from .verdict import MEASURES, Verdict, judge

FOLDS = 5


@dataclass(frozen=True)
class Goal:
    """What a threshold should reach in the mean over queries; value None stands for the most.

    Precision is the mean over queries that keep a document: an empty list has none. Recall is the
    mean over queries with a relevant document.
    """

    metric: Literal["precision", "recall", "f1"] = "f1"
    value: float | None = None

    def __str__(self) -> str:
        if self.value is None:
            return f"the best {MEASURES[self.metric]}"
        return f"{self.metric} {self.value:g}"

    def choose(self, sweep: ThresholdSweep, weights: Array | None = None) -> float:
        """The threshold that reaches the goal, or else comes nearest to it.

        For a precision it is the lowest threshold that reaches it, for a recall the highest, for F1
        the highest of the best. NaN if the measure means nothing for the queries.

        Args:
            sweep: The goal's measure at all thresholds.
            weights: How often each query counts, (queries,).
        """
        thresholds, means = sweep.means(weights)
        wanted = np.fmax.reduce(means)
        if self.value is not None:
            wanted = min(wanted, self.value)
        reached = thresholds[means >= wanted - ROUNDING]
        if not len(reached):
            return np.nan
        if self.metric == "precision":
            return float(reached[-1])
        return float(reached[0])


@dataclass(frozen=True)
class Tuned:
    """A threshold from labelled queries, and how it does on queries that did not choose it."""

    goal: Goal
    # Reaches the goal on all queries, or comes nearest to it.
    threshold: float
    # The threshold with its bootstrap interval over queries.
    estimate: Estimate
    # The threshold in use so far; None for a system without one, which keeps everything.
    before: float | None
    # The goal's measure on all queries, at the threshold in use so far and at the new one.
    value_before: float
    value: float
    # The threshold so far against thresholds that were chosen without the queries they are
    # measured on.
    verdict: Verdict

    @property
    def reached(self) -> bool:
        """Whether the goal is reached on the queries that chose the threshold."""
        return self.goal.value is None or self.value >= self.goal.value - ROUNDING

    @property
    def is_judged(self) -> bool:
        """Whether two thresholds are compared by F1; another goal is paid for by other measures."""
        return self.goal.value is None and self.before is not None

    @property
    def problem(self) -> str | None:
        """Why the threshold should not be used; None if nothing speaks against it."""
        name = MEASURES[self.goal.metric]
        if not self.reached:
            return (
                f"no threshold reaches {self.goal} on these {self.verdict.queries} queries: the "
                f"highest {name} is {self.value:.3f}, at threshold {self.threshold:.3f}"
            )
        held_out = self.verdict.after.get(self.goal.metric)
        if held_out is None:
            return None
        if self.goal.value is None:
            is_missed = self.goal.metric in self.verdict.losses
            wanted = f"the value {self.so_far}"
        else:
            is_missed = held_out.is_below(self.goal.value - ROUNDING)
            wanted = f"{self.goal.value:g}"
        if not is_missed:
            return None
        return f"on queries that did not choose the threshold, {name} is {held_out}, below {wanted}"

    @property
    def summary(self) -> str:
        """What was measured, in sentences, and what to expect on other queries."""
        name = MEASURES[self.goal.metric]
        aim = f"nearest to {self.goal}"
        if self.reached:
            aim = f"for {self.goal}"
        return (
            f"Threshold {aim}: {self.estimate}. On the {self.verdict.queries} queries that "
            f"chose it {name} is {self.value:.3f}; {self.so_far} it is "
            f"{self.value_before:.3f}.{self._direction()}{self._on_other_queries()}"
        )

    @property
    def so_far(self) -> str:
        """In words, what is kept without the new threshold."""
        if self.before is None:
            return "with everything kept"
        return f"at the threshold so far, {self.before:g},"

    def _direction(self) -> str:
        """Why a precision lowers the threshold, or a recall raises it; empty if neither does."""
        if self.goal.value is None or self.before is None or not self.reached:
            return ""
        if self.goal.metric == "precision" and self.threshold < self.before:
            words = ("lowest", "below")
        elif self.goal.metric == "recall" and self.threshold > self.before:
            words = ("highest", "above")
        else:
            return ""
        return (
            f" The {words[0]} threshold with {self.goal} or more is asked for, and it is "
            f"{words[1]} {self.before:g}."
        )

    def _on_other_queries(self) -> str:
        """Whether a wanted value holds on queries that did not choose the threshold."""
        held_out = self.verdict.after.get(self.goal.metric)
        if self.goal.value is None or held_out is None:
            return ""
        value = self.goal.value - ROUNDING
        words = f"more labels are needed to say whether {self.goal} holds"
        if held_out.low is not None and held_out.low >= value:
            words = "the goal is reached beyond chance"
        if held_out.is_below(value):
            words = "the goal is missed beyond chance"
        return f" On queries that did not choose the threshold it is {held_out}: {words}."


def find_threshold(queries: Sequence[ScoredQuery], goal: Goal, before: float | None = 0.0) -> Tuned:
    """The threshold that reaches a goal on scored queries, or comes nearest to it.

    Where the threshold in use so far keeps the same documents, it stays.

    Args:
        queries: At least two, with scores and labels.
        goal: What the threshold should reach.
        before: The threshold in use so far; None if everything is kept.

    Raises:
        TrainingError: There are fewer than two queries, or the goal means nothing for them.
    """
    sweep = ThresholdSweep(queries, goal.metric)
    held_out: list[ScoredQuery] = []
    shifted: list[ScoredQuery] = []
    for numbers in folds(len(queries), FOLDS):
        weights = np.ones(len(queries))
        weights[numbers] = 0
        threshold = goal.choose(sweep, weights)
        if np.isnan(threshold):
            raise TrainingError(
                f"{MEASURES[goal.metric]} cannot be tuned: no query has a relevant document. Label "
                "queries that have one."
            )
        for number in numbers:
            query = queries[number]
            held_out.append(query)
            scores = [score - threshold for score in query.scores]
            shifted.append(ScoredQuery(scores, query.relevant))
    drawn = np.array([goal.choose(sweep, weights) for weights in resampled(len(queries))])
    old = selection_measures(queries, Rule(before))
    new = selection_measures(queries, Rule(drawn[0]))
    if before is not None and np.array_equal(old["kept"], new["kept"]):
        drawn[0] = before
    return Tuned(
        goal=goal,
        threshold=float(drawn[0]),
        estimate=estimate(drawn),
        before=before,
        value_before=present_means(old).get(goal.metric, 0.0),
        value=present_means(new).get(goal.metric, 0.0),
        verdict=judge(held_out, shifted, (before, 0.0)),
    )


def tune(
    model: str,
    data: Path,
    output: Path,
    goal: Goal,
    *,
    revision: str | None = None,
    load: LoadOptions | None = None,
    force: bool = False,
) -> Tuned:
    """Write a copy of an artifact with the threshold that reaches a goal on labelled queries.

    Args:
        model: The artifact: built-in name, folder or Hub id; or another system's name.
        data: Labelled queries, ``.jsonl`` or ``.jsonl.gz``.
        output: Folder of the new artifact; for another system, a file that ends in ``.json``.
        goal: What the threshold should reach.
        revision: The artifact's commit, tag or branch on the Hub.
        load: How to load the model.
        force: Write the artifact even if there is a `Tuned.problem`.

    Returns:
        The threshold. Nothing was written where it has a problem, unless ``force``.
    """
    load = load or LoadOptions()
    is_artifact = systems.parse(model)[0] is None
    if is_artifact is (output.suffix == ".json"):
        raise InputError(
            f"--output {output} cannot hold {model}. Name a folder for an artifact, and a file "
            "that ends in .json for another system."
        )
    queries = read_labelled(data)
    source = ModelSource(model, revision, load)
    ranker = systems.load(source)
    scored = score_dataset(ranker, queries)
    tuned = find_threshold(scored, goal, ranker.threshold)
    if tuned.problem and not force:
        return tuned
    note = f"Threshold for {goal} on {len(queries)} labelled queries of {data.name}."
    if tuned.problem:
        note = f"{note} It was forced: {tuned.problem}."
    if not isinstance(ranker, RSRank):
        scale = float(np.std(np.concatenate([query.scores for query in scored]))) or 1.0
        zero = systems.Zero(
            model=model, revision=revision, threshold=tuned.threshold, scale=scale, notes=note
        )
        write_text(output, zero.model_dump_json(indent=2))
        return tuned
    config = ranker.config
    notes = f"{config.training.notes} {note}".strip()
    training = config.training.model_copy(update={"notes": notes})
    config = config.model_copy(update={"threshold": tuned.threshold, "training": training})
    write_artifact(output, config, ranker.projection, hub.resolve(model, revision, load) / INSIDE)
    return tuned
