"""How a request is refused: one body for every error, on every route, in which each client finds the field it reads."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, Field

from ..errors import RSRankError

ERROR_TYPES = {
    **dict.fromkeys((400, 413, 422), "Validation"),
    **dict.fromkeys((404, 405), "NotFound"),
    **dict.fromkeys((408, 504), "Timeout"),
    401: "Unauthorized",
    429: "Overloaded",
    503: "Unhealthy",
}
"""``error_type`` by status; "Backend" for all others."""


class DocumentError(BaseModel):
    """A document that could not be used or scored."""

    index: int
    message: str


class Error(BaseModel):
    """The body of every error."""

    error: str = Field(description="What is the matter (read by clients of TEI).")
    error_type: str = Field(description="What kind of error.")
    message: str = Field(description="The same as error (read by clients of Cohere).")
    detail: str = Field(description="The same as error (read by clients of Jina and NVIDIA).")
    documents: list[DocumentError] | None = Field(default=None, description="The documents that it is about.")


class RefusedError(RSRankError):
    """A request that is answered with an HTTP error: ``documents`` are those that something is wrong with, and what."""

    def __init__(self, status: int, message: str, documents: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.documents = status, dict(documents or {})


def document_errors(faults: Mapping[int, str]) -> list[DocumentError]:
    """Faults by number of document, in order."""
    return [DocumentError(index=index, message=faults[index]) for index in sorted(faults)]


def error_body(status: int, message: str, documents: Mapping[int, str] | None = None) -> Error:
    """The body of an error.

    >>> error_body(429, "Full.").error_type
    'Overloaded'
    """
    text = message.encode("utf-8", "replace").decode()
    kind = ERROR_TYPES.get(status, "Backend")
    return Error(
        error=text, error_type=kind, message=text, detail=text, documents=document_errors(documents or {}) or None
    )


def refusal(faults: Mapping[int, str], status: int) -> RefusedError:
    """The error of a request with documents that have no score."""
    texts = set(faults.values())
    if len(texts) == 1 and (text := next(iter(texts))).startswith(("The query", "A query")):
        return RefusedError(status, text)
    first = min(faults)
    more = f" So it is with {len(faults) - 1} more." if len(faults) > 1 else ""
    return RefusedError(status, f"Document {first} {faults[first]}{more}", faults)
