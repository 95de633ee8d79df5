"""A threshold for a wanted precision or recall, or the best F1, from labelled queries."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ..adapters import systems
from ..artifact import hub
from ..errors import InputError
from ..evaluation.datasets import dataset_name, read_labelled, warn_of_reuse
from ..evaluation.evaluate import score_dataset
from ..evaluation.metrics import (
    ScoredQuery,
    ThresholdSweep,
    present_means,
    selection_measures,
)
from ..evaluation.statistics import (
    FEWEST,
    RESAMPLES,
    ROUNDING,
    Array,
    Estimate,
    estimate,
    estimate_mean,
    resampled,
)
from ..language_model.options import ModelSource
from ..partial_files import write_text
from ..passages.rule import Rule, plain
from ..rsrank import RSRank
from .batches import folds
from .run import write_trained
from .verdict import MEASURES, Verdict, judge

FOLDS = 5


@dataclass(frozen=True)
class Goal:
    """What a threshold should reach in the mean over queries: the best F1, or a value of another.

    Precision is the mean over queries that keep a document: an empty list has none. Recall is the
    mean over queries with a relevant document.
    """

    metric: Literal["precision", "recall", "f1"] = "f1"
    value: float = math.inf

    def __str__(self) -> str:
        if self.metric == "f1":
            return "the best F1"
        return f"{self.metric} {self.value:g}"

    def choose(self, sweep: ThresholdSweep, weights: Array | None = None) -> float:
        """The threshold that reaches the goal, or else comes nearest to it.

        For a precision it is the lowest threshold that reaches it, for a recall the highest, for F1
        the highest of the best. NaN if the measure means nothing for the queries.

        Args:
            sweep: The goal's measure at all thresholds.
            weights: How often each query counts, (queries,).
        """
        return sweep.reaching(self.value, weights, lowest=self.metric == "precision")[0]


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
    # The goal's measure on all queries, at the threshold in use so far and at the new one. None for
    # a precision if nothing is kept so far.
    value_before: float | None
    value: Estimate
    # The queries for which the goal's measure means something.
    counted: int
    # All documents, and those that score above the new threshold.
    documents: int
    kept: int
    # The threshold so far against thresholds that were chosen without the queries they are
    # measured on.
    verdict: Verdict

    @property
    def reached(self) -> bool:
        """Whether the goal is reached on the queries that chose the threshold."""
        return self.goal.metric == "f1" or self.value.mean >= self.goal.value - ROUNDING

    @property
    def is_new(self) -> bool:
        """Whether the threshold keeps other documents than the one in use so far."""
        return self.threshold != self.before

    @property
    def problem(self) -> str | None:
        """Why the threshold should not be used; None if nothing speaks against it."""
        name = MEASURES[self.goal.metric]
        if not self.reached:
            return (
                f"no threshold reaches {self.goal} on these {self.verdict.queries} queries: the "
                f"highest {name} is {self.value.mean:.3f}, at threshold {plain(self.threshold)}"
            )
        held_out = self.verdict.after.get(self.goal.metric)
        if held_out is None:
            return None
        missed = f"on queries that did not choose the threshold, {name} is {held_out}, below"
        if self.goal.metric == "f1":
            # Few queries often choose a threshold that suits no other query. Most such losses are
            # within chance.
            if self.is_new and self.verdict.difference["f1"].mean < -ROUNDING:
                return f"{missed} {self.verdict.before['f1'].mean:.3f} {self._so_far}"
        elif held_out.is_below(self.goal.value):
            return f"{missed} {self.goal.value:g}"
        return None

    @property
    def summary(self) -> str:
        """What was measured, in sentences, and what to expect on other queries."""
        name = MEASURES[self.goal.metric]
        keeps = "fewest"
        if self.goal.metric == "precision":
            keeps = "most"
        aim = "with" if self.reached else "nearest to"
        before = "undefined"
        if self.value_before is not None:
            before = plain(self.value_before)
            if self.value_before >= self.goal.value:
                before += ", which reaches the goal already"
        return (
            f"The threshold {aim} {self.goal} that keeps the {keeps} documents: "
            f"{self.estimate.shown(plain)}. "
            f"On the {self.counted} of {self.verdict.queries} queries that count, {name} is "
            f"{self.value}, with {self.kept:,} of {self.documents:,} documents kept; "
            f"{self._so_far} it is {before}."
            f"{self._on_other_queries()}"
        )

    @property
    def _so_far(self) -> str:
        """In words, what is kept without the new threshold."""
        if self.before is None:
            return "with everything kept"
        return f"at the threshold so far ({self.before:g})"

    def _on_other_queries(self) -> str:
        """Whether the goal holds on queries that did not choose the threshold."""
        metric = self.goal.metric
        held_out = self.verdict.after.get(metric)
        if held_out is None:
            return ""
        words = f"whether {self.goal} holds for new queries stays open"
        if metric == "f1" and not self.is_new:
            words = "the threshold stays as it was"
        elif metric == "f1":
            chance = "which may be chance"
            if metric in self.verdict.gains + self.verdict.losses:
                chance = "beyond chance"
            words = f"it changes by {self.verdict.difference[metric]}, {chance}"
        elif held_out.is_below(self.goal.value):
            words = "the goal is missed"
            if held_out.high is not None:
                words += " beyond chance"
        # The thresholds of the left-out queries may be far from the one that is written.
        elif held_out.proves(self.goal.value) and self.value.proves(self.goal.value):
            words = "the goal is reached beyond chance"
        return (
            f" On queries that did not choose the threshold it is {held_out}: {words}. There, each "
            "part of the queries is measured with the threshold that the other parts choose."
        )


def find_threshold(queries: Sequence[ScoredQuery], goal: Goal, before: float | None = 0.0) -> Tuned:
    """The threshold that reaches a goal on scored queries, or comes nearest to it.

    Where the threshold in use so far keeps the same documents, it stays.

    Args:
        queries: At least two, with scores and labels.
        goal: What the threshold should reach.
        before: The threshold in use so far; None if everything is kept.

    Raises:
        InputError: There are fewer than two queries, or the goal means nothing for them.
    """
    if not any(any(query.relevant) for query in queries):
        raise InputError(
            "A threshold cannot be tuned: no query has a relevant document. Add queries with one."
        )
    sweep = ThresholdSweep(queries, goal.metric)
    held_out: list[ScoredQuery] = []
    shifted: list[ScoredQuery] = []
    for numbers in folds(len(queries), FOLDS):
        weights = np.ones(len(queries))
        weights[numbers] = 0
        threshold = goal.choose(sweep, weights)
        if np.isnan(threshold):
            raise InputError(
                f"{MEASURES[goal.metric]} cannot be tuned: too few queries have a relevant "
                "document. Label more queries that have one."
            )
        for number in numbers:
            held_out.append(queries[number])
            shifted.append(queries[number].shifted(threshold))
    samples = RESAMPLES if len(queries) >= FEWEST else 0
    draws = resampled(len(queries), samples)
    drawn = np.array([goal.choose(sweep, weights) for weights in draws])
    old = selection_measures(queries, Rule(before))
    new = selection_measures(queries, Rule(drawn[0]))
    if before is not None and np.array_equal(old["kept"], new["kept"]):
        drawn = np.array([before])
    return Tuned(
        goal=goal,
        threshold=float(drawn[0]),
        estimate=estimate(drawn),
        before=before,
        value_before=present_means(old).get(goal.metric),
        value=estimate_mean(new[goal.metric]),
        counted=int(np.isfinite(new[goal.metric]).sum()),
        documents=sum(len(query.scores) for query in queries),
        kept=int(new["kept"].sum()),
        verdict=judge(held_out, shifted, (before, 0.0)),
    )


def tune(
    source: ModelSource,
    data: Path,
    output: Path,
    goal: Goal,
    *,
    force: bool = False,
    show: Callable[[Tuned], object] = str,
) -> Tuned:
    """Write a copy of an artifact with the threshold that reaches a goal on labelled queries.

    Args:
        source: The artifact, or another system by its name, and how to load it.
        data: Labelled queries, ``.jsonl`` or ``.jsonl.gz``.
        output: Folder of the new artifact; for another system, a file that ends in ``.json``.
        goal: What the threshold should reach.
        force: Write the artifact even if there is a `Tuned.problem`.
        show: Receives the threshold before it is written.

    Returns:
        The threshold. If the threshold has a problem and ``force`` is false, nothing was written.

    Raises:
        InputError: The data cannot be used, there are fewer than two queries, or ``output`` does
            not fit the kind of the system.
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
    tuned = find_threshold(scored, goal, ranker.threshold)
    show(tuned)
    if tuned.problem and not force:
        return tuned
    note = (
        f"Threshold {plain(tuned.threshold)} for {goal} on {len(queries)} labelled queries of "
        f"{data.name}."
    )
    if tuned.problem:
        note = f"{note} It was forced: {tuned.problem}."
    used = tuple(sorted({*ranker.labelled_data, name}))
    if isinstance(ranker, RSRank):
        config = ranker.config
        training = config.training.model_copy(
            # The recorded figures were measured at another threshold.
            update={
                "notes": f"{config.training.notes} {note}".strip(),
                "data": used,
                "metrics": {},
            }
        )
        config = config.model_copy(update={"threshold": tuned.threshold, "training": training})
        write_trained(
            output,
            config,
            ranker.projection,
            hub.resolve(source.name, source.revision, source.load),
        )
        return tuned
    tuned_threshold = systems.TunedThreshold(
        model=source.name,
        revision=source.revision,
        threshold=tuned.threshold,
        data=used,
        notes=note,
    )
    # A file names the system itself, never another file.
    if source.name.endswith(".json"):
        known = systems.TunedThreshold.read(source.name)
        tuned_threshold.model = known.model
        tuned_threshold.revision = source.revision or known.revision
    write_text(output, tuned_threshold.model_dump_json(indent=2))
    return tuned
