"""What waits before the model: clients, their requests' documents, and parts of documents.

Clients share the model's time by fair queueing. Each client has a clock of the tokens that it has
had, and the client whose clock is furthest behind is next. A client that comes anew starts with a
small credit.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ..passages.pairs import Segment, combined
from ..passages.parts import WHOLE, Span
from ..reranker import Pair, Scored
from .backend import Outcome


@dataclass(frozen=True)
class QueueLimits:
    """How much may wait, and how long the model is held.

    Attributes:
        documents: Documents that may wait; `OverloadedError` answers a request beyond that.
        batch_seconds: What a batch should take: about the longest wait for a new client's turn.
        hang_seconds: Seconds without an answer after which the model's process is replaced.
    """

    documents: int = 10_000
    batch_seconds: float = 0.1
    hang_seconds: float = 300.0


@dataclass(eq=False, slots=True)
class QueueRequest:
    """What one caller waits for; ``missing`` is the number of documents without an outcome."""

    client: "QueueClient"
    done: asyncio.Future[Any]
    missing: int


@dataclass(eq=False, slots=True)
class QueueDocument:
    """A document with the outcomes of its parts; ``uncut`` estimates the tokens not cut yet."""

    request: QueueRequest
    pair: Pair
    arrived: float
    uncut: int
    segment: Segment | None = None
    spans: list[Span] = field(default_factory=list)
    outcomes: list[Outcome | None] = field(default_factory=list)
    missing: int = 0
    failure: Outcome | None = None
    deaths: int = 0

    def outcome(self) -> Outcome:
        """The outcome of the document from those of its parts."""
        if self.failure is not None:
            return self.failure
        outcomes = [part for part in self.outcomes if part is not None]
        if self.pair.reading == WHOLE:
            return outcomes[0]
        parts = [Scored(one.score or 0.0, one.truncated, one.tokens) for one in outcomes]
        whole = combined(self.pair, self.spans, parts)
        return Outcome(
            whole.score,
            whole.truncated,
            whole.tokens,
            window=whole.window,
            sentences=whole.sentences,
        )


@dataclass(eq=False, slots=True)
class QueueItem:
    """One part of a document to score (``run``), or a score to take apart (``explain``)."""

    method: Literal["run", "explain"]
    document: QueueDocument
    place: int
    pair: Pair
    cost: int
    deaths: int = 0

    @property
    def is_alone(self) -> bool:
        """Whether the item is a batch by itself."""
        return self.method == "explain" or self.deaths > 0


@dataclass(eq=False, slots=True)
class QueueClient:
    """A client's work, first come, first served.

    ``served`` is the tokens that the client has had, on a clock that all clients share.
    """

    served: float
    documents: int = 0
    uncut: deque[QueueDocument] = field(default_factory=deque)
    items: deque[QueueItem] = field(default_factory=deque)

    def remove(self, is_unwanted: Callable[[QueueDocument], bool]) -> None:
        """Take documents and their items out of the queue."""
        self.items = deque(item for item in self.items if not is_unwanted(item.document))
        self.uncut = deque(document for document in self.uncut if not is_unwanted(document))

    @property
    def cost(self) -> int:
        """Tokens of all that waits."""
        return self.ready + sum(document.uncut for document in self.uncut)

    @property
    def ready(self) -> int:
        """Tokens of the items that wait."""
        return sum(item.cost for item in self.items)


class FairQueue:
    """The clients with work, and the clock that they share.

    Attributes:
        clients: By name.
        clock: Tokens that the client of the last item had had when the item was taken.
    """

    def __init__(self) -> None:
        self.clients: dict[str, QueueClient] = {}
        self.clock = 0.0

    @property
    def open_clients(self) -> dict[str, QueueClient]:
        """Clients with requests that have no answer yet."""
        return {name: client for name, client in self.clients.items() if client.documents}

    @property
    def documents(self) -> int:
        """Documents of requests that have no answer yet."""
        return sum(client.documents for client in self.clients.values())

    def documents_of(self, client: str) -> int:
        """Documents of a client's requests that have no answer yet."""
        return self.clients[client].documents if client in self.clients else 0

    def has_work(self) -> bool:
        """Whether anything waits to be cut or to be run."""
        return any(client.uncut or client.items for client in self.clients.values())

    def join(self, name: str, credit: float) -> QueueClient:
        """The client of a new request, at most so many tokens ahead of the shared clock."""
        newest = self.clock - credit
        client = self.clients.setdefault(name, QueueClient(newest))
        client.served = max(client.served, newest)
        return client

    def forget_clients(self, credit: float) -> None:
        """Forget clients without requests, unless they have had more than a new client has."""
        newest = self.clock - credit if self.documents else math.inf
        self.clients = {
            name: client
            for name, client in self.clients.items()
            if client.documents or client.served > newest
        }

    def documents_to_cut(self, tokens: int) -> list[QueueDocument]:
        """Of each client as many documents as may be in the next batch.

        A document on which the process died before is cut alone.
        """
        documents: list[QueueDocument] = []
        for client in self.clients.values():
            ready = client.ready
            while client.uncut and ready < tokens:
                if client.uncut[0].deaths:
                    return documents or [client.uncut.popleft()]
                ready += client.uncut[0].uncut
                documents.append(client.uncut.popleft())
        return documents

    def next_batch(self, tokens: int) -> list[QueueItem]:
        """Items of whichever client has had the least, up to so many tokens."""
        batch: list[QueueItem] = []
        ready = [client for client in self.clients.values() if client.items]
        while ready:
            client = min(ready, key=lambda one: one.served)
            item = client.items[0]
            if batch and (item.cost > tokens or item.is_alone or batch[0].is_alone):
                break
            batch.append(client.items.popleft())
            tokens -= item.cost
            self.clock = max(self.clock, client.served)
            client.served += item.cost
            if not client.items:
                ready.remove(client)
        return batch

    def take_all(self) -> list[QueueDocument]:
        """Empty the queue; the documents that waited, a document once for each of its items."""
        documents: list[QueueDocument] = []
        for client in self.clients.values():
            documents += [*client.uncut, *(item.document for item in client.items)]
            client.uncut.clear()
            client.items.clear()
        return documents


def outcomes_of(documents: list[QueueDocument]) -> list[Outcome]:
    """The outcome of each document, from those of its parts."""
    return [document.outcome() for document in documents]
