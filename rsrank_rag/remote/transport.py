"""One request and its answer in time: keys, retries, and what may go wrong, as errors of this package."""

import asyncio
import logging
import os
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

import httpx
from pydantic import SecretStr

from ..errors import InputError, RemoteError, RSRankError, ScoringError
from . import connections
from .wire import first_document, message_of

logger = logging.getLogger(__name__)

KEY_VARIABLE = "RSRANK_API_KEY"
"""Environment variable that holds the API key where none is given; of several, by commas, the first is sent."""
TRANSIENT = (429, 502, 503)
"""Too much at once, nobody behind the proxy, not ready. Not 504: what took too long would take as long again."""
CONNECT_SECONDS = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0
HEADERS = {
    "Content-Type": "application/json",
    "Accept": "application/json",
    "User-Agent": "rsrank-rag",
}
ANSWER_BYTES = 1 << 20  # a longer answer is not read, unless more is expected


@dataclass(frozen=True)
class Call:
    """One request."""

    method: str
    path: str  # after the service's address
    body: bytes | None = None  # JSON
    most_bytes: int = ANSWER_BYTES  # of the answer, which is not read if it is longer


@dataclass(frozen=True)
class Transport:
    """Calls one service."""

    base_url: str
    api_key: SecretStr | None  # None for that of the environment
    timeout: float  # seconds for a call in all
    max_retries: int

    def send(self, call: Call) -> bytes:
        """The body of the answer; errors as `RemoteReranker` describes them."""
        future = connections.begin(self._answer(call))
        try:
            return future.result()
        finally:
            future.cancel()  # no effect unless waiting was interrupted

    async def asend(self, call: Call) -> bytes:
        """As `send`."""
        return await asyncio.wrap_future(connections.begin(self._answer(call)))

    async def _answer(self, call: Call) -> bytes:
        """The body of an answer, asked for again after what may pass, with pauses that grow, until time is up."""
        ends, asked, waits = time.monotonic() + self.timeout, 1, FIRST_PAUSE
        while True:
            left = max(
                ends - time.monotonic(), 1e-3
            )  # never quite none, which would be no limit to some
            try:
                with self._named_errors():
                    response, body = await asyncio.wait_for(self._asked(call, left), left)
                if response.is_success:
                    return body
                raise self._refusal(response, body)
            except RemoteError as error:
                if not error.transient:
                    raise
                pause = max(waits, error.retry_after or 0.0) + random.uniform(0, waits)
                if asked > self.max_retries or time.monotonic() + pause > ends:
                    why = f"Asked {asked} times" if asked > 1 else "Asked once"
                    why += (
                        " and there is no time for another try."
                        if asked <= self.max_retries
                        else "."
                    )
                    raise RemoteError(
                        f"{error} {why}", error.status, error.transient, error.retry_after
                    ) from error
                logger.info("%s Trying again in %.1f s.", error, pause)
            await asyncio.sleep(pause)
            asked, waits = asked + 1, min(2 * waits, LONGEST_PAUSE)

    async def _asked(self, call: Call, seconds: float) -> tuple[httpx.Response, bytes]:
        """Send a request once; the answer and its body."""
        timeout, url = (
            httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS)),
            self.base_url + call.path,
        )
        options: dict[str, Any] = {
            "timeout": timeout,
            "auth": partial(_with_key, self._key()),
            "headers": HEADERS,
        }
        async with (
            connections.client(self.base_url) as client,
            client.stream(
                call.method, url, content=call.body, follow_redirects=False, **options
            ) as response,
        ):
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > call.most_bytes:
                    most = f"{call.most_bytes:,} bytes"
                    raise RemoteError(
                        f"The answer of {self.base_url} is too long to be scores: more than {most}."
                    )
        return response, bytes(body)

    def _key(self) -> SecretStr | None:
        """The key for one request: the one that was given, or that of the environment."""
        if self.api_key is not None:
            return self.api_key
        keys = (part.strip() for part in os.environ.get(KEY_VARIABLE, "").split(","))
        return usable_key(SecretStr(next(filter(None, keys), "")), KEY_VARIABLE)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """What httpx and asyncio raise, as errors of this package."""
        try:
            yield
        except (
            asyncio.TimeoutError,
            httpx.ReadTimeout,
            httpx.WriteTimeout,
            httpx.PoolTimeout,
        ) as error:
            raise RemoteError(
                f"{self.base_url} did not answer in {self.timeout:g} seconds. Raise timeout, or send fewer documents."
            ) from error
        except httpx.TransportError as error:
            raise RemoteError(
                f"{self.base_url} could not be reached ({_reason(error)}). Is the service running, and base_url right?",
                transient=not isinstance(
                    error, (httpx.LocalProtocolError, httpx.UnsupportedProtocol)
                ),
            ) from error
        except httpx.RequestError as error:
            raise RemoteError(
                f"The answer of {self.base_url} cannot be read ({_reason(error)})."
            ) from error

    def _refusal(self, response: httpx.Response, body: bytes) -> RSRankError:
        status, reason = response.status_code, message_of(body)
        if status in TRANSIENT or status == 408 or status >= 500:
            wait = _seconds(response.headers.get("Retry-After", ""))
            return RemoteError(
                f"{self.base_url} answered {status}{reason}", status, status in TRANSIENT, wait
            )
        if status < 400:
            there = (
                response.next_request.url.netloc.decode()
                if response.next_request
                else "another address"
            )
            return RemoteError(
                f"{self.base_url} sends on to {there} ({status}), where nothing was sent. "
                "If the service is there, give that address as base_url.",
                status,
            )
        if status in (401, 403):
            source = "api_key" if self.api_key else KEY_VARIABLE if self._key() else ""
            sent = (
                f"the key in {source}"
                if source
                else f"a request without a key; give api_key or set {KEY_VARIABLE}"
            )
            return InputError(f"{self.base_url} refused {sent} ({status}){reason}")
        if status in (404, 405):
            path = str(response.request.url).removeprefix(self.base_url)
            return InputError(
                f"{self.base_url} has no {path} ({status}){reason} Is it the address of an rsrank service?"
            )
        index = first_document(body)
        if status == 422 and index is not None:
            return ScoringError(reason.removeprefix(": "), index)
        return InputError(f"{self.base_url} refused the request ({status}){reason}")


def _with_key(key: SecretStr | None, request: httpx.Request) -> httpx.Request:
    """Puts the key into a request only when it is sent, so that it stands in no variable before."""
    if key:
        request.headers["Authorization"] = f"Bearer {key.get_secret_value()}"
    return request


def usable_key(key: SecretStr | None, source: str = "api_key") -> SecretStr | None:
    """A key without the line break that files end with, None if nothing is left; InputError if none can send it."""
    text = key.get_secret_value().strip() if key else ""
    if not (text.isascii() and text.isprintable()):  # httpx would refuse it too, and show the key
        raise InputError(
            f"{source} holds characters that cannot be sent. Only printable ASCII can."
        )
    return SecretStr(text) if text else None


def service_address(base_url: str) -> str:
    """Address of a service as it is asked, without ``/v1`` or ``/v1/rerank``; InputError if it is no plain address.

    >>> service_address("http://localhost:8080/v1/")
    'http://localhost:8080'
    """
    try:
        url = httpx.URL(base_url.strip())
        url.host.encode("idna")  # what the resolver does, only later
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


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _seconds(retry_after: str) -> float | None:
    """Of a Retry-After header: seconds, or a date."""
    with suppress(ValueError):
        return max(0.0, float(retry_after))
    with suppress(ValueError, OverflowError):  # a year may have any number of digits
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    return None
