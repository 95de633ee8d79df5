"""One queue before one model: clients share the model's time, and requests share its batches.

The queue holds items. An item is one part of one document for one query, such as a window; its
cost is the number of tokens that the model will run. A batch holds items of the clients that have
had the least, and as many tokens as the model runs in a tenth of a second. So no request holds the
model for long, whatever its size; what nobody waits for any more leaves between two batches.

Documents are cut into parts shortly before their turn, a segment at a time, by the model's process.

If the process dies, another one takes its place and the batch's items run again, each alone. An
item that kills the process twice is answered with an error.
"""

import asyncio
import contextlib
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import RSRankError
from ..passages.explanation import Explanation
from ..passages.pairs import Segment, combined
from ..passages.parts import WHOLE, Span
from ..reranker import CHARACTERS_PER_TOKEN, Pair, Reranker, Scored
from .backend import DeadlineError, Description, Outcome, OverloadedError, UnavailableError
from .engine import BatchResult, Canary, CutResult, parts_of
from .worker import Loading, ModelProcess, ProcessLostError

logger = logging.getLogger(__name__)

# Tokens a second before the first full batch has been timed: about what `mini` runs on two cores.
FIRST_SPEED = 5_000.0

# Share of a request's time that the work before it and its own may take, by estimate.
MARGIN = 0.5

# Weight of a batch's speed in the mean, if the batch takes as long as it should; more if longer.
WEIGHT = 0.5

# Seconds of the model's time by which a client that asks for little is ahead of one that asks for
# much. So a short request hardly waits for a large one, and no client gains more than this.
CREDIT_SECONDS = 0.25

COUNTERS = (
    "pairs",
    "tokens",
    "truncated",
    "unscored",
    "failed",
    "cancelled",
    "refused",
    "late",
    "batches",
    "restarts",
)


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
class _Request:
    """What one caller waits for; ``missing`` is the number of documents without an outcome."""

    client: "_Client"
    done: asyncio.Future[Any]
    missing: int


@dataclass(eq=False, slots=True)
class _Document:
    """A document with the outcomes of its parts; ``uncut`` estimates the tokens not cut yet."""

    request: _Request
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
class _Item:
    """One part of a document to score (``run``), or a score to take apart (``explain``)."""

    method: Literal["run", "explain"]
    document: _Document
    place: int
    pair: Pair
    cost: int
    deaths: int = 0

    @property
    def is_alone(self) -> bool:
        """Whether the item is a batch by itself."""
        return self.method == "explain" or self.deaths > 0


@dataclass(eq=False, slots=True)
class _Client:
    """A client's work, first come, first served.

    ``served`` is the tokens that the client has had, on a clock that all clients share.
    """

    served: float
    documents: int = 0
    uncut: deque[_Document] = field(default_factory=deque)
    items: deque[_Item] = field(default_factory=deque)

    @property
    def cost(self) -> int:
        """Tokens of all that waits."""
        return self.ready + sum(document.uncut for document in self.uncut)

    @property
    def ready(self) -> int:
        """Tokens of the items that wait."""
        return sum(item.cost for item in self.items)


class Scheduler:
    """Scores pairs for many clients at once, with one model in one process.

    Args:
        make: Loads the model; ``make`` and the model's results must be picklable.
        name: What the model is called.
        limits: Of the queue.
        canary: Scored after each load; None for none.
        prepare: Called in the model's process before all else, such as to set up its logs.
    """

    def __init__(
        self,
        make: Callable[[], Reranker],
        name: str,
        *,
        limits: QueueLimits | None = None,
        canary: Canary | None = Canary(),  # noqa: B008 - it is frozen
        prepare: Callable[[], object] | None = None,
    ) -> None:
        self.name = name
        self.limits = limits or QueueLimits()
        self.model = ModelProcess(
            Loading(make, name, canary, prepare), hang_seconds=self.limits.hang_seconds
        )
        self.observe_wait: Callable[[float], object] = lambda seconds: None
        self._trouble = "The service has not been started."
        self._is_stopping = False
        self.is_ending = False
        self._clients: dict[str, _Client] = {}
        self._cutting: list[_Document] = []
        self._running: list[_Item] = []
        self._clock = 0.0
        self._speed = FIRST_SPEED
        self._is_speed_known = False
        self._work = asyncio.Event()
        self._ending = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._counts: dict[str, float] = dict.fromkeys((*COUNTERS, "busy_seconds"), 0)
        self._model_stats: Mapping[str, float] = {}

    @property
    def description(self) -> Description:
        """The model that is served; raises UnavailableError if nothing is loaded yet."""
        if self.model.loaded is None:
            raise UnavailableError(f"{self.name} is not loaded. {self._trouble}", retry_after=1.0)
        return self.model.loaded.description

    def readiness(self) -> str | None:
        """None if requests are answered and the canary scored as it should; else the reason."""
        if self._is_stopping or self.is_ending:
            return "The service is stopping."
        if self._runner is not None and self._runner.done():
            return "The queue has ended. Restart the service."
        if self.model.hangs:
            return "The model does not answer."
        if not self._trouble and self._runner is not None and self.model.is_gone():
            self._work.set()
            return "The model's process is gone; it is being replaced."
        return self._trouble or (None if self.model.loaded is None else self.model.loaded.complaint)

    def stats(self) -> dict[str, float]:
        """Counters and levels, see `metrics`; the reranker's own begin with model_."""
        return {
            **self._counts,
            "waiting": self._documents,
            "clients": len(self._open_clients),
            "tokens_per_second": self._speed,
            **{f"model_{name}": value for name, value in self._model_stats.items()},
        }

    @property
    def _open_clients(self) -> dict[str, _Client]:
        """Clients with requests that have no answer yet."""
        return {name: client for name, client in self._clients.items() if client.documents}

    @property
    def _documents(self) -> int:
        """Documents of requests that have no answer yet."""
        return sum(client.documents for client in self._clients.values())

    @property
    def _batch_tokens(self) -> int:
        """Tokens that a batch may have."""
        return max(1, int(self._speed * self.limits.batch_seconds))

    @property
    def _credit(self) -> float:
        """Tokens by which a client that has asked for little is ahead of others."""
        return self._speed * CREDIT_SECONDS

    async def start(self) -> None:
        """Load the model and check it; returns when it can score, or raises what loading raises."""
        self._trouble = "The model is being loaded."
        try:
            await self.model.start()
        except BaseException:
            self.model.kill()
            raise
        self._trouble = ""
        if self.readiness() is not None:
            logger.warning("%s", self.readiness())
        self._runner = asyncio.create_task(self._supervised())

    def end_soon(self) -> None:
        """Report from now on that the service is not ready; requests are taken until `stop`."""
        self.is_ending = True

    async def stop(self) -> None:
        """Take no more work, finish what is there, and let the model go."""
        self._is_stopping = True
        if self._runner is not None:
            self._work.set()
            self._ending.set()
            if self._is_abandoned():
                self.model.kill()
            await asyncio.wait([self._runner])
            self._runner = None
        await asyncio.to_thread(self.model.end)

    def _is_abandoned(self) -> bool:
        """Whether the model runs a batch, and nobody waits for anything."""
        return bool(self._running) and not self._documents

    async def score(
        self, pairs: Sequence[Pair], *, client: str = "", timeout: float | None = None
    ) -> list[Outcome]:
        """One outcome for each pair, in input order. Cancelling the call cancels the work.

        Clients share the model's time equally.

        Args:
            pairs: What to score.
            client: Who asks.
            timeout: Seconds after which to give up; None for never.

        Raises:
            OverloadedError: The queue is full, or so long that time would be up before the answer.
            DeadlineError: Time was up.
            UnavailableError: The service is stopping.
        """
        if not pairs:
            return []
        documents = self._admitted(pairs, client, timeout)
        documents[0].request.client.uncut.extend(documents)
        await self._answer(documents[0].request, timeout)
        if any(len(document.outcomes) > 1 for document in documents):
            outcomes = await asyncio.to_thread(_outcomes, documents)
        else:
            outcomes = _outcomes(documents)
        self._counts["pairs"] += len(outcomes)
        for outcome in outcomes:
            self._counts["truncated"] += outcome.truncated
            self._counts["unscored"] += outcome.fault == "unscored"
            self._counts["failed"] += outcome.fault in ("input", "internal")
        return outcomes

    async def explain(
        self, pair: Pair, *, client: str = "", timeout: float | None = None
    ) -> Explanation:
        """Take one score apart; errors as of `score` and of `Engine.explain`."""
        document = self._admitted([pair], client, timeout)[0]
        item = _Item("explain", document, 0, pair, document.uncut)
        document.request.client.items.append(item)
        explanation: Explanation = await self._answer(document.request, timeout)
        return explanation

    def _admitted(
        self, pairs: Sequence[Pair], client: str, timeout: float | None
    ) -> list[_Document]:
        """The documents of a new request; raises as `_admit`."""
        costs = [self._estimate(pair) for pair in pairs]
        self._admit(len(pairs), sum(costs), client, timeout)
        loop = asyncio.get_running_loop()
        newest = self._clock - self._credit
        owner = self._clients.setdefault(client, _Client(newest))
        owner.served = max(owner.served, newest)
        request = _Request(owner, loop.create_future(), len(pairs))
        return [
            _Document(request, pair, loop.time(), cost)
            for pair, cost in zip(pairs, costs, strict=True)
        ]

    async def _answer(self, request: _Request, timeout: float | None) -> Any:
        """Wait for the answer to a request. Giving up takes the request out of the queue."""
        client, count = request.client, request.missing
        client.documents += count
        self._work.set()
        try:
            return await asyncio.wait_for(request.done, timeout)
        except asyncio.TimeoutError:
            self._counts["late"] += 1
            raise DeadlineError(
                f"There was no answer in {timeout:.4g} seconds; the work has been cancelled."
            ) from None
        finally:
            client.documents -= count
            if request.done.cancelled():
                self._counts["cancelled"] += request.missing
                client.uncut = deque(one for one in client.uncut if one.request is not request)
                client.items = deque(
                    one for one in client.items if one.document.request is not request
                )
            self._forget_clients()

    def _estimate(self, pair: Pair, start: int = 0) -> int:
        """Tokens of a document from a character on, without what is never read."""
        tokens = (len(pair.document) - start) // CHARACTERS_PER_TOKEN
        if pair.reading == WHOLE and self.model.loaded is not None:
            most = self.model.loaded.description.max_tokens
            tokens = min(tokens, most or tokens)
        tokens = min(tokens, pair.max_tokens or tokens)
        return tokens + len(pair.query) // CHARACTERS_PER_TOKEN + 1

    def _admit(self, count: int, cost: int, client: str, timeout: float | None) -> None:
        """Take a request, or raise: the service stops, the queue is full, or there is no time."""
        if self._runner is None or self._runner.done() or self._is_stopping:
            raise UnavailableError(f"No requests are taken. {self.readiness()}", retry_after=5.0)
        waiting = self._documents
        if not waiting:
            return
        own = self._clients[client].documents if client in self._clients else 0
        seconds = 0.0
        # A client may fill what it leaves free for others.
        if waiting + own + count > self.limits.documents:
            reason = f"{count:,} more"
        elif timeout is None or not self._is_speed_known:
            return
        else:
            seconds = self._seconds(client, cost) - MARGIN * timeout
            if seconds <= 0:
                return
            reason = f"an answer in {timeout:.4g} seconds"
        self._counts["refused"] += 1
        raise OverloadedError(
            f"{waiting:,} documents are waiting or being scored, too many for {reason}. "
            "Try again later.",
            retry_after=max(1.0, math.ceil(seconds)),
        )

    def _seconds(self, client: str, cost: int) -> float:
        """Seconds until so many more tokens of a client have run, with all others that wait."""
        costs = {name: one.cost for name, one in self._open_clients.items()}
        costs[client] = costs.get(client, 0) + cost
        # Other requests may double what waits, or get as much as this one. The last batch ends
        # for all its items at once, and another batch runs now.
        ahead = min(costs[client] * len(costs), 2 * sum(costs.values())) + 2 * self._batch_tokens
        return ahead / self._speed

    def _forget_clients(self) -> None:
        """Forget clients without requests, unless they have had more than a new client has."""
        newest = self._clock - self._credit if self._documents else math.inf
        self._clients = {
            name: client
            for name, client in self._clients.items()
            if client.documents or client.served > newest
        }

    # The loop

    async def _supervised(self) -> None:
        """The loop, which goes on after every error, because all requests depend on it."""
        while True:
            try:
                return await self._run()
            except Exception:
                logger.exception("The queue failed and goes on.")
                self._fail_batch(RSRankError("The service failed."))
            except BaseException:
                self._trouble = "The queue was cancelled."
                self._give_up()
                raise

    async def _run(self) -> None:
        while True:
            self._work.clear()
            has_work = any(client.uncut or client.items for client in self._clients.values())
            if self._is_stopping and not has_work:
                return
            if self.model.is_gone():
                await self._restart()
            elif has_work:
                await self._cut(self._documents_to_cut())
                await self._process(self._next_batch())
            else:
                await self._work.wait()

    def _documents_to_cut(self) -> list[_Document]:
        """Of each client as many documents as may be in the next batch.

        A document on which the process died before is cut alone.
        """
        documents: list[_Document] = []
        for client in self._clients.values():
            ready = client.ready
            while client.uncut and ready < self._batch_tokens:
                if client.uncut[0].deaths:
                    return documents or [client.uncut.popleft()]
                ready += client.uncut[0].uncut
                documents.append(client.uncut.popleft())
        return documents

    async def _cut(self, documents: list[_Document]) -> None:
        """Cut the next segment of each document into items."""
        if not documents:
            return
        self._cutting = documents
        arguments = [(document.pair, document.segment) for document in documents]
        try:
            results: list[CutResult] = await self.model.call("cut", arguments)
        except ProcessLostError:
            for document in reversed(documents):
                if not self._has_killed_twice(document, document):
                    document.request.client.uncut.appendleft(document)
            self._cutting = []
            await self._restart()
            return
        except RSRankError as error:
            results = [Outcome(None, fault="internal", error=str(error))] * len(documents)
        self._take_in(documents, results)
        self._cutting = []

    def _take_in(self, documents: list[_Document], results: Sequence[CutResult]) -> None:
        for document, result in zip(documents, results, strict=True):
            if isinstance(result, Outcome):
                self._fail(document, result)
            elif not document.request.done.done():
                self._add_items(document, *result)
        for document in reversed(documents):
            if document.uncut and not document.request.done.done():
                document.request.client.uncut.appendleft(document)

    def _add_items(self, document: _Document, segment: Segment, costs: Sequence[int]) -> None:
        """Queue the parts of a segment; the rest of the document waits to be cut."""
        client = document.request.client
        first = len(document.outcomes)
        for part, cost in zip(parts_of(document.pair, segment), costs, strict=True):
            item = _Item("run", document, len(document.outcomes), part, cost)
            client.items.append(item)
            document.outcomes.append(None)
        document.segment = segment
        document.spans += segment.spans
        document.missing += len(document.outcomes) - first
        document.uncut = 0
        if not segment.is_last:
            document.uncut = self._estimate(document.pair, segment.stop)
        self._finish_if_complete(document)

    def _next_batch(self) -> list[_Item]:
        """Items of whichever client has had the least, until the batch takes long enough."""
        tokens = self._batch_tokens
        batch: list[_Item] = []
        ready = [client for client in self._clients.values() if client.items]
        while ready:
            client = min(ready, key=lambda one: one.served)
            item = client.items[0]
            if batch and (item.cost > tokens or item.is_alone or batch[0].is_alone):
                break
            batch.append(client.items.popleft())
            tokens -= item.cost
            self._clock = max(self._clock, client.served)
            client.served += item.cost
            if not client.items:
                ready.remove(client)
        return batch

    async def _process(self, batch: list[_Item]) -> None:
        if not batch:
            return
        self._running = batch
        now = asyncio.get_running_loop().time()
        for item in batch:
            if item.place == 0:
                self.observe_wait(now - item.document.arrived)
        try:
            if batch[0].method == "explain":
                await self._explain(batch[0])
            else:
                await self._score(batch)
        except ProcessLostError:
            for item in reversed(batch):
                if not self._has_killed_twice(item, item.document):
                    item.document.request.client.items.appendleft(item)
            if not (self._is_stopping and self._is_abandoned()):
                await self._restart()
        except RSRankError as error:
            self._fail_batch(error)
        self._running = []

    async def _explain(self, item: _Item) -> None:
        explanation = await self.model.call("explain", item.pair)
        if not item.document.request.done.done():
            item.document.request.done.set_result(explanation)

    async def _score(self, batch: list[_Item]) -> None:
        result: BatchResult = await self.model.call("run", [item.pair for item in batch])
        self._learn(result, sum(item.cost for item in batch))
        for item, outcome in zip(batch, result.outcomes, strict=True):
            self._settle(item, outcome)

    def _has_killed_twice(self, work: _Document | _Item, document: _Document) -> bool:
        """Count a death of the process; after the second one, and if nobody waits, answer."""
        work.deaths += 1
        if document.request.done.done():
            return True
        if work.deaths < 2:
            return False
        error = RSRankError("ended the model's process, twice.")
        if isinstance(work, _Item) and work.method == "explain":
            document.request.done.set_exception(error)
        else:
            self._fail(document, Outcome(None, fault="internal", error=str(error)))
        return True

    def _fail_batch(self, error: RSRankError) -> None:
        """Answer with an error what the model cut or ran."""
        for document in self._cutting:
            self._fail(document, Outcome(None, fault="internal", error=str(error)))
        for item in self._running:
            if item.method == "run":
                self._fail(item.document, Outcome(None, fault="internal", error=str(error)))
            elif not item.document.request.done.done():
                item.document.request.done.set_exception(error)

    def _learn(self, result: BatchResult, cost: int) -> None:
        """Take in how fast a batch was. A small batch says little about the speed of a full one."""
        self._counts["batches"] += 1
        self._counts["busy_seconds"] += result.seconds
        self._model_stats = result.stats
        if cost >= self._batch_tokens / 2:
            seconds = max(result.seconds, 1e-6)
            weight = min(1.0, WEIGHT * seconds / self.limits.batch_seconds)
            self._speed += max(weight, 0.1) * (cost / seconds - self._speed)
            self._is_speed_known = True

    def _settle(self, item: _Item, outcome: Outcome) -> None:
        """Take in the outcome of a part. If a part has no score, the document has none."""
        document = item.document
        self._counts["tokens"] += outcome.tokens
        if outcome.score is None:
            self._fail(document, outcome)
        elif document.failure is None:
            document.outcomes[item.place] = outcome
            document.missing -= 1
            self._finish_if_complete(document)

    def _fail(self, document: _Document, outcome: Outcome) -> None:
        """Answer a document with an error. Nothing more of the document is scored."""
        if document.failure is None:
            document.failure = outcome
            document.uncut = 0
            client = document.request.client
            client.items = deque(item for item in client.items if item.document is not document)
            client.uncut = deque(one for one in client.uncut if one is not document)
            self._finish(document.request)

    def _finish_if_complete(self, document: _Document) -> None:
        if not document.missing and document.segment is not None and document.segment.is_last:
            self._finish(document.request)

    def _finish(self, request: _Request) -> None:
        """Count a document of a request as answered; the last one answers the request."""
        request.missing -= 1
        if not request.missing and not request.done.done():
            request.done.set_result(None)

    async def _restart(self) -> None:
        """Replace a dead process; if that fails, try again ever more slowly."""
        for attempt in itertools.count():
            self._counts["restarts"] += 1
            self._trouble = "The model is being loaded."
            try:
                await self.model.start()
            except RSRankError as error:
                # The cause may pass, such as a device that is still full.
                self._trouble = (
                    "The model's process died and could not be replaced; the log says why."
                )
                logger.error("The model's process could not be replaced: %s", error)
                if self._is_stopping:
                    self._give_up()
                    return
                pause = min(30.0, 0.5 * 2 ** min(attempt, 6))
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), pause)
            else:
                self._trouble = ""
                logger.warning("The model's process died and was replaced.")
                return

    def _give_up(self) -> None:
        """Answer all that waits: there is no model and will be none."""
        documents = self._cutting + [item.document for item in self._running]
        for client in self._clients.values():
            documents += [*client.uncut, *(item.document for item in client.items)]
            client.uncut.clear()
            client.items.clear()
        for document in documents:
            if not document.request.done.done():
                document.request.done.set_exception(UnavailableError(self._trouble))


def _outcomes(documents: list[_Document]) -> list[Outcome]:
    return [document.outcome() for document in documents]
