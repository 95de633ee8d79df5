"""A reranker that asks a service (``rsrank serve``), so that one model in one process does for many applications."""

import asyncio
import math
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Literal

from pydantic import SecretStr
from typing_extensions import Self, Unpack

from ..errors import InputError
from ..passages.parts import WHOLE, Reading, ReadingOptions
from ..reranker import (
    RankOptions,
    RankResult,
    Reranker,
    Scored,
    as_list,
    blanks_last,
    check_limits,
    choose,
)
from . import connections
from .transport import ANSWER_BYTES, Call, Transport, service_address, usable_key
from .wire import Answer, Info, parsed, request_body, scores_of

__all__ = ["RemoteReranker", "service_address", "usable_key"]

ROW_BYTES = 1 << 12  # of an answer, for each document; a longer one is not read

SENTENCE_BYTES = (
    100  # likewise with sentences, for each byte of the request: at worst, each letter ends one
)

INFO = Call("GET", "/info")


class RemoteReranker(
    Reranker,
    AbstractContextManager["RemoteReranker"],
    AbstractAsyncContextManager["RemoteReranker"],
):
    """Asks a service for scores; what is kept is decided here. Threads and event loops may share it.

    All that talk to one address share its connections. Proxies and certificates come from the environment, as httpx
    reads them; redirects are not followed, so that texts and key go nowhere else. The native threshold is that of the
    service's model and comes with every answer; `threshold` asks ``/info`` only if there has been no answer yet.
    All calls raise InputError if the service refuses the request or the key, ScoringError if a document could not be
    scored, and RemoteError if there was no usable answer in time.

    Args:
        base_url: Where the service listens, such as ``http://localhost:8080``; a ``/v1`` at its end may stay.
        model: Name of the model that must answer; None for whichever the service holds.
        api_key: Sent as a bearer token. By default what ``RSRANK_API_KEY`` holds at the time of a call, or its first
            part if it holds several keys, by commas, as a service takes them. It is neither shown nor pickled.
        timeout: Seconds that a call may take in all, with its retries and the pauses between them.
        max_retries: How often a call is sent again after a lost connection, a 429, 502 or 503, after pauses that grow,
            or that the service asks for. What takes too long is not sent again.
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
        self._instruction: str | None = None
        self._native: tuple[float | None] | None = None  # None: not known yet

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r})"

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))  # not by __getstate__, which leaves out the key
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.__copy__()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_api_key": None}

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def threshold(self) -> float | None:  # type: ignore[override]  # it is read only
        """The native threshold of the service's model; None if it has none."""
        return self._native[0] if self._native else self._learn(self._transport.send(INFO))

    async def athreshold(self) -> float | None:
        """As `threshold`, without blocking the event loop."""
        return self._native[0] if self._native else self._learn(await self._transport.asend(INFO))

    def with_instruction(self, instruction: str) -> Self:
        """The same, sending an instruction, which the service refuses if its model takes none."""
        twin = self.__copy__()
        twin._instruction = instruction
        return twin

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """Scores in input order."""
        return [found.score for found in self.score_documents(query, as_list(documents))]

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        show_progress: bool = False,
        **options: Unpack[RankOptions],
    ) -> RankResult:
        """See `Reranker.rank`."""
        documents, (threshold, top_n, min_docs, reading) = as_list(documents), _checked(**options)
        call = self._call(query, documents, reading)
        scored, native = (
            self._read(self._transport.send(call), documents, reading) if call else ([], None)
        )
        if threshold == "native":
            threshold = native if call else self.threshold
        return choose(
            query, documents, scored, threshold, top_n=top_n, min_docs=min_docs, reading=reading
        )

    async def arank(
        self, query: str, documents: Sequence[str], **options: Unpack[RankOptions]
    ) -> RankResult:
        """As `rank`, on the event loop; cancelling it closes the request."""
        documents, (threshold, top_n, min_docs, reading) = as_list(documents), _checked(**options)
        call = self._call(query, documents, reading)
        scored, native = (
            self._read(await self._transport.asend(call), documents, reading)
            if call
            else ([], None)
        )
        if threshold == "native":
            threshold = native if call else await self.athreshold()
        return choose(
            query, documents, scored, threshold, top_n=top_n, min_docs=min_docs, reading=reading
        )

    def warm_up(self) -> None:
        """Return when the service is ready to answer and holds the right model; open a connection."""
        self._transport.send(Call("GET", "/ready"))
        self._learn(self._transport.send(INFO))

    def close(self) -> None:
        """Close this address's connections, for all, after the calls under way; the next call opens new ones."""
        connections.close(self.base_url)

    async def aclose(self) -> None:
        """As `close`, without blocking the event loop."""
        await asyncio.wrap_future(connections.begin(connections.give_up(self.base_url)))

    def score_documents(
        self, query: str, documents: Sequence[str], *, show_progress: bool = False
    ) -> list[Scored]:
        """As `score`, with whether a document was cut."""
        call = self._call(query, documents)
        return self._read(self._transport.send(call), documents)[0] if call else []

    @property
    def _transport(self) -> Transport:
        return Transport(self.base_url, self._api_key, self.timeout, self.max_retries)

    def _call(self, query: str, documents: Sequence[str], reading: Reading = WHOLE) -> Call | None:
        """The request for scores; None if there is nothing to ask."""
        body = request_body(self.model, query, documents, reading, self._instruction)
        most = (
            ANSWER_BYTES
            + ROW_BYTES * len(documents)
            + (SENTENCE_BYTES * len(body) if reading.extract else 0)
        )
        return Call("POST", "/v1/rerank", body, most) if documents else None

    def _read(
        self, body: bytes, documents: Sequence[str], reading: Reading = WHOLE
    ) -> tuple[list[Scored], float | None]:
        """Scores, and the native threshold that came with them."""
        answer = parsed(Answer, body, self.base_url, self.model)
        scored = blanks_last(documents, scores_of(answer, documents, self.base_url, reading))
        self._native = (answer.threshold,)
        return scored, answer.threshold

    def _learn(self, body: bytes) -> float | None:
        self._native = (parsed(Info, body, self.base_url, self.model).threshold,)
        return self._native[0]


def _checked(
    threshold: float | Literal["native"] | None = "native",
    top_n: int | None = None,
    min_docs: int = 0,
    **options: Unpack[ReadingOptions],
) -> tuple[float | Literal["native"] | None, int | None, int, Reading]:
    """The options of a call that make sense, with their defaults."""
    check_limits(threshold, top_n, min_docs)
    chosen: Any = {**options, "long_documents": options.get("long_documents") or "cut"}
    return threshold, top_n, min_docs, Reading(**chosen)
