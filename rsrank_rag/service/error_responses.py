"""Error responses: one body for every error, in which each client finds the field that it reads."""

from collections.abc import Mapping

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from .messages import ServiceError


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


def malformed(error: ValidationError) -> ServiceError:
    """The error of a body that is no request. It repeats nothing that the client sent."""
    first = error.errors(include_url=False, include_input=False)[0]
    text = first["msg"].removeprefix("Value error, ")
    # A field's name and the number in its list, or only the name if a field has several types.
    place = [part for part in first["loc"][:2] if part != "float"]
    if not place:
        return ServiceError(400, f"The body is no request: {text}.")
    documents = {part: text for part in place if isinstance(part, int)}
    status = 413 if first["type"] == "string_too_long" else 400
    return ServiceError(status, f"{'.'.join(map(str, place))}: {text}.", documents)


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
    rows = [DocumentError(index=index, message=text) for index, text in documents.items()]
    body = Error(error=message, message=message, detail=message, documents=rows or None)
    return Response(
        body.model_dump_json(exclude_none=True), status, headers, media_type="application/json"
    )


def answer_errors(app: FastAPI) -> None:
    """Give every error the same body."""

    @app.exception_handler(ServiceError)
    async def not_answered(request: Request, error: ServiceError) -> Response:
        headers = {"Retry-After": str(error.retry_after)} if error.retry_after else {}
        if error.status == 408:
            # The rest of a late body may never come.
            headers["Connection"] = "close"
        return error_response(error.status, str(error), error.documents, headers)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        return error_response(error.status_code, error.detail, headers=error.headers)
