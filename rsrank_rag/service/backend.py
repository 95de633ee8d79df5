"""What the model's side tells the rest of the service: what is served, what became of a pair, why no answer comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import RSRankError

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
