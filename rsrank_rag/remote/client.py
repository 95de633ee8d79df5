"""A reranker whose model is in a service (``rsrank serve``), which many applications can share."""

import asyncio
import math
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Literal

from pydantic import SecretStr
from typing_extensions import Self, Unpack

from ..errors import InputError
from ..passages.parts import Reading, ReadingOptions
from ..reranker import (
    RankOptions,
    RankResult,
    Reranker,
    Scored,
    as_list,
    check_limits,
    choose,
)
from . import connections
from .transport import Transport, service_address, usable_key
from .wire import Answer, Info, parsed, request_body, scores_of

__all__ = ["RemoteReranker", "service_address", "usable_key"]


class RemoteReranker(
    Reranker,
    AbstractContextManager["RemoteReranker"],
    AbstractAsyncContextManager["RemoteReranker"],
):
    """Gets scores from a service, and drops documents here. Threads and event loops may share it.

    All rerankers of one address share its connections. Proxies and certificates come from the
    environment, as in httpx. Redirects are not followed, so that texts and the key go nowhere
    else. The native threshold is that of the service's model and comes with every answer.

    All calls raise InputError if the service refuses the request or the key, ScoringError if a
    document could not be scored, and RemoteError if there was no usable answer in time.

    Args:
        base_url: Address of the service, such as ``http://localhost:8080``. A ``/v1`` at its end
            is removed.
        model: Name of the model that must answer; None for whichever the service holds.
        api_key: Sent as a bearer token. By default, the first of the keys in ``RSRANK_API_KEY``
            (separated by commas) at the time of a call. It is neither shown nor pickled.
        timeout: Seconds for a call, with its retries and the pauses between them.
        max_retries: How often a request is repeated after a lost connection, a 429, 502 or 503.
            Pauses grow, and are at least as long as the service asks for.
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
        self.base_url = service_address(base_url)
        self.model = model
        self.timeout = timeout
        self.max_retries = max_retries
        self._api_key = usable_key(SecretStr(api_key) if isinstance(api_key, str) else api_key)
        self._instruction: str | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r})"

    def __copy__(self) -> Self:
        # The default would use __getstate__, which leaves out the key.
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.__copy__()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_api_key": None}

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def threshold(self) -> float | None:  # type: ignore[override]
        """The native threshold of the service's model; None if it has none. This is a request."""
        return self._threshold_in(self._transport.send("GET", "/info"))

    async def athreshold(self) -> float | None:
        """As `threshold`, without blocking the event loop."""
        return self._threshold_in(await self._transport.asend("GET", "/info"))

    def with_instruction(self, instruction: str) -> Self:
        """A copy that sends an instruction, which the service refuses if its model takes none."""
        copy = self.__copy__()
        copy._instruction = instruction
        return copy

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """Scores in input order."""
        result = self.rank(query, documents, threshold=None)
        return [document.score for document in sorted(result.kept, key=lambda kept: kept.index)]

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        show_progress: bool = False,
        **options: Unpack[RankOptions],
    ) -> RankResult:
        """See `Reranker.rank`."""
        call = _Call(self, query, as_list(documents), **options)
        return call.result(self._transport.send(*call.request()))

    async def arank(
        self, query: str, documents: Sequence[str], **options: Unpack[RankOptions]
    ) -> RankResult:
        """As `rank`, without blocking the event loop; cancelling it closes the request."""
        call = _Call(self, query, as_list(documents), **options)
        return call.result(await self._transport.asend(*call.request()))

    def warm_up(self) -> None:
        """Wait until the service is ready, check its model, and open a connection."""
        self._transport.send("GET", "/ready")
        self._threshold_in(self._transport.send("GET", "/info"))

    def close(self) -> None:
        """Close the address's connections after the calls in progress; the next call opens new."""
        connections.close(self.base_url)

    async def aclose(self) -> None:
        """As `close`, without blocking the event loop."""
        await asyncio.wrap_future(connections.start(connections.aclose(self.base_url)))

    @property
    def _transport(self) -> Transport:
        return Transport(self.base_url, self._api_key, self.timeout, self.max_retries)

    def _threshold_in(self, body: bytes) -> float | None:
        return parsed(Info, body, self.base_url, self.model).threshold


class _Call:
    """A call of `RemoteReranker.rank`: the request, and the result in its answer."""

    def __init__(
        self,
        reranker: RemoteReranker,
        query: str,
        documents: list[str],
        threshold: float | Literal["native"] | None = "native",
        top_n: int | None = None,
        min_docs: int = 0,
        **options: Unpack[ReadingOptions],
    ) -> None:
        check_limits(threshold, top_n, min_docs)
        self.reranker = reranker
        self.query = query
        self.documents = documents
        self.threshold = threshold
        self.top_n = top_n
        self.min_docs = min_docs
        fields: dict[str, Any] = dict(options)
        fields["long_documents"] = options.get("long_documents") or "cut"
        self.reading = Reading(**fields)

    def request(self) -> tuple[str, str, bytes | None]:
        """Method, path and body. Without documents, only the threshold is needed."""
        remote = self.reranker
        body = request_body(
            remote.model, self.query, self.documents, self.reading, remote._instruction
        )
        return ("POST", "/v1/rerank", body) if self.documents else ("GET", "/info", None)

    def result(self, body: bytes) -> RankResult:
        """Sort and drop documents by the scores in an answer."""
        remote = self.reranker
        scored: list[Scored] = []
        if self.documents:
            answer = parsed(Answer, body, remote.base_url, remote.model)
            native = answer.threshold
            scored = scores_of(answer, self.documents, remote.base_url, self.reading)
        else:
            native = remote._threshold_in(body)
        return choose(
            self.query,
            self.documents,
            scored,
            native if self.threshold == "native" else self.threshold,
            top_n=self.top_n,
            min_docs=self.min_docs,
            reading=self.reading,
        )
