"""The service on a cluster: documents keep to their replicas, and replicas come, go and die without a wrong score."""

import asyncio
import os
import random
import signal
import socket
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from ray_models import Lengths, refuse

from rsrank_rag.errors import InputError
from rsrank_rag.reranker import Pair
from rsrank_rag.service.backend import DeadlineError, OverloadedError, UnavailableError
from rsrank_rag.service.scheduler import QueueLimits

pytest.importorskip("ray.serve")

from rsrank_rag.service import ray_backend
from rsrank_rag.service.app import Settings, create_app
from rsrank_rag.service.ray_backend import RayBackend, Replicas, deploy, key_of, serve_on_ray, take_down

with socket.socket() as made:
    made.bind(("127.0.0.1", 0))
    PORT = made.getsockname()[1]

SMALL = {"cpus": 0.1, "drain": 30.0}


@pytest.fixture(scope="module")
def service(ray_cluster):
    """Function: number of replicas -> the service has so many. One service for all tests."""
    from ray import serve

    serve.start(http_options={"port": PORT})
    yield lambda count, make=Lengths, **options: deploy(
        make, "lengths", Replicas(count, **SMALL), canary=None, **options
    )
    serve.shutdown()


@asynccontextmanager
async def backend(app=ray_backend.APP):
    made = RayBackend(app)
    await made.start()
    yield made
    await made.stop()


def pairs(*texts, query="q"):
    return [Pair(query, str(text)) for text in texts]


def scores(outcomes):
    return [outcome.score for outcome in outcomes]


def right(given):
    return [float(len(pair.document) - 1000 * len(pair.query)) for pair in given]


def random_pairs(generator, count):
    return [Pair("q" * generator.randint(1, 3), "d" * generator.randint(0, 500)) for _ in range(count)]


async def owners(made, documents):
    return {text: made._owner(key_of(text)) for text in documents}


async def until(condition, seconds=30):
    for _ in range(seconds * 20):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it never came true")


DOCUMENTS = [f"document {number}" for number in range(2000)]


async def test_scores_come_back_in_order_from_several_replicas_with_one_call_each(service):
    service(2)
    async with backend() as made:
        given = random_pairs(random.Random(0), 100)
        assert scores(await made.score(given)) == right(given)
        before = made.stats()["calls"]
        assert scores(await made.score(given)) == right(given)
        assert made.stats()["calls"] - before == 2
        assert await made.score([]) == []
        assert made.description.name == "lengths"
        assert made.readiness() is None
        assert made.stats()["pairs"] == 200
        assert made.stats()["replicas"] == 2


async def test_what_is_wrong_with_a_pair_is_said_of_it_alone(service):
    service(2)
    async with backend() as made:
        found = await made.score(pairs("a", "no score", "bb", "kill the process", "ccc"))
        assert scores(found) == [-999, None, -998, None, -997]
        assert (found[1].fault, found[1].error) == ("unscored", "has no score.")
        assert found[3].error == "ended the model's process, twice."
        with pytest.raises(InputError, match="cannot take its scores apart"):
            await made.explain(Pair("q", "a"))


async def test_a_document_goes_to_the_same_replica_from_every_gateway(service):
    service(2)
    async with backend() as one, backend() as two:
        assert await owners(one, DOCUMENTS) == await owners(two, DOCUMENTS)
        share = sum(owner == one._owner(key_of("x")) for owner in (await owners(one, DOCUMENTS)).values())
        assert 0.35 < share / len(DOCUMENTS) < 0.65


async def hit_rate(made, requests):
    def counts():
        stats = made.stats()
        return stats.get("model_hits", 0), stats.get("model_misses", 0)

    for _ in range(3):  # from the second time on everything that fits is there
        hits, misses = counts()
        for request in requests:
            await made.score(request)
    after = counts()
    return (after[0] - hits) / (after[0] - hits + after[1] - misses)


async def test_prefixes_that_fit_together_are_all_hit_and_with_random_routing_they_are_not(ray_cluster, monkeypatch):
    deploy(partial(Lengths, 300), "small", Replicas(2, **SMALL), canary=None, app="small")
    requests = [pairs(*DOCUMENTS[start : start + 50]) for start in range(0, 500, 50)]
    async with backend("small") as made:  # 500 documents: too many for one replica of 300, not for two
        assert await hit_rate(made, requests) > 0.9
        generator = random.Random(0)
        monkeypatch.setattr(ray_backend, "key_of", lambda text: str(generator.random()))
        assert await hit_rate(made, requests) < 0.7
    take_down("small")


async def test_replicas_come_and_go_under_load_and_every_score_is_right(service):
    service(1)
    generator, wrong, answered = random.Random(0), [], 0
    async with backend() as made:
        stop = asyncio.Event()

        async def client():
            nonlocal answered
            while not stop.is_set():
                given = random_pairs(generator, generator.randint(1, 40))
                found = scores(await made.score(given))
                answered += len(found)
                if found != right(given):
                    wrong.append((given, found))

        clients = [asyncio.create_task(client()) for _ in range(4)]
        alone = await owners(made, DOCUMENTS)
        assert len(set(alone.values())) == 1
        await asyncio.to_thread(service, 2)
        await until(lambda: made.stats()["replicas"] == 2)
        both = await owners(made, DOCUMENTS)
        moved = sum(alone[text] != both[text] for text in DOCUMENTS)
        assert 0.35 < moved / len(DOCUMENTS) < 0.65  # to the new one, and nowhere else
        assert set(both.values()) > set(alone.values())
        before = answered
        await asyncio.to_thread(service, 1)
        await until(lambda: made.stats()["replicas"] == 1)
        await until(lambda: answered > before + 100)
        stop.set()
        await asyncio.gather(*clients)
    assert not wrong


async def test_a_replica_that_is_killed_under_load_costs_no_score(service):
    service(2)
    generator = random.Random(1)
    async with backend() as made:

        async def client():
            for _ in range(30):
                given = random_pairs(generator, 20)
                assert scores(await made.score(given, timeout=60)) == right(given)

        clients = [asyncio.create_task(client()) for _ in range(4)]
        await asyncio.sleep(0.3)
        os.kill(await replica_process(made), signal.SIGKILL)
        await asyncio.gather(*clients)
        assert made.stats()["retried"] > 0
        await until(lambda: made.stats()["replicas"] == 2)
        assert scores(await made.score(pairs("a", "bb"))) == [-999, -998]


async def replica_process(made):
    """Number of the process of some replica: the parent of its model's, which may just have been replaced."""
    for _ in range(300):
        for latest in made._latest.values():
            state = Path(f"/proc/{int(latest['model_process'])}/stat")
            if state.exists():
                return int(state.read_text().rpartition(")")[2].split()[1])
        await asyncio.sleep(0.1)
    raise AssertionError("no replica has a model")


async def test_a_document_on_which_replicas_die_fails_alone(service):
    service(2)
    async with backend() as made:
        found = await made.score([*pairs("a", "kill the replica", "bb")], timeout=90)
        assert scores(found) == [-999, None, -998]
        assert found[1].error == "3 replicas died on it."


async def test_late_work_is_cancelled_on_its_replica(ray_cluster):
    slow = partial(Lengths, seconds=0.5)
    limits = QueueLimits(pairs=50, step_seconds=1e-9, least_tokens=16)
    deploy(slow, "slow", Replicas(1, **SMALL), canary=None, limits=limits, app="slow")
    async with backend("slow") as made:
        with pytest.raises(DeadlineError, match=r"no answer in 0\.3 seconds"):
            await made.score(pairs(*range(40)), timeout=0.3)
        assert scores(await made.score(pairs("a"), timeout=5)) == [-999]
        assert made.stats()["late"] == 1
        assert made.stats()["cancelled"] >= 38
        task = asyncio.create_task(made.score(pairs(*range(45))))
        await asyncio.sleep(0.3)
        with pytest.raises(OverloadedError, match="tokens are waiting") as caught:
            await made.score(pairs(*range(45)))
        assert caught.value.retry_after >= 1
        task.cancel()
    take_down("slow")


async def test_without_replicas_there_is_no_service(ray_cluster):
    with pytest.raises(UnavailableError, match="No replicas are deployed on this Ray cluster under the name 'nothing'"):
        await RayBackend("nothing").start()
    with pytest.raises(UnavailableError, match="has not been started"):
        await RayBackend("nothing").score(pairs("a"))
    with pytest.raises(UnavailableError, match="There is no such artifact"):
        deploy(refuse, "refused", Replicas(1, **SMALL), app="refused")
    take_down("refused")


async def test_the_app_answers_over_http_through_serve(service):
    build, replicas = partial(create_app, settings=Settings()), Replicas(2, **SMALL)
    await asyncio.to_thread(serve_on_ray, Lengths, "lengths", build, replicas, canary=None, port=PORT)
    documents = ["a", "bbb", "cc"]
    waits = httpx.AsyncHTTPTransport(retries=6)  # Serve's proxy may begin to listen a little after its application
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", timeout=60, transport=waits) as client:
        answer = await client.post("/v1/rerank", json={"query": "q", "documents": documents})
        assert answer.status_code == 200, answer.text
        ranked = answer.json()["results"]
        assert [(row["index"], row["relevance_score"]) for row in ranked] == [(1, -997), (2, -998), (0, -999)]

        async def ask(count):  # several calls each, at the same time: Serve must not take one for another
            given = ["d" * number for number in range(count)]
            answer = await client.post("/v2/rerank", json={"query": "q", "documents": given})
            return [row["relevance_score"] for row in sorted(answer.json()["results"], key=lambda row: row["index"])]

        counts = range(1, 31)
        found = await asyncio.gather(*map(ask, counts))
        assert found == [[number - 1000 for number in range(count)] for count in counts]
        assert (await client.get("/ready")).status_code == 200
        assert f"rsrank_documents_total {3 + sum(counts)}" in (await client.get("/metrics")).text
