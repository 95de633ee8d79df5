"""The work of the model's process: cuts documents into parts, and scores the parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..errors import InputError, RSRankError, ScoringError, finite
from ..ranking.pairs import cut, most_tokens, parts_of
from ..ranking.results import Scored
from ..reranker import Pair, Reranker
from .messages import Description, Outcome, Parts, Task


class ProcessLostError(RSRankError):
    """The model's process died, did not answer in time, or has lost its device."""


@dataclass
class Engine:
    """A reranker for which an error on one pair does not affect the other pairs of a call."""

    reranker: Reranker

    def __post_init__(self) -> None:
        self._fit_query = lru_cache(self.reranker.fit_query)

    def describe(self) -> Description:
        """The model that is served."""
        reranker = self.reranker
        max_tokens = most_tokens(reranker.token_ends)
        return Description(reranker.native_rule, max_tokens, reranker.long_documents)

    def run(self, tasks: Sequence[Task]) -> list[Any]:
        """Do tasks of any clients: `Parts` for each section to cut, an `Outcome` for each pair.

        Raises:
            ProcessLostError: Nothing more can be scored in this process.
        """
        results: dict[Task, Any] = {}
        for work in (self.cut, self.score, self.explain):
            group = [task for task in tasks if task.work == work.__name__]
            results.update(zip(group, _halved(work, group), strict=True))
        return [results[task] for task in tasks]

    def cut(self, tasks: Sequence[Task]) -> list[Parts]:
        """Cut the section of each task into parts, and count the tokens of each part."""
        results: list[Parts] = []
        for task in tasks:
            pair = self._fitting(task)
            spans = cut(pair, task.section, self.reranker.token_ends)
            costs = self.reranker.token_costs(parts_of(pair, spans))
            results.append(list(zip(spans, costs, strict=True)))
        return results

    def score(self, tasks: Sequence[Task]) -> list[Outcome]:
        """Scores as plain numbers, because a model may give a tensor, or what cannot be pickled."""
        outcomes: list[Outcome] = []
        pairs = [self._fitting(task) for task in tasks]
        for task, pair, one in zip(tasks, pairs, self.reranker.score_pairs(pairs), strict=True):
            score = finite(float(one.score), len(outcomes))
            scored = Scored(score, bool(one.truncated), int(one.tokens))
            outcomes.append(Outcome(scored, pair.query != task.pair.query))
        return outcomes

    def explain(self, tasks: Sequence[Task]) -> list[Outcome]:
        """Scores with their parts."""
        outcomes = []
        for task in tasks:
            pair = self._fitting(task)
            explanation = self.reranker.explain(pair.query, pair.document)
            scored = Scored(finite(explanation.score, 0), explanation.truncated)
            outcomes.append(Outcome(scored, explanation=explanation))
        return outcomes

    def _fitting(self, task: Task) -> Pair:
        """A task's pair with as much of the query as the model reads."""
        return replace(task.pair, query=self._fit_query(task.pair.query))


def _halved(work: Callable[[Sequence[Task]], list[Any]], tasks: Sequence[Task]) -> list[Any]:
    """Call ``work`` on the tasks. If the call fails, each half of the tasks is tried.

    A task on which ``work`` fails gets an Outcome with the error.
    """
    if not tasks:
        return []
    try:
        return work(tasks)
    # A panic in Rust and sys.exit() are no Exception.
    except BaseException as error:
        # After most errors, CUDA refuses everything.
        text = str(error)
        if "CUDA error: " in text and "out of memory" not in text:
            raise ProcessLostError(f"The device is lost: {text.splitlines()[0]}") from error
        if len(tasks) == 1:
            return [_failure(error)]
    middle = len(tasks) // 2
    return _halved(work, tasks[:middle]) + _halved(work, tasks[middle:])


def _failure(error: BaseException) -> Outcome:
    """The outcome of a document on which the model failed, without its number in a batch."""
    if isinstance(error, ScoringError):
        return Outcome(error=error.reason)
    if isinstance(error, InputError):
        return Outcome(error=str(error))
    return Outcome(error=f"made the model fail ({type(error).__name__}).", model_failed=True)
