"""What waits for the model: clients, their documents, and items that the model cuts or runs.

Clients share the model's time by fair queueing. For each client, the queue counts the tokens that
the model has run for it. The client with the smallest count is next. A new client starts with the
count of the client that was served last, less a small credit.
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

# Characters that are cut in the time that one token takes: about that of `mini` on two cores.
CHARACTERS_CUT_PER_TOKEN = 100


@dataclass(frozen=True)
class QueueLimits:
    """How much may wait, and how long the model is held.

    Attributes:
        documents: Documents that may wait; `OverloadedError` answers a request beyond that.
        batch_seconds: Seconds that a batch should take. A new client waits about so long at most.
        hang_seconds: Seconds without an answer after which the model's process is replaced.
    """

    documents: int = 10_000
    batch_seconds: float = 0.05
    hang_seconds: float = 300.0


@dataclass(eq=False, slots=True)
class QueueDocument:
    """A document with its items, and the outcomes of its parts.

    Attributes:
        client: Who waits for it.
        pair: The document and its query.
        explain: Whether its score is to be taken apart.
        cost: An estimate of the document's tokens.
        answer: Done when every part has a score, or when a part has an error.
        segment: The last segment that was cut.
        spans: Where the parts that were cut begin and end.
        items: Parts without an outcome, in their order. If the document is not cut to its end, the
            last item is the rest of it.
        outcomes: The outcomes of the other parts, in their order.
    """

    client: "QueueClient"
    pair: Pair
    explain: bool
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
        """Replace the rest of the document by the parts of the next segment, and a new rest."""
        self.items.pop()
        self.segment, costed = parts
        self.spans += self.segment.spans
        self.items.extend(QueueItem(self, part, cost) for part, cost in costed)
        if not self.segment.is_last:
            self.add_rest()
        if not self.items and not self.answer.done():
            self.answer.set_result(None)

    def take_outcome(self, outcome: Outcome) -> None:
        """Replace the first item by its outcome. After an error, the document is answered."""
        if not self.answer.done():
            self.items.popleft()
            self.outcomes.append(outcome)
            if outcome.scored is None or not self.items:
                self.answer.set_result(None)

    def fail(self, error: str) -> None:
        """Answer with an error that is not the document's own."""
        self.take_outcome(Outcome(None, fault="internal", error=error))

    def outcome(self) -> Outcome:
        """The document's outcome: the error of a part, or what the parts' scores combine to."""
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
        cost: Tokens that the model runs for a part. For a rest, the tokens that the model would run
            in the time that the cutting takes.
        deaths: How often the model's process died on the item.
    """

    document: QueueDocument
    part: Pair | None
    cost: int
    deaths: int = 0

    @property
    def is_alone(self) -> bool:
        """Whether the item must be the only one of its batch."""
        return self.deaths > 0 or self.document.explain


@dataclass(eq=False, slots=True)
class QueueClient:
    """A client's work, first come, first served.

    Attributes:
        served: Tokens that the model has run for the client, plus the count with which the client
            started.
        documents: Documents of requests without an answer, in their order. The values are unused.
    """

    served: float
    documents: dict[QueueDocument, None] = field(default_factory=dict)

    @property
    def cost(self) -> int:
        """An estimate of the tokens of all documents."""
        return sum(document.cost for document in self.documents)

    def turns(self) -> Iterator[tuple[float, QueueItem]]:
        """The client's items in their order, each with what ``served`` is before the item."""
        served = self.served
        for document in self.documents:
            if not document.answer.done():
                for item in document.items:
                    yield served, item
                    served += item.cost


@dataclass
class FairQueue:
    """The clients with work.

    Attributes:
        clients: The clients by name.
        clock: The largest count of tokens that a client had when an item of it was taken.
        credit: Tokens below ``clock`` at which a new client starts.
    """

    clients: dict[str, QueueClient] = field(default_factory=dict)
    clock: float = 0.0
    credit: float = 0.0

    @property
    def waiting(self) -> dict[str, int]:
        """Documents of requests that have no answer yet, by client."""
        return {
            name: len(client.documents) for name, client in self.clients.items() if client.documents
        }

    def add(
        self, name: str, pairs: Iterable[Pair], costs: Iterable[int], explain: bool
    ) -> list[QueueDocument]:
        """Queue the documents of a client's request. An event loop must run.

        Args:
            name: The client's name.
            pairs: The query with each document.
            costs: An estimate of the tokens of each pair.
            explain: Whether to take the scores apart.

        Returns:
            One document for each pair. Its ``answer`` is done when the document has an outcome.
        """
        loop = asyncio.get_running_loop()
        newest = self.clock - self.credit
        client = self.clients.setdefault(name, QueueClient(newest))
        client.served = max(client.served, newest)
        documents = []
        for pair, cost in zip(pairs, costs, strict=True):
            answer = loop.create_future()
            document = QueueDocument(client, pair, explain, cost, answer)
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
        """Items of the clients with the smallest counts, of at most ``tokens`` tokens together.

        The first item is taken even if the item alone costs more. The items of a batch are either
        all to be cut or all to be run. The items stay in the queue until their documents have the
        results. This method adds the items' costs to their clients' counts.
        """
        batch: list[QueueItem] = []
        turns = [client.turns() for client in self.clients.values()]
        for _, item in heapq.merge(*turns, key=itemgetter(0)):
            if batch:
                is_full = item.cost > tokens or item.is_alone or batch[0].is_alone
                # The requests of a light client do not wait for items of a heavy client.
                lead = item.document.client.served - batch[0].document.client.served
                if is_full or lead > self.credit / 2:
                    break
            batch.append(item)
            tokens -= item.cost
        # If the batch has items to cut, only these are taken.
        batch = [item for item in batch if item.part is None] or batch
        for item in batch:
            client = item.document.client
            self.clock = max(self.clock, client.served)
            client.served += item.cost
        return batch

    def give_up(self) -> None:
        """Cancel the answers of all documents, because there will be no model."""
        for client in self.clients.values():
            for document in client.documents:
                document.answer.cancel()
        self.clients.clear()
