"""A reranker whose model is in a service (``rsrank serve``), which many applications can share."""

import asyncio
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from pydantic import SecretStr
from typing_extensions import Unpack

from ..errors import InputError
from ..reading.documents import DocumentLike
from ..reranker import RankCall, RankOptions, RankResult, Reranker, Rule
from . import connections
from .address import service_address, usable_key
from .transport import Transport
from .wire import parsed, request_body


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
        key = usable_key(SecretStr(api_key) if isinstance(api_key, str) else api_key)
        self.base_url = service_address(base_url)
        self.model = model
        self._transport = Transport(self.base_url, key, timeout, max_retries)

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
        """Wait until the service is ready, check its model, and open a connection."""
        connections.wait(connections.start(self._transport.send("GET", "/ready")))
        self.rank("", [])

    async def _rank(self, call: RankCall) -> RankResult:
        request = request_body(self.model, call)
        body = await self._transport.send("POST", "/v1/rerank", request)
        answer, scored = parsed(body, call.texts, self.base_url, self.model)
        native = Rule(answer.threshold, answer.max_gap, answer.fallback)
        return call.result(scored, native, query_truncated=answer.query_truncated)
