"""What the HTTP app asks for scores: a contract, and the ways in which it can refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ..errors import RSRankError
from ..method.explanation import Explanation
from ..reranker import Pair

Fault = Literal["input", "unscored", "internal"]
"""Why a pair has no score: it cannot be used as given, the model found none, or the model failed on it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one pair: a score, or the reason why it has none.

    Attributes:
        score: On the reranker's own scale; None where there is an error.
        truncated: Whether the document's end was not read.
        tokens: Tokens read; 0 where the reranker does not count.
        fault: What kind of error.
        error: What is the matter, to be read after the document's name; of a query that cannot be used, the whole text.
    """

    score: float | None
    truncated: bool = False
    tokens: int = 0
    fault: Fault | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Description:
    """What is being served.

    Attributes:
        name: Of the model.
        threshold: Its native threshold; None if it has none.
        explains: Whether scores can be taken apart.
    """

    name: str
    threshold: float | None
    explains: bool


class ServiceError(RSRankError):
    """A request that was not answered, though there is nothing wrong with it.

    Attributes:
        retry_after: Seconds after which it may be worth trying again; None if it is not.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class OverloadedError(ServiceError):
    """The queue is full."""


class DeadlineError(ServiceError):
    """The request's time was up; what was left of it has been cancelled."""


class UnavailableError(ServiceError):
    """The service is starting, stopping, or without a model."""


class Backend(Protocol):
    """Scores pairs for many clients at once."""

    @property
    def description(self) -> Description:
        """What is being served.

        Raises:
            UnavailableError: Nothing is loaded yet.
        """

    async def start(self) -> None:
        """Load the model and check it; returns when it can score.

        Raises:
            RSRankError: It cannot be loaded.
        """

    async def stop(self) -> None:
        """Take no more work, finish what is there, and let the model go."""

    async def score(self, pairs: Sequence[Pair], *, client: str = "", timeout: float | None = None) -> list[Outcome]:
        """Score pairs; cancelling the call cancels the work.

        Args:
            pairs: Of any number of queries.
            client: Whose they are: clients share the model's time equally.
            timeout: Seconds after which to give up.

        Returns:
            One outcome a pair, in input order.

        Raises:
            OverloadedError: The queue is full.
            DeadlineError: Time was up.
            UnavailableError: The service is stopping.
        """

    async def explain(self, pair: Pair, *, client: str = "", timeout: float | None = None) -> Explanation:
        """Take one score apart.

        Raises:
            ServiceError: As `score`.
            InputError: The pair cannot be used, or the model's scores cannot be taken apart.
            ScoringError: The document could not be scored.
            RSRankError: The model failed on it.
        """

    def readiness(self) -> str | None:
        """None if requests are answered and the last canary scored as it should; else what is the matter."""

    def stats(self) -> Mapping[str, float]:
        """Counters and levels, by name; see `Scheduler.stats`."""
