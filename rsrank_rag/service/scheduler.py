"""One queue before one model: clients share the model's time, and requests share its batches.

The queue holds small items with a known cost. An item is one part of one document for one query,
such as a window. The cost of an item is the number of tokens that the model runs in the same time.
A batch holds items of the clients for which the model has run the fewest tokens. A batch has as
many tokens as the model runs in `QueueLimits.batch_seconds`. So no request occupies the model for
long, whatever the size of the request. The items of a cancelled request are never run.

The model's process cuts a document into parts shortly before its turn, one segment after another.
The part of the document that is not cut yet waits as an item, too.

If the process dies, another one takes its place and the batch's items run again, each alone. An
item that kills the process twice is answered with an error.
"""

import asyncio
import contextlib
import logging
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from ..errors import RSRankError
from ..passages.parts import WHOLE
from ..reranker import CHARACTERS_PER_TOKEN, Pair, Reranker
from .backend import DeadlineError, Description, Outcome, OverloadedError, UnavailableError
from .engine import Canary
from .fair_queue import FairQueue, QueueItem, QueueLimits
from .worker import ModelProcess, ProcessLostError

logger = logging.getLogger(__name__)

# Tokens a second before the first full batch has been timed: less than `mini` runs on one core, so
# that the first batches are short.
FIRST_SPEED = 5_000.0

# Full batches whose median is the model's speed. They take 20 seconds, so that a processor that
# other programs use for some seconds does not make the model seem slow.
BATCHES_TIMED = 400

# A batch counts as slow if the batch took this many times the time that it should take.
MUCH_LONGER = 4

# A request is taken if its own work and the work before it are expected to take at most this share
# of its timeout. The rest is for requests of other clients that come later.
SHARE = 0.5

# Seconds of the model's time by which a client that asks for little is ahead of one that asks for
# much. So a short request hardly waits for a large one, and no client gains more than this.
CREDIT_SECONDS = 0.25

# Seconds without work after which the model's process is asked for a sign of life.
IDLE_SECONDS = 1.0

# Longest pause in seconds before a model that could not be loaded is tried again.
LONGEST_PAUSE = 30.0


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
        limits: QueueLimits = QueueLimits(),  # noqa: B008 - it is frozen
        canary: Canary | None = Canary(),  # noqa: B008 - likewise
        prepare: Callable[[], object] | None = None,
    ) -> None:
        self.name = name
        self.limits = limits
        self.model = ModelProcess(make, name, canary, prepare, limits.hang_seconds)
        # Set by the server at SIGTERM. Requests are taken until `stop`, and /ready is 503.
        self.is_ending = False
        self._stopping = asyncio.Event()
        self._trouble = "The service has not been started."
        self._queue = FairQueue()
        self._work = asyncio.Event()
        self._running: list[QueueItem] = []
        self._speeds: deque[float] = deque(maxlen=BATCHES_TIMED)
        # Of the last batch, also if it was small.
        self._last_speed = 0.0
        self._runner: asyncio.Task[None] | None = None
        self._counts = Counter[str]()
        self._model_stats: Mapping[str, int] = {}

    @property
    def description(self) -> Description:
        """The model that is served; raises UnavailableError if nothing is loaded yet."""
        if self.model.description is None:
            raise UnavailableError(f"{self.name} is not loaded. {self._trouble}")
        return self.model.description

    def readiness(self) -> str | None:
        """None if requests are answered and the canary scored as it should; else the reason."""
        if self.is_ending or self._stopping.is_set():
            return "The service is stopping."
        if self.model.hangs:
            return "The model does not answer."
        return self._trouble or getattr(self.model.description, "complaint", None)

    def stats(self) -> Counter[str]:
        """The scheduler's and the reranker's numbers, by name; `metrics` describes each of them."""
        waiting = sum(self._queue.waiting.values())
        return Counter({**self._counts, **self._model_stats, "waiting": waiting})

    @property
    def _speed(self) -> float:
        """Tokens that the model runs in a second."""
        return statistics.median(self._speeds) if self._speeds else FIRST_SPEED

    @property
    def _batch_tokens(self) -> int:
        """Tokens that a batch may have: what the fastest tenth of all batches run in the time.

        Slower batches ran beside other programs. Smaller ones would hardly take less time then, and
        far fewer tokens would be run in a second. For the same reason, a batch may have at least
        what a model of FIRST_SPEED runs. But after a batch that took MUCH_LONGER than it should,
        the next one is smaller, because the measured speeds may not be those of these documents.
        """
        fastest = sorted(self._speeds)[-len(self._speeds) // 10 :]
        speed = min([MUCH_LONGER * self._last_speed, *fastest[:1]])
        return int(max(FIRST_SPEED, speed) * self.limits.batch_seconds)

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
        self._runner = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Take no more work, finish what is there, and let the model go."""
        self._stopping.set()
        self._work.set()
        if self._runner is not None:
            if self._running and not self._queue.waiting:
                # Nobody waits for what the model is doing.
                self.model.kill()
            await asyncio.wait([self._runner])
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
        documents = self._queue.add(client, pairs, costs, explain)
        self._work.set()
        try:
            _, late = await asyncio.wait([one.answer for one in documents], timeout=timeout)
        finally:
            self._counts["cancelled_documents"] += self._queue.withdraw(documents)
            self._work.set()
        if late:
            self._counts["late_requests"] += 1
            raise DeadlineError(
                f"There was no answer in {timeout:.4g} seconds; the work has been cancelled."
            )
        if any(one.answer.cancelled() for one in documents):
            raise UnavailableError(self._trouble)
        # In a thread, because a document may have very many sentences.
        outcomes = await asyncio.to_thread(lambda: [one.outcome() for one in documents])
        for outcome in outcomes:
            self._counts["documents"] += 1
            self._counts["failed_documents"] += outcome.scored is None
            self._counts["truncated_documents"] += bool(outcome.scored and outcome.scored.truncated)
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
        if self._runner is None or self._stopping.is_set():
            raise UnavailableError(f"No requests are taken. {self.readiness()}")
        waiting = self._queue.waiting
        total = sum(waiting.values())
        reason, seconds = "", 0.0
        # A client's own documents count twice, so that no client can fill the queue alone.
        if total + waiting.get(client, 0) + len(costs) > self.limits.documents:
            reason = f"{len(costs):,} more"
        elif timeout is not None and self._speeds:
            costs_by_client = {name: self._queue.clients[name].cost for name in waiting}
            cost = costs_by_client.get(client, 0) + sum(costs)
            costs_by_client[client] = cost
            # By the time of the answer, every other client may have had as much work done as this
            # client, but hardly more than twice the work that waits now.
            ahead = min(len(costs_by_client) * cost, 2 * sum(costs_by_client.values()))
            seconds = ahead / self._speed - SHARE * timeout
            if seconds > 0:
                reason = f"an answer in {timeout:.4g} seconds"
        # If nothing waits, a request of any size is taken.
        if total and reason:
            self._counts["refused_requests"] += 1
            raise OverloadedError(
                f"{total:,} documents are waiting or being scored, too many for {reason}. "
                "Try again later.",
                retry_after=max(1, math.ceil(seconds)),
            )

    # The loop

    async def _run(self) -> None:
        """Run batches until the end. No error ends the loop, because all requests depend on it."""
        while self._queue.waiting or not self._stopping.is_set():
            self._work.clear()
            self._queue.credit = CREDIT_SECONDS * self._speed
            if self.model.is_gone():
                await self._restart()
                continue
            batch = self._running = self._queue.next_batch(self._batch_tokens)
            try:
                if not batch:
                    await self._idle()
                elif batch[0].part is None:
                    await self._cut(batch)
                else:
                    await self._score(batch)
            except ProcessLostError:
                for item in batch:
                    item.deaths += 1
                    if item.deaths > 1:
                        item.document.fail("ended the model's process, twice.")
                await self._restart()
            except Exception as error:
                logger.exception("A batch failed.")
                text = str(error) if isinstance(error, RSRankError) else "was lost."
                for item in batch:
                    item.document.fail(text)
            self._running = []

    async def _idle(self) -> None:
        """Wait for work. After some time without work, see whether the process still answers."""
        try:
            await asyncio.wait_for(self._work.wait(), IDLE_SECONDS)
        except asyncio.TimeoutError:
            _, self._model_stats = await self.model.call("run", [], False)

    async def _cut(self, batch: Sequence[QueueItem]) -> None:
        """Have the model's process cut documents, and queue their parts."""
        documents = [(item.document.pair, item.document.segment) for item in batch]
        results = await self.model.call("cut", documents)
        for item, result in zip(batch, results, strict=True):
            if isinstance(result, Outcome):
                item.document.take_outcome(result)
            else:
                item.document.take_parts(result)

    async def _score(self, batch: Sequence[QueueItem]) -> None:
        """Have the model's process score parts, and note their outcomes and the model's speed."""
        pairs = [item.part for item in batch]
        outcomes, self._model_stats = await self.model.call("run", pairs, batch[0].document.explain)
        cost = sum(item.cost for item in batch)
        # A small batch says little about the speed of a full one.
        is_full = cost >= self._batch_tokens / 2
        self._last_speed = cost / max(self.model.seconds, 1e-6)
        if is_full:
            self._speeds.append(self._last_speed)
        for item, outcome in zip(batch, outcomes, strict=True):
            if outcome.scored is not None:
                self._counts["tokens"] += outcome.scored.tokens
            item.document.take_outcome(outcome)

    async def _restart(self) -> None:
        """Replace a dead process; if that fails, try again ever more slowly."""
        pause = 0.5
        while self._queue.waiting or not self._stopping.is_set():
            self._counts["restarts"] += 1
            self._trouble = "The model is being loaded."
            try:
                await self.model.start()
            except Exception as error:
                # The cause may pass, such as a device that is still full.
                self._trouble = (
                    "The model's process died and could not be replaced; the log says why."
                )
                logger.error("The model's process could not be replaced: %s", error)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause)
                    self._queue.give_up()
                    return
                pause = min(LONGEST_PAUSE, 2 * pause)
            else:
                self._trouble = ""
                logger.warning("The model's process died and was replaced.")
                return
