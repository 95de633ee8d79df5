"""What waits before the model: clients, their documents, and items that the model cuts or runs.

Clients share the model's time by fair queueing. Each client has a clock of the tokens that it has
had, and the client whose clock is furthest behind is next. A client that comes anew starts with a
small credit.
"""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from ..passages.pairs import Segment, combined
from ..passages.parts import SEGMENT, Span
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
    """A document with its items, and the outcomes of its parts.

    Attributes:
        client: Who waits for it.
        pair: The document and its query.
        explain: Whether its score is to be taken apart.
        arrived: On the event loop's clock.
        cost: Tokens, by estimate.
        answer: Done when all parts have a score, or one has none.
        segment: The last one that was cut.
        spans: Of all parts that are known.
        items: Parts that have no outcome yet, in their order; last the rest, if any, to be cut.
        outcomes: Of the first parts.
    """

    client: "QueueClient"
    pair: Pair
    explain: bool
    arrived: float
    cost: int
    answer: "asyncio.Future[None]"
    segment: Segment | None = None
    spans: list[Span] = field(default_factory=list)
    items: "deque[QueueItem]" = field(default_factory=deque)
    outcomes: list[Outcome] = field(default_factory=list)

    def add_rest(self) -> None:
        """Add an item for what is not cut yet; its cost is that of cutting the next segment."""
        start = self.segment.stop if self.segment else 0
        rest = len(self.pair.document) - start
        cost = 1 + min(rest, SEGMENT) // CHARACTERS_CUT_PER_TOKEN
        self.items.append(QueueItem(self, None, cost))

    def take_parts(self, parts: Parts) -> None:
        """Replace the rest by the parts of the next segment, and what is behind them."""
        self.items.pop()
        self.segment, costed = parts
        self.spans += self.segment.spans
        self.items.extend(QueueItem(self, part, cost) for part, cost in costed)
        if not self.segment.is_last:
            self.add_rest()
        if not self.items and not self.answer.done():
            self.answer.set_result(None)

    def take_outcome(self, outcome: Outcome) -> None:
        """Replace the first item by its outcome. If it has no score, the document has none."""
        if not self.answer.done():
            self.items.popleft()
            self.outcomes.append(outcome)
            if outcome.scored is None or not self.items:
                self.answer.set_result(None)

    def fail(self, error: str) -> None:
        """Answer with an error that is not the document's own."""
        self.take_outcome(Outcome(None, fault="internal", error=error))

    def outcome(self) -> Outcome:
        """Why the document has no score, or its outcome from those of its parts."""
        parts = [one.scored for one in self.outcomes if one.scored is not None]
        if len(parts) < len(self.outcomes):
            return self.outcomes[-1]
        first = self.outcomes[0] if parts else Outcome(None)
        return replace(first, scored=combined(self.pair, self.spans, parts))


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


@dataclass(eq=False, slots=True)
class QueueClient:
    """A client's work, first come, first served.

    Attributes:
        served: Tokens that the client has had, on a clock that all clients share.
        documents: Those of requests without an answer, in their order; the values mean nothing.
    """

    served: float
    documents: dict[QueueDocument, None] = field(default_factory=dict)

    @property
    def cost(self) -> int:
        """Tokens of all documents, by estimate."""
        return sum(document.cost for document in self.documents)

    def turns(self) -> Iterator[tuple[float, QueueItem]]:
        """Items in their order, each after the tokens that the client has had before it."""
        served = self.served
        for document in self.documents:
            if not document.answer.done():
                for item in document.items:
                    yield served, item
                    served += item.cost


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
        documents = []
        for pair, cost in zip(pairs, costs, strict=True):
            answer = loop.create_future()
            document = QueueDocument(client, pair, explain, loop.time(), cost, answer)
            document.add_rest()
            documents.append(document)
        client.documents.update(dict.fromkeys(documents))
        return documents

    def withdraw(self, documents: Sequence[QueueDocument]) -> int:
        """Take out the documents of a request; returns how many had no answer.

        Clients without requests are forgotten, unless they have had more than a new client has.
        """
        for document in documents:
            document.client.documents.pop(document, None)
        newest = self.clock - self.credit if self.waiting else math.inf
        self.clients = {
            name: client
            for name, client in self.clients.items()
            if client.documents or client.served > newest
        }
        return sum(document.answer.cancel() for document in documents)

    def next_batch(self, tokens: int) -> list[QueueItem]:
        """Items of whichever client has had the least, up to so many tokens.

        The items of a batch are either all to be cut or all to be run. They stay in the queue until
        their documents take in the results, and their clients pay for them now.
        """
        batch: list[QueueItem] = []
        turns = [client.turns() for client in self.clients.values()]
        for _, item in heapq.merge(*turns, key=itemgetter(0)):
            if batch:
                is_full = item.cost > tokens or item.is_alone or batch[0].is_alone
                # Whoever asks for little need not wait for the items of whoever asks for much.
                lead = item.document.client.served - batch[0].document.client.served
                if is_full or lead > self.credit / 2:
                    break
            batch.append(item)
            tokens -= item.cost
        # What is not cut yet is cut before anything of the batch is run.
        batch = [item for item in batch if item.part is None] or batch
        for item in batch:
            client = item.document.client
            self.clock = max(self.clock, client.served)
            client.served += item.cost
        return batch

    def give_up(self) -> None:
        """Answer all that waits: there is no model and will be none."""
        for client in self.clients.values():
            for document in client.documents:
                document.answer.cancel()
        self.clients.clear()
