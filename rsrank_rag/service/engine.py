"""The model's side of the service: score a batch of pairs, whatever is in it. It runs in a process of its own."""

from __future__ import annotations

import itertools
import logging
import math
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol, runtime_checkable

from ..errors import InputError, RSRankError, ScoringError
from ..method.explanation import Explanation
from ..reranker import Pair, Reranker, Scored
from .backend import Description, Fault, Outcome

logger = logging.getLogger(__name__)

FAILURES = 3
"""Pairs that may fail by name before the rest is searched in parts, which takes fewer runs if there are many."""


class DeviceLostError(Exception):
    """The device answers no more in this process; another process may be luckier."""


@dataclass(frozen=True, slots=True)
class Canary:
    """A question and two passages; a model that ranks them the other way round is not fit to serve."""

    query: str = "Which animal gives milk?"
    relevant: str = "The cow is an animal that gives milk."
    irrelevant: str = "The train leaves the station at noon."


@dataclass(frozen=True, slots=True)
class Step:
    """What one batch gave.

    Attributes:
        outcomes: One a pair.
        seconds: The model took.
        stats: The reranker's counters, since it was loaded.
    """

    outcomes: list[Outcome]
    seconds: float
    stats: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready.

    Attributes:
        process: Number of the process it lives in.
        description: What it is.
        complaint: What is wrong with how it ranks the canary; None if nothing is.
    """

    process: int
    description: Description
    complaint: str | None


@runtime_checkable
class _Explains(Protocol):
    def explain(self, query: str, document: str, *, max_tokens: int | None = None) -> Explanation: ...


@runtime_checkable
class _Counts(Protocol):
    def stats(self) -> dict[str, int]: ...


class Engine:
    """A reranker that answers for each pair alone.

    Args:
        reranker: The model.
        name: What it is called.
    """

    def __init__(self, reranker: Reranker, name: str) -> None:
        self.reranker, self.name = reranker, name

    @property
    def description(self) -> Description:
        """What is being served."""
        return Description(self.name, self.reranker.threshold, isinstance(self.reranker, _Explains))

    def step(self, pairs: Sequence[Pair]) -> Step:
        """Score pairs of any clients; whatever is wrong with one of them concerns no other.

        Raises:
            DeviceLostError: Nothing more can be scored in this process.
        """
        started = time.perf_counter()
        outcomes = self._outcomes(pairs)
        stats = self.reranker.stats() if isinstance(self.reranker, _Counts) else {}
        return Step(outcomes, time.perf_counter() - started, stats)

    def explain(self, pair: Pair) -> Explanation:
        """See `Backend.explain`."""
        if not isinstance(self.reranker, _Explains):
            raise InputError(f"{self.name} cannot take its scores apart. RSRank models can.")
        if pair.max_tokens is None:
            return self.reranker.explain(pair.query, pair.document)
        return self.reranker.explain(pair.query, pair.document, max_tokens=pair.max_tokens)

    def check(self, canary: Canary) -> str | None:
        """What is wrong with how the model ranks the canary; None if nothing is."""
        outcomes = self.step([Pair(canary.query, text) for text in (canary.relevant, canary.irrelevant)]).outcomes
        good, bad = (outcome.score for outcome in outcomes)
        if good is None or bad is None:
            return "The canary could not be scored: " + " ".join(o.error for o in outcomes if o.error)
        return None if good > bad else f"The canary's relevant passage scored {good:.4g}, its irrelevant one {bad:.4g}."

    def _outcomes(self, pairs: Sequence[Pair]) -> list[Outcome]:
        found: list[Outcome | None] = [None] * len(pairs)
        waiting, failed = [list(range(len(pairs)))], 0
        while waiting:
            places = waiting.pop()
            if not places:
                continue
            batch = [pairs[place] for place in places]
            try:
                scored = self.reranker.score_pairs(batch)
                outcomes = [_outcome(result) for result in scored]
                found_here = list(zip(places, outcomes, strict=True))
            except Exception as error:  # it must not reach another client's pairs, nor end the service
                if _is_final(error):
                    raise DeviceLostError from error
                if isinstance(error, ScoringError) and 0 <= error.index < len(places):
                    # The reranker says which one it is; the others can do without it.
                    failed += 1
                    found[places.pop(error.index)] = Outcome(None, fault="unscored", error=_without_number(error))
                    waiting += [places] if failed < FAILURES else _parts(pairs, places)
                elif len(places) == 1:
                    found[places[0]] = _failure(error)
                else:
                    waiting += _parts(pairs, places)
            else:
                for place, outcome in found_here:
                    found[place] = outcome
        return [outcome for outcome in found if outcome is not None]


def _parts(pairs: Sequence[Pair], places: list[int]) -> list[list[int]]:
    """Halves, each with queries of its own if there are several, because most faults are a query's."""
    queries: dict[str, list[int]] = {}
    for place in places:
        queries.setdefault(pairs[place].query, []).append(place)
    groups = list(queries.values()) if len(queries) > 1 else [[place] for place in places]
    middle = len(groups) // 2
    return [list(itertools.chain(*half)) for half in (groups[:middle], groups[middle:])]


def _is_final(error: Exception) -> bool:
    """Whether a device is lost to this process: after such an error CUDA refuses whatever it is asked to do."""
    text = str(error)
    return isinstance(error, RuntimeError) and "CUDA error: " in text and "out of memory" not in text


def _outcome(found: Scored) -> Outcome:
    if math.isfinite(found.score):
        return Outcome(found.score, found.truncated, found.tokens)
    return Outcome(None, fault="unscored", error=f"scored {found.score}.")


def _without_number(error: Exception) -> str:
    """What is said of a document, less its number in the batch, which means nothing to whoever sent it."""
    return re.sub(r"^Document \d+( of query \d+)? ", "", str(error))


def _failure(error: Exception) -> Outcome:
    if isinstance(error, InputError):
        return Outcome(None, fault="input", error=_without_number(error))
    fault: Fault = "unscored" if isinstance(error, RSRankError) else "internal"
    expected = isinstance(error, RSRankError)
    text = _without_number(error) if expected else f"made the model fail ({type(error).__name__})."
    return Outcome(None, fault=fault, error=text)


class Host:
    """Where an `Engine` lives: in this process, or, through the functions below, in one of its own."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def load(self, make: Callable[[], Reranker], name: str, canary: Canary | None) -> Loaded:
        """Load the model and try it out."""
        self._engine = Engine(make(), name)
        complaint = None if canary is None else self._engine.check(canary)
        return Loaded(os.getpid(), self._engine.description, complaint)

    def step(self, pairs: Sequence[Pair]) -> Step:
        """`Engine.step` of the loaded model."""
        assert self._engine is not None
        return self._engine.step(pairs)

    def explain(self, pair: Pair) -> Explanation:
        """`Engine.explain` of the loaded model."""
        assert self._engine is not None
        return self._engine.explain(pair)


_host = Host()


def begin(prepare: Callable[[], object] | None) -> None:
    """Make this process one that ends with its parent, and not before; then do what else it takes."""
    # Ctrl-C and a service manager reach the whole group, but the parent needs this process to finish its work.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    ends: Callable[[], object] = parent.join

    def end_with_parent() -> None:
        ends()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    if prepare is not None:
        prepare()


def load(make: Callable[[], Reranker], name: str, canary: Canary | None) -> Loaded:
    """`Host.load` in this process."""
    return _host.load(make, name, canary)


def step(pairs: Sequence[Pair]) -> Step:
    """`Host.step` in this process, which ends if it has lost its device: the queue replaces it then."""
    try:
        return _host.step(pairs)
    except DeviceLostError as error:
        _end_for(error.__cause__)


def explain(pair: Pair) -> Explanation:
    """`Host.explain` in this process, which ends as `step` says."""
    try:
        return _host.explain(pair)
    except RuntimeError as error:
        if not _is_final(error):
            raise
        _end_for(error)


def _end_for(error: BaseException | None) -> NoReturn:
    logger.error("The device is lost (%s); the model's process ends.", str(error).partition("\n")[0])
    os._exit(1)
