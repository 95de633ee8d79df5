"""What the model's side reports to the service: what is served, outcomes of pairs, errors."""

from dataclasses import dataclass
from typing import Literal

from ..errors import RSRankError
from ..passages.explanation import Explanation
from ..passages.parts import Excerpt, Window

Fault = Literal["input", "unscored", "internal"]
"""Why a pair has no score: the pair cannot be used, there is no score, or the model failed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A pair's score, or the reason why the pair has none.

    Attributes:
        score: On the reranker's own scale; None where there is an error.
        truncated: Whether the document's end was not read.
        query_truncated: Whether only the first and the last part of the query were read.
        tokens: Tokens read; 0 where the reranker does not count.
        fault: The kind of error; None where there is a score.
        window: The best window of a document that was read in windows.
        sentences: All sentences of a document that was read sentence by sentence.
        error: What follows the document's name in a message; about a query, a whole sentence.
        explanation: The score taken apart, where that was asked for.
    """

    score: float | None
    truncated: bool = False
    tokens: int = 0
    fault: Fault | None = None
    window: Window | None = None
    sentences: tuple[Excerpt, ...] = ()
    error: str = ""
    explanation: Explanation | None = None
    query_truncated: bool = False


@dataclass(frozen=True, slots=True)
class Description:
    """The model that is served.

    Attributes:
        name: What the model is called.
        threshold: The native threshold; None if there is none.
        explains: Whether scores can be taken apart.
        identity: Short hash of everything that decides a score; empty if the model has none.
        max_tokens: The most tokens of a document that are read; None if unknown.
    """

    name: str
    threshold: float | None
    explains: bool
    identity: str = ""
    max_tokens: int | None = None


class ServiceError(RSRankError):
    """A request that was not answered, though nothing is wrong with the request.

    ``retry_after`` is the number of seconds after which another try makes sense; None if unknown.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class OverloadedError(ServiceError):
    """The queue is full."""


class DeadlineError(ServiceError):
    """The request's time was up. The rest of its work has been cancelled."""


class UnavailableError(ServiceError):
    """The service is starting, stopping, or without a model."""
