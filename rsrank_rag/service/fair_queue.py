"""What waits before the model: clients, their documents, and items that the model cuts or runs.

Clients share the model's time by fair queueing. Each client has a clock of the tokens that it has
had, and the client whose clock is furthest behind is next. A client that comes anew starts with a
small credit.
"""

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..passages.pairs import Segment, combined
from ..passages.parts import SEGMENT, WHOLE, Span
from ..reranker import MOST_TOKENS, Pair, Scored
from .backend import Outcome
from .engine import parts_of

# Characters that are cut in the time in which one token is run, about: `mini` on two cores.
CHARACTERS_CUT_PER_TOKEN = 100


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
class QueueDocument:
    """A document with the outcomes of its parts.

    Attributes:
        client: Who waits for it.
        pair: The document and its query.
        explain: Whether its score is to be taken apart.
        arrived: On the event loop's clock.
        cost: Tokens, by estimate.
        answer: Done when all parts have a score (None) or one has none (its outcome).
        segment: The last one that was cut.
        spans: Of all parts that are known.
        scored: Outcomes of parts, by place.
    """

    client: "QueueClient"
    pair: Pair
    explain: bool
    arrived: float
    cost: int
    answer: "asyncio.Future[Outcome | None]"
    segment: Segment | None = None
    spans: list[Span] = field(default_factory=list)
    scored: dict[int, Outcome] = field(default_factory=dict)

    def uncut(self) -> "QueueItem":
        """An item that stands for what is not cut yet, with the cost of about one part."""
        return QueueItem(self, None, min(self.cost, MOST_TOKENS))

    def add(self, segment: Segment, costs: Sequence[int | Outcome]) -> None:
        """Queue the parts of the next segment, and what is behind them."""
        items: list[QueueItem] = []
        for part, cost in zip(parts_of(self.pair, segment), costs, strict=True):
            if isinstance(cost, Outcome):
                self.finish(cost)
                return
            items.append(QueueItem(self, part, cost, len(self.spans) + len(items)))
        self.segment = segment
        self.spans += segment.spans
        if not segment.is_last:
            items.append(self.uncut())
        self.client.items.extendleft(reversed(items))
        self.finish_if_complete()

    def finish(self, failure: Outcome | None = None) -> None:
        """Answer. Nothing more of the document is scored."""
        if not self.answer.done():
            self.answer.set_result(failure)

    def finish_if_complete(self) -> None:
        """Answer if all parts are known and have a score."""
        if self.segment and self.segment.is_last and len(self.scored) == len(self.spans):
            self.finish()

    def outcome(self) -> Outcome:
        """The outcome of the document from those of its parts."""
        outcomes = [self.scored[place] for place in range(len(self.spans))]
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
    """A part of a document to run, or the rest of a document to cut (``part`` is None).

    Attributes:
        document: The document.
        part: The part, as a pair that is read whole.
        cost: Tokens that the model runs; by estimate if the item is to be cut.
        place: Number of the part in the document.
        deaths: How often the model's process died on the item.
    """

    document: QueueDocument
    part: Pair | None
    cost: int
    place: int = 0
    deaths: int = 0

    @property
    def method(self) -> str:
        """The method of the `Engine` that is next."""
        if self.part is None:
            return "cut"
        return "explain" if self.document.explain else "run"

    @property
    def is_alone(self) -> bool:
        """Whether the item is a batch by itself."""
        return self.deaths > 0 or self.method == "explain"

    @property
    def charge(self) -> int:
        """Tokens that are run in the time that the model's process needs for the item."""
        if self.part is not None:
            return self.cost
        before = self.document.segment
        rest = len(self.document.pair.document) - (before.stop if before else 0)
        return 1 + min(rest, SEGMENT) // CHARACTERS_CUT_PER_TOKEN


@dataclass(eq=False, slots=True)
class QueueClient:
    """A client's work, first come, first served.

    Attributes:
        served: Tokens that the client has had, on a clock that all clients share.
        documents: Those of requests without an answer.
        items: What can be cut or run.
    """

    served: float
    documents: set[QueueDocument] = field(default_factory=set)
    items: deque[QueueItem] = field(default_factory=deque)

    def add(self, documents: Iterable[QueueDocument]) -> None:
        """Queue documents."""
        for document in documents:
            self.documents.add(document)
            self.items.append(document.uncut())

    def withdraw(self, documents: Iterable[QueueDocument]) -> int:
        """Take out the documents of a request; returns how many had no answer."""
        self.documents.difference_update(documents)
        unanswered = sum(document.answer.cancel() for document in documents)
        if unanswered:
            self.items = deque(item for item in self.items if not item.document.answer.done())
        return unanswered

    @property
    def cost(self) -> int:
        """Tokens of all documents, by estimate."""
        return sum(document.cost for document in self.documents)


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
    def waiting(self) -> dict[str, int]:
        """Documents of requests that have no answer yet, by client."""
        return {
            name: len(client.documents) for name, client in self.clients.items() if client.documents
        }

    def has_work(self) -> bool:
        """Whether anything waits to be cut or to be run."""
        return any(client.items for client in self.clients.values())

    def join(self, name: str, credit: float) -> QueueClient:
        """The client of a new request, at most so many tokens ahead of the shared clock."""
        newest = self.clock - credit
        client = self.clients.setdefault(name, QueueClient(newest))
        client.served = max(client.served, newest)
        return client

    def forget_clients(self, credit: float) -> None:
        """Forget clients without requests, unless they have had more than a new client has."""
        newest = self.clock - credit if self.waiting else math.inf
        self.clients = {
            name: client
            for name, client in self.clients.items()
            if client.documents or client.served > newest
        }

    def next_batch(self, tokens: int) -> list[QueueItem]:
        """Take items of whichever client has had the least, up to so many tokens."""
        batch: list[QueueItem] = []
        served = {client: client.served for client in self.clients.values()}
        while ready := [client for client in served if client.items]:
            client = min(ready, key=served.__getitem__)
            item = client.items[0]
            if item.document.answer.done():
                client.items.popleft()
                continue
            if batch and (item.cost > tokens or item.is_alone or batch[0].is_alone):
                break
            batch.append(client.items.popleft())
            tokens -= item.cost
            served[client] += item.cost
        return batch

    def charge(self, items: Iterable[QueueItem]) -> None:
        """Put on their clients' clocks what the model's process is going to do."""
        for item in items:
            client = item.document.client
            self.clock = max(self.clock, client.served)
            client.served += item.charge


def outcomes_of(documents: Sequence[QueueDocument]) -> list[Outcome]:
    """The outcome of each document: why it has no score, or that of its parts."""
    return [document.answer.result() or document.outcome() for document in documents]
