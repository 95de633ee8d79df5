"""The work of the model's process: cuts documents into parts, and scores the parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import InputError, ScoringError, finite
from ..ranking.pairs import cut, parts_of
from ..ranking.results import Scored
from ..reranker import Pair, Reranker
from .messages import Description, Outcome, Parts, Task


class DeviceLostError(Exception):
    """The device does not answer in this process any more; a new process may be luckier."""


@dataclass
class Engine:
    """A reranker for which an error on one pair does not affect the other pairs of a call."""

    reranker: Reranker

    def describe(self) -> Description:
        """The model that is served."""
        reranker = self.reranker
        try:
            max_tokens = reranker.token_ends("")[1]
        except InputError:
            max_tokens = None
        return Description(
            reranker.native_rule,
            type(reranker).explain is not Reranker.explain,
            max_tokens,
            reranker.long_documents,
        )

    def run(self, tasks: Sequence[Task]) -> list[Any]:
        """Do tasks of any clients: `Parts` for each section to cut, an `Outcome` for each pair.

        Raises:
            DeviceLostError: Nothing more can be scored in this process.
        """
        results: dict[int, Any] = {}
        for work in (self._cut, self._score, self._explain):
            places = [n for n, task in enumerate(tasks) if work.__name__ == f"_{task.work}"]
            # Tasks of one query stay together, because most errors are about a query.
            places.sort(key=lambda n: tasks[n].pair.query)
            results.update(zip(places, _halved(work, [tasks[n] for n in places]), strict=True))
        return [results[n] for n in range(len(tasks))]

    def _cut(self, tasks: Sequence[Task]) -> list[Parts]:
        results = []
        for task, pair in zip(tasks, self._fitting(tasks), strict=True):
            spans = cut(pair, task.section, self.reranker.token_ends)
            costs = self.reranker.token_costs(parts_of(pair, spans))
            results.append(Parts(spans, costs, pair.query))
        return results

    def _score(self, tasks: Sequence[Task]) -> list[Outcome]:
        """Scores as plain numbers, because a model may give a tensor, or what cannot be pickled."""
        outcomes: list[Outcome] = []
        pairs = self._fitting(tasks)
        for task, pair, one in zip(tasks, pairs, self.reranker.score_pairs(pairs), strict=True):
            score = finite(float(one.score), len(outcomes))
            scored = Scored(score, bool(one.truncated), int(one.tokens))
            outcomes.append(Outcome(scored, pair.query != task.pair.query))
        return outcomes

    def _explain(self, tasks: Sequence[Task]) -> list[Outcome]:
        explanations = [
            self.reranker.explain(one.query, one.document) for one in self._fitting(tasks)
        ]
        return [
            Outcome(Scored(finite(one.score, 0), one.truncated), explanation=one)
            for one in explanations
        ]

    def _fitting(self, tasks: Sequence[Task]) -> list[Pair]:
        """The tasks' pairs, with queries that fit the model."""
        fitting = {task.pair.query: "" for task in tasks}
        for query in fitting:
            fitting[query] = self.reranker.fit_query(query)
        return [replace(task.pair, query=fitting[task.pair.query]) for task in tasks]


def _halved(work: Callable[[Sequence[Task]], list[Any]], tasks: Sequence[Task]) -> list[Any]:
    """Call ``work`` on the tasks. If the call fails, each half of the tasks is tried.

    A task on which ``work`` fails gets an Outcome with the error.
    """
    if not tasks:
        return []
    try:
        values = work(tasks)
        return [value for _, value in zip(tasks, values, strict=True)]
    except (KeyboardInterrupt, DeviceLostError):
        raise
    # A panic in Rust and sys.exit() are no Exception.
    except BaseException as error:
        # After most errors, CUDA refuses everything.
        text = str(error)
        if "CUDA error: " in text and "out of memory" not in text:
            raise DeviceLostError(text.partition("\n")[0]) from error
        if len(tasks) == 1:
            return [_failure(error)]
    middle = len(tasks) // 2
    return _halved(work, tasks[:middle]) + _halved(work, tasks[middle:])


def _failure(error: BaseException) -> Outcome:
    """The outcome of a document on which the model failed, without its number in a batch."""
    if isinstance(error, ScoringError):
        return Outcome(None, fault="unscored", error=error.reason)
    if isinstance(error, InputError):
        return Outcome(None, fault="input", error=str(error))
    name = type(error).__name__
    return Outcome(None, fault="internal", error=f"made the model fail ({name}).")
