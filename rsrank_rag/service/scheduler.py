"""One queue before one model: clients share the model's time, and requests share its batches.

The queue holds small items with a known cost. An item is one part of one document for one query,
such as a window; its cost is the number of tokens that the model will run. A batch holds items of
the clients that have had the least, and as many tokens as the model runs in a tenth of a second.
So no request holds the model for long, whatever its size; what nobody waits for any more leaves
between two batches.

Documents are cut into parts shortly before their turn, a segment at a time, by the model's process.
The rest of a document waits as an item, too.

If the process dies, another one takes its place and the batch's items run again, each alone. An
item that kills the process twice is answered with an error.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from ..errors import RSRankError
from ..passages.parts import WHOLE
from ..reranker import CHARACTERS_PER_TOKEN, Pair, Reranker
from .backend import DeadlineError, Description, Outcome, OverloadedError, UnavailableError
from .engine import BatchResult, Canary, CutResult
from .fair_queue import FairQueue, QueueDocument, QueueItem, QueueLimits, outcomes_of
from .worker import Loading, ModelProcess, ProcessLostError

logger = logging.getLogger(__name__)

# Tokens a second before the first full batch has been timed: about what `mini` runs on two cores.
FIRST_SPEED = 5_000.0

# Full batches whose median is the model's speed. They take 20 seconds, so that a processor that
# other programs use for some seconds does not make the model seem slow.
BATCHES_TIMED = 200

# Share of a request's time that the work before it and its own may take. The rest is for requests
# of others that come later.
SHARE = 0.5

# Seconds of the model's time by which a client that asks for little is ahead of one that asks for
# much. So a short request hardly waits for a large one, and no client gains more than this.
CREDIT_SECONDS = 0.25

PROBLEMS = ("truncated", "unscored", "failed", "cancelled", "refused", "late")
COUNTERS = (*PROBLEMS, "pairs", "tokens", "batches", "restarts", "busy_seconds")


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
        self._running: list[QueueItem] = []
        self._speeds: deque[float] = deque(maxlen=BATCHES_TIMED)
        self._work = asyncio.Event()
        self._ending = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._counts: dict[str, float] = dict.fromkeys(COUNTERS, 0)
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
        if self.model.hangs:
            return "The model does not answer."
        if not self._trouble and self.model.is_gone():
            self._work.set()
            return "The model's process is gone; it is being replaced."
        return self._trouble or getattr(self.model.loaded, "complaint", None)

    def stats(self) -> dict[str, float]:
        """Counters and levels, see `metrics`; the reranker's own begin with model_."""
        return {
            **self._counts,
            "waiting": sum(self._queue.waiting.values()),
            "clients": len(self._queue.waiting),
            "tokens_per_second": self._speed,
            **{f"model_{name}": value for name, value in self._model_stats.items()},
        }

    @property
    def _speed(self) -> float:
        """Tokens a second."""
        return statistics.median(self._speeds) if self._speeds else FIRST_SPEED

    @property
    def _batch_tokens(self) -> int:
        """Tokens that a batch may have. After a slow batch comes a small one."""
        speeds = [self._speed, *self._speeds]
        return max(1, int(min(speeds[0], speeds[-1]) * self.limits.batch_seconds))

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
            if self._running and not self._queue.waiting:
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
        self._admit(costs, client, timeout)
        loop = asyncio.get_running_loop()
        owner = self._queue.join(client, self._credit)
        documents = [
            QueueDocument(owner, pair, explain, loop.time(), cost, loop.create_future())
            for pair, cost in zip(pairs, costs, strict=True)
        ]
        owner.add(documents)
        self._work.set()
        try:
            _, late = await asyncio.wait([one.answer for one in documents], timeout=timeout)
        finally:
            self._counts["cancelled"] += owner.withdraw(documents)
            self._queue.forget_clients(self._credit)
        if late:
            self._counts["late"] += 1
            raise DeadlineError(
                f"There was no answer in {timeout:.4g} seconds; the work has been cancelled."
            )
        if documents[0].answer.cancelled():
            raise UnavailableError(self._trouble)
        # In a thread, because a document may have very many sentences.
        outcomes = await asyncio.to_thread(outcomes_of, documents)
        self._counts["pairs"] += len(outcomes)
        for outcome in outcomes:
            self._counts["truncated"] += outcome.truncated
            self._counts["unscored"] += outcome.fault == "unscored"
            self._counts["failed"] += outcome.fault in ("input", "internal")
        return outcomes

    def _estimate(self, pair: Pair) -> int:
        """Tokens of a pair by its characters, without what is never read."""
        limits = [len(pair.document) // CHARACTERS_PER_TOKEN, pair.max_tokens]
        if pair.reading == WHOLE:
            limits.append(self.description.max_tokens)
        tokens = min(limit for limit in limits if limit is not None)
        return tokens + len(pair.query) // CHARACTERS_PER_TOKEN + 1

    def _admit(self, costs: Sequence[int], client: str, timeout: float | None) -> None:
        """Take a request, or raise: the service stops, the queue is full, or there is no time."""
        if self._runner is None or self._is_stopping:
            raise UnavailableError(f"No requests are taken. {self.readiness()}", retry_after=5.0)
        waiting = self._queue.waiting
        total = sum(waiting.values())
        if not waiting:
            return
        seconds = 0.0
        # A client may fill what it leaves free for others.
        if total + waiting.get(client, 0) + len(costs) > self.limits.documents:
            reason = f"{len(costs):,} more"
        elif timeout is None or not self._speeds:
            return
        else:
            costs_by_client = {name: self._queue.clients[name].cost for name in waiting}
            cost = costs_by_client.get(client, 0) + sum(costs)
            costs_by_client[client] = cost
            # Others may ask for as much as this client, or double what waits.
            ahead = min(len(costs_by_client) * cost, 2 * sum(costs_by_client.values()))
            seconds = ahead / self._speed - SHARE * timeout
            if seconds <= 0:
                return
            reason = f"an answer in {timeout:.4g} seconds"
        self._counts["refused"] += 1
        raise OverloadedError(
            f"{total:,} documents are waiting or being scored, too many for {reason}. "
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
                for item in self._running:
                    self._fail(item, "The service failed.")

    async def _run(self) -> None:
        while self._queue.has_work() or not self._is_stopping:
            self._work.clear()
            if self.model.is_gone():
                await self._restart()
            elif self._queue.has_work():
                self._running = self._queue.next_batch(self._batch_tokens)
                # What is not cut yet is cut before the batch is run.
                uncut = [item for item in self._running if item.part is None]
                await self._do(uncut or self._running)
                self._running = []
            else:
                await self._work.wait()

    async def _do(self, work: Sequence[QueueItem]) -> None:
        """Have the model's process cut or run a batch, and take in the answer."""
        if not work:
            return
        self._queue.charge(work)
        arguments = [item.part or (item.document.pair, item.document.segment) for item in work]
        try:
            answer = await self.model.call(work[0].method, arguments)
        except ProcessLostError:
            for item in work:
                item.deaths += 1
                if item.deaths > 1:
                    self._fail(item, "ended the model's process, twice.")
            self._take_parts({})
            if not self._is_stopping or self._queue.waiting:
                await self._restart()
        except RSRankError as error:
            for item in self._running:
                self._fail(item, str(error))
        else:
            if isinstance(answer, BatchResult):
                self._take_outcomes(work, answer)
            else:
                self._take_parts(dict(zip(work, answer, strict=True)))

    def _take_parts(self, results: Mapping[QueueItem, CutResult]) -> None:
        """Queue the parts of documents that were cut, and again what else the batch has."""
        for item in reversed(self._running):
            result = results.get(item)
            if result is None:
                item.document.client.items.appendleft(item)
            elif isinstance(result, Outcome):
                item.document.finish(result)
            else:
                item.document.add(*result)

    def _take_outcomes(self, batch: Sequence[QueueItem], result: BatchResult) -> None:
        """Take in outcomes of parts. If a part has no score, its document has none."""
        self._model_stats = result.stats
        self._counts["batches"] += 1
        self._counts["busy_seconds"] += result.seconds
        cost = sum(item.cost for item in batch)
        # A small batch says little about the speed of a full one.
        if cost >= self._batch_tokens / 2:
            self._speeds.append(cost / max(result.seconds, 1e-6))
        ended = asyncio.get_running_loop().time()
        for item, outcome in zip(batch, result.outcomes, strict=True):
            document = item.document
            self._counts["tokens"] += outcome.tokens
            if item.place == 0:
                self.observe_wait(ended - result.seconds - document.arrived)
            if outcome.score is None:
                document.finish(outcome)
            else:
                document.scored[item.place] = outcome
                document.finish_if_complete()

    def _fail(self, item: QueueItem, error: str) -> None:
        item.document.finish(Outcome(None, fault="internal", error=error))

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
        for client in self._queue.clients.values():
            client.items.clear()
            for document in client.documents:
                document.answer.cancel()
