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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import RSRankError
from ..passages.parts import WHOLE
from ..reranker import CHARACTERS_PER_TOKEN, Pair, Reranker
from .backend import DeadlineError, Description, Outcome, OverloadedError, UnavailableError
from .engine import BatchResult, Canary, CutResult
from .fair_queue import (
    FairQueue,
    QueueDocument,
    QueueItem,
    QueueLimits,
    QueueRequest,
    outcomes_of,
)
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

Work = QueueDocument | QueueItem
"""A document to cut, or a part of one to run."""

PROBLEMS = ("truncated", "unscored", "failed", "cancelled", "refused", "late")
COUNTERS = ("pairs", "tokens", *PROBLEMS, "batches", "restarts")


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
        self._queue = FairQueue()
        self._running: Sequence[Work] = []
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
            "waiting": self._queue.documents,
            "clients": len(self._queue.open_clients),
            "tokens_per_second": self._speed,
            **{f"model_{name}": value for name, value in self._model_stats.items()},
        }

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
            if self._running and not self._queue.open_clients:
                # Nobody waits for what the model is doing.
                self.model.kill()
            await asyncio.wait([self._runner])
            self._runner = None
        await asyncio.to_thread(self.model.end)

    async def score(
        self,
        pairs: Sequence[Pair],
        *,
        client: str = "",
        timeout: float | None = None,
        explain: bool = False,
    ) -> list[Outcome]:
        """One outcome for each pair, in input order. Cancelling the call cancels the work.

        Clients share the model's time equally.

        Args:
            pairs: What to score.
            client: Who asks.
            timeout: Seconds after which to give up; None for never.
            explain: Take the scores apart, too. Documents are then read whole.

        Raises:
            OverloadedError: The queue is full, or so long that time would be up before the answer.
            DeadlineError: Time was up.
            UnavailableError: The service is stopping.
        """
        if not pairs:
            return []
        costs = [self._estimate(pair) for pair in pairs]
        self._admit(len(pairs), sum(costs), client, timeout)
        loop = asyncio.get_running_loop()
        owner = self._queue.join(client, self._credit)
        request = QueueRequest(owner, loop.create_future(), len(pairs), len(pairs))
        documents = [
            QueueDocument(request, pair, explain, loop.time(), cost)
            for pair, cost in zip(pairs, costs, strict=True)
        ]
        owner.uncut.extend(documents)
        owner.requests.add(request)
        self._work.set()
        try:
            await asyncio.wait_for(request.done, timeout)
        except asyncio.TimeoutError:
            self._counts["late"] += 1
            raise DeadlineError(
                f"There was no answer in {timeout:.4g} seconds; the work has been cancelled."
            ) from None
        finally:
            owner.requests.discard(request)
            if request.done.cancelled():
                self._counts["cancelled"] += request.missing
                owner.tidy()
            self._queue.forget_clients(self._credit)
        # In a thread, because a document may have very many sentences.
        outcomes = await asyncio.to_thread(outcomes_of, documents)
        self._counts["pairs"] += len(outcomes)
        for outcome in outcomes:
            self._counts["truncated"] += outcome.truncated
            self._counts["unscored"] += outcome.fault == "unscored"
            self._counts["failed"] += outcome.fault in ("input", "internal")
        return outcomes

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
        clients = self._queue.open_clients
        if not clients:
            return
        waiting = self._queue.documents
        own = clients[client].documents if client in clients else 0
        seconds = 0.0
        # A client may fill what it leaves free for others.
        if waiting + own + count > self.limits.documents:
            reason = f"{count:,} more"
        elif timeout is None or not self._is_speed_known:
            return
        else:
            costs = {name: one.cost for name, one in clients.items()}
            costs[client] = costs.get(client, 0) + cost
            # Other requests may double what waits, or get as much as this one. The last batch ends
            # for all its items at once, and another batch runs now.
            ahead = min(costs[client] * len(costs), 2 * sum(costs.values()))
            seconds = (ahead + 2 * self._batch_tokens) / self._speed - MARGIN * timeout
            if seconds <= 0:
                return
            reason = f"an answer in {timeout:.4g} seconds"
        self._counts["refused"] += 1
        raise OverloadedError(
            f"{waiting:,} documents are waiting or being scored, too many for {reason}. "
            "Try again later.",
            retry_after=max(1.0, math.ceil(seconds)),
        )

    # The loop

    async def _supervised(self) -> None:
        """The loop, which goes on after every error, because all requests depend on it."""
        while True:
            try:
                return await self._run()
            except Exception:
                logger.exception("The queue failed and goes on.")
                self._fail_running("The service failed.")
            except BaseException:
                self._trouble = "The queue was cancelled."
                self._give_up()
                raise

    async def _run(self) -> None:
        while True:
            self._work.clear()
            has_work = self._queue.has_work()
            if self._is_stopping and not has_work:
                return
            if self.model.is_gone():
                await self._restart()
            elif has_work:
                await self._do(self._queue.documents_to_cut(self._batch_tokens), self._take_in)
                await self._do(self._queue.next_batch(self._batch_tokens), self._take_outcomes)
            else:
                await self._work.wait()

    async def _do(self, work: Sequence[Work], take: Callable[[Any, Any], None]) -> None:
        """Send work to the model's process and take in the answer."""
        if not work:
            return
        self._running = work
        try:
            answer = await self.model.call(work[0].method, [one.argument for one in work])
        except ProcessLostError:
            for one in reversed(work):
                self._put_back(one)
            if not self._is_stopping or self._queue.open_clients:
                await self._restart()
        except RSRankError as error:
            self._fail_running(str(error))
        else:
            take(work, answer)
        for client in {one.document.request.client for one in work}:
            client.tidy()
        self._running = []

    def _put_back(self, work: Work) -> None:
        """After a death of the process, try again, alone; after the second one, answer."""
        work.deaths += 1
        if work.deaths > 1:
            error = "ended the model's process, twice."
            self._fail(work.document, Outcome(None, fault="internal", error=error))
        elif isinstance(work, QueueItem) and work.document.is_wanted:
            work.document.request.client.items.appendleft(work)

    def _fail_running(self, error: str) -> None:
        """Answer with an error what the model cut or ran."""
        for one in self._running:
            self._fail(one.document, Outcome(None, fault="internal", error=error))

    def _take_in(self, documents: Sequence[QueueDocument], results: Sequence[CutResult]) -> None:
        """Queue the parts of the next segment of each document."""
        for document, result in zip(documents, results, strict=True):
            if isinstance(result, Outcome):
                self._fail(document, result)
            elif document.is_wanted:
                segment, costs = result
                document.add(segment, costs)
                document.uncut = self._estimate(document.pair, segment.stop)
                self._finish_if_complete(document)

    def _take_outcomes(self, batch: Sequence[QueueItem], result: BatchResult) -> None:
        """Take in outcomes of parts. If a part has no score, its document has none."""
        self._learn(result, sum(item.cost for item in batch))
        ended = asyncio.get_running_loop().time()
        for item, outcome in zip(batch, result.outcomes, strict=True):
            document = item.document
            self._counts["tokens"] += outcome.tokens
            if item.place == 0:
                self.observe_wait(ended - result.seconds - document.arrived)
            if outcome.score is None:
                self._fail(document, outcome)
            elif document.failure is None:
                document.parts[item.place] = outcome
                document.missing -= 1
                self._finish_if_complete(document)

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

    def _fail(self, document: QueueDocument, outcome: Outcome) -> None:
        """Answer a document with an error. Nothing more of the document is scored."""
        if document.failure is None and not document.is_complete:
            document.failure = outcome
            self._finish(document.request)

    def _finish_if_complete(self, document: QueueDocument) -> None:
        if document.is_complete:
            self._finish(document.request)

    def _finish(self, request: QueueRequest) -> None:
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
                pause = min(30.0, 0.5 * 2 ** min(attempt, 6))
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), pause)
                if self._is_stopping:
                    self._give_up()
                    return
            else:
                self._trouble = ""
                logger.warning("The model's process died and was replaced.")
                return

    def _give_up(self) -> None:
        """Answer all that waits: there is no model and will be none."""
        for client in self._queue.open_clients.values():
            for request in client.requests:
                if not request.done.done():
                    request.done.set_exception(UnavailableError(self._trouble))
            client.tidy()
