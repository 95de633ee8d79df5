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
from ..reranker import Pair
from .backend import Outcome
from .engine import Parts

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
        outcomes: Of the first parts. The parts of a document are run in their order.
    """

    client: "QueueClient"
    pair: Pair
    explain: bool
    arrived: float
    cost: int
    answer: "asyncio.Future[Outcome | None]"
    segment: Segment | None = None
    spans: list[Span] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def uncut(self) -> "QueueItem":
        """An item for what is not cut yet; its cost is that of cutting the next segment."""
        start = self.segment.stop if self.segment else 0
        rest = len(self.pair.document) - start
        return QueueItem(self, None, 1 + min(rest, SEGMENT) // CHARACTERS_CUT_PER_TOKEN)

    def take_parts(self, parts: Parts) -> None:
        """Queue the parts of the next segment, and what is behind them."""
        self.segment, costed = parts
        self.spans += self.segment.spans
        items = [QueueItem(self, part, cost) for part, cost in costed]
        if not self.segment.is_last:
            items.append(self.uncut())
        self.client.items.extendleft(reversed(items))
        self._finish_if_complete()

    def take_outcome(self, outcome: Outcome) -> None:
        """Take in the outcome of the next part. If it has no score, the document has none."""
        if outcome.scored is None:
            self.finish(outcome)
        self.outcomes.append(outcome)
        self._finish_if_complete()

    def finish(self, failure: Outcome | None = None) -> None:
        """Answer. Nothing more of the document is scored."""
        if not self.answer.done():
            self.answer.set_result(failure)

    def _finish_if_complete(self) -> None:
        if self.segment and self.segment.is_last and len(self.outcomes) == len(self.spans):
            self.finish()

    def outcome(self) -> Outcome:
        """Why the document has no score, or its outcome from those of its parts."""
        failure = self.answer.result()
        if failure is not None or self.pair.reading == WHOLE:
            return failure or self.outcomes[0]
        parts = [one.scored for one in self.outcomes if one.scored is not None]
        return Outcome(
            combined(self.pair, self.spans, parts),
            any(one.query_truncated for one in self.outcomes),
        )


@dataclass(eq=False, slots=True)
class QueueItem:
    """A part of a document to run, or the rest of a document to cut (``part`` is None).

    Attributes:
        document: The document.
        part: The part, as a pair that is read whole.
        cost: Tokens that the model runs, or would run in the time in which the item is cut.
        deaths: How often the model's process died on the item.
    """

    document: QueueDocument
    part: Pair | None
    cost: int
    deaths: int = 0

    @property
    def is_alone(self) -> bool:
        """Whether the item is a batch by itself."""
        return self.deaths > 0 or self.document.explain

    def fail(self, error: str) -> None:
        """Answer with an error that is not the document's own."""
        self.document.finish(Outcome(None, fault="internal", error=error))


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

    @property
    def cost(self) -> int:
        """Tokens of all documents, by estimate."""
        return sum(document.cost for document in self.documents)


class FairQueue:
    """The clients with work, and the clock that they share.

    Attributes:
        clients: By name.
        clock: Tokens that the client of the last item had had when the item was taken.
        credit: Tokens by which a client that has asked for little is ahead of others.
    """

    def __init__(self) -> None:
        self.clients: dict[str, QueueClient] = {}
        self.clock = 0.0
        self.credit = 0.0

    @property
    def waiting(self) -> dict[str, int]:
        """Documents of requests that have no answer yet, by client."""
        return {
            name: len(client.documents) for name, client in self.clients.items() if client.documents
        }

    def add(
        self, name: str, pairs: Iterable[Pair], costs: Iterable[int], explain: bool
    ) -> list[QueueDocument]:
        """Queue the documents of a client's request."""
        loop = asyncio.get_running_loop()
        newest = self.clock - self.credit
        client = self.clients.setdefault(name, QueueClient(newest))
        client.served = max(client.served, newest)
        documents = [
            QueueDocument(client, pair, explain, loop.time(), cost, loop.create_future())
            for pair, cost in zip(pairs, costs, strict=True)
        ]
        client.documents.update(documents)
        client.items.extend(document.uncut() for document in documents)
        return documents

    def withdraw(self, documents: Sequence[QueueDocument]) -> int:
        """Take out the documents of a request; returns how many had no answer.

        Clients without requests are forgotten, unless they have had more than a new client has.
        """
        client = documents[0].client
        client.documents.difference_update(documents)
        unanswered = sum(document.answer.cancel() for document in documents)
        if unanswered:
            client.items = deque(item for item in client.items if not item.document.answer.done())
        newest = self.clock - self.credit if self.waiting else math.inf
        self.clients = {
            name: client
            for name, client in self.clients.items()
            if client.documents or client.served > newest
        }
        return unanswered

    def next_batch(self, tokens: int) -> list[QueueItem]:
        """Take items of whichever client has had the least, up to so many tokens."""
        batch: list[QueueItem] = []
        served = {client: client.served for client in self.clients.values()}
        while ready := [client for client in served if client.items]:
            client = min(ready, key=served.__getitem__)
            item = client.items[0]
            if not item.document.answer.done():
                if batch and (item.cost > tokens or item.is_alone or batch[0].is_alone):
                    break
                # Whoever asks for little need not wait for the items of whoever asks for much.
                if batch and client.served - batch[0].document.client.served > self.credit / 2:
                    break
                batch.append(item)
                tokens -= item.cost
                served[client] += item.cost
            client.items.popleft()
        return batch

    def charge(self, items: Iterable[QueueItem]) -> None:
        """Put on their clients' clocks what the model's process is going to do."""
        for item in items:
            client = item.document.client
            self.clock = max(self.clock, client.served)
            client.served += item.cost

    def give_up(self) -> None:
        """Answer all that waits: there is no model and will be none."""
        for client in self.clients.values():
            client.items.clear()
            for document in client.documents:
                document.answer.cancel()
        self.clients.clear()
