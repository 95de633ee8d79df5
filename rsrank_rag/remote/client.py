"""A reranker that asks a service (``rsrank serve``), so that one model in one process does for many applications."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, Literal, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from typing_extensions import Self

from ..errors import InputError, RemoteError, RSRankError, ScoringError
from ..method.template import clean
from ..reranker import ConcurrentReranker, RankResult, Scored, as_list, check_limits, choose
from . import connections

logger = logging.getLogger(__name__)

KEY_VARIABLE = "RSRANK_API_KEY"
"""Environment variable that holds the API key where none is given."""
TRANSIENT = (429, 502, 503)
"""Too much at once, nobody behind the proxy, not ready. Not 504: what took too long would take as long again."""
CONNECT_SECONDS = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0
ANSWER_BYTES, ROW_BYTES = 1 << 20, 1 << 12
"""An answer longer than the first, and the second for each document, is not read."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, protected_namespaces=())


class _Row(_Strict):
    index: int
    relevance_score: float | None
    truncated: bool = False


class _Fault(_Strict):
    index: int
    message: str


class _Answer(_Strict):
    model: str
    results: list[_Row]
    threshold: float | None = Field(allow_inf_nan=False)
    errors: list[_Fault] | None = None


class _Info(_Strict):
    model_id: str
    threshold: float | None = Field(allow_inf_nan=False)


Shape = TypeVar("Shape", _Answer, _Info)


class RemoteReranker(ConcurrentReranker):
    """Asks a service for scores; what is kept is decided here.

    It may be used from any number of threads and event loops. All that talk to one address share its connections.
    Proxies and certificates come from the environment, as httpx reads them; redirects are not followed, so that texts
    and key go nowhere else.

    Args:
        base_url: Where the service listens, such as ``http://localhost:8080``; a ``/v1`` at its end may stay.
        model: Name of the model that must answer; None for whichever the service holds.
        api_key: Sent as a bearer token. By default what ``RSRANK_API_KEY`` holds at the time of a call. It is neither
            shown nor pickled.
        timeout: Seconds that a call may take in all, with its retries and the pauses between them. (A synchronous call
            whose answer comes in drops can take longer, by as much for each of its steps.)
        max_retries: How often a call is sent again after a lost connection, a 429, 502 or 503, after pauses that grow,
            or that the service asks for. What takes too long is not sent again.

    Raises:
        InputError: An argument that cannot be used.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | SecretStr | None = None,
        timeout: float = 60.0,
        max_retries: int = 3,
    ) -> None:
        if not (0 < timeout < math.inf):
            raise InputError(f"timeout must be a positive number of seconds, got {timeout!r}.")
        if max_retries < 0:
            raise InputError(f"max_retries must be 0 or more, got {max_retries!r}.")
        self.base_url, self.model = service_address(base_url), model
        self.timeout, self.max_retries = timeout, max_retries
        self._api_key = usable_key(SecretStr(api_key) if isinstance(api_key, str) else api_key)
        self._native: float | None = None
        self._native_known = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r})"

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.__copy__()  # all it holds cannot be changed

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_api_key": None}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def threshold(self) -> float | None:  # type: ignore[override]  # it is read only
        """The native threshold of the service's model, which comes with each answer; at first it is asked for.

        Raises:
            RemoteError: It had to be asked for, and there was no usable answer.
        """
        if not self._native_known:
            self._learn(self._send("GET", "/info", None, ANSWER_BYTES))
        return self._native

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """Scores in input order.

        Raises:
            InputError: The service refuses the request: what is wrong with it, or with the key, is said.
            ScoringError: A document could not be scored; it is named.
            RemoteError: There was no usable answer in time.
        """
        return [found.score for found in self._ask(query, as_list(documents))[0]]

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        threshold: float | Literal["native"] | None = "native",
        top_n: int | None = None,
        min_docs: int = 0,
        show_progress: bool = False,
    ) -> RankResult:
        """See `Reranker.rank`; the native threshold is that of the service's model.

        Raises:
            InputError: An argument out of range, or the service refuses the request.
            ScoringError: A document could not be scored; it is named, and nothing is returned.
            RemoteError: There was no usable answer in time.
        """
        documents = as_list(documents)
        check_limits(None if threshold == "native" else threshold, top_n, min_docs)
        scored, native = self._ask(query, documents)
        if threshold == "native":
            threshold = native if documents else self.threshold
        return choose(query, documents, scored, threshold, top_n=top_n, min_docs=min_docs)

    async def arank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        threshold: float | Literal["native"] | None = "native",
        top_n: int | None = None,
        min_docs: int = 0,
    ) -> RankResult:
        """As `rank`, on the event loop; cancelling it closes the request."""
        documents = as_list(documents)
        check_limits(None if threshold == "native" else threshold, top_n, min_docs)
        scored, native = await self._aask(query, documents)
        if threshold == "native":
            if not documents and not self._native_known:
                self._learn(await self._asend("GET", "/info", None, ANSWER_BYTES))
            threshold = native if documents else self._native
        return choose(query, documents, scored, threshold, top_n=top_n, min_docs=min_docs)

    def warm_up(self) -> None:
        """Return when the service is ready to answer; open a connection.

        Raises:
            InputError: It refuses the key, or there is no such service at this address.
            RemoteError: It cannot be reached, is not ready, or holds another model than ``model``.
        """
        self._send("GET", "/ready", None, ANSWER_BYTES)
        self._learn(self._send("GET", "/info", None, ANSWER_BYTES))

    def close(self) -> None:
        """Close the connections to this address when the calls that use them are done, for all who share them.

        The next call opens new ones.
        """
        connections.close(self.base_url)

    async def aclose(self) -> None:
        """As `close`; those of the running event loop are closed when it returns, unless they are in use."""
        await connections.aclose(self.base_url)

    def score_documents(self, query: str, documents: Sequence[str], *, show_progress: bool = False) -> list[Scored]:
        """As `score`, with whether a document was cut."""
        return self._ask(query, documents)[0]

    def _ask(self, query: str, documents: Sequence[str]) -> tuple[list[Scored], float | None]:
        """Scores, and the native threshold as far as it is known."""
        body = self._body(query, documents)
        if not documents:
            return [], self._native
        return self._read(self._send("POST", "/v1/rerank", body, _room(documents)), len(documents))

    async def _aask(self, query: str, documents: Sequence[str]) -> tuple[list[Scored], float | None]:
        body = self._body(query, documents)
        if not documents:
            return [], self._native
        return self._read(await self._asend("POST", "/v1/rerank", body, _room(documents)), len(documents))

    def _body(self, query: str, documents: Sequence[str]) -> bytes:
        for name, text in (("A query", query), *((f"Document {i}", text) for i, text in enumerate(documents))):
            if not isinstance(text, str):
                raise InputError(f"{name} must be a string, got {type(text).__name__}.")
        asked = {
            **({} if self.model is None else {"model": self.model}),
            "query": clean(query),
            "documents": [clean(text) for text in documents],
            "partial": True,
            "threshold": None,  # this and the next are said because a service may be set otherwise
            "normalize": False,
        }
        return json.dumps(asked, ensure_ascii=False).encode()

    def _read(self, body: bytes, count: int) -> tuple[list[Scored], float | None]:
        """Scores in the order of the documents: rows come in whichever, so that only their numbers count."""
        answer = self._understood(_Answer, body)
        self._check_model(answer.model)
        faults = answer.errors or []
        named = Counter([row.index for row in answer.results] + [fault.index for fault in faults])
        wrong_index = next((i for i in (*range(count), *named) if named[i] != 1 or not 0 <= i < count), None)
        if wrong_index is not None:
            raise RemoteError(
                f"{self.base_url} was asked about {count} documents and gave {named[wrong_index]} scores for document "
                f"{wrong_index}, so none of its answer can be trusted."
            )
        if faults:
            first = min(faults, key=lambda fault: fault.index)
            more = f" So it is with {len(faults) - 1} more." if len(faults) > 1 else ""
            raise ScoringError(f"Document {first.index} {_line(first.message)}{more}", first.index)
        rows = {row.index: row for row in answer.results}
        scored: list[Scored] = []
        for index in range(count):
            score = rows[index].relevance_score
            if score is None or not math.isfinite(score):
                raise ScoringError(f"{self.base_url} gave document {index} the score {score}, which is none.", index)
            scored.append(Scored(score, rows[index].truncated))
        self._native, self._native_known = answer.threshold, True
        return scored, answer.threshold

    def _learn(self, body: bytes) -> None:
        info = self._understood(_Info, body)
        self._check_model(info.model_id)
        self._native, self._native_known = info.threshold, True

    def _understood(self, shape: type[Shape], body: bytes) -> Shape:
        try:
            return shape.model_validate_json(body)
        except ValidationError as error:
            wrong = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(map(str, wrong["loc"])) or "the answer"
            raise RemoteError(
                f"{self.base_url} did not answer as an rsrank service does ({place}: {wrong['msg']}). Is it one?"
            ) from None

    def _check_model(self, name: str) -> None:
        if self.model is not None and name != self.model:
            raise RemoteError(
                f"{self.base_url} was asked for {self.model!r} and holds {name!r}. Give that name, or none."
            )

    # Requests

    def _send(self, method: str, path: str, body: bytes | None, room: int) -> bytes:
        patience = _Patience(self.timeout, self.max_retries)
        while True:
            try:
                with self._named_errors():
                    return self._answer(method, path, body, room, patience)
            except RemoteError as error:
                pause = patience.pause(error)
            time.sleep(pause)

    def _answer(self, method: str, path: str, body: bytes | None, room: int, patience: _Patience) -> bytes:
        with (
            connections.client(self.base_url) as client,
            client.stream(**self._request(method, path, body, patience)) as response,
        ):
            answer = bytearray()
            for chunk in response.iter_bytes():
                patience.check()
                self._grow(answer, chunk, room)
            return self._accepted(response, bytes(answer))

    async def _asend(self, method: str, path: str, body: bytes | None, room: int) -> bytes:
        with self._named_errors():
            return await asyncio.wait_for(self._patient_asend(method, path, body, room), self.timeout)

    async def _patient_asend(self, method: str, path: str, body: bytes | None, room: int) -> bytes:
        patience = _Patience(self.timeout, self.max_retries)
        while True:
            try:
                with self._named_errors():
                    return await self._aanswer(method, path, body, room, patience)
            except RemoteError as error:
                pause = patience.pause(error)
            await asyncio.sleep(pause)

    async def _aanswer(self, method: str, path: str, body: bytes | None, room: int, patience: _Patience) -> bytes:
        async with (
            connections.async_client(self.base_url) as client,
            client.stream(**self._request(method, path, body, patience)) as response,
        ):
            answer = bytearray()
            async for chunk in response.aiter_bytes():
                self._grow(answer, chunk, room)
            return self._accepted(response, bytes(answer))

    def _request(self, method: str, path: str, body: bytes | None, patience: _Patience) -> dict[str, Any]:
        left = patience.left
        return {
            "method": method,
            "url": self.base_url + path,
            "content": body,
            "headers": {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "rsrank-rag"},
            "auth": self._auth(),
            "follow_redirects": False,
            "timeout": httpx.Timeout(left, connect=min(left, CONNECT_SECONDS)),
        }

    def _auth(self) -> httpx.Auth | None:
        """The key for one request: the one that was given, or that of the environment."""
        if self._api_key:
            return _Bearer(self._api_key)
        key = usable_key(SecretStr(os.environ.get(KEY_VARIABLE, "")), KEY_VARIABLE)
        return _Bearer(key) if key else None

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """What httpx and asyncio raise, as errors of this package."""
        try:
            yield
        except (asyncio.TimeoutError, httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout) as error:
            raise RemoteError(
                f"{self.base_url} did not answer in {self.timeout:g} seconds. Raise timeout, or send fewer documents."
            ) from error
        except httpx.TransportError as error:
            raise RemoteError(
                f"{self.base_url} could not be reached ({_reason(error)}). Is the service running, and base_url right?",
                transient=not isinstance(error, (httpx.LocalProtocolError, httpx.UnsupportedProtocol)),
            ) from error
        except httpx.RequestError as error:
            raise RemoteError(f"The answer of {self.base_url} cannot be read ({_reason(error)}).") from error

    def _grow(self, answer: bytearray, chunk: bytes, room: int) -> None:
        answer += chunk
        if len(answer) > room:
            raise RemoteError(f"The answer of {self.base_url} is too long to be scores: more than {room:,} bytes.")

    def _accepted(self, response: httpx.Response, body: bytes) -> bytes:
        """The body of an answer that is none of the refusals.

        Raises:
            InputError: A refusal because of the request.
            RemoteError: A refusal because of the service.
        """
        status = response.status_code
        if response.is_success:
            return body
        said = _said(body)
        if status in TRANSIENT or status == 408 or status >= 500:
            raise RemoteError(
                f"{self.base_url} answered {status}{said}",
                status,
                transient=status in TRANSIENT,
                retry_after=_seconds(response.headers.get("Retry-After", "")),
            )
        raise self._refusal(response, body, said)

    def _refusal(self, response: httpx.Response, body: bytes, said: str) -> RSRankError:
        status = response.status_code
        if status < 400:
            there = response.next_request.url.netloc.decode() if response.next_request else "another address"
            return RemoteError(
                f"{self.base_url} sends on to {there} ({status}), where nothing was sent. "
                "If the service is there, give that address as base_url.",
                status,
            )
        if status in (401, 403):
            source = "api_key" if self._api_key else KEY_VARIABLE if self._auth() else ""
            sent = f"the key in {source}" if source else f"a request without a key; give api_key or set {KEY_VARIABLE}"
            return InputError(f"{self.base_url} refused {sent} ({status}){said}")
        if status in (404, 405):
            path = str(response.request.url).removeprefix(self.base_url)
            return InputError(f"{self.base_url} has no {path} ({status}){said} Is it the address of an rsrank service?")
        index = _first_document(body)
        if status == 422 and index is not None:
            return ScoringError(said.removeprefix(": "), index)
        return InputError(f"{self.base_url} refused the request ({status}){said}")


class _Bearer(httpx.Auth):
    """Puts the key into a request when it is sent, so that it stands in no variable."""

    def __init__(self, key: SecretStr) -> None:
        self.key = key

    def sync_auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["Authorization"] = f"Bearer {self.key.get_secret_value()}"
        yield request

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        request.headers["Authorization"] = f"Bearer {self.key.get_secret_value()}"
        yield request


class _Patience:
    """How long a call may go on, and when it is tried again."""

    def __init__(self, seconds: float, tries: int) -> None:
        self.ends, self.tries, self.waits, self.asked = time.monotonic() + seconds, tries, FIRST_PAUSE, 1

    @property
    def left(self) -> float:
        """Seconds; never quite none, which would be no limit to some."""
        return max(self.ends - time.monotonic(), 1e-3)

    def check(self) -> None:
        """Stop when time is up."""
        if time.monotonic() > self.ends:
            raise asyncio.TimeoutError

    def pause(self, error: RemoteError) -> float:
        """Seconds until the next try; an error after which there is none is raised."""
        pause = max(self.waits, error.retry_after or 0.0) + random.uniform(0, self.waits)
        if not error.transient:
            raise error
        if not self.tries or time.monotonic() + pause > self.ends:
            why = f"Asked {self.asked} times" if self.asked > 1 else "Asked once"
            why += " and there is no time for another try." if self.tries else "."
            raise RemoteError(f"{error} {why}", error.status, error.transient, error.retry_after) from error
        self.tries -= 1
        self.asked += 1
        self.waits = min(2 * self.waits, LONGEST_PAUSE)
        logger.info("%s Trying again in %.1f s.", error, pause)
        return pause


def usable_key(key: SecretStr | None, source: str = "api_key") -> SecretStr | None:
    """A key without the line break that files end with; None if nothing is left.

    Raises:
        InputError: It holds what no header may. (httpx would say so too, and show the key.)
    """
    text = key.get_secret_value().strip() if key else ""
    if not (text.isascii() and text.isprintable()):
        raise InputError(f"{source} holds characters that cannot be sent. Only printable ASCII can.")
    return SecretStr(text) if text else None


def service_address(base_url: str) -> str:
    """Address of a service as it is asked: without a slash, ``/v1`` or ``/v1/rerank`` at its end.

    Raises:
        InputError: It is no http address, or it holds what does not belong there.

    >>> service_address("http://localhost:8080/v1/")
    'http://localhost:8080'
    """
    try:
        url = httpx.URL(base_url.strip())
        url.host.encode("idna")  # what the resolver does, only later
    except (httpx.InvalidURL, UnicodeError, AttributeError):
        raise InputError("base_url must be an address such as http://localhost:8080.") from None
    if url.userinfo or url.query or url.fragment:
        raise InputError("base_url must hold no user, password, query or fragment. A key belongs into api_key.")
    if url.scheme not in ("http", "https") or not url.host:
        raise InputError(f"base_url must begin with http:// or https:// and a host, got {base_url!r}.")
    return re.sub(r"(/v1(/rerank)?)?/*$", "", str(url).rstrip("/"))


def _room(documents: Collection[str]) -> int:
    return ANSWER_BYTES + ROW_BYTES * len(documents)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _fields(body: bytes) -> dict[str, Any]:
    """Of an error; a proxy's page has none."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _said(body: bytes) -> str:
    """What a service says about an error, as a sentence to be put behind the status."""
    fields = _fields(body)
    told = [text for text in (fields.get("message"), fields.get("detail")) if isinstance(text, str) and text.strip()]
    return f": {_line(told[0]).rstrip('.')}." if told else "."


def _first_document(body: bytes) -> int | None:
    """Number of the first document that an error is about."""
    documents = _fields(body).get("documents")
    first = documents[0] if isinstance(documents, list) and documents else None
    index = first.get("index") if isinstance(first, dict) else None
    return index if isinstance(index, int) else None


def _line(text: str) -> str:
    return " ".join(text.split())[:500]


def _seconds(retry_after: str) -> float | None:
    """Of a Retry-After header: seconds, or a date."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return None
