"""One queue before one model: pairs of all requests that wait share its batches, and clients share its time.

The model scores one batch after another in a process of its own. Between two batches whatever has come meanwhile joins,
and whatever was cancelled leaves. If the process dies, another takes its place and its batch is scored again; a pair on
which it dies each time is found by halving and answered alone.
"""

import asyncio
import contextlib
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import RSRankError
from ..passages.explanation import Explanation
from ..reranker import Pair, Reranker
from .backend import DeadlineError, Description, Outcome, OverloadedError, UnavailableError
from .engine import Canary, Step
from .worker import ModelProcess

logger = logging.getLogger(__name__)

CHARACTERS_A_TOKEN = 4  # to plan with, before anybody has counted
OVERHEAD = 16  # tokens that a pair costs beside its texts, to plan with
MARGIN = 0.8  # of a request's time: what the work before it and its own may take, which is no more than an estimate

OVERDUE = 10.0
"""Seconds after which the model is stopped in what nobody waits for, beyond what that and a new load were to take."""

COUNTED = (
    "pairs",
    "tokens",
    "truncated",
    "unscored",
    "failed",
    "cancelled",
    "refused",
    "late",
    "steps",
    "restarts",
)


@dataclass(frozen=True)
class QueueLimits:
    """How much may wait, and how much is scored at once."""

    pairs: int = 10_000  # that may wait; a request beyond is refused with `OverloadedError`
    step_seconds: float = (
        0.2  # what a batch should take: roughly the longest that a new request waits for its turn
    )
    least_tokens: int = (
        2048  # a batch may hold so many (estimated) tokens however slow the model is
    )
    longest_step: float = 300.0  # seconds after which the process is taken for hung and replaced


@dataclass(eq=False)
class _Item:
    """One pair of a request, to be scored with others (``step``) or taken apart by itself (``explain``)."""

    method: Literal["step", "explain"]
    pair: Pair
    tokens: int
    done: asyncio.Future[Any]
    came: float  # on the loop's clock


@dataclass(eq=False)
class _Client:
    """A client's pairs, first come first served, and the tokens it has had, on a clock that all clients share."""

    served: float
    waiting: deque[_Item] = field(default_factory=deque)
    tokens: int = 0  # of what waits


class Scheduler:
    """Scores pairs for many clients at once, with one model in one process.

    Args:
        make: Loads the model; it and what it gives must be picklable by reference.
        name: What the model is called.
        limits: Of what may wait.
        canary: Scored after each load; None for none.
        prepare: Called in the model's own process before all else, such as to set up its logs.
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
        self.name, self.limits = name, limits or QueueLimits()
        self.model = ModelProcess((make, name, canary), self.limits.longest_step, prepare)
        self._trouble = "It has not been started."
        self._stopping = self._leaving = False
        self._clients: dict[str, _Client] = {}  # that wait, or have had more than others who do
        self._suspects: deque[list[_Item]] = deque()
        self._in_hand: list[_Item] = []  # what the model is scoring
        self._in_hand_until: float | None = None  # when that should be done; None if nothing is
        self.observe_wait: Callable[[float], object] = lambda seconds: (
            None
        )  # called with each pair's time in the queue
        self._clock = 0.0
        self._rate = self.limits.least_tokens / self.limits.step_seconds
        self._work, self._ending = asyncio.Event(), asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._counts: dict[str, float] = dict.fromkeys((*COUNTED, "busy_seconds"), 0)
        self._model_stats: Mapping[str, float] = {}

    @property
    def description(self) -> Description:
        """What is being served; raises UnavailableError if nothing is loaded yet."""
        if self.model.loaded is None:
            raise UnavailableError(f"{self.name} is not loaded. {self._trouble}", retry_after=1.0)
        return self.model.loaded.description

    def readiness(self) -> str | None:
        """None if requests are answered and the last canary scored as it should; else what is the matter."""
        if self._stopping or self._leaving:
            return "The service is stopping."
        if self._runner is not None and self._runner.done():
            return "The queue has ended; only a new start of the service helps."
        if self.model.hangs:
            return "The model does not answer."
        if not self._trouble and self._runner is not None and self.model.is_gone():
            self._work.set()  # nobody else would look before the next request
            return "The model's process is gone; it is being replaced."
        return self._trouble or (None if self.model.loaded is None else self.model.loaded.complaint)

    def stats(self) -> dict[str, float]:
        """Counters and levels, as `metrics` describes them; the reranker's own, since it was loaded, are model_*."""
        return {
            **self._counts,
            "waiting": self._waiting,
            "clients": len(self._askers),
            "tokens_per_second": self._rate,
            **{f"model_{name}": value for name, value in self._model_stats.items()},
        }

    @property
    def _askers(self) -> dict[str, _Client]:
        """Clients with something in the queue."""
        return {name: client for name, client in self._clients.items() if client.waiting}

    @property
    def _waiting(self) -> int:
        return sum(len(client.waiting) for client in self._clients.values())

    @property
    def _waiting_tokens(self) -> int:
        return sum(client.tokens for client in self._clients.values())

    async def start(self) -> None:
        """Load the model and check it; returns when it can score, or raises what loading raises."""
        self._trouble = "The model is being loaded."
        try:
            await self.model.start()
        except BaseException:
            self.model.end(wait=False)
            raise
        self._trouble = ""
        if self.readiness() is not None:
            logger.warning("%s", self.readiness())
        self._runner = asyncio.create_task(self._supervised())

    def end_soon(self) -> None:
        """Say from now on that the service is not ready; requests are still taken, until `stop`."""
        self._leaving = True

    async def stop(self) -> None:
        """Take no more work, finish what is there, and let the model go."""
        self._stopping = True
        if self._runner is not None:
            self._work.set()
            self._ending.set()
            if self._in_hand and self._is_abandoned():
                self.model.kill()
            await asyncio.wait([self._runner])
            self._runner = None
        await asyncio.to_thread(self.model.end)

    def _is_abandoned(self) -> bool:
        """Whether nobody waits for what the model is doing, nor for anything else."""
        return not self._waiting and all(item.done.done() for item in self._in_hand)

    async def score(
        self, pairs: Sequence[Pair], *, client: str = "", timeout: float | None = None
    ) -> list[Outcome]:
        """One outcome for each pair of any queries, in input order; cancelling the call cancels the work.

        Clients share the model's time equally. ``timeout`` is the number of seconds after which to give up.

        Raises:
            OverloadedError: The queue is full, or so long that time would be up before the answer.
            DeadlineError: Time was up.
            UnavailableError: The service is stopping.
        """
        return await self._answered("step", pairs, client, timeout) if pairs else []

    async def explain(
        self, pair: Pair, *, client: str = "", timeout: float | None = None
    ) -> Explanation:
        """Take one score apart; errors as of `score` or of the model, InputError where that cannot be done."""
        found: list[Explanation] = await self._answered("explain", [pair], client, timeout)
        return found[0]

    async def _answered(
        self,
        method: Literal["step", "explain"],
        pairs: Sequence[Pair],
        client: str,
        timeout: float | None,
    ) -> list[Any]:
        """Put pairs into the queue and wait for what becomes of each; giving up takes them out again."""
        loop = asyncio.get_running_loop()
        items = [
            _Item(method, pair, _estimate(pair), loop.create_future(), loop.time())
            for pair in pairs
        ]
        self._admit(items, client, timeout)
        mine = self._clients.setdefault(client, _Client(self._clock))
        mine.waiting.extend(items)
        mine.tokens += sum(item.tokens for item in items)
        self._work.set()
        together = asyncio.gather(*(item.done for item in items))
        together.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # else Python 3.11 logs an error
        try:
            return await asyncio.wait_for(together, timeout)
        except asyncio.TimeoutError:
            self._counts["late"] += 1
            raise DeadlineError(
                f"There was no answer in {timeout:.4g} seconds; the work has been cancelled."
            ) from None
        finally:
            if any(item.done.cancelled() for item in items):
                self._withdraw(mine)

    def _admit(self, items: Sequence[_Item], client: str, timeout: float | None) -> None:
        """Let a request in, or refuse it: no more work is taken, the queue is full, or there is no time for it."""
        if self._runner is None or self._runner.done() or self._stopping:
            raise UnavailableError(f"No requests are taken. {self.readiness()}", retry_after=5.0)
        waiting = self._waiting
        if not waiting and self._in_hand_until is None:
            return  # however long it seems to take: without a try nobody would learn that it takes less
        late, why = self._waiting_tokens / self._rate, f"{len(items):,} more"
        if not waiting or waiting + len(items) <= self.limits.pairs:
            if timeout is None:
                return
            late = self._seconds(client, sum(item.tokens for item in items)) - MARGIN * timeout
            if late <= 0:
                return
            why = f"an answer in {timeout:.4g} seconds"
        self._counts["refused"] += 1
        text = f"{waiting + len(self._in_hand):,} documents are waiting or being scored, too many for {why}."
        raise OverloadedError(f"{text} Try again later.", retry_after=max(1.0, math.ceil(late)))

    def _seconds(self, client: str, tokens: int) -> float:
        """How long it should take until so many more tokens of a client are scored, beside all others that wait."""
        askers = self._askers
        mine, clients = (
            tokens + (askers[client].tokens if client in askers else 0),
            len({*askers, client}),
        )
        # Others come meanwhile, and double what waits or get as much as this one; the last batch ends for all in it.
        ahead = min(mine * clients, 2 * (self._waiting_tokens + tokens)) + self._room()
        # What should be done by now and is not may take as long again.
        rest = (
            0.0
            if self._in_hand_until is None
            else abs(self._in_hand_until - asyncio.get_running_loop().time())
        )
        return rest + ahead / self._rate

    def _withdraw(self, client: _Client) -> None:
        """Take what nobody waits for any more out of the queue."""
        before = len(client.waiting)
        client.waiting = deque(item for item in client.waiting if not item.done.done())
        client.tokens = sum(item.tokens for item in client.waiting)
        self._counts["cancelled"] += before - len(client.waiting)
        self._tidy()
        if self._in_hand_until is not None and all(item.done.done() for item in self._in_hand):
            late = self._in_hand_until + self.model.load_seconds + OVERDUE
            asyncio.get_running_loop().call_at(late, self._end_abandoned, self._in_hand)

    def _end_abandoned(self, batch: list[_Item]) -> None:
        """End the model's process if it is still at a batch that nobody waits for any more."""
        if self._in_hand is batch and self._in_hand_until is not None and not self._trouble:
            self.model.kill()

    def _tidy(self) -> None:
        """Forget who waits for nothing. What they have had counts for as long as others who wait have had less."""
        busy = self._waiting > 0
        self._clients = {
            n: c for n, c in self._clients.items() if c.waiting or (busy and c.served > self._clock)
        }

    # The loop

    async def _supervised(self) -> None:
        """The loop, which goes on whatever happens in it: every request waits for it."""
        while True:
            try:
                return await self._run()
            except Exception as error:
                logger.exception("The queue failed and goes on.")
                self._settle(self._in_hand, [_failure(item, error) for item in self._in_hand])
            except BaseException:  # cancelled, with the loop that it runs in
                self._trouble = "The queue was cancelled."
                self._give_up()
                raise

    async def _run(self) -> None:
        while True:
            self._work.clear()
            if self._suspects:
                await self._process(self._suspects.popleft(), suspect=True)
            elif batch := self._next_batch():
                await self._process(batch)
            elif self._stopping:
                return
            elif self.model.is_gone():
                await self._restart()
            else:
                await self._work.wait()

    def _room(self) -> int:
        """Tokens that a batch may have."""
        return max(self.limits.least_tokens, int(self._rate * self.limits.step_seconds))

    def _next_batch(self) -> list[_Item]:
        """What is scored next: pairs of whichever client has had the least, until the batch takes long enough."""
        room, batch = self._room(), list[_Item]()
        while askers := self._askers.values():
            mine = min(askers, key=lambda client: client.served)
            if batch and (
                mine.waiting[0].tokens > room
                or "explain" in (mine.waiting[0].method, batch[0].method)
            ):
                break
            item = mine.waiting.popleft()
            batch.append(item)
            room -= item.tokens
            mine.tokens -= item.tokens
            self._clock = mine.served
            mine.served += item.tokens
        self._tidy()
        return batch

    async def _process(self, batch: list[_Item], *, suspect: bool = False) -> None:
        batch = [item for item in batch if not item.done.done()]
        if not batch:
            return
        tokens, started = sum(item.tokens for item in batch), asyncio.get_running_loop().time()
        self._in_hand, self._in_hand_until = batch, started + tokens / self._rate
        for item in batch:
            self.observe_wait(started - item.came)
        try:
            if batch[0].method == "explain":
                results: list[Any] = [await self.model.call("explain", batch[0].pair)]
            else:
                step: Step = await self.model.call("step", [item.pair for item in batch])
                self._learn(step, tokens)
                results = step.outcomes
        except BrokenProcessPool:
            self._suspect(batch, suspect)
            if not (self._stopping and self._is_abandoned()):
                await self._restart()
            return
        except RSRankError as error:
            results = [_failure(item, error) for item in batch]
        finally:
            self._in_hand_until = None
        self._settle(batch, results)
        self._in_hand = []

    def _learn(self, step: Step, tokens: int) -> None:
        """Take in what a batch of so many (estimated) tokens tells about the model."""
        self._counts["steps"] += 1
        self._counts["busy_seconds"] += step.seconds
        self._model_stats = step.stats
        speed, small = tokens / max(step.seconds, 1e-6), tokens < self.limits.least_tokens / 2
        # Small batches say little about how fast a full one would be: quick ones only make up, as far as the rate that
        # was assumed at first, for one that took too long, which must not be repeated.
        enough = min(speed, self.limits.least_tokens / self.limits.step_seconds)
        if small and step.seconds <= self.limits.step_seconds and self._rate >= enough:
            return
        weight = min(1.0, 0.3 * step.seconds / self.limits.step_seconds)
        self._rate += weight * (speed - self._rate)

    def _suspect(self, batch: list[_Item], again: bool) -> None:
        """The process died on a batch: try it once more, for it may have died of something else; then in halves."""
        if not again:
            self._suspects.appendleft(batch)
        elif len(batch) == 1:
            self._settle(
                batch, [_failure(batch[0], RSRankError("ended the model's process, twice."))]
            )
        else:
            middle = len(batch) // 2
            self._suspects.extendleft([batch[middle:], batch[:middle]])

    def _settle(
        self, batch: list[_Item], results: Sequence[Outcome | Explanation | Exception]
    ) -> None:
        for item, result in zip(batch, results, strict=True):
            if isinstance(result, Outcome):
                self._counts["pairs"] += 1
                self._counts["tokens"] += result.tokens
                self._counts["truncated"] += result.truncated
                self._counts["unscored"] += result.fault == "unscored"
                self._counts["failed"] += result.fault in ("input", "internal")
            if item.done.done():
                continue
            if isinstance(result, Exception):
                item.done.set_exception(result)
            else:
                item.done.set_result(result)

    async def _restart(self) -> None:
        """Put a new process in the place of a dead one; while that fails, try again ever more slowly."""
        self._in_hand_until = asyncio.get_running_loop().time() + self.model.load_seconds
        for attempt in itertools.count():
            self._counts["restarts"] += 1
            self._trouble = "The model is being loaded."
            try:
                await self.model.start()
            except (
                RSRankError
            ) as error:  # whatever loading meets, such as a device that is still full: it may pass
                self._trouble = (
                    "The model's process died and could not be replaced; the log says why."
                )
                logger.error("The model's process could not be replaced: %s", error)
                if self._stopping:
                    self._give_up()
                    return
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(
                        self._ending.wait(), min(30.0, 0.5 * 2 ** min(attempt, 6))
                    )
            else:
                self._trouble, self._in_hand_until = "", None
                logger.warning("The model's process died and was replaced.")
                return

    def _give_up(self) -> None:
        """Answer all that waits: there is no model and will be none."""
        waiting = (client.waiting for client in self._clients.values())
        for item in itertools.chain(self._in_hand, *self._suspects, *waiting):
            if not item.done.done():
                item.done.set_exception(UnavailableError(self._trouble))
        self._suspects.clear()
        self._clients.clear()


def _estimate(pair: Pair) -> int:
    return (len(pair.query) + len(pair.document)) // CHARACTERS_A_TOKEN + OVERHEAD


def _failure(item: _Item, error: Exception) -> Exception | Outcome:
    """An error is the whole answer to whoever wants an explanation, and that of one document to others."""
    told = error if isinstance(error, RSRankError) else RSRankError("The service failed.")
    return told if item.method == "explain" else Outcome(None, fault="internal", error=str(told))
