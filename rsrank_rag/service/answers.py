"""Errors as HTTP answers, and what OpenAPI says of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from ..errors import InputError, RSRankError, ScoringError
from .backend import DeadlineError, OverloadedError, ServiceError
from .refusals import Error, RefusedError, error_body

RETRY_AFTER = 5.0
"""Seconds to stay away from a service without a model, if it has no better idea."""

_BRANCHES = frozenset({"body", "TEI", "rerank"})
_LISTS = frozenset({"documents", "texts", "passages"})


def error_answer(
    status: int, message: str, documents: dict[int, str] | None = None, retry_after: float | None = None
) -> Response:
    """An error; see `error_body`."""
    headers = {} if retry_after is None else {"Retry-After": str(math.ceil(retry_after))}
    body = error_body(status, message, documents).model_dump_json(exclude_none=True)
    return Response(body, status, headers, media_type="application/json")


def described(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Errors of a route, as FastAPI takes them."""
    return {status: {"model": Error} for status in statuses}


def answer_errors(app: FastAPI) -> None:
    """Give every error the same body."""

    @app.exception_handler(RSRankError)
    async def own(request: Request, error: RSRankError) -> Response:
        if isinstance(error, RefusedError):
            return error_answer(error.status, str(error), error.documents)
        if isinstance(error, DeadlineError):
            return error_answer(504, str(error))
        if isinstance(error, ServiceError):
            status = 429 if isinstance(error, OverloadedError) else 503
            return error_answer(status, str(error), retry_after=error.retry_after or RETRY_AFTER)
        return error_answer(422 if isinstance(error, (InputError, ScoringError)) else 500, str(error))

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        return error_answer(400, *_what_is_malformed(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        response = error_answer(error.status_code, str(error.detail))
        response.headers.update(error.headers or {})
        return response


def _what_is_malformed(errors: Sequence[Any]) -> tuple[str, dict[int, str]]:
    """What pydantic found, without what the client sent: a sentence, and the documents that it is about."""
    found: dict[str, dict[str, None]] = {}  # messages by field, each once and in order
    documents: dict[int, dict[str, None]] = {}
    for error in errors:
        if error["type"] == "json_invalid":
            return f"The body is not JSON: {error.get('ctx', {}).get('error', 'it cannot be parsed')}.", {}
        path = [part for part in error["loc"] if part not in _BRANCHES]
        numbers = [place for place, part in enumerate(path) if isinstance(part, int)]
        if numbers:  # what comes after is a branch of a union, or inside the document
            path = path[: numbers[0] + 1]
        told = str(error["msg"]).removeprefix("Value error, ")
        found.setdefault(".".join(map(str, path[:2])) or "The body", {})[told] = None
        if len(path) > 1 and path[0] in _LISTS and isinstance(path[1], int):
            documents.setdefault(path[1], {})[told] = None
    lines = [f"{name}: {' or '.join(messages)}" for name, messages in list(found.items())[:5]]
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    return f"{'; '.join(lines)}{more}.", {index: " or ".join(messages) for index, messages in documents.items()}
