"""One queue before one model: cancels late work, and replaces the model's process if it dies.

If the process dies, another one takes its place and the batch's items run again, each alone. An
item that kills the process twice is answered with an error.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from ..reranker import Pair, Reranker
from .messages import Description, Outcome, Work, unavailable
from .model_process import ModelProcess
from .work_queue import WorkQueue

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
        queue_tokens: Tokens of all requests without an answer. One client may have half of them.
        batch_tokens: Tokens that the model scores at a time.
    """

    def __init__(
        self,
        make: Callable[[], Reranker],
        name: str,
        queue_tokens: int = 800_000,
        batch_tokens: int = 1_024,
    ) -> None:
        self.name = name
        self.model = ModelProcess(make)
        # What is loaded; set by `start`.
        self.description: Description
        # Set by the server at SIGTERM. Requests in flight are answered, and /ready is 503.
        self.is_ending = False
        self._is_loaded = False
        self._queue = WorkQueue(queue_tokens, batch_tokens)
        self._work = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._counts = Counter[str]()
        self._model_stats: dict[str, int] = {}

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered."""
        return self._is_loaded and not self.is_ending

    def stats(self) -> Counter[str]:
        """The scheduler's and the reranker's numbers, by name; `metrics` describes each of them."""
        stats = Counter({f"prefix_{name}": n for name, n in self._model_stats.items()})
        stats["ready"] = int(self.is_ready)
        stats["waiting_documents"] = sum(len(one.outcomes) for one in self._queue.requests)
        return stats + self._counts

    async def start(self) -> None:
        """Load the model; returns when it can score.

        Raises:
            RSRankError: The model cannot be loaded.
        """
        await self._load()
        self._runner = asyncio.create_task(self._run())

    async def _load(self) -> None:
        self.description = await self.model.start()
        self._is_loaded = True

    async def stop(self) -> None:
        """Finish what is there, and end the model's process."""
        self.is_ending = True
        while self._queue.requests:
            await asyncio.sleep(0.05)
        self.abort()

    def abort(self) -> None:
        """End the model's process, whatever it is doing, and load no other one."""
        self.is_ending = True
        if self._runner is not None:
            self._runner.cancel()
            self._runner = None
        self.model.kill()

    async def score(
        self, pairs: Sequence[Pair], client: str = "", work: Work = "score"
    ) -> list[Outcome]:
        """One outcome for each pair, in input order. Cancelling the call cancels the work.

        Clients share the model's time equally. Equal pairs are scored once.

        Args:
            pairs: What to score.
            client: Who waits for the scores.
            work: Whether the scores are taken apart, too.

        Raises:
            ServiceError: Too much waits, or the pairs are too many (`WorkQueue.add`); or the
                service is stopping or has not been started (status 503).
        """
        if self._runner is None:
            raise unavailable()
        if not pairs:
            return []
        request = self._queue.add(client, pairs, self.description.max_tokens, work)
        self._work.set()
        try:
            await request.answer
        finally:
            self._queue.remove(request)
        self._counts["documents"] += len(pairs)
        # In a thread, because a document may have thousands of sentences.
        return await asyncio.to_thread(lambda: [request.outcome(pair) for pair in pairs])

    async def _run(self) -> None:
        """Run batches until the end. No error ends the loop, because all requests depend on it."""
        while True:
            if self.model.pid is None:
                await self._replace_model()
                continue
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._work.wait(), IDLE_SECONDS)
            # An empty batch asks for a sign of life.
            batch = self._queue.next_batch()
            if not batch:
                self._work.clear()
            try:
                results, self._model_stats = await self.model.run([item.task for item in batch])
            except Exception as error:
                logger.error(error)
                self._queue.put_back(batch)
                continue
            self._queue.finish(batch, results)
            for result in results:
                if isinstance(result, Outcome) and result.scored is not None:
                    self._counts["tokens"] += result.scored.tokens

    async def _replace_model(self) -> None:
        self._is_loaded = False
        self._counts["restarts"] += 1
        try:
            await self._load()
        except Exception as error:
            logger.error("The model's process could not be replaced: %s", error)
            # The cause may pass, such as a device that is still full.
            await asyncio.sleep(PAUSE_SECONDS)
