"""Hostile requests: connections, headers, bodies, names and keys, and the metrics of each."""

import asyncio
import json
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from service_helpers import (
    JSON,
    RERANK,
    Numbers,
    address_of,
    metrics,
    scheduler,
    scope_of,
    serving,
)  # fmt: skip

from rsrank_rag.errors import ArtifactError
from rsrank_rag.service.messages import Budget, ServiceError

HEAD = b"POST /v1/rerank HTTP/1.1\r\nHost: localhost\r\n"


# Connections


def connected(url):
    result = httpx.URL(url)
    return socket.create_connection((result.host, result.port), timeout=60)


def is_closed(connection):
    """Wait for the end of what the service says."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("size", [100_000, 3_000_000])
def test_a_head_beyond_the_limit_is_not_read_to_its_end(size):
    with address_of(scheduler(Numbers())) as url, connected(url) as connection:
        try:
            connection.sendall(HEAD + b"X-Large: " + b"x" * size)
            answer = connection.recv(100)
        except ConnectionError:  # closed while much of it was on its way
            answer = b"HTTP/1.1 400"
        assert answer.startswith(b"HTTP/1.1 400")
        assert is_closed(connection)
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("first", [b"", b"2\r\n{}\r\n"])
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("key", [b"", b"Authorization: Bearer k\r\n"])
def test_a_body_that_breaks_off_in_nonsense_ends_only_its_own_connection(key, waits, first):
    with address_of(scheduler(Numbers()), api_keys=["k"]) as url, connected(url) as connection:
        connection.sendall(HEAD + key + b"Transfer-Encoding: chunked\r\n\r\n" + first)
        answer = connection.recv(12) if waits and not key else b""
        connection.sendall(b"nonsense\r\n\r\n")
        with suppress(ConnectionError):
            answer += b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert answer.count(b"HTTP/1.1") <= 1
        assert httpx.get(f"{url}/health").status_code == 200


# Bodies


@pytest.mark.parametrize("size", [100, 30_000_000])
def test_a_client_that_sends_a_whole_body_first_reads_why_it_is_refused(size):
    with address_of(scheduler(Numbers()), api_keys=["k"]) as url, connected(url) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % size)
        connection.sendall(b" " * size)
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 401")
    assert answer.endswith(b"}")


@pytest.mark.parametrize("entry", [b"[]", b"0", b"{}", b'""'])
async def test_an_answer_to_a_flood_of_small_values_is_short(entry):
    body = b'{"query": "q", "documents": [' + b",".join([entry] * 200_000) + b"]}"
    async with serving() as http:
        response = await http.post("/v1/rerank", content=body, headers=JSON)
    assert response.status_code in (400, 413)
    assert len(response.content) < 2000


# Names, keys, messages


class Telling(Numbers):
    """Has an error of ours that names a file."""

    def explain(self, query, document):
        raise ArtifactError("/home/someone/secret is damaged.")

    def scored(self, number, pair):
        if pair.document == "tell":
            raise ArtifactError("/home/someone/secret is damaged.")
        return super().scored(number, pair)


async def test_what_goes_wrong_inside_is_told_to_the_log_only(caplog):
    async with serving(Telling()) as http:
        answers = [
            await http.post("/explain", json={"query": "q", "documents": ["d"]}),
            await http.post("/v1/rerank", json={"query": "q", "documents": ["tell", "1"]}),
        ]
        backend = http.app.state.backend

        async def fails():
            raise ArtifactError("/home/someone/secret is gone.")

        backend.model.start = fails
        backend.model.pid = None
        while (answer := await http.get("/ready")).status_code != 503:
            await asyncio.sleep(0.01)
        while "secret is gone" not in caplog.text:
            await asyncio.sleep(0.01)
        answers.append(answer)
    assert [answer.status_code for answer in answers] == [500, 422, 503]
    assert not any("secret" in answer.text for answer in answers)
    assert "secret is gone" in caplog.text


# What can be seen


async def test_memory_and_files_can_be_seen():
    async with serving() as http:
        await http.post("/v1/rerank", json=RERANK)
        numbers = metrics((await http.get("/metrics")).text)
    if Path("/proc/self").is_dir():
        assert numbers["process_resident_memory_bytes",] > 1e6
        assert numbers["process_open_fds",] > 2
        assert numbers["rsrank_model_process_resident_memory_bytes",] > 1e6


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.slow
def test_freed_memory_of_mixed_lengths_goes_back():
    code = (
        "import random, threading, time\n"
        "from rsrank_rag.service.model_process import give_memory_back\n"
        "size = lambda: int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "pieces = [bytes(random.randint(1000, 100_000)) for _ in range(8000)]\n"
        "full = size(); kept = pieces[::100]; pieces.clear()\n"
        "threading.Thread(target=give_memory_back, args=(0.05,), daemon=True).start()\n"
        "ends = time.monotonic() + 60\n"
        "while size() > 0.3 * full and time.monotonic() < ends: time.sleep(0.05)\n"
        "print(full, size())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    full, left = map(int, done.stdout.split())
    assert left < 0.3 * full


# Bytes


def budgeted(limit, *amounts):
    """What clients take: the statuses of their errors; 0 without an error."""
    budget, statuses = Budget(limit, "bytes"), []
    for client, amount in amounts:
        try:
            budget.take(client, amount)
            statuses.append(0)
        except ServiceError as error:
            statuses.append(error.status_code)
    for client in list(budget.taken):
        budget.give_back(client, budget.taken[client])
    assert not budget.taken
    return statuses


def test_a_client_may_have_half_of_the_bytes_and_all_clients_all():
    assert budgeted(100, ("a", 30), ("a", 20), ("a", 1), ("b", 50), ("c", 1)) == [0, 0, 429, 0, 429]
    assert budgeted(100, ("a", 51), ("a", 50)) == [413, 0]


def announcing(size, key):
    head = HEAD + b"Authorization: Bearer %s\r\nContent-Type: application/json\r\n" % key
    return head + b"Content-Length: %d\r\n\r\n" % size


async def test_an_answer_that_cannot_be_sent_is_not_followed_by_another():
    sent = []

    async def send(message):
        sent.append(message["type"])
        raise OSError("The connection is broken.")

    scope = {"type": "http", "method": "GET", "path": "/health", "headers": [], "query_string": b""}
    async with serving() as http:
        await http.app(scope, None, send)
    assert sent == ["http.response.start"]


async def test_a_client_that_leaves_while_it_sends_is_no_error_of_the_service(caplog):
    messages = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message.get("status"))

    async with serving() as http:
        await http.app(scope_of(size=100), receive, send)
    assert sent[0] == 499
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_bodies_that_are_held_back_take_no_more_than_half_and_others_are_answered():
    settings = {"api_keys": ["rude", "polite"], "max_body": 100_000}
    with ExitStack() as stack:
        url = stack.enter_context(address_of(scheduler(Numbers()), **settings))
        statuses = []
        for _ in range(10):
            connection = stack.enter_context(connected(url))
            connection.sendall(announcing(100_000, b"rude") + b" " * 99_999)
            connection.settimeout(0.5)
            with suppress(TimeoutError):
                statuses.append(connection.recv(12))
        assert statuses == [b"HTTP/1.1 429"] * 8
        for _ in range(5):
            headers = {"Authorization": "Bearer polite"}
            answer = httpx.post(f"{url}/v1/rerank", json=RERANK, headers=headers)
            assert answer.status_code == 200


async def test_answers_are_counted_before_they_are_made():
    # JSON has six bytes for each of its characters.
    text = "\x01" * 10_000
    body = {"query": "q", "documents": ["1 " + text] * 3, "return_documents": True}
    async with serving(max_body=60_000) as http:
        assert (await http.post("/v1/rerank", json=body)).status_code == 413
    async with serving(max_body=190_000) as http:
        answer = await http.post("/v1/rerank", json=body)
        assert answer.status_code == 200
        assert len(answer.content) > 180_000
        assert (await http.post("/v1/rerank", json={**body, "top_k": 3})).status_code == 413


async def test_an_answer_waits_with_its_bytes_until_the_client_has_taken_it():
    sizes, taken = [], asyncio.Event()
    async with serving(max_body=1_000_000) as http:
        body = {"query": "q", "documents": ["1 " + "x" * 500_000], "return_documents": True}
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive():
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message):
            sizes.append(len(message.get("body", b"")))
            await taken.wait()

        scope = scope_of(messages[0]["body"])
        call = asyncio.create_task(http.app(scope, receive, send))
        while not sizes:
            await asyncio.sleep(0.01)
        budget = scope["state"]["record"].budget
        assert budget.taken.total() > 1_000_000
        taken.set()
        await call
        assert not budget.taken
    assert max(sizes) <= 65_536
