"""The model's side of the queue: cuts documents into parts and scores the parts."""

import math
import multiprocessing
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import InputError, ScoringError
from ..passages.explanation import Explanation
from ..passages.pairs import Segment, cut
from ..passages.parts import WHOLE
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


CutResult = tuple[Segment, list[int]] | Outcome
"""The next segment of a document with the tokens of its parts, or why there is none."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What one batch gave.

    Attributes:
        outcomes: One for each pair.
        seconds: Time that the model took.
        stats: The reranker's counters since it was loaded.
    """

    outcomes: list[Outcome]
    seconds: float
    stats: Mapping[str, float] = field(default_factory=dict)


class Engine:
    """A reranker that answers for each pair alone: an error on one pair is no other pair's.

    Every method raises DeviceLostError if nothing more can be scored in this process.
    """

    def __init__(self, reranker: Reranker, name: str) -> None:
        self.reranker = reranker
        self.name = name
        try:
            max_tokens = reranker.token_ends("")[1]
        except InputError:
            max_tokens = None
        self.description = Description(
            name,
            reranker.threshold,
            hasattr(reranker, "explain"),
            reranker.identity(),
            max_tokens,
        )

    def cut(self, documents: Sequence[tuple[Pair, Segment | None]]) -> list[CutResult]:
        """The next segment of each document, and what its parts cost."""
        segments: list[Segment | Outcome] = []
        parts: list[Pair] = []
        for pair, before in documents:
            try:
                segment = cut(pair, self._reranker_for(pair).token_ends, before)
            except BaseException as error:
                segments.append(_failure(error))
            else:
                segments.append(segment)
                parts += parts_of(pair, segment)
        counts = iter(
            self._alone(
                parts,
                lambda reranker, group: reranker.token_counts(
                    _with_fitting_queries(reranker, group)
                ),
            )
        )
        results: list[CutResult] = []
        for one in segments:
            if isinstance(one, Outcome):
                results.append(one)
                continue
            costs = [next(counts) for _ in one.spans]
            failures = [cost for cost in costs if isinstance(cost, Outcome)]
            results.append(failures[0] if failures else (one, costs))
        return results

    def score(self, pairs: Sequence[Pair]) -> list[Outcome]:
        """Score pairs of any clients, each document whole."""
        return self._alone(pairs, _outcomes)

    def run(self, pairs: Sequence[Pair]) -> BatchResult:
        """As `score`, with the time that it took."""
        return self._timed(pairs, _outcomes)

    def explain(self, pairs: Sequence[Pair]) -> BatchResult:
        """As `run`, with scores taken apart; an InputError if the model cannot do so."""
        return self._timed(pairs, self._explained)

    def _timed(
        self, pairs: Sequence[Pair], work: Callable[[Reranker, list[Pair]], list[Outcome]]
    ) -> BatchResult:
        started = time.perf_counter()
        outcomes = self._alone(pairs, work)
        stats: dict[str, float] = getattr(self.reranker, "stats", dict)()
        return BatchResult(outcomes, time.perf_counter() - started, stats)

    def _explained(self, reranker: Reranker, pairs: list[Pair]) -> list[Outcome]:
        explain: Callable[[str, str], Explanation] | None = getattr(reranker, "explain", None)
        if explain is None:
            raise InputError(f"{self.name} cannot take its scores apart. RSRank models can.")
        explained = [explain(pair.query, pair.document) for pair in pairs]
        return [Outcome(one.score, one.truncated, explanation=one) for one in explained]

    def check(self, canary: Canary) -> str | None:
        """What is wrong with how the model ranks the canary; None if nothing is."""
        texts = (canary.relevant, canary.irrelevant)
        relevant, irrelevant = self.score([Pair(canary.query, text) for text in texts])
        if relevant.score is None or irrelevant.score is None:
            errors = f"{relevant.error} {irrelevant.error}".strip()
            return f"The canary could not be scored: {errors}"
        if relevant.score > irrelevant.score:
            return None
        return (
            f"The canary's relevant passage scored {relevant.score:.4g}, "
            f"its irrelevant one {irrelevant.score:.4g}."
        )

    def _reranker_for(self, pair: Pair) -> Reranker:
        reranker = self.reranker
        if pair.instruction is not None:
            reranker = reranker.with_instruction(pair.instruction)
        return reranker.with_salt(pair.salt) if pair.salt else reranker

    def _alone(
        self, pairs: Sequence[Pair], work: Callable[[Reranker, list[Pair]], list[Any]]
    ) -> list[Any]:
        """What ``work`` gives for each pair, or the Outcome of a pair on which it fails.

        Pairs that fail together are tried again in halves. The pairs of one query stay together,
        because most faults are a query's.
        """
        results: list[Any] = [None] * len(pairs)
        groups: dict[tuple[str | None, str], list[int]] = {}
        for place, pair in enumerate(pairs):
            groups.setdefault((pair.instruction, pair.salt), []).append(place)
        waiting = list(groups.values())
        while waiting:
            places = waiting.pop()
            group = [pairs[place] for place in places]
            try:
                values = work(self._reranker_for(group[0]), group)
                for place, value in list(zip(places, values, strict=True)):
                    results[place] = value
            except BaseException as error:
                # A panic in Rust and sys.exit() are no Exception. They must not reach another
                # client's pairs, nor end the service. Ctrl-C ends a command.
                if isinstance(error, KeyboardInterrupt) and _is_command():
                    raise
                _check_device(error)
                if len(places) == 1:
                    results[places[0]] = _failure(error)
                else:
                    places.sort(key=lambda place: pairs[place].query)
                    middle = len(places) // 2
                    waiting += [places[middle:], places[:middle]]
        return results


def parts_of(pair: Pair, segment: Segment) -> list[Pair]:
    """The parts of a document as pairs whose documents are read whole."""
    if pair.reading == WHOLE:
        return [pair]
    return [
        replace(pair, document=pair.document[start:stop], reading=WHOLE)
        for start, stop in segment.spans
    ]


def _is_command() -> bool:
    """Whether Ctrl-C arrives here: the main thread, but not of a model process."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    return in_main_thread and multiprocessing.parent_process() is None


def _check_device(error: BaseException) -> None:
    """Raise if the device is lost: after such an error CUDA refuses everything in this process."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    if "CUDA error: " in text and "out of memory" not in text:
        raise DeviceLostError(text.partition("\n")[0]) from error


def _with_fitting_queries(reranker: Reranker, pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs, with queries cut that are too long and may be cut."""
    queries = {pair.query: reranker.fit_query(pair.query) for pair in pairs if pair.cut_query}
    return [replace(pair, query=queries.get(pair.query, pair.query)) for pair in pairs]


def _outcomes(reranker: Reranker, pairs: list[Pair]) -> list[Outcome]:
    """Scores as plain numbers, because a model may give a tensor, or what cannot be pickled."""
    outcomes = []
    read = _with_fitting_queries(reranker, pairs)
    for pair, fitting, scored in zip(pairs, read, reranker.score_pairs(read), strict=True):
        score = float(scored.score)
        if math.isfinite(score):
            is_cut = fitting.query != pair.query
            outcomes.append(
                Outcome(score, bool(scored.truncated), int(scored.tokens), query_truncated=is_cut)
            )
        else:
            outcomes.append(Outcome(None, fault="unscored", error=f"scored {score}."))
    return outcomes


def _failure(error: BaseException) -> Outcome:
    """The outcome of a document on which the model failed, without its number in a batch."""
    if isinstance(error, ScoringError):
        return Outcome(None, fault="unscored", error=error.reason)
    if isinstance(error, InputError):
        return Outcome(None, fault="input", error=str(error))
    name = type(error).__name__
    return Outcome(None, fault="internal", error=f"made the model fail ({name}).")
