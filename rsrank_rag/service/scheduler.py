"""One queue before one model: cancels late work, and replaces the model's process if it dies.

If the process dies, another one takes its place and the batch's items run again, each alone. An
item that kills the process twice is answered with an error.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ..errors import RSRankError
from ..reranker import Pair, Reranker
from .messages import Description, Outcome, ServiceError, unavailable
from .model_process import ModelProcess, ProcessLostError
from .work_queue import QueueItem, QueueLimits, WorkQueue

logger = logging.getLogger(__name__)

# Seconds without work after which the model's process is asked for a sign of life.
IDLE_SECONDS = 1.0

# Seconds before a model that could not be loaded is tried again.
PAUSE_SECONDS = 5.0


class Scheduler:
    """Scores pairs for many clients at once, with one model in one process.

    Args:
        make: Loads the model; ``make`` and the model's results must be picklable.
        name: What the model is called.
        limits: Of the queue.
        prepare: Called in the model's process before all else, such as to set up its logs.
    """

    def __init__(
        self,
        make: Callable[[], Reranker],
        name: str,
        *,
        limits: QueueLimits = QueueLimits(),  # noqa: B008 - it is frozen
        prepare: Callable[[], object] | None = None,
    ) -> None:
        self.name = name
        self.model = ModelProcess(make, name, prepare)
        # Set by the server at SIGTERM. Requests in flight are answered, and /ready is 503.
        self.is_ending = False
        self._stopping = False
        self._description: Description | None = None
        self._trouble = "The service has not been started."
        self._queue = WorkQueue(limits)
        self._work = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._counts = Counter[str]()
        self._model_stats: Mapping[str, int] = {}

    @property
    def description(self) -> Description:
        """The model that is served; raises ServiceError if nothing is loaded yet."""
        if self._description is None:
            raise unavailable(f"{self.name} is not loaded. {self._trouble}")
        return self._description

    def readiness(self) -> str | None:
        """None if requests are answered; else the reason."""
        return "The service is stopping." if self.is_ending else self._trouble or None

    def stats(self) -> Counter[str]:
        """The scheduler's and the reranker's numbers, by name; `metrics` describes each of them."""
        waiting = sum(len(request.outcomes) for request in self._queue.requests)
        return Counter({**self._counts, **self._model_stats, "waiting": waiting})

    async def start(self) -> None:
        """Load the model; returns when it can score, or raises what loading raises."""
        self._trouble = "The model is being loaded."
        await self._load()
        self._runner = asyncio.create_task(self._run())

    async def _load(self) -> None:
        self._description = await self.model.start()
        self._trouble = ""

    async def stop(self) -> None:
        """Finish what is there, and end the model's process."""
        self.is_ending = self._stopping = True
        self._work.set()
        if self._runner is not None and self._queue.requests:
            await asyncio.wait([self._runner])
        self.abort()

    def abort(self) -> None:
        """End the model's process, whatever it is doing, and load no other one."""
        self.is_ending = self._stopping = True
        if self._runner is not None:
            self._runner.cancel()
        self.model.kill()

    async def score(
        self,
        pairs: Sequence[Pair],
        *,
        client: str = "",
        timeout: float | None = None,
        explain: bool = False,
    ) -> list[Outcome]:
        """One outcome for each pair, in input order. Cancelling the call cancels the work.

        Clients share the model's time equally. Equal pairs are scored once.

        Args:
            pairs: What to score.
            client: Who asks.
            timeout: Seconds after which to give up; None for never.
            explain: Take the scores apart, too. Documents are then read whole.

        Raises:
            ServiceError: Too much waits, or the pairs are too many (`WorkQueue.add`); time was up
                (status 504); or the service is stopping or without a model (503).
        """
        if self._runner is None or self._stopping:
            raise unavailable(f"No requests are taken. {self.readiness()}")
        if not pairs:
            return []
        try:
            request = self._queue.add(client, pairs, self.description.max_tokens, explain)
        except ServiceError:
            self._counts["refused_requests"] += 1
            raise
        self._work.set()
        try:
            await asyncio.wait([request.answer], timeout=timeout)
            if not request.answer.done():
                self._counts["late_requests"] += 1
                text = f"There was no answer in {timeout:.4g} seconds; the work has been cancelled."
                raise ServiceError(504, text)
            request.answer.result()
        finally:
            if not request.answer.done():
                self._counts["cancelled_documents"] += len(pairs)
            self._queue.remove(request)
        # In a thread, because a document may have thousands of sentences.
        outcomes = await asyncio.to_thread(
            lambda: {pair: request.outcome(pair) for pair in request.outcomes}
        )
        for pair in pairs:
            scored = outcomes[pair].scored
            self._counts["documents"] += 1
            self._counts["failed_documents"] += scored is None
            self._counts["truncated_documents"] += bool(scored and scored.truncated)
        return [outcomes[pair] for pair in pairs]

    async def _run(self) -> None:
        """Run batches until the end. No error ends the loop, because all requests depend on it."""
        while self._queue.requests or not self._stopping:
            batch: list[QueueItem] = []
            try:
                if self.model.pid is None:
                    self._counts["restarts"] += 1
                    await self._load()
                    logger.warning("The model's process died and was replaced.")
                batch = self._queue.next_batch()
                if batch or await self._is_idle():
                    await self._run_batch(batch)
            except ProcessLostError:
                self._trouble = "The model's process has died and is being replaced."
                self._queue.put_back(batch)
            except Exception as error:
                # Only our own messages are logged: others may quote a document.
                reason = error if isinstance(error, RSRankError) else type(error).__name__
                logger.exception("A batch or a load failed: %s", reason)
                lost = Outcome(None, fault="internal", error="was lost.")
                self._queue.finish(batch, [lost] * len(batch))
                if self.model.pid is None:
                    await self._pause()

    async def _run_batch(self, batch: Sequence[QueueItem]) -> None:
        results, self._model_stats = await self.model.run([item.task for item in batch])
        self._queue.finish(batch, results)
        for result in results:
            if isinstance(result, Outcome) and result.scored is not None:
                self._counts["tokens"] += result.scored.tokens

    async def _is_idle(self) -> bool:
        """Wait for work. After some time without work, the process must give a sign of life."""
        self._work.clear()
        try:
            await asyncio.wait_for(self._work.wait(), IDLE_SECONDS)
        except asyncio.TimeoutError:
            return True
        return False

    async def _pause(self) -> None:
        """Wait before the next load. The cause may pass, such as a device that is still full."""
        self._trouble = "The model's process died and could not be replaced; the log says why."
        if self._stopping:
            self._queue.give_up(unavailable(self._trouble))
        await asyncio.sleep(PAUSE_SECONDS)
