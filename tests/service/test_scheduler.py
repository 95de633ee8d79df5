"""One queue before one model: batches over requests, fairness, deadlines, process deaths."""

import asyncio
import multiprocessing
import os
import random
import signal
import time
from functools import cache, partial
from types import SimpleNamespace

import pytest
from service_helpers import Numbers, in_thread, until

from rsrank_rag import Reranker
from rsrank_rag.errors import ArtifactError, RSRankError
from rsrank_rag.reading.parts import Reading
from rsrank_rag.reranker import Pair, score_in_parts
from rsrank_rag.service import model_process as worker
from rsrank_rag.service import scheduler as scheduler_module
from rsrank_rag.service.engine import Engine
from rsrank_rag.service.messages import Description, ServiceError
from rsrank_rag.service.model_process import ModelProcess
from rsrank_rag.service.scheduler import Scheduler


class Mortal(Reranker):
    """Ends its process at "die", and at "die once" if a file is there, which it removes."""

    def __init__(self, folder):
        self.flag, self.lost = folder / "flag", False

    def score(self, query, documents):
        for text in documents:
            if text == "die" or (text == "die once" and self.flag.exists()):
                self.flag.unlink(missing_ok=True)
                os._exit(9)
            if text in ("lost", "hang") and self.flag.exists():
                self.flag.unlink()
                self.lost = text == "lost"
                time.sleep(60 if text == "hang" else 0)
        if self.lost:
            # As CUDA does, whatever it runs from then on.
            raise RuntimeError("CUDA error: device-side assert triggered\nSearch for it.")
        return [float(len(text)) for text in documents]

    def explain(self, query, document):
        os._exit(9)


def refuse_to_load():
    raise ArtifactError("There is no such artifact.")


def load_once(folder, error=ArtifactError):
    """Loads the first time only."""
    try:
        (folder / "may load").unlink()
    except FileNotFoundError:
        raise error("The artifact is gone.") from None
    return Mortal(folder)


class running:
    """A started scheduler, stopped at the end."""

    def __init__(self, make, thread=False, **options):
        self.scheduler = (in_thread if thread else Scheduler)(make, "fake", **options)

    async def __aenter__(self):
        await self.scheduler.start()
        return self.scheduler

    async def __aexit__(self, *error):
        await self.scheduler.stop()


def numbers(reranker, **limits):
    return running(lambda: reranker, thread=True, **limits)


def pairs(*texts, query="q"):
    return [Pair(query, str(text)) for text in texts]


def scores(outcomes):
    return [outcome.scored and outcome.scored.score for outcome in outcomes]


async def test_scores_come_back_in_the_order_of_the_request_and_copies_run_once():
    reranker = Numbers()
    async with numbers(reranker) as scheduler:
        assert scores(await scheduler.score(pairs(3, 1, 2, 3, 1))) == [3, 1, 2, 3, 1]
        assert await scheduler.score([]) == []
        assert scheduler.stats()["documents"] == 5
    assert reranker.batches == [["3", "1", "2"]]


async def test_requests_that_wait_together_share_a_batch():
    reranker = Numbers()
    async with numbers(reranker) as scheduler:
        reranker.may_go_on.clear()
        first = asyncio.create_task(scheduler.score(pairs(-1)))
        await until(lambda: reranker.batches)
        calls = [scheduler.score(pairs(i, i + 0.5), client=str(i)) for i in range(10)]
        tasks = [asyncio.create_task(call) for call in calls]
        await until(lambda: scheduler.stats()["waiting_documents"] == 21)
        reranker.may_go_on.set()
        actual = await asyncio.gather(*tasks)
        assert [scores(outcomes) for outcomes in actual] == [[i, i + 0.5] for i in range(10)]
        await first
    assert [len(batch) for batch in reranker.batches] == [1, 20]


async def test_a_cancelled_request_leaves_the_queue_and_the_others_stay():
    reranker = Numbers()
    async with numbers(reranker) as scheduler:
        reranker.may_go_on.clear()
        first = asyncio.create_task(scheduler.score(pairs(0)))
        await until(lambda: reranker.batches)
        gone = asyncio.create_task(scheduler.score(pairs(1, 2)))
        stays = asyncio.create_task(scheduler.score(pairs(3)))
        await until(lambda: scheduler.stats()["waiting_documents"] == 4)
        gone.cancel()
        await until(lambda: scheduler.stats()["waiting_documents"] == 2)
        reranker.may_go_on.set()
        assert scores(await stays) == [3]
        await first
    assert reranker.batches == [["0"], ["3"]]


async def test_a_model_that_cannot_be_loaded_is_an_error_at_the_start_and_leaves_no_process():
    with pytest.raises(ArtifactError, match="no such artifact"):
        await Scheduler(refuse_to_load, "fake").start()
    await until(lambda: not multiprocessing.active_children())
    with pytest.raises(RSRankError, match=r"could not be loaded \(ZeroDivisionError"):
        await in_thread(lambda: 1 / 0).start()


async def test_nothing_is_taken_before_the_start_or_after_the_end():
    scheduler = in_thread(Numbers)
    with pytest.raises(ServiceError, match="starting or stopping"):
        await scheduler.score(pairs(1))
    await scheduler.start()
    await scheduler.stop()
    assert not scheduler.is_ready
    with pytest.raises(ServiceError, match="starting or stopping") as refused:
        await scheduler.score(pairs(1))
    assert (refused.value.status_code, refused.value.headers) == (503, {"Retry-After": "5"})


async def test_what_waits_is_finished_before_the_end():
    reranker = Numbers()
    async with numbers(reranker, batch_tokens=1) as scheduler:
        reranker.may_go_on.clear()
        task = asyncio.create_task(scheduler.score(pairs(*range(10))))
        await until(lambda: reranker.batches)
        stop = asyncio.create_task(scheduler.stop())
        await until(lambda: not scheduler.is_ready)
        reranker.may_go_on.set()
        await stop
        assert scores(await task) == list(range(10))


# The process


async def test_a_process_that_dies_is_replaced_and_no_request_is_lost(tmp_path):
    (tmp_path / "flag").touch()
    async with running(partial(Mortal, tmp_path)) as scheduler:
        first = scheduler.model.pid
        assert first != os.getpid()
        actual = await asyncio.gather(
            scheduler.score(pairs("a", "die once", "bb"), client="one"),
            scheduler.score(pairs("ccc"), client="two"),
        )
        assert [scores(outcomes) for outcomes in actual] == [[1, 8, 2], [3]]
        assert scheduler.stats()["restarts"] == 1
        assert scheduler.model.pid != first


async def test_a_process_killed_while_idle_is_missed_and_replaced(tmp_path):
    async with running(partial(Mortal, tmp_path)) as scheduler:
        scheduler.model._process.kill()
        await until(lambda: not scheduler.is_ready)
        await until(lambda: scheduler.is_ready)
        assert scheduler.stats()["restarts"] == 1
        assert scores(await scheduler.score(pairs("a"))) == [1]


@pytest.mark.slow
async def test_a_document_on_which_the_process_dies_each_time_fails_alone(tmp_path):
    async with running(partial(Mortal, tmp_path)) as scheduler:
        result = await scheduler.score(pairs("a", "bb", "die", "dddd"))
        assert scores(result) == [1, 2, None, 4]
        assert result[2].error == "lost the model's process, or failed in it, twice."
        (result,) = await scheduler.score(pairs("d"), work="explain")
        assert result.error == "lost the model's process, or failed in it, twice."


async def test_a_process_that_loses_its_device_says_so_and_is_replaced(tmp_path, caplog):
    (tmp_path / "flag").touch()
    async with running(partial(Mortal, tmp_path)) as scheduler:
        assert scores(await scheduler.score(pairs("a", "lost", "bb"))) == [1, 4, 2]
        assert scheduler.stats()["restarts"] == 1
    assert "The device is lost: CUDA error: device-side assert triggered" in caplog.messages


async def test_a_process_that_hangs_is_replaced(tmp_path, monkeypatch):
    (tmp_path / "flag").touch()
    async with running(partial(Mortal, tmp_path)) as scheduler:
        monkeypatch.setattr(worker, "HANG_SECONDS", 2.0)
        task = asyncio.create_task(scheduler.score(pairs("a", "hang")))
        await until(lambda: scheduler.stats()["restarts"])
        monkeypatch.setattr(worker, "HANG_SECONDS", 300.0)  # the second try may be slow
        assert scores(await task) == [1, 4]


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
async def test_a_process_that_stops_while_it_loads_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler_module, "PAUSE_SECONDS", 0.01)
    async with running(partial(Mortal, tmp_path)) as scheduler:
        launch = ModelProcess._launch

        def stopped_once(process, connection):
            monkeypatch.setattr(ModelProcess, "_launch", launch)
            made = launch(process, connection)
            os.kill(made.pid, signal.SIGSTOP)
            return made

        monkeypatch.setattr(ModelProcess, "_launch", stopped_once)
        monkeypatch.setattr(worker, "LOAD_SECONDS", 1.0)
        scheduler.model._process.kill()
        await until(lambda: scheduler.stats()["restarts"] > 1)
        monkeypatch.setattr(worker, "LOAD_SECONDS", 300.0)
        assert scores(await scheduler.score(pairs("a"))) == [1]


@pytest.mark.parametrize("error", [ArtifactError, OSError])
async def test_a_model_that_can_be_loaded_again_goes_on_with_what_waited(
    tmp_path, error, monkeypatch
):
    monkeypatch.setattr(scheduler_module, "PAUSE_SECONDS", 0.01)
    (tmp_path / "may load").touch()
    (tmp_path / "flag").touch()
    async with running(partial(load_once, tmp_path, error)) as scheduler:
        task = asyncio.create_task(scheduler.score(pairs("die once", "bb")))
        await until(lambda: scheduler.stats()["restarts"] > 1)
        assert not scheduler.is_ready
        (tmp_path / "may load").touch()
        assert scores(await asyncio.wait_for(task, 60)) == [8, 2]
        assert scheduler.is_ready


async def test_the_end_does_not_wait_for_what_nobody_waits_for(tmp_path):
    (tmp_path / "flag").touch()
    async with running(partial(Mortal, tmp_path)) as scheduler:
        task = asyncio.create_task(scheduler.score(pairs("hang")))  # for a minute
        await until(lambda: not (tmp_path / "flag").exists())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        started = time.monotonic()
    assert time.monotonic() - started < 50
    assert scheduler.stats()["restarts"] == 0


async def test_a_batch_is_scored_again_after_a_fault_of_the_services_own():
    async with numbers(Numbers()) as scheduler:

        async def fails_once(tasks):
            del scheduler.model.run
            raise ZeroDivisionError

        scheduler.model.run = fails_once
        assert scores(await scheduler.score(pairs(1, 2))) == [1, 2]


# One client against nine, in simulated time


class Simulated(asyncio.SelectorEventLoop):
    """An event loop whose time passes at once whenever nothing is left to do."""

    now = 0.0

    def time(self):
        return self.now

    def _run_once(self):
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0].when())
        super()._run_once()

    def run_in_executor(self, executor, function, *arguments):
        """Call the function at once: the time of a real thread would not be the loop's."""
        future = self.create_future()
        future.set_result(function(*arguments))
        return future


class Counted(Reranker):
    """Four characters are a token, and a document has at most 512 of them."""

    long_documents = "windows"

    def token_ends(self, document):
        return range(4, len(document) + 4, 4), 512

    def token_costs(self, pairs):
        return [5 + min(512, len(pair.document) // 4) + len(pair.query) // 4 for pair in pairs]

    def score(self, query, documents):
        return [1.0] * len(documents)


class Timed(SimpleNamespace):
    """In the place of the model's process. Its work takes the loop's time, which is simulated."""

    pid = 1
    speed = 10_000.0  # tokens a second
    cut_speed = 1_000_000.0  # characters a second
    overhead = 0.005  # seconds a batch

    async def start(self):
        return self.engine.describe()

    def kill(self):
        pass

    async def run(self, tasks):
        results = self.engine.run(tasks)
        scored = [task.pair for task in tasks if task.work == "score"]
        seconds = sum(self.seconds_to_cut(task) for task in tasks if task.work == "cut")
        seconds += sum(self.engine.reranker.token_costs(scored)) / self.speed + self.overhead
        self.longest = max(self.longest, seconds)
        await asyncio.sleep(seconds)
        return results, {}

    def seconds_to_cut(self, task):
        start, stop = task.section
        if task.pair.reading == Reading():
            # Of a document that is read whole, only the beginning is tokenised.
            stop = min(stop, 5000)
        return (stop - start) / self.cut_speed


async def polite_waits(attack=None, leaves=None, seconds=60.0):
    """Waits of nine clients that ask for 60% of the model's time, and its longest batch."""
    loop, waits = asyncio.get_running_loop(), []
    scheduler = Scheduler(Counted, "fake")
    scheduler.model = Timed(engine=Engine(Counted()), longest=0.0)
    await scheduler.start()

    async def ask(client):
        generator = random.Random(client)
        await asyncio.sleep(generator.random())
        while loop.time() < seconds:
            began = loop.time()
            texts = [str(n) + "x" * generator.choice([400, 800, 2000]) for n in range(5)]
            await scheduler.score(pairs(*texts), client=client)
            waits.append(loop.time() - began)
            await asyncio.sleep(generator.expovariate(1 / 1.8))

    async def besiege():
        while loop.time() < seconds:
            try:
                call = scheduler.score(attack, client="giant")
                await asyncio.wait_for(call, leaves or 60)
            except ServiceError:
                await asyncio.sleep(0.5)
            except asyncio.TimeoutError:
                pass

    sieges = [asyncio.create_task(besiege()) for _ in range(2)] if attack else []
    await asyncio.gather(*(ask(str(number)) for number in range(9)))
    for siege in sieges:
        siege.cancel()
    await asyncio.gather(*sieges, return_exceptions=True)
    longest = scheduler.model.longest
    await scheduler.stop()
    return sorted(waits), longest


def in_simulated_time(work):
    loop = Simulated()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


LETTERS = "It was a long day. " * 60_000
WINDOWS = Reading(long_documents="windows")
SENTENCES = Reading(extract="sentences")


def giant(characters, reading, count=1, query="q"):
    """One request with long documents."""
    return [Pair(query, str(n) + LETTERS[:characters], reading=reading) for n in range(count)]


ATTACKS = {
    "999,000 characters in windows": (giant(999_000, WINDOWS), None),
    "the same, left after three seconds, again and again": (giant(999_000, WINDOWS), 3.0),
    "the same, left at once, again and again": (giant(999_000, WINDOWS), 0.05),
    "500,000 characters in sentences": (giant(500_000, SENTENCES), None),
    "five documents of 130,000 characters in windows": (giant(130_000, WINDOWS, 5), None),
    "a thousand documents of 500 characters": (giant(500, Reading(), 1000), None),
    "documents of the largest cost": (giant(2048, Reading(), 200, "q" * 8000), None),
    "documents that are read at their beginning only": (giant(900_000, Reading(), 10), None),
}


@cache
def calm_waits():
    return in_simulated_time(polite_waits())[0]


@pytest.mark.parametrize("name", ATTACKS)
def test_one_clients_giant_requests_hardly_delay_nine_polite_clients(name):
    pytest.importorskip("sentencex")
    calm = calm_waits()
    waits, longest = in_simulated_time(polite_waits(*ATTACKS[name]))
    assert waits[int(0.99 * len(waits))] <= 2 * calm[int(0.99 * len(calm))]
    assert longest < 1.0


async def answer_to_giant():
    scheduler = Scheduler(Counted, "fake")
    scheduler.model = Timed(engine=Engine(Counted()), longest=0.0)
    await scheduler.start()
    actual = await scheduler.score(giant(100_000, WINDOWS) + giant(50_000, SENTENCES))
    await scheduler.stop()
    return actual


def test_a_document_read_in_parts_is_read_as_in_python():
    pytest.importorskip("sentencex")
    actual = in_simulated_time(answer_to_giant())
    model = Counted()
    documents = giant(100_000, WINDOWS) + giant(50_000, SENTENCES)
    for outcome, pair in zip(actual, documents, strict=True):
        assert outcome.scored == score_in_parts([pair], model.token_ends, model.score_pairs)[0]
    assert actual[0].scored.window.count > 40
    assert Engine(Counted()).describe() == Description(Counted().native_rule, 512, "windows")
