"""What waits for the model: requests of clients, as items of a known cost.

An item is a section of a document to be cut, or a part of a document to be scored. Its cost is
counted in tokens. A client may have half of the tokens that may wait. Clients take turns: a batch
holds at most `QueueLimits.batch_tokens`, and each client that waits gets an equal share of them.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..ranking.pairs import combined, parts_of, sections_of
from ..reading.parts import Span
from ..reranker import Pair
from ..texts import CHARACTERS_PER_TOKEN
from .messages import Budget, Outcome, Parts, ServiceError, Task

# Characters that are cut in the time in which the model runs one token: about those of `mini` on
# one core.
CUT_PER_TOKEN = 50

# An item on which the model's process has died so often is answered with an error.
MOST_DEATHS = 2


@dataclass(frozen=True)
class QueueLimits:
    """How much may wait, and how much the model does at a time.

    Attributes:
        tokens: Tokens of all requests without an answer. One client may have half of them.
        batch_tokens: Tokens of a batch. An item of more tokens runs alone.
    """

    tokens: int = 800_000
    batch_tokens: int = 1_024


@dataclass(eq=False)
class QueuedRequest:
    """A client's request.

    Attributes:
        client: Who waits for it.
        answer: Done when each pair has an outcome.
        outcomes: For each distinct pair, the outcomes of its parts by their spans.
        cost: Tokens of all items, also of those that are done. Before a document is cut, its
            tokens are estimated from its characters.
        pending: Number of items that are not done.
        query_truncated: Whether only the first and the last part of the query are read.
    """

    client: str
    answer: "asyncio.Future[None]"
    outcomes: dict[Pair, dict[Span, Outcome]] = field(default_factory=dict)
    cost: int = 0
    pending: int = 0
    query_truncated: bool = False

    def outcome(self, pair: Pair) -> Outcome:
        """A pair's outcome: the error of a part, or what the scores of its parts combine to."""
        outcomes = self.outcomes[pair]
        spans = sorted(outcomes)
        scored = []
        for span in spans:
            outcome = outcomes[span]
            if outcome.scored is None or outcome.explanation:
                return outcome
            scored.append(outcome.scored)
        return Outcome(combined(pair, spans, scored), self.query_truncated)


@dataclass(eq=False, slots=True)
class QueueItem:
    """A task of a request.

    Attributes:
        request: The request.
        pair: The query and the whole document.
        task: What the model's process does.
        cost: The tokens that the model runs in the time of the task.
        estimate: For a section that is not cut yet, the tokens of its document's parts.
        deaths: How often the model's process died on the task.
    """

    request: QueuedRequest
    pair: Pair
    task: Task
    cost: int
    estimate: int = 0
    deaths: int = 0


@dataclass
class WorkQueue:
    """The requests without an answer, and the items that are not running.

    Attributes:
        limits: How much may wait.
        requests: All requests.
        items: The items of each client, in their order. A batch begins with the first client.
    """

    limits: QueueLimits
    requests: list[QueuedRequest] = field(default_factory=list)
    items: dict[str, deque[QueueItem]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.budget = Budget(self.limits.tokens, "tokens")

    def add(
        self, client: str, pairs: Iterable[Pair], max_tokens: int | None, explain: bool = False
    ) -> QueuedRequest:
        """Queue a client's request. An event loop must run. Equal pairs are one document.

        Args:
            client: The client.
            pairs: The query with each document.
            max_tokens: The most tokens of a document that the model reads; None if unknown.
            explain: Whether to take the scores apart. Documents are then read whole.

        Raises:
            ServiceError: Status 413 if the request has more tokens than one client may have, 429
                if it has more than the client, or all clients, may have now.
        """
        request = QueuedRequest(client, asyncio.get_running_loop().create_future())
        items: list[QueueItem] = []
        for pair in dict.fromkeys(pairs):
            request.outcomes[pair] = {}
            tokens = len(pair.document) // CHARACTERS_PER_TOKEN
            if pair.reading.is_whole:
                tokens = min(tokens, max_tokens or tokens)
            tokens += len(pair.query) // CHARACTERS_PER_TOKEN + 1
            if explain:
                items.append(QueueItem(request, pair, Task(pair, "explain"), tokens))
                continue
            for section in sections_of(pair, max_tokens):
                cost = 1 + (section[1] - section[0]) // CUT_PER_TOKEN
                items.append(QueueItem(request, pair, Task(pair, "cut", section), cost, tokens))
                tokens = 0
        request.pending = len(items)
        request.cost = sum(item.cost + item.estimate for item in items)
        self.budget.take(client, request.cost)
        self.requests.append(request)
        self.items.setdefault(client, deque()).extend(items)
        return request

    def remove(self, request: QueuedRequest) -> None:
        """Forget a request with its items, answered or not."""
        self.requests.remove(request)
        self.budget.give_back(request.client, request.cost)
        left = deque(item for item in self.items[request.client] if item.request is not request)
        self.items[request.client] = left
        if all(other.client != request.client for other in self.requests):
            del self.items[request.client]
        request.answer.cancel()

    def next_batch(self) -> list[QueueItem]:
        """Take the items of a batch out of the queue. They are equal shares of all clients."""
        clients = [client for client, items in self.items.items() if items]
        batch: list[QueueItem] = []
        left = self.limits.batch_tokens
        share = left // max(1, len(clients))
        size = -1
        # What clients with few items leave of their shares, the others get in more rounds.
        while len(batch) > size:
            size = len(batch)
            for client in clients:
                taken = 0
                items = self.items[client]
                while items and taken < share:
                    item = items[0]
                    if batch and (item.cost > left or item.deaths or batch[0].deaths):
                        break
                    batch.append(items.popleft())
                    taken += item.cost
                    left -= item.cost
        if clients:
            # The next batch begins with the next client.
            self.items[clients[0]] = self.items.pop(clients[0])
        return batch

    def put_back(self, batch: Sequence[QueueItem]) -> None:
        """Put the items of a batch on which the model's process died before the others."""
        error = Outcome(None, fault="internal", error="ended the model's process, twice.")
        for item in reversed(batch):
            item.deaths += 1
            if item.deaths >= MOST_DEATHS:
                self.finish([item], [error])
            elif item.request in self.requests:
                self.items[item.request.client].appendleft(item)

    def finish(self, batch: Sequence[QueueItem], results: Sequence[Parts | Outcome]) -> None:
        """Take the results of a batch. `Parts` become items, before the others of their client."""
        for item, result in zip(reversed(batch), reversed(results), strict=True):
            request, pair = item.request, item.pair
            if request.answer.done():
                continue
            request.pending -= 1
            if isinstance(result, Outcome):
                request.outcomes[pair][item.task.section] = result
            else:
                self._add_parts(item, result)
            if not request.pending and not request.answer.done():
                request.answer.set_result(None)

    def _add_parts(self, item: QueueItem, parts: Parts) -> None:
        request, pair = item.request, item.pair
        request.query_truncated |= parts.query != pair.query
        fitting = replace(pair, query=parts.query)
        items = []
        for part, span, cost in zip(
            parts_of(fitting, parts.spans), parts.spans, parts.costs, strict=True
        ):
            items.append(QueueItem(request, pair, Task(part, "score", span), cost))
        self.items[request.client].extendleft(reversed(items))
        request.pending += len(items)
        more = sum(parts.costs) - item.estimate
        try:
            self.budget.take(request.client, more, request.cost)
            request.cost += more
        except ServiceError as error:
            request.answer.set_exception(error)

    def give_up(self, error: ServiceError) -> None:
        """Answer all requests with an error."""
        for request in self.requests:
            if not request.answer.done():
                request.answer.set_exception(error)
