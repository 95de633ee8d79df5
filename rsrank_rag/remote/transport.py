"""One request to a service and its answer: key, retries, time limit, and failures as our errors."""

import asyncio
import logging
import os
import random
import time
from dataclasses import dataclass
from textwrap import shorten

from pydantic import BaseModel, SecretStr, ValidationError

from ..errors import InputError, RemoteError, RSRankError, ScoringError
from . import connections
from .address import usable_key
from .connections import httpx

logger = logging.getLogger(__name__)

# The environment variable of the API key; of several keys, separated by commas, the first is sent.
KEY_VARIABLE = "RSRANK_API_KEY"

# Too many requests, no service behind the proxy, not ready. A 504 is not among them: the same
# request would take as long again.
TRANSIENT = (429, 502, 503)

# Seconds before a request is repeated. They double with each try.
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 8.0

# The most bytes of an answer: some for each byte of the request, because each sentence of a
# document has places and a score, and some more.
ANSWER_BYTES = 1_000_000
TIMES_REQUEST = 100

HEADERS = {"Content-Type": "application/json", "User-Agent": "rsrank-rag"}


class _ErrorBody(BaseModel):
    """Body of an error. A proxy's page gives one without fields."""

    message: str = ""
    documents: list[dict[str, int | str]] = []


@dataclass(frozen=True)
class Transport:
    """Sends requests to one service.

    Attributes:
        base_url: Address of the service.
        api_key: Key to send. If None, each request reads it from ``RSRANK_API_KEY``.
        timeout: Seconds for a request with all its retries.
        max_retries: How often a request is repeated after a transient failure.
    """

    base_url: str
    api_key: SecretStr | None
    timeout: float
    max_retries: int

    async def send(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The body of the answer; raises as `RemoteReranker` says."""
        try:
            return await asyncio.wait_for(self._send_with_retries(method, path, body), self.timeout)
        except asyncio.TimeoutError as error:
            raise RemoteError(
                f"{self.base_url} did not answer in {self.timeout:g} seconds. "
                "Raise timeout, or send fewer documents."
            ) from error

    async def _send_with_retries(self, method: str, path: str, body: bytes) -> bytes:
        """Repeat a request after a transient failure, if there is time for the pause."""
        end = time.monotonic() + self.timeout
        retries = 0
        while True:
            try:
                return await self._send_once(method, path, body)
            except RemoteError as error:
                # The service's Retry-After, the pause, and a random part, which keeps clients that
                # failed together from coming back together.
                pause = min(FIRST_PAUSE * 2**retries, LONGEST_PAUSE)
                seconds = error.retry_after + pause + random.uniform(0, FIRST_PAUSE)
                late = time.monotonic() + seconds > end
                if not error.transient or retries >= self.max_retries or late:
                    raise
                logger.info("Trying again in %.2f seconds: %s", seconds, error)
            await asyncio.sleep(seconds)
            retries += 1

    async def _send_once(self, method: str, path: str, body: bytes) -> bytes:
        client = connections.client(asyncio.get_running_loop())
        url = self.base_url + path
        most = ANSWER_BYTES + TIMES_REQUEST * len(body)
        content = b""
        try:
            async with client.stream(
                method, url, content=body, headers=HEADERS, auth=self._authorize
            ) as response:
                async for piece in response.aiter_bytes():
                    content += piece
                    if len(content) > most:
                        raise RemoteError(f"{self.base_url} answers with more than {most:,} bytes.")
        except httpx.RequestError as error:
            raise RemoteError(
                f"{self.base_url} could not be reached ({error!r}). "
                "Is the service running, and base_url right?",
                transient=isinstance(error, httpx.TransportError),
            ) from error
        if response.is_success:
            return content
        raise self._error(response, content)

    def _authorize(self, request: httpx.Request) -> httpx.Request:
        """Add the key, at the last moment, so that no variable of a traceback holds its text."""
        variable = os.environ.get(KEY_VARIABLE, "").strip(" ,").partition(",")[0]
        key = self.api_key or usable_key(SecretStr(variable), KEY_VARIABLE)
        if key is not None:
            request.headers["Authorization"] = f"Bearer {key.get_secret_value()}"
        return request

    def _error(self, response: httpx.Response, content: bytes) -> RSRankError:
        """The error of an answer that is not a success."""
        status = response.status_code
        try:
            body = _ErrorBody.model_validate_json(content)
        except ValidationError:
            body = _ErrorBody()
        if status == 422 and body.documents:
            document = body.documents[0]
            return ScoringError(str(document["message"]), int(document["index"]))
        message = shorten(body.message, 500).rstrip(".")
        text = f"{self.base_url} answered {status}{': ' if message else ''}{message}."
        if response.is_redirect:
            text += (
                f" It redirects to {response.headers['Location']}, where nothing was sent. If the "
                "service is there, give that address as base_url."
            )
        if status < 400 or status in (408, *TRANSIENT) or status >= 500:
            seconds = response.headers.get("Retry-After", "")
            retry_after = float(seconds) if seconds.isdecimal() else 0.0
            return RemoteError(text, status, status in TRANSIENT, retry_after)
        if status in (401, 403, 404, 405):
            text += f" Check base_url, and the key in api_key or {KEY_VARIABLE}."
        return InputError(text)
