"""What the model's side reports to the service: what is served, outcomes of pairs, errors."""

from dataclasses import dataclass
from typing import Literal

from ..errors import RSRankError
from ..passages.explanation import Explanation
from ..passages.ranked import Scored
from ..passages.rule import Rule

Fault = Literal["input", "unscored", "internal"]
"""Why a pair has no score: the pair cannot be used, there is no score, or the model failed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A pair's score, or the reason why the pair has none.

    Attributes:
        scored: The score; None where there is an error.
        query_truncated: Whether only the first and the last part of the query were read.
        explanation: The score taken apart, where that was requested.
        fault: The kind of error; None where there is a score.
        error: The rest of a sentence that begins with the document's name, such as "scored nan.".
            An error about the query is a whole sentence.
    """

    scored: Scored | None
    query_truncated: bool = False
    explanation: Explanation | None = None
    fault: Fault | None = None
    error: str = ""

    @property
    def score(self) -> float | None:
        """The score on the reranker's own scale; None where there is an error."""
        return None if self.scored is None else self.scored.score


@dataclass(frozen=True, slots=True)
class Description:
    """The model that is served.

    Attributes:
        name: What the model is called.
        rule: The native rule; its threshold is None if the model has none.
        explains: Whether scores can be taken apart.
        max_tokens: The most tokens of a document that are read; None if unknown.
        complaint: What is wrong with how the model ranks the canary; None if nothing is.
    """

    name: str
    rule: Rule
    explains: bool
    max_tokens: int | None = None
    complaint: str | None = None

    @property
    def threshold(self) -> float | None:
        """The native threshold; None if there is none."""
        return self.rule.threshold


class ServiceError(RSRankError):
    """A request that was not answered, though nothing is wrong with the request.

    Attributes:
        status: HTTP's.
        retry_after: Seconds after which another try makes sense; None if it makes none.
    """

    status = 503
    retry_after: int | None = 5


class OverloadedError(ServiceError):
    """The queue is full."""

    status = 429

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineError(ServiceError):
    """The request's time was up. The rest of its work has been cancelled."""

    status = 504
    retry_after = None


class UnavailableError(ServiceError):
    """The service is starting, stopping, or without a model."""
