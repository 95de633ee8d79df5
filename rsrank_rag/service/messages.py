"""What server and model's process exchange, the service's error, and limits of clients."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..errors import RSRankError
from ..ranking.explanation import Explanation
from ..ranking.results import Scored
from ..ranking.rule import Rule
from ..reading.parts import LongDocuments, Span
from ..reranker import Pair

Work = Literal["cut", "score", "explain"]
"""What is done with a pair: cut a section of the document into its parts and count their tokens,
score the document whole, or take its score apart."""


@dataclass(frozen=True)
class Task:
    """Work on one pair for the model's process.

    ``section`` is the section to cut, or the place of the part to score in its document.
    """

    pair: Pair
    work: Work = "score"
    section: Span = (0, 0)


Parts = Sequence[tuple[Span, int]]
"""A section that has been cut: its parts, in characters of the document, and their costs."""


@dataclass(frozen=True)
class Outcome:
    """A pair's score, or the reason why the pair has none.

    Attributes:
        scored: The score; None where there is an error.
        query_truncated: Whether only the first and the last part of the query were read.
        explanation: The score taken apart, where that was requested.
        error: The rest of a sentence that begins with the document's name, such as "scored nan.".
            An error about the query is a whole sentence.
        model_failed: Whether the error is one of the model, and not of the pair.
    """

    scored: Scored | None = None
    query_truncated: bool = False
    explanation: Explanation | None = None
    error: str = ""
    model_failed: bool = False


@dataclass(frozen=True)
class Description:
    """The model that is served.

    Attributes:
        rule: The native rule; its threshold is None if the model has none.
        max_tokens: The most tokens of a document that are read; None if unknown.
        long_documents: How documents that are too long are read by default.
    """

    rule: Rule
    max_tokens: int | None = None
    long_documents: LongDocuments = "cut"


@dataclass(eq=False)
class ServiceError(RSRankError):
    """A request that gets an HTTP error.

    Attributes:
        status_code: HTTP's.
        detail: What is wrong.
        documents: What is wrong with documents, by their numbers.
        headers: More headers of the response, such as how long to wait before another try.
    """

    status_code: int
    detail: str
    documents: Mapping[int, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


def unavailable() -> ServiceError:
    """The error of a service that is starting, stopping, or without a model."""
    return ServiceError(503, "The service is starting or stopping.", headers={"Retry-After": "5"})


class Budget:
    """What the requests of all clients may have at a time. A client may have half of it.

    Args:
        limit: Of all clients together.
        unit: What is counted.
    """

    def __init__(self, limit: int, unit: str) -> None:
        self.limit = limit
        self.unit = unit
        self.taken = Counter[str]()

    def take(self, client: str, amount: int, before: int = 0) -> None:
        """Count what a request of a client needs, beside what the request had before.

        Raises:
            ServiceError: The request needs more than a client may ever have (status 413), or than
                this client or all clients may have now (429).
        """
        most = self.limit // 2
        if before + amount > most:
            text = f"The request needs {before + amount:,} {self.unit}; it may need {most:,}."
            raise ServiceError(413, text)
        if self.taken[client] + amount > most or self.taken.total() + amount > self.limit:
            text = f"Too many {self.unit} are in use. Try again later, or send less at a time."
            raise ServiceError(429, text, headers={"Retry-After": "1"})
        self.taken[client] += amount

    def give_back(self, client: str, amount: int) -> None:
        """Count what a request had no more."""
        self.taken[client] -= amount
        # Without the clients that have nothing.
        self.taken = +self.taken
