"""A model that answers for each pair alone: whatever is wrong with one pair of a batch concerns no other."""

import itertools
import math
import multiprocessing
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import InputError, ScoringError
from ..passages.explanation import Explanation
from ..reranker import Pair, Reranker, Scored, score_in_parts
from .backend import Description, Outcome


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
    """What one batch gave."""

    outcomes: list[Outcome]  # one a pair
    seconds: float  # that the model took
    stats: Mapping[str, float] = field(
        default_factory=dict
    )  # the reranker's counters, since it was loaded


class Engine:
    """A reranker, called ``name``, that answers for each pair alone."""

    def __init__(self, reranker: Reranker, name: str) -> None:
        self.reranker, self.name = reranker, name
        self.description = Description(
            name, reranker.threshold, hasattr(reranker, "explain"), reranker.identity()
        )

    def step(self, pairs: Sequence[Pair]) -> Step:
        """Score pairs of any clients; raises DeviceLostError if nothing more can be scored in this process."""
        started = time.perf_counter()
        outcomes = self._outcomes(pairs)
        return Step(
            outcomes, time.perf_counter() - started, getattr(self.reranker, "stats", dict)()
        )

    def explain(self, pair: Pair) -> Explanation:
        """Take one score apart; errors as of `step` and `Scheduler.explain`."""
        explain: Callable[[str, str], Explanation] | None = getattr(
            self._told(pair), "explain", None
        )
        if explain is None:
            raise InputError(f"{self.name} cannot take its scores apart. RSRank models can.")
        try:
            return explain(pair.query, pair.document)
        except RuntimeError as error:
            _check_device(error)
            raise

    def check(self, canary: Canary) -> str | None:
        """What is wrong with how the model ranks the canary; None if nothing is."""
        outcomes = self.step(
            [Pair(canary.query, text) for text in (canary.relevant, canary.irrelevant)]
        ).outcomes
        good, bad = (outcome.score for outcome in outcomes)
        if good is None or bad is None:
            return "The canary could not be scored: " + " ".join(
                o.error for o in outcomes if o.error
            )
        return (
            None
            if good > bad
            else f"The canary's relevant passage scored {good:.4g}, its irrelevant one {bad:.4g}."
        )

    def _told(self, pair: Pair) -> Reranker:
        told = (
            self.reranker
            if pair.instruction is None
            else self.reranker.with_instruction(pair.instruction)
        )
        return told.with_salt(pair.salt) if pair.salt else told

    def _outcomes(self, pairs: Sequence[Pair]) -> list[Outcome]:
        found: dict[int, Outcome] = {}
        groups: dict[
            tuple[str | None, str], list[int]
        ] = {}  # a run has one instruction and one salt
        for place, pair in enumerate(pairs):
            groups.setdefault((pair.instruction, pair.salt), []).append(place)
        waiting = list(groups.values())
        while waiting:
            places = waiting.pop()
            own = [pairs[place] for place in places]
            try:
                told = self._told(own[0])
                outcomes = [
                    _outcome(s) for s in score_in_parts(own, told.token_ends, told.score_pairs)
                ]
                found.update(
                    list(zip(places, outcomes, strict=True))
                )  # as a list: all of them or none
            except BaseException as error:  # a panic in Rust and sys.exit() are none of Exception's
                # Whatever it is, it must not reach another client's pairs, nor end the service. Ctrl-C ends a command.
                if isinstance(error, KeyboardInterrupt) and _in_a_command():
                    raise
                _check_device(error)
                named = (
                    error.index
                    if isinstance(error, ScoringError) and 0 <= error.index < len(places)
                    else None
                )
                if (
                    named is not None or len(places) == 1
                ):  # the others can do without the one that it is
                    found[places.pop(named or 0)] = _failure(error)
                waiting += [part for part in _parts(pairs, places) if part]
        return [found[place] for place in range(len(pairs))]


def _parts(pairs: Sequence[Pair], places: list[int]) -> list[list[int]]:
    """Halves, each with queries of its own if there are several, because most faults are a query's."""
    queries: dict[str, list[int]] = {}
    for place in places:
        queries.setdefault(pairs[place].query, []).append(place)
    groups = list(queries.values()) if len(queries) > 1 else [[place] for place in places]
    middle = len(groups) // 2
    return [list(itertools.chain(*half)) for half in (groups[:middle], groups[middle:])]


def _in_a_command() -> bool:
    """Whether this is where Ctrl-C arrives: the main thread, and not of a service's model process."""
    return (
        threading.current_thread() is threading.main_thread()
        and multiprocessing.parent_process() is None
    )


def _check_device(error: BaseException) -> None:
    """Raise if a device is lost to this process: after such an error CUDA refuses whatever it is asked to do."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    if "CUDA error: " in text and "out of memory" not in text:
        raise DeviceLostError(text.partition("\n")[0]) from error


def _outcome(found: Scored) -> Outcome:
    """Of plain numbers: a model may give a tensor as one, or what cannot be sent to another process."""
    score = float(found.score)
    if math.isfinite(score):
        return Outcome(
            score,
            bool(found.truncated),
            int(found.tokens),
            window=found.window,
            sentences=found.sentences,
        )
    return Outcome(None, fault="unscored", error=f"scored {score}.")


def _failure(error: BaseException) -> Outcome:
    """What is said of a document, less its number in the batch, which means nothing to whoever sent it."""
    if not isinstance(error, (InputError, ScoringError)):
        return Outcome(
            None, fault="internal", error=f"made the model fail ({type(error).__name__})."
        )
    if isinstance(error, ScoringError):
        return Outcome(None, fault="unscored", error=error.reason)
    return Outcome(None, fault="input", error=str(error))
