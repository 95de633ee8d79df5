"""A threshold for a wanted precision or recall, or the best F1, from labelled queries."""

import math
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
from ..evaluation.metrics import ScoredQuery, selection_measures
from ..evaluation.statistics import Array, mean_present
from ..language_model.options import LoadOptions, ModelSource
from ..partial_files import write_text
from ..rsrank import RSRank
from .batches import folds
from .run import write_artifact
from .verdict import MEASURES, Verdict, judge

FOLDS = 5

# All thresholds between two scores are tried, up to so many, evenly spread.
MOST_THRESHOLDS = 2000

ROUNDING = 1e-9


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


@dataclass(frozen=True)
class Tuned:
    """A threshold from labelled queries, and how it does on queries that did not choose it."""

    goal: Goal
    # Reaches the goal on all queries, or comes nearest to it.
    threshold: float
    # The threshold in use so far; minus infinity for a system without one, which keeps everything.
    before: float
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
        return self.goal.value is None and math.isfinite(self.before)

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
        if self.goal.value is None:
            missed = self.goal.metric in self.verdict.losses
            wanted = f"the value {self.so_far}"
        else:
            missed = held_out is not None and held_out.is_below(self.goal.value - ROUNDING)
            wanted = f"{self.goal.value:g}"
        if not missed or held_out is None:
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
            f"Threshold {aim}: {self.threshold:.3f}. On the {self.verdict.queries} queries that "
            f"chose it {name} is {self.value:.3f}; {self.so_far} it is "
            f"{self.value_before:.3f}.{self._direction()}{self._on_other_queries()}"
        )

    @property
    def so_far(self) -> str:
        """In words, what is kept without the new threshold."""
        if math.isinf(self.before):
            return "with everything kept"
        return f"at the threshold so far, {self.before:g},"

    def _direction(self) -> str:
        """Why a precision lowers the threshold, or a recall raises it; empty if neither does."""
        goal = self.goal
        is_precision = goal.metric == "precision"
        is_higher = self.threshold > self.before
        surprises = self.threshold != self.before and is_higher != is_precision
        if goal.value is None or not self.reached or not surprises or math.isinf(self.before):
            return ""
        words = ("highest", "above")
        if is_precision:
            words = ("lowest", "below")
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


class Curves:
    """Measures of each query at every threshold that makes a difference, (queries, thresholds)."""

    def __init__(self, queries: Sequence[ScoredQuery]) -> None:
        scores = np.unique(np.concatenate([np.asarray(query.scores) for query in queries]))
        below = np.nextafter(scores[:1], -np.inf)
        between = np.concatenate([below, (scores[:-1] + scores[1:]) / 2, scores[-1:]])
        count = min(len(between), MOST_THRESHOLDS)
        places = np.linspace(0, len(between) - 1, count).round().astype(int)
        self.thresholds: Array = between[places]
        self.measures = selection_measures(queries, self.thresholds)

    def choose(self, goal: Goal) -> float:
        """The threshold that reaches a goal, or else comes nearest to it.

        For a precision it is the lowest threshold that reaches it, for a recall the highest, for F1
        the highest of the best.

        Raises:
            TrainingError: The measure means nothing for these queries.
        """
        means = np.nan_to_num(mean_present(self.measures[goal.metric]), nan=-1.0)
        wanted = means.max()
        if wanted < 0:
            raise TrainingError(
                f"{MEASURES[goal.metric]} cannot be tuned: no query has a relevant document. Label "
                "queries that have one."
            )
        if goal.value is not None:
            wanted = min(wanted, goal.value)
        reached = self.thresholds[means >= wanted - ROUNDING]
        if goal.metric == "precision":
            return float(reached[0])
        return float(reached[-1])


def find_threshold(queries: Sequence[ScoredQuery], goal: Goal, before: float = 0.0) -> Tuned:
    """The threshold that reaches a goal on scored queries, or comes nearest to it.

    Where the threshold in use so far keeps the same documents, it stays.

    Args:
        queries: At least two, with scores and labels.
        goal: What the threshold should reach.
        before: The threshold in use so far; minus infinity if everything is kept.

    Raises:
        TrainingError: There are fewer than two queries, or the goal means nothing for them.
    """
    held_out, shifted = _cross_tuned(queries, goal)
    threshold = Curves(queries).choose(goal)
    scores = np.concatenate([query.scores for query in queries])
    if np.array_equal(scores > threshold, scores > before) and np.isfinite(before):
        threshold = before
    both = selection_measures(queries, np.array([before, threshold]))
    values = np.nan_to_num(mean_present(both[goal.metric]))
    return Tuned(
        goal=goal,
        threshold=threshold,
        before=before,
        value_before=float(values[0]),
        value=float(values[1]),
        verdict=judge(held_out, shifted, (before, 0.0)),
    )


def _cross_tuned(
    queries: Sequence[ScoredQuery], goal: Goal
) -> tuple[list[ScoredQuery], list[ScoredQuery]]:
    """The queries, and the same less a threshold that was chosen without them, fold by fold."""
    held_out = []
    shifted = []
    for numbers in folds(len(queries), FOLDS):
        others = [query for number, query in enumerate(queries) if number not in numbers]
        threshold = Curves(others).choose(goal)
        for number in numbers:
            query = queries[number]
            held_out.append(query)
            scores = [score - threshold for score in query.scores]
            shifted.append(ScoredQuery(scores, query.relevant))
    return held_out, shifted


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
    before = -math.inf if ranker.threshold is None else ranker.threshold
    tuned = find_threshold(scored, goal, before)
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
