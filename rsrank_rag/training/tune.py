"""A threshold for a wanted precision, recall or the best F1, from labelled queries."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..artifact import hub
from ..artifact.config import INSIDE
from ..errors import TrainingError
from ..evaluation.datasets import read_labelled
from ..evaluation.evaluate import score_dataset
from ..evaluation.metrics import ScoredQuery
from ..evaluation.statistics import LEVEL, RESAMPLES
from ..language_model.options import LoadOptions, ModelSource
from ..rsrank import RSRank
from .domain import Verdict, judge, parts
from .run import write_artifact

FOLDS = 5

AT_MOST = (
    2000  # thresholds that are tried: all between two scores, or so many of them, evenly spread
)


@dataclass(frozen=True)
class Goal:
    """What a threshold is to reach, in the mean over queries: a precision, a recall, or the best F1 (value None)."""

    metric: Literal["precision", "recall", "f1"] = "f1"
    value: float | None = None

    def __str__(self) -> str:
        return "the best F1" if self.value is None else f"{self.metric} {self.value:g}"


@dataclass(frozen=True)
class Tuned:
    """A threshold, where it lies when the queries are drawn again, and the one in use so far."""

    threshold: float
    interval: tuple[float, float]
    before: float
    verdict: Verdict  # that one against thresholds found without the queries that are measured


class Curves:
    """Precision, recall and F1 of each query at every threshold that makes a difference, (queries, thresholds)."""

    def __init__(self, queries: Sequence[ScoredQuery]) -> None:
        scores = np.unique(
            np.concatenate([np.asarray(query.scores, dtype=float) for query in queries])
        )
        between = np.concatenate(
            [[np.nextafter(scores[0], -np.inf)], (scores[:-1] + scores[1:]) / 2, scores[-1:]]
        )
        self.thresholds = between[
            np.linspace(0, len(between) - 1, min(len(between), AT_MOST)).round().astype(int)
        ]
        above = [
            np.asarray(query.scores, dtype=float)[:, None] > self.thresholds for query in queries
        ]
        labels = [np.asarray(query.relevant, dtype=bool) for query in queries]
        k = np.array([rows.sum(0) for rows in above])
        h = np.array([rows[label].sum(0) for rows, label in zip(above, labels, strict=True)])
        r = np.array([label.sum() for label in labels])[:, None]
        some = np.array([[len(label) > 0] for label in labels])
        nothing = (some & (k == 0) & (r == 0)).astype(float)  # nothing to keep, and nothing kept
        self.by_metric = {
            "precision": np.where(k > 0, h / np.maximum(k, 1), nothing),
            "recall": np.where(r > 0, h / np.maximum(r, 1), nothing),
            "f1": np.where(k + r > 0, 2 * h / np.maximum(k + r, 1), nothing),
        }

    def choose(self, goal: Goal, means: NDArray[np.float64]) -> NDArray[np.float64]:
        """The threshold that each row of means, (..., thresholds), leads to; NaN where none reaches the goal.

        For a precision it is the lowest that has it, for a recall the highest, for F1 the highest of the best.
        """
        reached = (
            means >= (means.max(-1, keepdims=True) if goal.value is None else goal.value) - 1e-12
        )
        low = goal.metric == "precision"
        place = reached.argmax(-1) if low else reached.shape[-1] - 1 - reached[..., ::-1].argmax(-1)
        return np.where(reached.any(-1), self.thresholds[place], np.nan)

    def nearest(self, goal: Goal) -> float:
        """The threshold that reaches a goal, or else comes nearest to it."""
        means = self.by_metric[goal.metric].mean(0)
        found = float(self.choose(goal, means))
        return float(self.thresholds[means.argmax()]) if np.isnan(found) else found


def find_threshold(
    queries: Sequence[ScoredQuery], goal: Goal, *, resamples: int = RESAMPLES
) -> tuple[float, tuple[float, float]]:
    """The threshold that reaches a goal on scored queries, and its bootstrap interval; TrainingError if none does."""
    curves = Curves(queries)
    values = curves.by_metric[goal.metric]
    means = values.mean(0)
    found = float(curves.choose(goal, means))
    if np.isnan(found):
        raise TrainingError(
            f"No threshold gives a {goal.metric} of {goal.value:g} on these {len(queries)} queries: the highest is "
            f"{means.max():.3f}. Ask for less."
        )
    drawn = np.random.default_rng(0).multinomial(
        len(queries), [1 / len(queries)] * len(queries), resamples
    )
    others = np.concatenate(
        [curves.choose(goal, part @ values / len(queries)) for part in np.array_split(drawn, 20)]
    )
    tail = 50 * (1 - LEVEL)
    others = others[~np.isnan(others)]  # where no threshold reaches the goal
    low, high = np.percentile(others, [tail, 100 - tail]) if others.size else (found, found)
    return found, (float(low), float(high))


def cross_tuned(queries: Sequence[ScoredQuery], goal: Goal, before: float) -> Verdict:
    """A threshold in use against those found on other queries than are measured (in five parts)."""
    held_out: list[ScoredQuery] = []
    moved: list[ScoredQuery] = []  # so that each has its own threshold at zero
    for held in parts(len(queries), FOLDS):
        threshold = Curves([query for i, query in enumerate(queries) if i not in held]).nearest(
            goal
        )
        held_out += [queries[i] for i in held]
        moved += [
            ScoredQuery([s - threshold for s in queries[i].scores], queries[i].relevant)
            for i in held
        ]
    return judge(held_out, moved, (before, 0.0))


def tune(
    model: str,
    data: Path,
    output: Path,
    goal: Goal,
    *,
    revision: str | None = None,
    load: LoadOptions | None = None,
) -> Tuned:
    """Write a copy of an artifact with the threshold that reaches a goal on labelled queries.

    Raises TrainingError: no threshold reaches it.
    """
    load = load or LoadOptions()
    queries = read_labelled(data)
    ranker = RSRank.from_source(ModelSource(model, revision, load))
    rows = score_dataset(ranker, queries)
    threshold, interval = find_threshold(rows, goal)
    before = ranker.threshold or 0.0
    tuned = Tuned(threshold, interval, before, cross_tuned(rows, goal, before))
    config = ranker.config
    note = f"{config.training.notes} Threshold for {goal} on {len(queries)} labelled queries of {data.name}.".strip()
    training = config.training.model_copy(update={"notes": note})
    config = config.model_copy(update={"threshold": threshold, "training": training})
    write_artifact(output, config, ranker.projection, hub.resolve(model, revision, load) / INSIDE)
    return tuned
