"""One request to a service and its answer: key, retries, time limit, and failures as our errors."""

import asyncio
import logging
import os
import re
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import SecretStr
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    before_sleep_log,
    retry_if_exception,
    stop_after_attempt,
    stop_before_delay,
    wait_exponential,
    wait_random,
)

from ..errors import InputError, RemoteError, RSRankError, ScoringError
from . import connections
from .wire import ErrorBody

logger = logging.getLogger(__name__)

# The environment variable of the API key; of several keys, separated by commas, the first is sent.
KEY_VARIABLE = "RSRANK_API_KEY"

# Too many requests, no service behind the proxy, not ready. A 504 is not among them: the same
# request would take as long again.
TRANSIENT = (429, 502, 503)

# Seconds. The random part keeps clients that failed together from coming back together.
PAUSE = wait_exponential(multiplier=0.25, max=8.0) + wait_random(0, 0.25)

HEADERS = {
    "Content-Type": "application/json",
    "Accept": "application/json",
    "User-Agent": "rsrank-rag",
}


class ApiKey(SecretStr):
    """A service's key. Copies share it; pickled, it becomes None."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "ApiKey":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@dataclass(frozen=True)
class Transport:
    """Sends requests to one service.

    Attributes:
        base_url: Address of the service.
        api_key: Key to send; None for that of the environment at the time of a request.
        timeout: Seconds for a request with all its retries.
        max_retries: How often a request is repeated after a transient failure.
    """

    base_url: str
    api_key: SecretStr | None
    timeout: float
    max_retries: int

    async def send(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """The body of the answer; raises as `RemoteReranker` says."""
        retrying = AsyncRetrying(
            retry=retry_if_exception(_is_transient),
            stop=stop_after_attempt(self.max_retries + 1) | stop_before_delay(self.timeout),
            wait=_pause,
            before_sleep=before_sleep_log(logger, logging.INFO),
            reraise=True,
        )
        try:
            work: Any = retrying(self._send_once, method, path, body)
            content: bytes = await asyncio.wait_for(work, self.timeout)
        except asyncio.TimeoutError as error:
            raise RemoteError(
                f"{self.base_url} did not answer in {self.timeout:g} seconds. "
                "Raise timeout, or send fewer documents."
            ) from error
        return content

    async def _send_once(self, method: str, path: str, body: bytes | None) -> bytes:
        url = self.base_url + path
        options: dict[str, Any] = {"content": body, "headers": HEADERS, "auth": self._authorize}
        try:
            async with connections.client(self.base_url) as client:
                response = await client.request(method, url, **options)
        except httpx.TransportError as error:
            raise RemoteError(
                f"{self.base_url} could not be reached ({error!r}). "
                "Is the service running, and base_url right?",
                transient=not isinstance(error, httpx.LocalProtocolError),
            ) from error
        except httpx.RequestError as error:
            raise RemoteError(
                f"The answer of {self.base_url} cannot be read ({error!r})."
            ) from error
        if not response.is_success:
            raise self._error(response, path)
        return response.content

    def _authorize(self, request: httpx.Request) -> httpx.Request:
        """Add the key, at the last moment, so that no variable of a traceback holds its text."""
        key = self._key()
        if key is not None:
            request.headers["Authorization"] = f"Bearer {key.get_secret_value()}"
        return request

    def _key(self) -> SecretStr | None:
        if self.api_key is not None:
            return self.api_key
        for key in os.environ.get(KEY_VARIABLE, "").split(","):
            if key.strip():
                return usable_key(SecretStr(key), KEY_VARIABLE)
        return None

    def _error(self, response: httpx.Response, path: str) -> RSRankError:
        """The error of an answer that is not a success."""
        status = response.status_code
        body = ErrorBody.parse(response.content)
        message = body.text
        if status in TRANSIENT or status == 408 or status >= 500:
            return RemoteError(
                f"{self.base_url} answered {status}{message}",
                status,
                status in TRANSIENT,
                _seconds(response.headers.get("Retry-After", "")),
            )
        if status < 400:
            location = response.headers.get("Location", "another address")
            return RemoteError(
                f"{self.base_url} redirects to {location} ({status}), where nothing was sent. "
                "If the service is there, give that address as base_url.",
                status,
            )
        if status in (401, 403):
            return InputError(f"{self.base_url} refused {self._credentials()} ({status}){message}")
        if status in (404, 405):
            return InputError(
                f"{self.base_url} has no {path} ({status}){message} "
                "Is it the address of an rsrank service?"
            )
        if status == 422 and body.documents:
            return ScoringError(body.documents[0].message, body.documents[0].index)
        return InputError(f"{self.base_url} refused the request ({status}){message}")

    def _credentials(self) -> str:
        if self.api_key is not None:
            return "the key in api_key"
        if self._key() is not None:
            return f"the key in {KEY_VARIABLE}"
        return f"a request without a key; give api_key or set {KEY_VARIABLE}"


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, RemoteError) and error.transient


def _pause(state: RetryCallState) -> float:
    """Seconds before the next try: the service's Retry-After, and `PAUSE` in addition."""
    error = state.outcome.exception() if state.outcome else None
    requested = error.retry_after if isinstance(error, RemoteError) else None
    return PAUSE(state) + (requested or 0.0)


def usable_key(key: SecretStr | None, source: str = "api_key") -> ApiKey | None:
    """A key without white space around it; None if it is empty.

    Raises:
        InputError: HTTP cannot send the key. The message does not contain it.
    """
    text = key.get_secret_value().strip() if key else ""
    if not (text.isascii() and text.isprintable()):
        raise InputError(
            f"{source} holds characters that cannot be sent. Only printable ASCII can."
        )
    if not text:
        return None
    return ApiKey(text)


def service_address(base_url: str) -> str:
    """The address of a service without ``/v1`` or ``/v1/rerank`` at its end.

    Raises:
        InputError: It is no plain address of a server.

    >>> service_address("http://localhost:8080/v1/")
    'http://localhost:8080'
    """
    try:
        url = httpx.URL(base_url.strip())
        # The resolver would encode the host in the same way, only later.
        url.host.encode("idna")
    except (httpx.InvalidURL, UnicodeError, AttributeError):
        raise InputError("base_url must be an address such as http://localhost:8080.") from None
    if url.userinfo or url.query or url.fragment:
        raise InputError(
            "base_url must hold no user, password, query or fragment. A key belongs into api_key."
        )
    if url.scheme not in ("http", "https") or not url.host:
        raise InputError(
            f"base_url must begin with http:// or https:// and a host, got {base_url!r}."
        )
    return re.sub(r"(/v1(/rerank)?)?/*$", "", str(url).rstrip("/"))


def _seconds(retry_after: str) -> float | None:
    """The seconds of a Retry-After header; None if it is missing or a date."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        return None
