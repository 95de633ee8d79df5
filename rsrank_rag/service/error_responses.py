"""How a request is refused: one body for every error, on every route, in which each client finds the field it reads."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from ..errors import InputError, RSRankError, ScoringError
from .backend import DeadlineError, OverloadedError, ServiceError

logger = logging.getLogger(__name__)

RETRY_AFTER = 5.0  # seconds to stay away from a service without a model, if it has no better idea

_BRANCHES = frozenset(
    {"body", "TEI", "rerank", "QueryObject", "float"}
)  # and what has a bracket in its name
_LISTS = frozenset({"documents", "texts", "passages"})

ERROR_TYPES = {
    **dict.fromkeys((400, 413, 422), "Validation"),
    **dict.fromkeys((404, 405), "NotFound"),
    **dict.fromkeys((408, 504), "Timeout"),
    401: "Unauthorized",
    421: "Validation",
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
    documents: list[DocumentError] | None = Field(
        default=None, description="The documents that it is about."
    )


class RequestError(HTTPException):
    """A request that is answered with an HTTP error: ``documents`` are those that something is wrong with, and what."""

    def __init__(
        self, status: int, message: str, documents: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(status, message)
        self.documents = documents or {}


def document_errors(faults: Mapping[int, str]) -> list[DocumentError]:
    """Faults by number of document, in order."""
    return [DocumentError(index=index, message=faults[index]) for index in sorted(faults)]


def request_error(faults: Mapping[int, str], status: int) -> RequestError:
    """The error of a request with documents that have no score."""
    texts = set(faults.values())
    if len(texts) == 1 and (text := next(iter(texts))).startswith(
        ("The query", "A query", "An instruction")
    ):
        return RequestError(status, text)
    first = min(faults)
    more = f" So it is with {len(faults) - 1} more." if len(faults) > 1 else ""
    return RequestError(status, f"Document {first} {faults[first]}{more}", faults)


def error_response(
    status: int,
    message: str,
    documents: Mapping[int, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An error, whose body is an `Error`.

    >>> b'"error_type":"Overloaded"' in error_response(429, "Full.").body
    True
    """
    text, kind = message.encode("utf-8", "replace").decode(), ERROR_TYPES.get(status, "Backend")
    about = document_errors(documents or {}) or None
    body = Error(error=text, error_type=kind, message=text, detail=text, documents=about)
    return Response(
        body.model_dump_json(exclude_none=True), status, headers, media_type="application/json"
    )


def described(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Errors of a route, as FastAPI takes them."""
    return {status: {"model": Error} for status in statuses}


def answer_errors(app: FastAPI) -> None:
    """Give every error the same body."""

    @app.exception_handler(RSRankError)
    async def own(request: Request, error: RSRankError) -> Response:
        if isinstance(error, DeadlineError):
            return error_response(504, str(error))
        if isinstance(error, ServiceError):
            status = 429 if isinstance(error, OverloadedError) else 503
            wait = math.ceil(error.retry_after or RETRY_AFTER)
            return error_response(status, str(error), headers={"Retry-After": str(wait)})
        if isinstance(error, (InputError, ScoringError)):
            return error_response(422, str(error))
        logger.error(
            "A request failed: %s", error
        )  # with names of files, say, that are nobody's business
        return error_response(500, "The model failed; the service's log says more.")

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        return error_response(400, *_what_is_malformed(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        return error_response(
            error.status_code, error.detail, getattr(error, "documents", None), error.headers
        )


def _what_is_malformed(errors: Sequence[Any]) -> tuple[str, dict[int, str]]:
    """What pydantic found, without what the client sent: a sentence, and the documents that it is about."""
    found: dict[
        tuple[str | int, ...], dict[str, None]
    ] = {}  # messages by field or document, each once and in order
    for error in errors:
        if error["type"] == "json_invalid":
            return (
                f"The body is not JSON: {error.get('ctx', {}).get('error', 'it cannot be parsed')}.",
                {},
            )
        place = tuple(
            part for part in error["loc"] if part not in _BRANCHES and "[" not in str(part)
        )[:2]
        if not place and error["type"] == "model_attributes_type":
            return (
                "The body must be a JSON object, sent with the header Content-Type: application/json.",
                {},
            )
        found.setdefault(place, {})[str(error["msg"]).removeprefix("Value error, ")] = None
    texts = {place: " or ".join(messages) for place, messages in found.items()}
    lines = [
        f"{'.'.join(map(str, place)) or 'The body'}: {text}"
        for place, text in list(texts.items())[:5]
    ]
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    documents = {place[-1]: text for place, text in texts.items() if place and place[0] in _LISTS}
    return f"{'; '.join(lines)}{more}.", {
        index: text for index, text in documents.items() if isinstance(index, int)
    }
