"""A reranker whose model is in a service (``rsrank serve``), which many applications can share."""

import asyncio
import logging
import os
import random
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from pydantic import SecretStr
from typing_extensions import Unpack

from ..errors import InputError, RemoteError, check_count
from ..ranking.rule import is_number
from ..reading.documents import DocumentLike
from ..reranker import RankCall, RankOptions, RankResult, Reranker, Rule
from . import connections
from .address import service_address, usable_key
from .connections import httpx
from .wire import error_of, parsed, request_body

logger = logging.getLogger(__name__)

# The environment variable of the API key; of several keys, separated by commas, the first is sent.
KEY_VARIABLE = "RSRANK_API_KEY"

# Seconds before a request is repeated. They double with each try.
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 8.0

# The most bytes of an answer: some for each byte of the request, because each sentence of a
# document has places and a score, and some more.
ANSWER_BYTES = 1_000_000
TIMES_REQUEST = 100


class RemoteReranker(Reranker):
    """Gets scores from a service, and drops documents here. Threads and event loops may share it.

    All rerankers of a process share its connections. Proxies and certificates come from the
    environment, as in httpx. Redirects are not followed, so that texts and the key go nowhere
    else. The native threshold is that of the service's model and comes with every answer.

    All calls raise InputError if the service rejects the request or the key, ScoringError if a
    document could not be scored, and RemoteError if there was no usable answer in time.

    Args:
        base_url: Address of the service, such as ``http://localhost:8080``. A ``/v1`` at its end
            is removed.
        model: Name of the model that must answer; None for whichever the service holds.
        api_key: Sent as a bearer token. By default, the first of the keys in ``RSRANK_API_KEY``
            (separated by commas) at the time of a call. It is neither shown nor pickled.
        timeout: Seconds for a call, with its retries and the pauses between them.
        max_retries: How often a request is repeated after a lost connection, a 429, 502 or 503.
            Pauses grow, and are at least as long as the service's Retry-After.

    Raises:
        InputError: An address, a key, ``timeout`` or ``max_retries`` cannot be used.
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
        self.base_url = service_address(base_url)
        self.model = model
        self.api_key = usable_key(SecretStr(api_key) if isinstance(api_key, str) else api_key)
        if not is_number(timeout) or timeout <= 0:
            raise InputError(f"timeout must be a number of seconds above 0, got {timeout!r}.")
        check_count("max_retries", max_retries, 0)
        self.timeout = timeout
        self.max_retries = max_retries

    @property
    def threshold(self) -> float | None:  # type: ignore[override]
        """The native threshold of the service's model; None if the model has none.

        Each reading of this attribute sends a request, and raises what `rank` raises.
        """
        return self.rank("", []).threshold

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """Scores in input order."""
        result = self.rank(query, documents, threshold=None)
        return [document.score for document in result.in_order]

    def rank(
        self, query: str, documents: Iterable[DocumentLike], **options: Unpack[RankOptions]
    ) -> RankResult:
        """See `Reranker.rank`."""
        return connections.wait(self.start(query, documents, **options))

    async def arank(
        self, query: str, documents: Iterable[DocumentLike], **options: Unpack[RankOptions]
    ) -> RankResult:
        """As `rank`, without blocking the event loop; cancelling it closes the request."""
        return await asyncio.wrap_future(self.start(query, documents, **options))

    def start(
        self, query: str, documents: Iterable[DocumentLike], **options: Unpack[RankOptions]
    ) -> Future[RankResult]:
        """Begin `rank`; cancelling the future closes the request."""
        return connections.start(self._rank(RankCall.of(query, documents, options)))

    def warm_up(self) -> None:
        """Open a connection, and check that the service answers and holds the model."""
        self.rank("", [])

    async def _rank(self, call: RankCall) -> RankResult:
        request = request_body(self.model, call)
        try:
            body = await asyncio.wait_for(self._send_with_retries(request), self.timeout)
        except asyncio.TimeoutError as error:
            raise RemoteError(
                f"{self.base_url} did not answer in {self.timeout:g} seconds. "
                "Raise timeout, or send fewer documents."
            ) from error
        answer, scored = parsed(body, call.texts, self.base_url, self.model)
        native = Rule(answer.threshold, answer.max_gap, answer.fallback)
        return call.result(scored, native, answer.query_truncated)

    async def _send_with_retries(self, body: bytes) -> bytes:
        """Repeat a request after a transient failure, if there is time for the pause."""
        end = time.monotonic() + self.timeout
        retries = 0
        while True:
            try:
                return await self._send(body)
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

    async def _send(self, body: bytes) -> bytes:
        """The body of the answer to a request; raises as the class says."""
        client = connections.client(asyncio.get_running_loop())
        most = ANSWER_BYTES + TIMES_REQUEST * len(body)
        content = b""
        try:
            async with client.stream(
                "POST",
                f"{self.base_url}/v1/rerank",
                content=body,
                headers={"Content-Type": "application/json"},
                auth=self._authorize,
            ) as response:
                async for piece in response.aiter_bytes():
                    content += piece
                    if len(content) > most:
                        raise RemoteError(f"{self.base_url} answers with more than {most:,} bytes.")
        except httpx.RequestError as error:
            raise RemoteError(
                f"{self.base_url} could not be reached ({error!r}). "
                "Is the service running, and base_url right?",
                transient=True,
            ) from error
        if response.is_success:
            return content
        raise error_of(response, content, self.base_url)

    def _authorize(self, request: httpx.Request) -> httpx.Request:
        """Add the key, at the last moment, so that no variable of a traceback holds its text."""
        variable = os.environ.get(KEY_VARIABLE, "").strip(" ,").partition(",")[0]
        key = self.api_key or usable_key(SecretStr(variable), KEY_VARIABLE)
        if key is not None:
            request.headers["Authorization"] = f"Bearer {key.get_secret_value()}"
        return request
