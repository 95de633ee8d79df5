"""What waits for the model: requests of clients, as items of a known cost.

An item is a section of a document to be cut, or a part of a document to be scored. Its cost is
counted in tokens. A client may have half of the tokens that may wait. The next item is always one
of the client that had the fewest tokens of the last hundred batches. A client that had more than
half of them gets nothing of a batch that begins with another client's item. So a client that sends
much delays others by one batch.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..ranking.pairs import combined, parts_of, sections_of
from ..reading.parts import Span
from ..reranker import Pair
from ..texts import CHARACTERS_PER_TOKEN
from .messages import Budget, Outcome, Parts, Task, Work

# Characters of a document and its query that are cut in the time in which the model runs one token:
# with `mini` on one core, about so many of a text of quotes, and 1,000 of English.
CUT_PER_TOKEN = 50


@dataclass(eq=False)
class QueuedRequest:
    """A client's request.

    Attributes:
        client: Who waits for it.
        work: What is done with each part.
        answer: Done when each pair has an outcome.
        items: What is neither running nor done.
        outcomes: For each distinct pair, the outcomes of its parts by their spans.
        tokens: Tokens of the queries and documents, estimated from their characters.
        pending: Number of items that are not done.
    """

    client: str
    work: Work
    answer: "asyncio.Future[None]"
    items: "deque[QueueItem]" = field(default_factory=deque)
    outcomes: dict[Pair, dict[Span, Outcome]] = field(default_factory=dict)
    tokens: int = 0
    pending: int = 0

    def outcome(self, pair: Pair) -> Outcome:
        """A pair's outcome: the error of a part, or what the scores of its parts combine to."""
        outcomes = self.outcomes[pair]
        spans = sorted(outcomes)
        scored = []
        outcome = Outcome()
        for span in spans:
            outcome = outcomes[span]
            if outcome.scored is None:
                return outcome
            scored.append(outcome.scored)
        return replace(outcome, scored=combined(pair, spans, scored))


@dataclass(eq=False)
class QueueItem:
    """A task of a request.

    Attributes:
        request: The request.
        pair: The query and the whole document.
        task: What the model's process does.
        cost: The tokens that the model runs in the time of the task.
        has_died: Whether the model's process has died on the task.
    """

    request: QueuedRequest
    pair: Pair
    task: Task
    cost: int
    has_died: bool = False


class WorkQueue:
    """The requests without an answer.

    Args:
        tokens: Tokens of all requests. One client may have half of them.
        batch_tokens: Tokens of a batch. An item of more tokens runs alone.
    """

    def __init__(self, tokens: int, batch_tokens: int) -> None:
        self.budget = Budget(tokens, "tokens")
        self.batch_tokens = batch_tokens
        self.requests: list[QueuedRequest] = []
        # Tokens that each client had lately. After each batch, they count a hundredth less.
        self._had = Counter[str]()

    def add(
        self, client: str, pairs: Iterable[Pair], max_tokens: int | None, work: Work = "score"
    ) -> QueuedRequest:
        """Queue a client's request. An event loop must run. Equal pairs are one document.

        Args:
            client: The client.
            pairs: The query with each document.
            max_tokens: The most tokens of a document that the model reads; None if unknown.
            work: What is done with each part of a document.

        Raises:
            ServiceError: Status 413 if the request has more tokens than one client may have, 429
                if it has more than the client, or all clients, may have now.
        """
        request = QueuedRequest(client, work, asyncio.get_running_loop().create_future())
        for pair in dict.fromkeys(pairs):
            request.outcomes[pair] = {}
            sections = sections_of(pair, max_tokens)
            # What is read of the document, and one character, which shows whether there is more.
            read = replace(pair, document=pair.document[: sections[-1][1] + 1])
            for section in sections:
                size = section[1] - section[0]
                cost = 1 + (size + len(pair.query)) // CUT_PER_TOKEN
                request.items.append(QueueItem(request, pair, Task(read, "cut", section), cost))
                if max_tokens and pair.reading.is_whole:
                    size = min(size, CHARACTERS_PER_TOKEN * max_tokens)
                request.tokens += (size + len(pair.query)) // CHARACTERS_PER_TOKEN + 1
        request.pending = len(request.items)
        self.budget.take(client, request.tokens)
        self.requests.append(request)
        return request

    def remove(self, request: QueuedRequest) -> None:
        """Forget a request with its items, answered or not."""
        self.requests.remove(request)
        self.budget.give_back(request.client, request.tokens)
        request.answer.cancel()

    def next_batch(self) -> list[QueueItem]:
        """Take the items of a batch out of the queue."""
        batch: list[QueueItem] = []
        left = self.batch_tokens
        faded = {client: tokens * 99 // 100 for client, tokens in self._had.items()}
        # Without the clients that had nothing lately.
        self._had = +Counter(faded)
        while True:
            # The first item of a batch may have any cost.
            ready = [
                one
                for one in self.requests
                if one.items and (not batch or one.items[0].cost <= left)
            ]
            if not ready:
                return batch
            request = min(ready, key=lambda one: self._had[one.client])
            is_greedy = self._had[request.client] > self._had.total() // 2
            if is_greedy and batch and batch[0].request.client != request.client:
                return batch
            item = request.items.popleft()
            batch.append(item)
            left -= item.cost
            self._had[request.client] += item.cost

    def put_back(self, batch: Sequence[QueueItem]) -> None:
        """Put the items of a batch that failed, or on which the process died, before the others."""
        error = Outcome(
            error="lost the model's process, or failed in it, twice.", model_failed=True
        )
        for item in reversed(batch):
            if item.has_died:
                self.finish([item], [error])
            else:
                item.has_died = True
                # It fills a batch, and so it runs alone.
                item.cost = self.batch_tokens
                item.request.items.appendleft(item)

    def finish(self, batch: Sequence[QueueItem], results: Sequence[Parts | Outcome]) -> None:
        """Take the results of a batch. `Parts` become items, before the others of the request."""
        for item, result in zip(reversed(batch), reversed(results), strict=True):
            request, pair = item.request, item.pair
            if request.answer.done():
                continue
            request.pending -= 1
            if isinstance(result, Outcome):
                request.outcomes[pair][item.task.section] = result
            else:
                request.pending += len(result)
                for span, cost in reversed(result):
                    (part,) = parts_of(pair, [span])
                    task = Task(part, request.work, span)
                    request.items.appendleft(QueueItem(request, pair, task, cost))
            if not request.pending:
                request.answer.set_result(None)
