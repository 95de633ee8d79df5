"""Error responses: one body for every error, in which each client finds the field that it reads."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..errors import problems_of
from .messages import ServiceError


def malformed(error: ValidationError) -> ServiceError:
    """The error of a body that is no request. It repeats nothing that the client sent."""
    too_long = error.errors(include_input=False)[0]["type"] == "string_too_long"
    return ServiceError(413 if too_long else 400, f"The body is no request. {problems_of(error)}.")


def error_response(
    status: int,
    message: str,
    documents: Mapping[int, str] = {},
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An error. Clients of TEI read ``error``, of Cohere ``message``, of Jina ``detail``.

    >>> b'"detail":"Full."' in error_response(429, "Full.").body
    True
    """
    body: dict[str, Any] = {"error": message, "message": message, "detail": message}
    if documents:
        body["documents"] = [{"index": n, "message": text} for n, text in documents.items()]
    return JSONResponse(body, status, headers)


async def service_error(request: Request, error: Any) -> Response:
    """The response to a `ServiceError`."""
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.status == 408:
        # The rest of a late body may never come.
        headers["Connection"] = "close"
    return error_response(error.status, str(error), error.documents, headers)


async def http_error(request: Request, error: Any) -> Response:
    """The response to a path or a method that there is not."""
    return error_response(error.status_code, error.detail, headers=error.headers)


HANDLERS: Mapping[Any, Any] = {ServiceError: service_error, HTTPException: http_error}
"""For each kind of error, the function that makes its response."""
