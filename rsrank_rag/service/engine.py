"""The model's side of the queue: cuts documents into parts and scores the parts."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from multiprocessing import parent_process
from typing import Any

from ..errors import InputError, ScoringError, finite
from ..passages.pairs import Segment, cut, parts_of
from ..passages.ranked import Scored
from ..reranker import Pair, Reranker
from .backend import Description, Outcome


class DeviceLostError(Exception):
    """The device does not answer in this process any more; a new process may be luckier."""


@dataclass(frozen=True, slots=True)
class Canary:
    """A query and two passages; a model that ranks them the other way round is not fit to serve."""

    query: str = "Which animal gives milk?"
    relevant: str = "The cow is an animal that gives milk."
    irrelevant: str = "The train leaves the station at noon."


Parts = tuple[Segment, list[tuple[Pair, int]]]
"""A segment of a document, and its parts with the cost of each."""

Work = Callable[[Reranker, list[Any]], list[Any]]
"""Gives one value for each item."""


@dataclass
class Engine:
    """A reranker for which an error on one pair does not affect the other pairs of a call.

    Every method raises DeviceLostError if nothing more can be scored in this process.
    """

    reranker: Reranker
    name: str

    def describe(self, canary: Canary | None) -> Description:
        """The model that is served. Its complaint says if the canary was ranked wrongly."""
        reranker = self.reranker
        try:
            max_tokens = reranker.token_ends("")[1]
        except InputError:
            max_tokens = None
        return Description(
            self.name,
            reranker.native_rule,
            hasattr(reranker, "explain"),
            max_tokens,
            None if canary is None else self._complaint(canary),
        )

    def _complaint(self, canary: Canary) -> str | None:
        texts = (canary.relevant, canary.irrelevant)
        (relevant, irrelevant), _ = self.run([Pair(canary.query, text) for text in texts])
        if relevant.score is None or irrelevant.score is None:
            return f"The canary could not be scored: {relevant.error or irrelevant.error}"
        if relevant.score > irrelevant.score:
            return None
        return (
            f"The canary's relevant passage scored {relevant.score:.4g}, "
            f"its irrelevant one {irrelevant.score:.4g}."
        )

    def cut(self, documents: Sequence[tuple[Pair, Segment | None]]) -> list[Parts | Outcome]:
        """The parts of the next segment of each document, or the outcome of an error.

        Args:
            documents: Each document with its last segment that was cut; None at its beginning.
        """
        return self._each(documents, [pair for pair, _ in documents], _parts)

    def run(
        self, pairs: Sequence[Pair], explain: bool = False
    ) -> tuple[list[Outcome], Mapping[str, int]]:
        """Score pairs of any clients, each document whole.

        Args:
            pairs: N pairs.
            explain: Whether to take the scores apart. If the reranker cannot do so, every outcome
                has the fault "input".

        Returns:
            N outcomes in input order, and the reranker's counters since it was loaded.
        """
        outcomes = self._each(pairs, pairs, self._explained if explain else _outcomes)
        return outcomes, getattr(self.reranker, "stats", dict)()

    def _explained(self, reranker: Reranker, pairs: list[Pair]) -> list[Outcome]:
        explain: Any = getattr(reranker, "explain", None)
        if explain is None:
            raise InputError(f"{self.name} cannot take its scores apart. RSRank models can.")
        outcomes = []
        for pair, fitting in zip(pairs, _with_fitting_queries(reranker, pairs), strict=True):
            one = explain(fitting.query, fitting.document, fitting.max_tokens)
            scored = Scored(one.score, one.truncated)
            outcomes.append(Outcome(scored, fitting.query != pair.query, one))
        return outcomes

    def _each(self, items: Sequence[Any], pairs: Sequence[Pair], work: Work) -> list[Any]:
        """Call ``work`` on the items. An item on which ``work`` fails gets an Outcome instead.

        Args:
            items: What ``work`` takes.
            pairs: The pair of each item. Items of the same query stay together, because most
                errors are about a query.
            work: Gives one value for each item.
        """
        places = sorted(range(len(items)), key=lambda n: (pairs[n].salt, pairs[n].query))
        results: dict[int, Any] = {}
        for salt, group in groupby(places, lambda n: pairs[n].salt):
            same = list(group)
            reranker = self.reranker.with_salt(salt) if salt else self.reranker
            values = _halved(reranker, [items[place] for place in same], work)
            results.update(zip(same, values, strict=True))
        return [results[place] for place in range(len(items))]


def _halved(reranker: Reranker, items: list[Any], work: Work) -> list[Any]:
    """As `Engine._each`, with one reranker. If a call fails, each half of its items is tried."""
    try:
        values = work(reranker, items)
        return [value for _, value in zip(items, values, strict=True)]
    except BaseException as error:
        if len(items) == 1:
            return [_failure(error)]
        _check_process(error)
        middle = len(items) // 2
        return _halved(reranker, items[:middle], work) + _halved(reranker, items[middle:], work)


def _check_process(error: BaseException) -> None:
    """Raise errors after which nothing can be scored in this process.

    A panic in Rust and sys.exit() are no Exception. They must not reach another client's pairs, nor
    end the service. But Ctrl-C ends a command, and after most errors CUDA refuses everything.
    """
    text = str(error) if isinstance(error, RuntimeError) else ""
    if "CUDA error: " in text and "out of memory" not in text:
        raise DeviceLostError(text.partition("\n")[0]) from error
    in_main_thread = threading.current_thread() is threading.main_thread()
    if isinstance(error, KeyboardInterrupt) and in_main_thread and not parent_process():
        raise error


def _with_fitting_queries(reranker: Reranker, pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs. A query that is too long is cut if its pair allows it."""
    uncut = dict.fromkeys(pair.query for pair in pairs if pair.cut_query)
    queries = {query: reranker.fit_query(query) for query in uncut}
    return [replace(pair, query=queries[pair.query]) if pair.cut_query else pair for pair in pairs]


def _parts(reranker: Reranker, documents: list[tuple[Pair, Segment | None]]) -> list[Parts]:
    segments: list[Segment] = []
    parts: list[Pair] = []
    for pair, before in documents:
        segment = cut(pair, reranker.token_ends, before)
        segments.append(segment)
        parts += parts_of(pair, segment.spans)
    costs = reranker.token_costs(_with_fitting_queries(reranker, parts))
    costed = zip(parts, costs, strict=True)
    return [(segment, list(islice(costed, len(segment.spans)))) for segment in segments]


def _outcomes(reranker: Reranker, pairs: list[Pair]) -> list[Outcome]:
    """Scores as plain numbers, because a model may give a tensor, or what cannot be pickled."""
    outcomes: list[Outcome] = []
    read = _with_fitting_queries(reranker, pairs)
    for pair, fitting, one in zip(pairs, read, reranker.score_pairs(read), strict=True):
        score = finite(float(one.score), len(outcomes))
        scored = Scored(score, bool(one.truncated), int(one.tokens))
        outcomes.append(Outcome(scored, query_truncated=fitting.query != pair.query))
    return outcomes


def _failure(error: BaseException) -> Outcome:
    """The outcome of a document on which the model failed, without its number in a batch."""
    _check_process(error)
    if isinstance(error, ScoringError):
        return Outcome(None, fault="unscored", error=error.reason)
    if isinstance(error, InputError):
        return Outcome(None, fault="input", error=str(error))
    name = type(error).__name__
    return Outcome(None, fault="internal", error=f"made the model fail ({name}).")
