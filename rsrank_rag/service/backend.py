"""What the model's side tells the rest of the service: what is served, what became of a pair, why no answer comes."""

from dataclasses import dataclass
from typing import Literal

from ..errors import RSRankError
from ..passages.parts import Excerpt, Window

Fault = Literal["input", "unscored", "internal"]
"""Why a pair has no score: it cannot be used as given, the model found none, or the model failed on it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one pair: a score, or the reason why it has none."""

    score: float | None  # on the reranker's own scale; None where there is an error
    truncated: bool = False  # whether the document's end was not read
    tokens: int = 0  # read; 0 where the reranker does not count
    fault: Fault | None = None
    window: Window | None = None
    sentences: tuple[Excerpt, ...] = ()
    error: str = (
        ""  # to be read after the document's name; of a query that cannot be used, the whole text
    )


@dataclass(frozen=True, slots=True)
class Description:
    """What is being served."""

    name: str
    threshold: float | None  # the native one, if there is one
    explains: bool  # whether scores can be taken apart
    identity: str = ""  # short hash of all that decides a score, where the model tells


class ServiceError(RSRankError):
    """A request that was not answered, though there is nothing wrong with it.

    ``retry_after`` is the number of seconds after which it may be worth trying again; None if it is not.
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
