"""What waits before the model: clients, their requests' documents, and parts of documents.

Clients share the model's time by fair queueing. Each client has a clock of the tokens that it has
had, and the client whose clock is furthest behind is next. A client that comes anew starts with a
small credit.
"""

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..passages.pairs import Segment, combined
from ..passages.parts import WHOLE, Span
from ..reranker import Pair, Scored
from .backend import Outcome
from .engine import parts_of


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
    done: asyncio.Future[None]
    count: int
    missing: int


@dataclass(eq=False, slots=True)
class QueueDocument:
    """A document with the outcomes of its parts.

    Attributes:
        request: What it is a part of.
        pair: The document and its query.
        explain: Whether its score is to be taken apart.
        arrived: On the event loop's clock.
        uncut: Tokens that are not cut yet, by estimate.
        segment: The last one that was cut.
        parts: One for each part; None until it has been run.
        missing: Parts that have no outcome.
        failure: Why the document has no score.
        deaths: How often the model's process died while it cut the document.
    """

    request: QueueRequest
    pair: Pair
    explain: bool
    arrived: float
    uncut: int
    segment: Segment | None = None
    spans: list[Span] = field(default_factory=list)
    parts: list[Outcome | None] = field(default_factory=list)
    missing: int = 0
    failure: Outcome | None = None
    deaths: int = 0

    @property
    def document(self) -> "QueueDocument":
        """As of a `QueueItem`."""
        return self

    @property
    def method(self) -> str:
        """The method of the `Engine` that is next."""
        return "cut"

    @property
    def argument(self) -> tuple[Pair, Segment | None]:
        """What that method needs."""
        return self.pair, self.segment

    @property
    def is_wanted(self) -> bool:
        """Whether its score is still waited for: it has not failed, and its request goes on."""
        return self.failure is None and not self.request.done.done()

    @property
    def is_cut(self) -> bool:
        """Whether all parts are known."""
        return self.segment is not None and self.segment.is_last

    @property
    def is_complete(self) -> bool:
        """Whether all parts have an outcome."""
        return self.is_cut and not self.missing

    def add(self, segment: Segment, costs: Sequence[int]) -> None:
        """Queue the parts of the next segment."""
        for part, cost in zip(parts_of(self.pair, segment), costs, strict=True):
            self.request.client.items.append(QueueItem(self, len(self.parts), part, cost))
            self.parts.append(None)
        self.segment = segment
        self.spans += segment.spans
        self.missing += len(costs)

    def outcome(self) -> Outcome:
        """The outcome of the document from those of its parts."""
        if self.failure is not None:
            return self.failure
        outcomes = [part for part in self.parts if part is not None]
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
            query_truncated=any(one.query_truncated for one in outcomes),
        )


@dataclass(eq=False, slots=True)
class QueueItem:
    """One part of a document, and what it costs in tokens."""

    document: QueueDocument
    place: int
    argument: Pair
    cost: int
    deaths: int = 0

    @property
    def method(self) -> str:
        """The method of the `Engine` that runs the item."""
        return "explain" if self.document.explain else "run"

    @property
    def is_alone(self) -> bool:
        """Whether the item is a batch by itself."""
        return self.document.explain or self.deaths > 0


@dataclass(eq=False, slots=True)
class QueueClient:
    """A client's work, first come, first served.

    Attributes:
        served: Tokens that the client has had, on a clock that all clients share.
        requests: Those without an answer.
        uncut: Documents of which a part is not cut yet.
        items: Parts that can run.
    """

    served: float
    requests: set[QueueRequest] = field(default_factory=set)
    uncut: deque[QueueDocument] = field(default_factory=deque)
    items: deque[QueueItem] = field(default_factory=deque)

    def tidy(self) -> None:
        """Take out what is cut, and what nobody waits for."""
        self.items = deque(item for item in self.items if item.document.is_wanted)
        self.uncut = deque(one for one in self.uncut if one.is_wanted and not one.is_cut)

    @property
    def documents(self) -> int:
        """Documents of requests that have no answer yet."""
        return sum(request.count for request in self.requests)

    @property
    def ready(self) -> int:
        """Tokens of the items that wait."""
        return sum(item.cost for item in self.items)

    @property
    def cost(self) -> int:
        """Tokens of all that waits."""
        return self.ready + sum(document.uncut for document in self.uncut)


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
        return {name: client for name, client in self.clients.items() if client.requests}

    @property
    def documents(self) -> int:
        """Documents of requests that have no answer yet."""
        return sum(client.documents for client in self.clients.values())

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
        newest = self.clock - credit if self.open_clients else math.inf
        self.clients = {
            name: client
            for name, client in self.clients.items()
            if client.requests or client.served > newest
        }

    def documents_to_cut(self, tokens: int) -> list[QueueDocument]:
        """Of each client as many documents as may be in the next batch. They stay in the queue.

        A document on which the process died before is cut alone.
        """
        documents: list[QueueDocument] = []
        for client in self.clients.values():
            ready = client.ready
            for document in client.uncut:
                if ready >= tokens:
                    break
                if document.deaths:
                    return documents or [document]
                ready += document.uncut
                documents.append(document)
        return documents

    def next_batch(self, tokens: int) -> list[QueueItem]:
        """Take items of whichever client has had the least, up to so many tokens."""
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


def outcomes_of(documents: list[QueueDocument]) -> list[Outcome]:
    """The outcome of each document, from those of its parts."""
    return [document.outcome() for document in documents]
