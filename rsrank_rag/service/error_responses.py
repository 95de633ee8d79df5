"""Error responses: one body for every error, in which each client finds the field that it reads."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from ..errors import InputError
from .backend import ServiceError

# Parts of pydantic's locations that name a branch of a union, and no field of the request.
_BRANCHES = frozenset({"body", "TEI", "NVIDIA", "rerank", "TextObject", "float"})


class DocumentError(BaseModel):
    """A document that could not be used or scored."""

    index: int
    message: str


class Error(BaseModel, use_attribute_docstrings=True):
    """The body of every error."""

    error: str
    """What is wrong (read by clients of TEI)."""
    message: str
    """The same as error (read by clients of Cohere)."""
    detail: str
    """The same as error (read by clients of Jina and NVIDIA)."""
    documents: list[DocumentError] | None = None
    """The documents that have the error."""


class RequestError(HTTPException):
    """A request that gets an HTTP error; ``documents`` maps indices to what is wrong."""

    def __init__(self, status: int, message: str, documents: Mapping[int, str] = {}) -> None:
        super().__init__(status, message)
        self.documents = documents


def request_error(faults: Mapping[int, str], status: int) -> RequestError:
    """The error of a request with documents that have no score."""
    first, text = min(faults.items())
    if text.startswith(("The query", "A query")):
        return RequestError(status, text)
    return RequestError(status, f"Document {first} {text}", faults)


def error_response(
    status: int,
    message: str,
    documents: Mapping[int, str] = {},
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An error, whose body is an `Error`.

    >>> b'"detail":"Full."' in error_response(429, "Full.").body
    True
    """
    text = message.encode("utf-8", "replace").decode()
    rows = [DocumentError(index=index, message=error) for index, error in documents.items()]
    body = Error(error=text, message=text, detail=text, documents=rows or None)
    return Response(
        body.model_dump_json(exclude_none=True), status, headers, media_type="application/json"
    )


def answer_errors(app: FastAPI) -> None:
    """Give every error the same body."""

    @app.exception_handler(ServiceError)
    async def not_answered(request: Request, error: ServiceError) -> Response:
        headers = {"Retry-After": str(error.retry_after)} if error.retry_after else {}
        return error_response(error.status, str(error), headers=headers)

    @app.exception_handler(InputError)
    async def unusable(request: Request, error: InputError) -> Response:
        return error_response(422, str(error))

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        return error_response(400, *_validation_message(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        documents = getattr(error, "documents", {})
        return error_response(error.status_code, error.detail, documents, error.headers)


def _validation_message(errors: Sequence[Any]) -> tuple[str, dict[int, str]]:
    """A sentence about one field with an error, and the errors of documents by their number.

    The sentence repeats nothing that the client sent.
    """
    # The error with the longest location. If an object was sent where a text may stand, this error
    # is about a field of the object.
    first = max(errors, key=lambda error: len(_field(error)))
    if first["type"] == "json_invalid":
        return f"The body is not JSON: {first['ctx']['error']}.", {}
    place = _field(first)
    if not place:
        return "The body must be a JSON object, sent with Content-Type: application/json.", {}
    # A field of several types has an error for each of them.
    messages = [str(error["msg"]) for error in errors if _field(error) == place]
    text = " or ".join(dict.fromkeys(messages)).replace("Value error, ", "")
    documents = {place[1]: text} if isinstance(place[-1], int) else {}
    return f"{'.'.join(map(str, place))}: {text}.", documents


def _field(error: Any) -> tuple[Any, ...]:
    """The field of the request that an error of pydantic is about, and the number in its list."""
    # What has a bracket in its name is a branch of a union, too.
    parts = (part for part in error["loc"] if part not in _BRANCHES and "[" not in str(part))
    return tuple(parts)[:2]
