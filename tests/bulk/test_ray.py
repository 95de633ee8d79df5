"""The service on a Ray cluster: replicas start, stop and die without a wrong score."""

import asyncio
import random
import socket
from functools import partial

import httpx
import pytest
from ray_models import Lengths, refuse

pytest.importorskip("ray.serve")

from ray_service import application

from rsrank_rag.service.app import Settings, create_app
from rsrank_rag.service.scheduler import Scheduler

pytestmark = pytest.mark.ray

with socket.socket() as made:
    made.bind(("127.0.0.1", 0))
    PORT = made.getsockname()[1]


def build(make, **limits):
    return create_app(Scheduler(make, "lengths", **limits), Settings(timeout=60))


def run(make, count, **limits):
    """Bring up so many replicas; returns when they answer."""
    from ray import serve

    options = {"num_replicas": count, "ray_actor_options": {"num_cpus": 0.1}}
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(application(partial(build, make, **limits), **options), name="rsrank")


@pytest.fixture(scope="module")
def service(ray_cluster):
    """Function: number of replicas -> the service has so many. One service for all tests."""
    from ray import serve

    yield partial(run, Lengths)
    serve.shutdown()


@pytest.fixture
async def http():
    waits = httpx.AsyncHTTPTransport(
        retries=6
    )  # Serve's proxy may begin to listen a little after its application
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{PORT}", timeout=90, transport=waits
    ) as client:
        yield client


async def scores(http, query, documents):
    """Scores in input order; None where the service has none."""
    body = {"query": query, "documents": documents}
    answer = await http.post("/v1/rerank", json=body)
    assert answer.status_code == 200, answer.text
    actual = {row["index"]: row["relevance_score"] for row in answer.json()["results"]}
    return [actual.get(index) for index in range(len(documents))]


def right(query, documents):
    return [float(len(text) - 1000 * len(query)) for text in documents]


def random_request(generator):
    lengths = [generator.randint(1, 500) for _ in range(generator.randint(1, 40))]
    return "q" * generator.randint(1, 3), ["d" * length for length in lengths]


def running_replicas():
    from ray import serve

    deployment = serve.status().applications["rsrank"].deployments["Service"]
    return deployment.replica_states.get("RUNNING", 0)


async def until(condition, seconds=60):
    for _ in range(seconds * 10):
        if await condition():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it never came true")


async def test_replicas_answer_as_one_service_and_change_their_number_under_load(service, http):
    await asyncio.to_thread(service, 1)
    generator, answered, stop = random.Random(0), 0, asyncio.Event()

    async def client():
        nonlocal answered
        while not stop.is_set():
            query, documents = random_request(generator)
            assert await scores(http, query, documents) == right(query, documents)
            answered += 1

    async def has(count):
        return await asyncio.to_thread(running_replicas) == count

    async def more_answers(before):
        return answered > before + 20

    clients = [asyncio.create_task(client()) for _ in range(4)]
    for count in (2, 1):
        await asyncio.to_thread(service, count)
        await until(partial(has, count))
        await until(partial(more_answers, answered))
    stop.set()
    await asyncio.gather(*clients)
    assert (await http.get("/ready")).json() == {"status": "ready"}
    assert (await http.get("/info")).json()["model_id"] == "lengths"
    assert "rsrank_documents_total" in (await http.get("/metrics")).text


async def test_a_document_on_which_the_models_process_dies_fails_alone(service, http):
    await asyncio.to_thread(service, 1)
    body = {"query": "q", "documents": ["a", "no score", "bb", "kill the process"]}
    answer = await http.post("/v1/rerank", json=body)
    assert answer.is_error
    assert [row["index"] for row in answer.json()["documents"]] == [1, 3]
    assert await scores(http, "q", ["a", "bb"]) == [-999, -998]


async def test_a_replica_that_dies_is_replaced(service, http):
    await asyncio.to_thread(service, 1)
    assert (
        await http.post("/v1/rerank", json={"query": "q", "documents": ["kill the replica"]})
    ).is_error

    async def is_back():
        return (
            await http.post("/v1/rerank", json={"query": "q", "documents": ["a"]})
        ).status_code == 200

    await until(is_back)
    assert await scores(http, "q", ["a", "bb"]) == [-999, -998]


def test_what_cannot_be_brought_up_is_an_error(service):
    from ray import serve

    serve.delete("rsrank")
    with pytest.raises(RuntimeError):
        run(refuse, 1)
