"""The service's queue: batches over requests, fairness, deadlines, faults, process deaths."""

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from service_helpers import in_thread

from rsrank_rag import Reranker
from rsrank_rag.errors import ArtifactError, InputError, RSRankError, ScoringError
from rsrank_rag.passages.explanation import Explanation
from rsrank_rag.passages.parts import WHOLE, Reading
from rsrank_rag.reranker import Pair, Scored, score_in_parts
from rsrank_rag.service import scheduler as scheduler_module
from rsrank_rag.service import worker
from rsrank_rag.service.backend import DeadlineError, OverloadedError, UnavailableError
from rsrank_rag.service.engine import Canary, Engine
from rsrank_rag.service.fair_queue import FairQueue, QueueLimits
from rsrank_rag.service.scheduler import Scheduler
from rsrank_rag.service.worker import ModelProcess


class Clock:
    """The time that a call takes, which passes only where a model says so."""

    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(worker, "time", found)
    return found


class Numbers(Reranker):
    """Scores "3.5" as 3.5; remembers its batches."""

    def __init__(self, seconds=0.0, clock=None):
        self.seconds, self.clock, self.batches, self.began = seconds, clock, [], 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def score_pairs(self, pairs):
        self.began += 1
        self.may_go_on.wait(120)  # a test that fails must end
        self.batches.append([pair.document for pair in pairs])
        self.spend(self.seconds)
        return super().score_pairs(pairs)

    def spend(self, seconds):
        if self.clock is None:
            time.sleep(seconds)
        else:
            self.clock.now += seconds

    def score(self, query, documents):
        for index, text in enumerate(documents):
            if text == "no score":
                raise ScoringError("has no score.", index)
            if text == "broken":
                raise ZeroDivisionError
        if query == "refused":
            raise InputError("The query is refused.")
        return [float(text) for text in documents]


class Mortal(Reranker):
    """Kills its process at "die", and at "die once" if a file is there, which it removes."""

    def __init__(self, folder):
        self.folder, self.lost = folder, False

    def score(self, query, documents):
        flag = self.folder / "flag"
        for text in documents:
            if text == "die" or (text == "die once" and flag.exists()):
                flag.unlink(missing_ok=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if (
                text == "lost" and flag.exists()
            ):  # as CUDA does, in whatever is asked of it from then on
                flag.unlink()
                self.lost = True
        if self.lost:
            raise RuntimeError("CUDA error: device-side assert triggered\nSearch for it.")
        for text in documents:
            if text == "hang" and flag.exists():
                flag.unlink()
                time.sleep(60)
        return [float(len(text)) for text in documents]

    def explain(self, query, document, max_tokens=None):
        if document == "broken":
            raise ZeroDivisionError
        os.kill(os.getpid(), signal.SIGKILL)


class Miscounting(Numbers):
    """Counts nothing, and says so in an odd way."""

    def stats(self):
        return None


def refuse_to_load():
    raise ArtifactError("There is no such artifact.")


def load_once(folder):
    """Loads the first time only."""
    try:
        (folder / "may load").unlink()
    except FileNotFoundError:
        raise ArtifactError("The artifact is gone.") from None
    return Mortal(folder)


def load_on_a_free_device(folder):
    """As `load_once`, with an error that is none of ours."""
    try:
        (folder / "may load").unlink()
    except FileNotFoundError:
        raise RuntimeError("CUDA out of memory.") from None
    return Mortal(folder)


class running:
    """A started scheduler, stopped at the end."""

    def __init__(self, make, thread=False, **options):
        self.scheduler = (in_thread if thread else Scheduler)(
            make, "fake", **{"canary": None, **options}
        )

    async def __aenter__(self):
        await self.scheduler.start()
        return self.scheduler

    async def __aexit__(self, *error):
        await self.scheduler.stop()


class WithoutCredit(FairQueue):
    """A queue in which no client is ahead of another."""

    credit = property(lambda self: 0.0, lambda self, credit: None)


def numbers(reranker, batch_tokens=None, **limits):
    """A scheduler of a reranker; ``batch_tokens`` fixes the size of batches, without credit."""
    started = running(lambda: reranker, thread=True, limits=QueueLimits(**limits))
    if batch_tokens is not None:
        started.scheduler.__class__ = type("Fixed", (Scheduler,), {"_batch_tokens": batch_tokens})
        started.scheduler._queue = WithoutCredit()
    return started


def pairs(*texts, query="q"):
    return [Pair(query, str(text)) for text in texts]


async def explained(scheduler, document, query="q"):
    """The outcome of a document whose score is to be taken apart."""
    found = await scheduler.score(pairs(document, query=query), explain=True, timeout=60)
    return found[0]


def scores(outcomes):
    return [outcome.score for outcome in outcomes]


async def until(condition):
    ends = time.monotonic() + 120  # far beyond what a loaded machine takes to start a process
    while not condition():
        assert time.monotonic() < ends, "it never came true"
        await asyncio.sleep(0.005)


async def test_scores_come_back_in_the_order_of_the_request():
    async with numbers(Numbers()) as scheduler:
        assert scores(await scheduler.score(pairs(3, 1, 2))) == [3, 1, 2]
        assert await scheduler.score([]) == []
        assert scheduler.stats()["documents"] == 3


async def test_requests_that_wait_together_share_a_batch():
    reranker = Numbers()
    async with numbers(reranker) as scheduler:
        reranker.may_go_on.clear()
        first = asyncio.create_task(scheduler.score(pairs(-1)))
        await until(lambda: reranker.began)
        tasks = [
            asyncio.create_task(scheduler.score(pairs(i, i + 0.5), client=str(i)))
            for i in range(10)
        ]
        await until(lambda: scheduler.stats()["waiting"] == 21)
        reranker.may_go_on.set()
        assert [scores(found) for found in await asyncio.gather(*tasks)] == [
            [i, i + 0.5] for i in range(10)
        ]
        await first
    assert [len(batch) for batch in reranker.batches] == [
        1,
        20,
    ]  # what was there first, then all that came meanwhile


async def test_a_batch_holds_no_more_than_its_tokens():
    reranker = Numbers()
    async with numbers(reranker, batch_tokens=3) as scheduler:
        await scheduler.score(pairs(*range(8)))
    assert [len(batch) for batch in reranker.batches] == [3, 3, 2]


async def test_a_document_larger_than_a_batch_runs_by_itself():
    reranker = Numbers()
    async with numbers(reranker, batch_tokens=50) as scheduler:
        assert scores(await scheduler.score(pairs("1" + " " * 4000, 2))) == [1, 2]
    assert [len(batch) for batch in reranker.batches] == [1, 1]


async def test_batches_grow_until_they_take_as_long_as_they_may(clock):
    reranker = Numbers(seconds=0.002, clock=clock)
    async with numbers(reranker, batch_seconds=0.02) as scheduler:
        await scheduler.score(pairs(*range(5000)))
    sizes = [len(batch) for batch in reranker.batches]
    assert max(sizes) > 10 * sizes[0]


async def test_batches_do_not_shrink_if_each_takes_long_whatever_its_size(clock):
    reranker = Numbers(seconds=0.05, clock=clock)
    async with numbers(reranker, batch_seconds=0.02) as scheduler:
        await scheduler.score(pairs(*[1] * 5000))
    sizes = [len(batch) for batch in reranker.batches]
    assert min(sizes[:-1]) == sizes[0] > 50


class Uneven(Numbers):
    """Takes much longer for "2" than for others."""

    def score(self, query, documents):
        self.spend(sum(0.002 if text == "2" else 0.00004 for text in documents))
        return super().score(query, documents)


async def test_after_one_batch_that_took_too_long_the_next_is_small(clock):
    reranker = Uneven(clock=clock)
    async with numbers(reranker, batch_seconds=0.02) as scheduler:
        await scheduler.score(pairs(*[1] * 4000))
        await scheduler.score(pairs(*[2] * 2000))
    slow = [len(batch) for batch in reranker.batches if "2" in batch]
    assert slow[0] == 500
    # What a model of the first speed, 5,000 tokens a second, runs in the time.
    assert max(slow[1:]) <= 100


class Slowed(Numbers):
    """Other programs make each batch take longer, whatever its size."""

    more = 0.0

    def score(self, query, documents):
        self.spend(0.0001 * len(documents) + self.more)
        return super().score(query, documents)


async def test_batches_stay_large_while_other_programs_slow_them_down(clock):
    reranker = Slowed(clock=clock)
    async with numbers(reranker, batch_seconds=0.02) as scheduler:
        await scheduler.score(pairs(*[1] * 5000))
        quick = max(map(len, reranker.batches))
        reranker.batches.clear()
        reranker.more = 0.05
        await scheduler.score(pairs(*[1] * 5000))
    slow = [len(batch) for batch in reranker.batches]
    assert min(slow[:-1]) == quick > 150


async def test_a_small_request_does_not_wait_for_another_clients_large_one():
    reranker = Numbers()
    async with numbers(reranker, batch_tokens=10) as scheduler:
        reranker.may_go_on.clear()
        large = asyncio.create_task(scheduler.score(pairs(*range(200)), client="large"))
        await until(lambda: reranker.began)
        small = asyncio.create_task(scheduler.score(pairs(-1, -2), client="small"))
        await until(lambda: scheduler.stats()["waiting"] == 202)
        reranker.may_go_on.set()
        await asyncio.gather(large, small)
    places = [
        number for number, batch in enumerate(reranker.batches) if "-1" in batch or "-2" in batch
    ]
    assert places == [1]  # the batch after the one that was running


async def test_two_clients_get_equal_shares():
    reranker = Numbers()
    async with numbers(reranker, batch_tokens=10) as scheduler:
        reranker.may_go_on.clear()
        tasks = [
            asyncio.create_task(scheduler.score(pairs(*[number] * 100), client=str(number)))
            for number in (1, 2)
        ]
        await until(lambda: scheduler.stats()["waiting"] == 200)
        reranker.may_go_on.set()
        await asyncio.gather(*tasks)
    shares = [batch.count("1") for batch in reranker.batches[1:10]]
    assert all(4 <= share <= 6 for share in shares)


async def test_asking_again_and_again_gives_no_larger_share_than_waiting():
    reranker = Numbers(seconds=0.002)
    async with numbers(reranker, batch_tokens=160) as scheduler:
        texts = ["1" + " " * 60] * 300
        patient = asyncio.create_task(scheduler.score(pairs(*texts), client="patient"))

        async def ask_again():  # each time with a document that fills a batch
            while not patient.done() and len(reranker.batches) < 200:
                await scheduler.score(pairs("2" + " " * 572), client="busy")

        first = asyncio.create_task(ask_again())
        await until(lambda: any("2" in text for batch in reranker.batches for text in batch))
        await asyncio.gather(
            patient, first, ask_again()
        )  # from here on one always waits while the other is scored
    tokens = {1: 0, 2: 0}
    for text in [text for batch in reranker.batches for text in batch]:
        tokens[int(text)] += len(text) // 4 + 1
    assert tokens[2] < 1.5 * tokens[1]
    assert not scheduler._queue.clients  # nobody waits, so nobody is ahead


async def test_a_request_beyond_the_limit_is_refused_with_a_time_to_come_back():
    reranker = Numbers()
    async with numbers(reranker, documents=5) as scheduler:
        reranker.may_go_on.clear()
        first = asyncio.create_task(scheduler.score(pairs(1)))  # runs
        await until(lambda: reranker.began)
        second = asyncio.create_task(scheduler.score(pairs(1, 2, 3)))  # waits
        await until(lambda: scheduler.stats()["waiting"] == 4)
        with pytest.raises(
            OverloadedError, match="4 documents are waiting or being scored, too many for 3"
        ) as caught:
            await scheduler.score(pairs(1, 2, 3))
        assert caught.value.retry_after >= 1
        reranker.may_go_on.set()
        assert scores(await second) == [1, 2, 3]
        await first
        assert scheduler.stats()["refused_requests"] == 1
        assert scores(await scheduler.score(pairs(*range(9)))) == list(
            range(9)
        )  # one that is too large waits for none


async def test_late_work_is_cancelled_and_says_so():
    reranker = Numbers()
    async with numbers(reranker, batch_tokens=2) as scheduler:
        reranker.may_go_on.clear()
        with pytest.raises(DeadlineError, match=r"no answer in 0\.05 seconds"):
            await scheduler.score(pairs(*range(20)), timeout=0.05)
        assert scheduler.stats()["waiting"] == 0
        reranker.may_go_on.set()
        assert scores(await scheduler.score(pairs(7), timeout=60)) == [7]
        assert scheduler.stats()["late_requests"] == 1
        assert scheduler.stats()["cancelled_documents"] == 20
    assert reranker.batches == [["0", "1"], ["7"]]  # the running batch ended, the rest never ran


async def test_a_cancelled_request_leaves_the_queue_and_the_others_stay():
    reranker = Numbers()
    async with numbers(reranker) as scheduler:
        reranker.may_go_on.clear()
        first = asyncio.create_task(scheduler.score(pairs(0)))
        await until(lambda: reranker.began)
        gone = asyncio.create_task(scheduler.score(pairs(1, 2)))
        stays = asyncio.create_task(scheduler.score(pairs(3)))
        await until(lambda: scheduler.stats()["waiting"] == 4)
        gone.cancel()
        await until(lambda: scheduler.stats()["waiting"] == 2)
        reranker.may_go_on.set()
        assert scores(await stays) == [3]
        await first
    assert reranker.batches == [["0"], ["3"]]


async def test_a_document_without_a_score_fails_alone():
    async with numbers(Numbers()) as scheduler:
        found = await scheduler.score(pairs(1, "no score", 2))
    assert scores(found) == [1, None, 2]
    assert (found[1].fault, found[1].error) == ("unscored", "has no score.")


@pytest.mark.parametrize("bad", ["broken", "nan", "inf"])
async def test_whatever_the_model_does_on_one_document_the_others_get_their_scores(bad):
    async with numbers(Numbers()) as scheduler:
        found = await scheduler.score([*pairs(1, 2, bad, 3), *pairs(4, query="other")])
        assert scores(found) == [1, 2, None, 3, 4]
        assert found[2].fault == ("internal" if bad == "broken" else "unscored")
        assert scores(await scheduler.score(pairs(5))) == [5]


async def test_a_refused_query_concerns_no_other_clients_pairs():
    async with numbers(Numbers()) as scheduler:
        found = await scheduler.score([*pairs(1, 2, query="refused"), *pairs(3)])
    assert scores(found) == [None, None, 3]
    assert [outcome.fault for outcome in found[:2]] == ["input"] * 2
    assert found[0].error == "The query is refused."


class ShortQueries(Numbers):
    """Takes queries of four characters at most."""

    def fit_query(self, query):
        return query[:4]

    def score(self, query, documents):
        if len(query) > 4:
            raise InputError("The query is too long.")
        return super().score(query, documents)

    def explain(self, query, document, max_tokens=None):
        (score,) = self.score(query, [document])
        return Explanation(query, document, score, False, (), (), (), ())


def test_a_query_of_many_pairs_is_cut_once(monkeypatch):
    cut = []
    monkeypatch.setattr(ShortQueries, "fit_query", lambda self, query: cut.append(query) or "q")
    Engine(ShortQueries(), "fake").run([Pair("a long query", str(n)) for n in range(9)])
    assert cut == ["a long query"]


def test_a_long_query_is_cut_for_the_pairs_that_allow_it_and_for_no_other():
    engine = Engine(ShortQueries(), "fake")
    asked = [Pair("a long query", "1", cut_query=cut) for cut in (True, False)]
    for explain in (False, True):
        found, _ = engine.run(asked, explain)
        assert scores(found) == [1, None]
        assert found[0].query_truncated
        assert found[1].error == "The query is too long."


@pytest.mark.parametrize("count", [0, 1, 3, 40])
def test_many_documents_without_scores_are_found_in_few_runs(count):
    reranker = Numbers()
    texts = [*["no score"] * count, *map(str, range(40))]
    found, _ = Engine(reranker, "fake").run(pairs(*texts))
    assert scores(found) == [*[None] * count, *range(40)]
    assert len(reranker.batches) <= 2 * count + 10


class Wrong(Numbers):
    """Omits a score at "too few", names a missing document at "elsewhere", gives None at "none"."""

    def score_pairs(self, pairs):
        texts = [pair.document for pair in pairs]
        if "elsewhere" in texts:
            raise ScoringError("has no score.", 1000)
        found = [
            Scored(None if text == "none" else float(text)) for text in texts if text != "too few"
        ]
        return found


@pytest.mark.parametrize("bad", ["too few", "elsewhere", "none"])
def test_a_model_that_breaks_its_contract_on_one_document_costs_no_other_its_score(bad):
    found, _ = Engine(Wrong(), "fake").run(pairs(1, 2, bad, 3))
    assert scores(found) == [1, 2, None, 3]
    assert found[2].error


class Refusing(Numbers):
    """Remembers the queries of the batches that it scored."""

    def score_pairs(self, pairs):
        found = super().score_pairs(pairs)
        self.scored = [*getattr(self, "scored", []), {pair.query for pair in pairs}]
        return found


@pytest.mark.parametrize("clients", [2, 40])
def test_a_refused_query_does_not_take_the_others_batches_apart(clients):
    reranker = Refusing()
    asked = [
        Pair("refused" if client == 0 else str(client), str(n))
        for n in range(20)
        for client in range(clients)
    ]
    found, _ = Engine(reranker, "fake").run(asked)
    assert [outcome.score is None for outcome in found] == [
        pair.query == "refused" for pair in asked
    ]
    assert (
        len(reranker.scored) <= 12
    )  # halves of the other queries, not each of their documents by itself


async def test_the_canary_must_rank_the_right_way_round():
    canary = Canary("q", "2", "1")
    async with running(Numbers, thread=True, canary=canary) as scheduler:
        assert scheduler.readiness() is None
    assert scheduler.readiness() == "The service is stopping."
    async with running(Numbers, thread=True, canary=Canary("q", "1", "2")) as scheduler:
        assert (
            scheduler.readiness() == "The canary's relevant passage scored 1, its irrelevant one 2."
        )
    async with running(Numbers, thread=True, canary=Canary("q", "1", "no score")) as scheduler:
        assert scheduler.readiness().startswith("The canary could not be scored: ")


async def test_a_model_that_cannot_be_loaded_is_an_error_at_the_start_and_leaves_no_process():
    with pytest.raises(ArtifactError, match="no such artifact"):
        await Scheduler(refuse_to_load, "fake").start()
    await until(lambda: not multiprocessing.active_children())


async def test_nothing_is_taken_before_the_start_or_after_the_end():
    scheduler = in_thread(Numbers, canary=None)
    with pytest.raises(UnavailableError, match="has not been started"):
        await scheduler.score(pairs(1))
    with pytest.raises(UnavailableError, match="not loaded"):
        scheduler.description  # noqa: B018
    await scheduler.start()
    await scheduler.stop()
    with pytest.raises(UnavailableError, match="stopping"):
        await scheduler.score(pairs(1))


async def test_what_waits_is_finished_before_the_end():
    reranker = Numbers(seconds=0.01)
    async with numbers(reranker, batch_tokens=1) as scheduler:
        task = asyncio.create_task(scheduler.score(pairs(*range(10))))
        await until(lambda: reranker.began)
    assert scores(await task) == list(range(10))


async def test_a_model_without_explanations_says_so():
    async with numbers(Numbers()) as scheduler:
        assert not scheduler.description.explains
        found = await explained(scheduler, "1")
    assert found.fault == "input"
    assert "cannot take its scores apart" in found.error


async def test_an_explanation_that_nobody_waits_for_leaves_the_queue():
    reranker = Numbers()
    async with numbers(reranker, documents=4) as scheduler:
        reranker.may_go_on.clear()
        first = asyncio.create_task(scheduler.score(pairs(1)))
        await until(lambda: reranker.began)
        for _ in range(4):  # not one of them finds a full queue
            gone = asyncio.create_task(explained(scheduler, "d"))
            await until(lambda: scheduler.stats()["waiting"] == 2)
            gone.cancel()
            await until(lambda: scheduler.stats()["waiting"] == 1)
        second = asyncio.create_task(scheduler.score(pairs(2, 3)))
        await until(lambda: scheduler.stats()["waiting"] == 3)
        reranker.may_go_on.set()
        assert [scores(found) for found in await asyncio.gather(first, second)] == [[1], [2, 3]]


async def test_whatever_a_model_raises_on_an_explanation_the_next_request_is_served(tmp_path):
    async with running(lambda: Mortal(tmp_path), thread=True) as scheduler:
        found = await explained(scheduler, "broken")
        assert (found.fault, found.error) == (
            "internal",
            "made the model fail (ZeroDivisionError).",
        )
        assert scores(await scheduler.score(pairs("a"), timeout=60)) == [1]


class Unpacked:
    """Becomes the number of the thread in which it is unpickled."""

    score, truncated = 1.0, False

    def __reduce__(self):
        return threading.get_ident, ()


async def test_what_a_model_answers_is_unpacked_beside_the_event_loop(monkeypatch):
    monkeypatch.setattr(Numbers, "explain", lambda self, *_: Unpacked(), raising=False)
    async with numbers(Numbers()) as scheduler:
        place = (await explained(scheduler, "1")).explanation
    assert isinstance(place, int)
    assert place != threading.get_ident()


async def test_a_real_model_explains_and_counts(ranker):
    async with running(lambda: ranker, thread=True) as scheduler:
        explanation = (await explained(scheduler, "In 1932.", "When?")).explanation
        assert explanation.score == pytest.approx(ranker.score("When?", ["In 1932."])[0], abs=1e-4)
        assert (await scheduler.score(pairs("In 1932.", query="When?")))[0].scored.tokens > 3


async def test_an_explanation_reads_as_many_tokens_as_the_request_allows(ranker):
    asked = [Pair("When?", "In 1932.", max_tokens=1)]
    async with running(lambda: ranker, thread=True) as scheduler:
        (score,) = await scheduler.score(asked)
        (outcome,) = await scheduler.score(asked, explain=True, timeout=60)
    assert outcome.explanation.truncated
    assert outcome.explanation.score == pytest.approx(score.score, abs=1e-4)
    whole = ranker.score("When?", ["In 1932."])[0]
    assert abs(outcome.explanation.score - whole) > 1e-3


async def test_a_process_that_dies_is_replaced_and_no_request_is_lost(tmp_path):
    (tmp_path / "flag").touch()
    async with running(partial(Mortal, tmp_path)) as scheduler:
        first = scheduler.model.pid
        assert first != os.getpid()
        found = await asyncio.gather(
            scheduler.score(pairs("a", "die once", "bb"), client="one"),
            scheduler.score(pairs("ccc"), client="two"),
        )
        assert [scores(outcomes) for outcomes in found] == [[1, 8, 2], [3]]
        assert scheduler.stats()["restarts"] == 1
        assert scheduler.model.pid != first


async def test_a_process_killed_from_outside_is_replaced(tmp_path):
    async with running(partial(Mortal, tmp_path)) as scheduler:
        os.kill(scheduler.model.pid, signal.SIGKILL)
        assert scores(await scheduler.score(pairs("a", "bb"), timeout=60)) == [1, 2]


async def test_an_error_of_the_system_does_not_end_the_attempts_to_replace_a_process(
    tmp_path, monkeypatch
):
    async with running(partial(Mortal, tmp_path)) as scheduler:
        launch = ModelProcess._launch
        failures = [OSError("Too many open files")]

        def launched(process, connection):
            if failures:
                raise failures.pop()
            return launch(process, connection)

        monkeypatch.setattr(ModelProcess, "_launch", launched)
        os.kill(scheduler.model.pid, signal.SIGKILL)
        assert scores(await scheduler.score(pairs("a", "bb"), timeout=60)) == [1, 2]
        assert failures == []


class GivingUp(Numbers):
    """Cancels the answer of the second document while it scores the first."""

    def score(self, query, documents):
        if documents == ["1"]:
            (client,) = self.scheduler._queue.clients.values()
            _, second = client.documents
            self.loop.call_soon_threadsafe(second.answer.cancel)
        return super().score(query, documents)


async def test_a_request_of_which_one_document_was_given_up_is_not_half_answered():
    reranker = GivingUp()
    async with numbers(reranker, batch_tokens=1) as scheduler:
        reranker.scheduler, reranker.loop = scheduler, asyncio.get_running_loop()
        with pytest.raises(UnavailableError):
            await scheduler.score(pairs(1, 2), timeout=60)


async def test_a_process_killed_while_idle_is_missed_by_whoever_asks_whether_all_is_well(tmp_path):
    async with running(partial(Mortal, tmp_path)) as scheduler:
        os.kill(scheduler.model.pid, signal.SIGKILL)
        await until(lambda: scheduler.readiness() is not None)
        await until(lambda: scheduler.readiness() is None)
        assert scheduler.stats()["restarts"] == 1
        assert scores(await scheduler.score(pairs("a"), timeout=60)) == [1]


@pytest.mark.slow
async def test_a_document_on_which_the_process_dies_each_time_fails_alone(tmp_path):
    async with running(partial(Mortal, tmp_path)) as scheduler:
        found = await scheduler.score(pairs("a", "bb", "die", "dddd"))
        assert scores(found) == [1, 2, None, 4]
        assert found[2].error == "ended the model's process, twice."


async def test_the_models_process_logs_as_it_is_told_to(tmp_path, capfd):
    pytest.importorskip("pythonjsonlogger")
    from rsrank_rag.service.logs import configure

    (tmp_path / "flag").touch()
    async with running(partial(Mortal, tmp_path), prepare=partial(configure, "INFO")) as scheduler:
        await scheduler.score(pairs("lost"))
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["level"] for line in lines if "device is lost" in line["message"]] == ["ERROR"]


def configured_beside_a_library_that_logs_everything():
    from rsrank_rag.service.logs import configure

    configure("INFO")
    library = logging.getLogger("library")
    library.setLevel(logging.DEBUG)
    library.debug("noise")
    library.warning("trouble")


async def test_a_process_that_stops_without_work_is_not_ready_and_is_replaced(tmp_path):
    limits = QueueLimits(hang_seconds=10)
    async with running(partial(Mortal, tmp_path), limits=limits) as scheduler:
        assert scores(await scheduler.score(pairs("a"))) == [1]
        stopped = scheduler.model.pid
        os.kill(stopped, signal.SIGSTOP)
        await until(lambda: scheduler.readiness() is not None)
        await until(lambda: scheduler.readiness() is None)
        assert scheduler.model.pid != stopped
        assert scores(await scheduler.score(pairs("bb"))) == [2]


async def test_of_other_libraries_only_warnings_are_logged(tmp_path, capfd):
    pytest.importorskip("pythonjsonlogger")
    prepare = configured_beside_a_library_that_logs_everything
    async with running(partial(Mortal, tmp_path), prepare=prepare) as scheduler:
        await scheduler.score(pairs("a"))
    lines = [json.loads(line)["message"] for line in capfd.readouterr().err.splitlines()]
    assert "trouble" in lines
    assert "noise" not in lines


async def test_a_process_that_loses_its_device_is_replaced(tmp_path):
    (tmp_path / "flag").touch()
    async with running(partial(Mortal, tmp_path)) as scheduler:
        assert scores(await scheduler.score(pairs("a", "lost", "bb"))) == [1, 4, 2]
        assert scheduler.stats()["restarts"] == 1


@pytest.mark.slow
async def test_a_process_that_hangs_is_replaced(tmp_path):
    (tmp_path / "flag").touch()
    async with running(
        partial(Mortal, tmp_path), limits=QueueLimits(hang_seconds=1.0)
    ) as scheduler:
        task = asyncio.create_task(scheduler.score(pairs("a", "hang")))
        await until(lambda: scheduler.stats()["restarts"])
        scheduler.model.hang_seconds = 300.0  # the second try may be slow
        assert scores(await task) == [1, 4]
        assert scheduler.stats()["restarts"] == 1


async def test_an_explanation_on_which_the_process_dies_is_an_error_and_the_next_request_is_served(
    tmp_path,
):
    async with running(partial(Mortal, tmp_path)) as scheduler:
        assert (await explained(scheduler, "d")).error == "ended the model's process, twice."
        assert scores(await scheduler.score(pairs("a"))) == [1]


async def test_without_a_model_requests_are_answered_when_the_service_stops(tmp_path):
    (tmp_path / "may load").touch()
    async with running(partial(load_once, tmp_path)) as scheduler:
        task = asyncio.create_task(scheduler.score(pairs("die")))
        await until(lambda: "could not be replaced" in (scheduler.readiness() or ""))
    with pytest.raises(UnavailableError, match="could not be replaced"):
        await task


async def test_a_batch_of_who_asks_for_little_has_no_items_of_who_asks_for_much():
    queue = FairQueue()
    queue.credit = 100.0
    queue.add("much", pairs(*"abcdef"), [1] * 6, explain=False)
    queue.clients["much"].served = queue.clock = 500.0
    for name in ("little", "as little"):
        queue.add(name, pairs("x"), [1], explain=False)
    clients = {client: name for name, client in queue.clients.items()}

    def batch():
        """The clients of the next batch, whose documents are then withdrawn."""
        documents = [item.document for item in queue.next_batch(1000)]
        queue.withdraw(documents)
        return [clients[document.client] for document in documents]

    assert batch() == ["little", "as little"]
    assert batch() == ["much"] * 6


async def test_a_queue_that_gives_up_answers_all_and_has_nothing_that_waits():
    queue = FairQueue()
    documents = queue.add("client", pairs("a", "b"), [1, 1], explain=False)
    queue.give_up()
    assert all(document.answer.cancelled() for document in documents)
    # Otherwise the loop would load the model once more before it ends.
    assert not queue.waiting
    assert queue.withdraw(documents) == 0


@pytest.mark.parametrize("load", [load_once, load_on_a_free_device])
async def test_a_model_that_can_be_loaded_again_goes_on_with_what_waited(tmp_path, load):
    (tmp_path / "may load").touch()
    (tmp_path / "flag").touch()
    async with running(partial(load, tmp_path)) as scheduler:
        task = asyncio.create_task(scheduler.score(pairs("die once", "bb")))
        await until(lambda: "could not be replaced" in (scheduler.readiness() or ""))
        (tmp_path / "may load").touch()
        assert scores(await asyncio.wait_for(task, 60)) == [8, 2]
        assert scheduler.readiness() is None


async def test_the_end_does_not_wait_for_the_pause_before_the_next_try(tmp_path, monkeypatch):
    pauses = []

    async def pause(told, seconds):
        pauses.append(seconds)
        await told  # for ever, if nobody tells

    (tmp_path / "may load").touch()
    async with running(partial(load_once, tmp_path), thread=True) as scheduler:
        monkeypatch.setattr(
            scheduler_module, "asyncio", SimpleNamespace(**{**vars(asyncio), "wait_for": pause})
        )
        restart = asyncio.create_task(scheduler._restart())
        await until(lambda: 0.5 in pauses)
    await asyncio.wait_for(restart, 60)
    # It was told in the first pause, and tried no more. The other waits are those without work.
    assert [seconds for seconds in pauses if seconds != scheduler_module.IDLE_SECONDS] == [0.5]


@pytest.mark.slow
async def test_the_models_process_ends_with_its_parent(tmp_path):
    code = (
        "import asyncio, sys; sys.path[:0] = sys.argv[2].split(':')\n"
        "from functools import partial; from pathlib import Path\n"
        "import test_scheduler as t\n"
        "async def main():\n"
        "    s = t.Scheduler(partial(t.Mortal, Path(sys.argv[1])), 'fake', canary=None); await "
        "s.start()\n"
        "    print(s.model.pid, flush=True); await asyncio.sleep(60)\n"
        "if __name__ == '__main__': asyncio.run(main())\n"
    )
    script = tmp_path / "main.py"
    script.write_text(code)
    arguments = [
        sys.executable,
        str(script),
        str(tmp_path),
        f"{Path(__file__).parents[1]}:{Path(__file__).parent}",
    ]
    parent = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    child = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    await until(lambda: not Path(f"/proc/{child}").exists())
    assert not Path(f"/proc/{child}").exists()


# Whatever the model raises


class Panic(BaseException):
    """What a panic in Rust is in Python: no Exception."""


class Unpicklable(Exception):
    """Can be sent and not be read again."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


RAISED = {
    "panic": lambda: Panic("secret"),
    "cancelled": asyncio.CancelledError,
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
    "unpicklable": lambda: Unpicklable(1, 2),
    "unreadable": lambda: type("Local", (InputError,), {"__reduce__": lambda self: 1 / 0})(
        "It is wrong."
    ),
}


class Raising(Numbers):
    """Raises what a document names, as scores and as explanations."""

    def score(self, query, documents):
        for text in documents:
            if text in RAISED:
                raise RAISED[text]()
        return [float(text) for text in documents]

    def explain(self, query, document, max_tokens=None):
        raise RAISED[document]()


@pytest.mark.parametrize("thread", [True, False])
async def test_an_error_on_one_document_fails_only_that_one_and_the_next_request_is_served(
    thread,
):
    async with running(Raising, thread=thread) as scheduler:
        first = scheduler.model.pid
        for bad in RAISED:
            found = await asyncio.gather(
                scheduler.score(pairs(1, bad, 2), client="guilty"),
                scheduler.score(pairs(3, 4), client="innocent"),
            )
            assert [scores(outcomes) for outcomes in found] == [[1, None, 2], [3, 4]]
            assert "secret" not in found[0][1].error
            assert (await explained(scheduler, bad)).fault in ("input", "internal")
        assert scheduler.readiness() is None
        assert scheduler.model.pid == first
        assert scheduler.stats()["restarts"] == 0


@pytest.mark.parametrize("raised", ["panic", "exit", "unpicklable"])
async def test_whatever_loading_raises_is_an_error_of_ours(raised):
    def refuse():
        raise RAISED[raised]()

    with pytest.raises(RSRankError, match="fake could not be loaded"):
        await in_thread(refuse).start()


class Odd(Numbers):
    """Says things about a document that no pickle takes."""

    def score_pairs(self, pairs):
        return [
            Scored(Number(pair.document), truncated=lambda: 0, tokens=Number(1)) for pair in pairs
        ]


class Number(float):
    def __reduce__(self):
        raise ZeroDivisionError


async def test_what_the_model_gives_as_numbers_is_sent_as_numbers():
    async with running(Odd) as scheduler:
        assert scores(await scheduler.score(pairs(1, 2), timeout=60)) == [1, 2]


@pytest.mark.parametrize("method", ["_cut", "_score"])
async def test_a_fault_of_the_queues_own_costs_one_batch_and_not_the_service(method):
    async with numbers(Numbers()) as scheduler:

        def fails_once(*arguments):
            delattr(scheduler, method)
            raise ZeroDivisionError

        setattr(scheduler, method, fails_once)
        assert [found.fault for found in await scheduler.score(pairs(1, 2))] == ["internal"] * 2
        assert scores(await scheduler.score(pairs(3))) == [3]
        assert scheduler.readiness() is None


async def test_a_model_that_does_not_answer_is_not_ready_long_before_it_is_replaced():
    reranker, killed = Numbers(), []
    async with numbers(reranker, hang_seconds=30.0) as scheduler:
        scheduler.model.kill = lambda: killed.append(True)
        reranker.may_go_on.clear()
        task = asyncio.create_task(scheduler.score(pairs(1)))
        await until(lambda: scheduler.readiness() == "The model does not answer.")
        reranker.may_go_on.set()
        assert scores(await task) == [1]
        assert scheduler.readiness() is None
    assert not killed


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


# Time


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

    def token_ends(self, document):
        return range(4, len(document) + 4, 4), 512

    def token_costs(self, pairs):
        return [5 + min(512, pair.max_tokens or 512, len(pair.document) // 4) for pair in pairs]

    def score(self, query, documents):
        return [1.0] * len(documents)


class Timed(SimpleNamespace):
    """In the place of the model's process. Its work takes the loop's time, which is simulated."""

    hangs, pid = False, None
    speed = 10_000.0  # tokens a second
    cut_speed = 1_000_000.0  # characters a second
    overhead = 0.005  # seconds a batch

    def __init__(self, engine):
        super().__init__(engine=engine, longest=0.0, seconds=0.0, description=engine.describe(None))

    def is_gone(self):
        return False

    def kill(self):
        pass

    def end(self):
        pass

    async def call(self, method, *arguments):
        result = getattr(self.engine, method)(*arguments)
        if method == "cut":
            lengths = (sum(stop - start for start, stop in one[0].spans) for one in result)
            seconds = sum(lengths) / self.cut_speed
        else:
            seconds = sum(self.engine.reranker.token_costs(arguments[0])) / self.speed
            seconds += self.overhead
        self.seconds = seconds
        self.longest = max(self.longest, seconds)
        await asyncio.sleep(seconds)
        return result


class simulated:
    """A started scheduler before a `Timed` model."""

    def __init__(self, model=Timed):
        self.scheduler = Scheduler(Counted, "fake", canary=None)
        engine = Engine(Counted(), "fake")
        self.scheduler.model = model(engine)

    async def __aenter__(self):
        self.scheduler._trouble = ""
        self.scheduler._runner = asyncio.create_task(self.scheduler._run())
        return self.scheduler

    async def __aexit__(self, *error):
        await self.scheduler.stop()


def in_simulated_time(work):
    loop = Simulated()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


async def goodput(load, clients, timeout=3.0, seconds=30.0):
    """The share of the model's time spent on requests answered in time, and their outcomes."""
    generator, loop, counts = random.Random(0), asyncio.get_running_loop(), Counter()
    async with simulated() as scheduler:

        async def ask(client, texts):
            try:
                await scheduler.score(pairs(*texts), client=client, timeout=timeout)
            except (OverloadedError, DeadlineError) as error:
                counts[type(error).__name__] += 1
                return
            counts["answered"] += 1
            counts["tokens"] += sum(len(text) // 4 + 5 for text in texts)

        tasks = []
        while loop.time() < seconds:
            count = generator.randint(1, 5)
            texts = ["x" * generator.choice([40, 400, 1200]) for _ in range(count)]
            tasks.append(asyncio.create_task(ask(str(generator.randrange(clients)), texts)))
            await asyncio.sleep(generator.expovariate(load * Timed.speed / (3 * (547 / 4 + 5))))
        await asyncio.gather(*tasks)
        ended = loop.time()
    return counts["tokens"] / Timed.speed / ended, counts


@pytest.mark.parametrize("clients", [1, 20])
@pytest.mark.parametrize("load", [0.5, 2, 5])
def test_what_cannot_be_answered_in_time_is_refused_so_that_the_rest_is_answered(load, clients):
    share, counts = in_simulated_time(goodput(load, clients))
    assert share > 0.8 * min(load, 1.0)
    assert counts["DeadlineError"] < 0.02 * counts["answered"]
    assert load > 1 or counts["OverloadedError"] < 0.2 * counts["answered"]


async def many_after_few():
    """Six clients' large requests, a third of the time in all, after one client's small ones."""
    async with simulated() as scheduler:
        for _ in range(300):
            await scheduler.score(pairs("x" * 40), timeout=60)
        large = pairs(*["x" * 1000] * 100)
        answers = await asyncio.gather(
            *(scheduler.score(large, client=name, timeout=60) for name in "abcdef"),
            return_exceptions=True,
        )
    return [len(one) if isinstance(one, list) else str(one) for one in answers]


def test_small_requests_do_not_make_the_model_seem_too_slow_for_large_ones():
    assert in_simulated_time(many_after_few()) == [100] * 6


class Stalling(Timed):
    """Takes a second more for the first batch: it swaps, or another process has the processor."""

    stalls = 1.0

    async def call(self, method, *arguments):
        result = await super().call(method, *arguments)
        if method == "run":
            await asyncio.sleep(self.stalls)
            self.seconds += self.stalls
            self.stalls = 0.0
        return result


async def small_after_stall():
    """How many of 200 small requests, four at a time, are refused after one that took long."""
    async with simulated(Stalling) as scheduler:
        await scheduler.score(pairs("x" * 40), timeout=60)
        for _ in range(50):
            calls = (scheduler.score(pairs("x" * 40), client=name, timeout=60) for name in "abcd")
            await asyncio.gather(*calls, return_exceptions=True)
        return scheduler.stats()["refused_requests"]


def test_after_one_stall_small_requests_are_not_refused():
    assert in_simulated_time(small_after_stall()) == 0


class Starved(Timed):
    """Every 40 seconds, other programs leave it a twentieth of its speed, for five seconds."""

    async def call(self, method, *arguments):
        began = asyncio.get_running_loop().time()
        result = await super().call(method, *arguments)
        if began % 40 > 35:
            await asyncio.sleep(19 * (asyncio.get_running_loop().time() - began))
        self.seconds = asyncio.get_running_loop().time() - began
        return result


async def polite_refusals():
    """Refusals of nine clients with one request at a time, before a model that is starved."""
    loop = asyncio.get_running_loop()
    async with simulated(Starved) as scheduler:

        async def ask(client):
            generator = random.Random(client)
            while loop.time() < 200:
                with contextlib.suppress(OverloadedError):
                    await scheduler.score(pairs(*["x" * 600] * 20), client=client, timeout=60)
                await asyncio.sleep(generator.expovariate(1.0))

        await asyncio.gather(*(ask(str(number)) for number in range(9)))
        return scheduler.stats()["refused_requests"]


def test_nobody_is_refused_because_the_processor_is_busy_for_some_seconds():
    assert in_simulated_time(polite_refusals()) == 0


# One client against nine


LETTERS = "It was a long day. " * 60_000
WINDOWS = Reading(long_documents="windows")
SENTENCES = Reading(extract="sentences")


def giant(characters, reading, count=1):
    """One request with long documents."""
    return [Pair("q", LETTERS[:characters], reading=reading)] * count


ATTACKS = {
    "999,000 characters in windows": (giant(999_000, WINDOWS), None),
    "the same, left after three seconds, again and again": (giant(999_000, WINDOWS), 3.0),
    "the same, left at once, again and again": (giant(999_000, WINDOWS), 0.05),
    "999,000 characters in sentences": (giant(999_000, SENTENCES), None),
    "five documents of 130,000 characters in windows": (giant(130_000, WINDOWS, 5), None),
    "a thousand documents of 500 characters": (giant(500, WHOLE, 1000), None),
}


async def polite_waits(attack=None, leaves=None, seconds=120.0):
    """Waits of nine clients that ask for 60% of the model's time, and how long it was held."""
    loop, waits = asyncio.get_running_loop(), []
    async with simulated() as scheduler:

        async def ask(client):
            generator = random.Random(client)
            await asyncio.sleep(generator.random())
            while loop.time() < seconds:
                began = loop.time()
                texts = ["x" * generator.choice([400, 800, 2000]) for _ in range(5)]
                await scheduler.score(pairs(*texts), client=client, timeout=60)
                waits.append(loop.time() - began)
                await asyncio.sleep(generator.expovariate(1 / 1.8))

        async def besiege():
            while loop.time() < seconds:
                try:
                    call = scheduler.score(attack, client="giant", timeout=60)
                    await asyncio.wait_for(call, leaves)
                except OverloadedError:
                    await asyncio.sleep(0.5)
                except (DeadlineError, asyncio.TimeoutError):
                    pass

        siege = asyncio.create_task(besiege()) if attack else None
        await asyncio.gather(*(ask(str(number)) for number in range(9)))
        if siege is not None:
            siege.cancel()
            await asyncio.gather(siege, return_exceptions=True)
        return sorted(waits), scheduler.model.longest, scheduler.stats()


@pytest.mark.parametrize("name", ATTACKS)
def test_one_clients_giant_requests_hardly_delay_nine_polite_clients(name):
    pytest.importorskip("sentencex")
    calm, _, _ = in_simulated_time(polite_waits())
    waits, longest, stats = in_simulated_time(polite_waits(*ATTACKS[name]))
    at = 0.99
    assert waits[int(at * len(waits))] <= 1.5 * calm[int(at * len(calm))]
    assert longest < 1.0
    assert stats["late_requests"] <= 2  # the giant's own, of a minute each


async def thousand_after(attack):
    """Seconds that a polite client waits during another's thousand documents, after an attack."""
    async with simulated() as scheduler:
        if attack:
            await scheduler.score(attack, client="stranger", timeout=600)
        many = asyncio.create_task(scheduler.score(pairs(*["x" * 500] * 1000), client="stranger"))
        await asyncio.sleep(0.5)
        began = asyncio.get_running_loop().time()
        await scheduler.score(pairs(*["x" * 500] * 5), client="polite")
        waited = asyncio.get_running_loop().time() - began
        await many
        return waited


def test_long_documents_that_are_cut_do_not_teach_a_false_speed():
    calm = in_simulated_time(thousand_after(None))
    assert in_simulated_time(thousand_after(giant(900_000, WHOLE, 4))) <= 1.5 * calm


async def cut_documents_beside_others():
    """Outcomes of four documents that are cut, asked for with little time while others wait."""
    async with simulated() as scheduler:
        many = asyncio.create_task(scheduler.score(pairs(*["x" * 500] * 100), client="polite"))
        await asyncio.sleep(0.5)
        outcomes = await scheduler.score(giant(900_000, WHOLE, 4), client="stranger", timeout=10)
        await many
        return outcomes


def test_what_is_cut_from_documents_does_not_count_when_a_request_is_admitted():
    assert len(in_simulated_time(cut_documents_beside_others())) == 4


async def answer_to_giant():
    async with simulated() as scheduler:
        return await scheduler.score(giant(100_000, WINDOWS) + giant(50_000, SENTENCES))


def test_a_document_read_in_parts_has_the_windows_and_sentences_of_the_whole():
    pytest.importorskip("sentencex")
    windows, sentences = in_simulated_time(answer_to_giant())
    whole = giant(100_000, WINDOWS)[0]
    expected = score_in_parts([whole], Counted().token_ends, Counted().score_pairs)[0]
    assert (windows.score, windows.scored.window) == (expected.score, expected.window)
    assert "".join(one.text for one in sentences.scored.sentences).replace(" ", "") == LETTERS[
        :50_000
    ].replace(" ", "")


async def test_a_client_that_has_asked_for_much_is_refused_and_others_are_not():
    reranker = Numbers()
    async with numbers(reranker) as scheduler:
        scheduler._speeds.append(50.0)
        reranker.may_go_on.clear()
        first = asyncio.create_task(scheduler.score(pairs(1)))
        await until(lambda: reranker.began)
        tasks = [
            asyncio.create_task(scheduler.score(pairs(*[1] * 4000), client="greedy", timeout=400))
        ]
        await until(lambda: scheduler.stats()["waiting"] == 4001)
        with pytest.raises(
            OverloadedError, match="too many for an answer in 60 seconds"
        ) as refused:
            await scheduler.score(
                pairs(*[1] * 400), client="greedy", timeout=59.9996
            )  # what is left of 60
        assert 35 <= refused.value.retry_after <= 150
        tasks.append(
            asyncio.create_task(scheduler.score(pairs(*[1] * 400), client="modest", timeout=60))
        )
        await until(lambda: scheduler.stats()["waiting"] == 4401)
        reranker.may_go_on.set()
        assert [len(found) for found in await asyncio.gather(first, *tasks)] == [1, 4000, 400]


async def test_a_client_cannot_fill_the_queue_alone():
    reranker = Numbers()
    async with numbers(reranker, documents=100) as scheduler:
        reranker.may_go_on.clear()
        tasks = [asyncio.create_task(scheduler.score(pairs(*[1] * 45), client="greedy"))]
        await until(lambda: reranker.began)
        with pytest.raises(OverloadedError):
            await scheduler.score(pairs(*[1] * 20), client="greedy")
        tasks.append(asyncio.create_task(scheduler.score(pairs(*[1] * 45), client="modest")))
        await until(lambda: scheduler.stats()["waiting"] == 90)
        reranker.may_go_on.set()
        await asyncio.gather(*tasks)


class SlowToLoad(Mortal):
    """Hangs while it is loaded a second time."""

    def __init__(self, folder):
        super().__init__(folder)
        if (folder / "flag").exists():
            (folder / "flag").unlink()
            time.sleep(600)


@pytest.mark.slow
async def test_a_process_that_hangs_while_it_loads_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "LATER_LOAD", 1.0)
    monkeypatch.setattr(worker, "TIMES_FIRST", 3.0)
    async with running(partial(SlowToLoad, tmp_path)) as scheduler:
        (tmp_path / "flag").touch()
        scheduler.model.kill()
        assert scores(await scheduler.score(pairs("a"), timeout=300)) == [1]
        assert scheduler.stats()["restarts"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("is_busy", [True, False])
async def test_a_process_that_is_stopped_is_replaced_and_no_request_is_lost(tmp_path, is_busy):
    async with running(partial(Mortal, tmp_path)) as scheduler:
        scheduler.model.hang_seconds = 5.0
        first = scheduler.model.pid
        calls = [asyncio.create_task(scheduler.score(pairs("a"))) for _ in range(3 * is_busy)]
        os.kill(first, signal.SIGSTOP)
        calls += [asyncio.create_task(scheduler.score(pairs("bb"), client="b")) for _ in range(3)]
        await until(lambda: scheduler.readiness() == "The model does not answer.")
        await until(lambda: scheduler.stats()["restarts"])
        scheduler.model.hang_seconds = 300.0
        assert [scores(found) for found in await asyncio.gather(*calls)][-3:] == [[2]] * 3
        assert scheduler.model.pid != first


@pytest.mark.slow
async def test_a_process_that_is_stopped_while_it_loads_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "LATER_LOAD", 1.0)
    monkeypatch.setattr(worker, "TIMES_FIRST", 3.0)
    async with running(partial(Mortal, tmp_path)) as scheduler:
        scheduler.model.kill()
        call = asyncio.create_task(scheduler.score(pairs("a")))
        await until(lambda: scheduler.readiness() == "The model is being loaded.")
        os.kill(multiprocessing.active_children()[-1].pid, signal.SIGSTOP)
        assert scores(await call) == [1]
        assert scheduler.stats()["restarts"] >= 2
