"""Hostile requests: connections, headers, bodies, names and keys, and the metrics of each."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from prometheus_client.parser import text_string_to_metric_families
from service_helpers import Numbers, address_of, client_of, scheduler

from rsrank_rag.errors import ArtifactError
from rsrank_rag.service import middleware, server
from rsrank_rag.service.app import create_app
from rsrank_rag.service.middleware import Settings
from rsrank_rag.service.server import ConnectionLimits

JSON = {"content-type": "application/json"}
RERANK = {"query": "q", "documents": ["3", "1", "2"]}
HEAD = b"POST /v1/rerank HTTP/1.1\r\nHost: localhost\r\n"


def serving(reranker=None, **settings):
    return client_of(scheduler(reranker or Numbers()), **settings)


def sample(text, metric, /, **labels):
    """One number of /metrics."""
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    return next(s.value for s in samples if s.name == metric and s.labels.items() >= labels.items())


def wait_until(condition):
    ends = time.monotonic() + 300  # a test that fails must end
    while not condition():
        assert time.monotonic() < ends, "it never came true"
        time.sleep(0.01)


# Connections


def connected(url):
    found = httpx.URL(url)
    return socket.create_connection((found.host, found.port), timeout=60)


def is_closed(connection):
    """Wait for the end of what the service says."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("size", [30_000, 3_000_000])
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


def test_connections_beyond_the_limit_get_503_and_open_ones_are_answered():
    with ExitStack() as stack:
        url = stack.enter_context(address_of(scheduler(Numbers()), ConnectionLimits(connections=5)))
        client = stack.enter_context(httpx.Client())
        assert client.get(f"{url}/health").status_code == 200
        idle = [stack.enter_context(connected(url)) for _ in range(5)]
        assert httpx.get(f"{url}/health").status_code == 503
        for connection in idle:
            connection.close()
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)


def test_an_idle_connection_is_closed():
    limits = ConnectionLimits(idle_seconds=1)
    with address_of(scheduler(Numbers()), limits) as url, connected(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert is_closed(connection)


def test_a_request_that_announces_an_empty_body_keeps_its_connection():
    with address_of(scheduler(Numbers())) as url, httpx.Client() as client:
        answer = client.get(f"{url}/health", headers={"Content-Length": "0"})
    assert answer.status_code == 200
    assert "connection" not in answer.headers


def test_a_clients_pipelined_requests_are_answered_in_turn_with_others():
    backend, may_go_on = scheduler(Numbers()), threading.Event()
    may_go_on.set()
    backend.readiness = lambda: None if may_go_on.wait(60) else "It never went on."
    request = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n%s\r\n"
    with ExitStack() as stack:
        url = stack.enter_context(address_of(backend))
        # The service stands still until all requests have been sent.
        may_go_on.clear()
        stack.enter_context(connected(url)).sendall(request % (b"ready", b""))
        for _ in range(20):
            stack.enter_context(connected(url)).sendall(request % (b"health", b"") * 300)
        other = stack.enter_context(connected(url))
        other.sendall(request % (b"metrics", b"Connection: close\r\n"))
        may_go_on.set()
        text = b"".join(iter(lambda: other.recv(1 << 16), b"")).decode()
    metrics = text.partition("\r\n\r\n")[2]
    answered = sample(metrics, "rsrank_request_seconds_count", route="/health")
    assert answered < 0.5 * 20 * 300


def test_connections_leave_room_for_other_files(monkeypatch):
    monkeypatch.setattr(server.os, "sysconf", lambda name: 256)
    assert server.connection_limit(1000) == 192
    assert server.connection_limit(100) == 100


def test_no_request_is_lost_when_the_service_ends_with_clients_that_keep_connections():
    app = create_app(scheduler(Numbers()), Settings())
    served = server.Server(app, ConnectionLimits(notice=2.0))
    lost, closing = [], []

    def ask(url):
        with httpx.Client() as client:
            while True:
                try:
                    answer = client.post(f"{url}/v1/rerank", json=RERANK)
                except httpx.ConnectError:
                    # Nobody listens any more, and nothing was sent.
                    return
                except httpx.HTTPError as error:
                    lost.append(error)
                    return
                assert answer.status_code == 200
                if answer.headers.get("connection") == "close":
                    closing.append(answer)

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=served.run, kwargs={"sockets": [bound]})
        thread.start()
        wait_until(lambda: served.started)
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        clients = [threading.Thread(target=ask, args=(url,)) for _ in range(4)]
        for client in clients:
            client.start()
        wait_until(lambda: app.state.backend.stats()["documents"] >= 30)
        assert not closing
        served.handle_exit(signal.SIGTERM, None)
        for one in (thread, *clients):
            one.join(120)
    assert not lost
    assert len(closing) >= 4
    assert app.state.metrics.unanswered == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's packet filter")
def test_before_the_listener_closes_no_connection_is_made_and_those_that_wait_are_accepted():
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        address = listener.getsockname()
        first = stack.enter_context(socket.create_connection(address))
        server.take_no_connections(listener)
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=0.3)
        accepted = stack.enter_context(listener.accept()[0])
        first.sendall(b"said")
        assert accepted.recv(4) == b"said"
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


# Bodies


def test_a_request_with_two_ends_is_refused_and_nothing_behind_it_is_read():
    with address_of(scheduler(Numbers())) as url, connected(url) as connection:
        hidden = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        connection.sendall(
            HEAD + b"Content-Length: 100\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + hidden
        )
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1


def never_ending(head, pause):
    """A body of which pieces come for half a minute, or until the connection is closed."""
    yield head + b"Transfer-Encoding: chunked\r\n\r\n"
    ends = time.monotonic() + 30
    while time.monotonic() < ends:
        yield b"10\r\n" + 16 * b" " + b"\r\n"
        time.sleep(pause)
    raise AssertionError("the connection was never closed")


@pytest.mark.parametrize(
    ("status", "key", "pause", "settings"),
    [
        (401, b"", 0.05, {}),
        (408, b"Authorization: Bearer k\r\n", 0.05, {"timeout": 0.5}),
        (413, b"Authorization: Bearer k\r\n", 0, {"max_body_bytes": 1000}),
    ],
)
def test_a_body_that_never_ends_is_answered_and_its_connection_closed(
    status, key, pause, settings, monkeypatch
):
    monkeypatch.setattr(middleware, "LINGER", 0.5)
    with (
        address_of(scheduler(Numbers()), api_keys=["k"], **settings) as url,
        connected(url) as connection,
    ):
        with suppress(ConnectionError):
            for piece in never_ending(HEAD + key, pause):
                connection.sendall(piece)
        with suppress(ConnectionError):
            connection.recv(1 << 16)
        counted = sample(
            httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer k"}).text,
            "rsrank_request_seconds_count",
            status=str(status),
        )
    assert counted == 1


@pytest.mark.parametrize("size", [100, 30_000_000])
def test_a_client_that_sends_a_whole_body_first_reads_why_it_is_refused(size):
    with address_of(scheduler(Numbers()), api_keys=["k"]) as url, connected(url) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % size)
        connection.sendall(b" " * size)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 401")
    assert answer.endswith(b"}")


@pytest.mark.parametrize("key", ["voil\u00e0", "\u00c5", "\u30ad\u30fc"])
async def test_a_key_may_have_letters_of_any_alphabet(key):
    async with serving(api_keys=[key]) as http:
        for sent in (key, key + "x", key[:-1]):
            answer = await http.get(
                "/info", headers={b"Authorization": b"Bearer  " + sent.encode() + b" "}
            )
            assert (answer.status_code == 200) == (sent == key)


@pytest.mark.parametrize("entry", [b"[]", b"0", b"{}", b'""'])
async def test_an_answer_to_a_flood_of_small_values_is_short(entry):
    body = b'{"query": "q", "documents": [' + b",".join([entry] * 200_000) + b"]}"
    async with serving() as http:
        response = await http.post("/v1/rerank", content=body, headers=JSON)
    assert response.status_code in (400, 413)
    assert len(response.content) < 2000


async def test_bodies_that_come_together_are_limited_together(monkeypatch):
    monkeypatch.setattr(middleware, "BODIES", 2)
    taken, never = [], asyncio.Event()

    async def stays():
        yield b" " * 900
        taken.append(900)
        await never.wait()

    async with serving(max_body_bytes=1000) as http:
        held = [
            asyncio.create_task(http.post("/v1/rerank", content=stays(), headers=JSON))
            for _ in range(2)
        ]
        while len(taken) < 2:
            await asyncio.sleep(0.01)
        assert (await http.post("/v1/rerank", content=b" " * 300, headers=JSON)).status_code == 429
        assert (await http.post("/v1/rerank", json=RERANK)).status_code == 200
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        assert (await http.post("/v1/rerank", content=b" " * 300, headers=JSON)).status_code == 400


# Names, keys, messages


@pytest.mark.parametrize(
    ("host", "settings", "status"),
    [
        ("evil.example", {}, 421),
        ("evil.example:8080", {}, 421),
        ("127.0.0.1.evil.example", {}, 421),
        ("[::1", {}, 421),
        ("127.0.0.1:80", {}, 200),
        ("[::1]:80", {}, 200),
        ("localhost:8080", {}, 200),
        ("rsrank", {}, 200),
        ("rsrank.default.svc.cluster.local", {}, 200),
        ("ranks.example", {"allowed_hosts": ("ranks.example",)}, 200),
        ("ranks.example", {"allowed_hosts": ("Ranks.Example",)}, 200),
        ("evil.example", {"allowed_hosts": ("ranks.example",)}, 421),
        ("ranks.example", {"api_keys": ("k",)}, 200),
        ("evil.example", {"api_keys": ("k",), "allowed_hosts": ("ranks.example",)}, 421),
    ],
)
async def test_another_sites_name_does_not_lead_here(host, settings, status):
    async with serving(**settings) as http:
        headers = {"Host": host, "Authorization": "Bearer k"}
        for path in ("/info", "/health"):
            assert (await http.get(path, headers=headers)).status_code == status


@pytest.mark.parametrize("path", ["/", "/health", "/nothing", "/info"])
async def test_every_answer_forbids_guessing_its_type_and_framing_it(path):
    async with serving(api_keys=["k"]) as http:
        found = (await http.get(path)).headers
    assert (found["x-content-type-options"], found["x-frame-options"]) == ("nosniff", "DENY")
    assert "frame-ancestors 'none'" in found["content-security-policy"]


async def test_keys_change_with_their_file_and_stay_if_it_is_broken(tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_text("old\n")
    async with serving(api_keys=["fixed"], api_key_file=file) as http:

        async def opens(*keys):
            found = [
                await http.get("/info", headers={"Authorization": f"Bearer {key}"}) for key in keys
            ]
            return [answer.status_code == 200 for answer in found]

        assert await opens("fixed", "old", "new") == [True, True, False]
        other = tmp_path / "other"
        other.write_text("new\nnewer\n\n of three words \n")
        other.replace(file)
        assert await opens("fixed", "old", "new", "newer") == [True, False, True, True]
        # A line is one key.
        assert await opens("of three words", "of", "words") == [True, False, False]
        before = file.stat()
        file.write_text("two\nnewer\n")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert await opens("new", "two") == [False, True]
        file.write_text("\n")
        assert await opens("two", "") == [True, False]
        file.unlink()
        assert await opens("two", "") == [True, False]
        # Nobody writes to it, so reading it would never end.
        os.mkfifo(file)
        assert await opens("two", "") == [True, False]
        assert caplog.text.count("The keys that were read before stay.") == 2


class Telling(Numbers):
    """Has an error of ours that names a file."""

    def explain(self, query, document, max_tokens=None):
        raise ArtifactError("/home/someone/secret is damaged.")

    def scored(self, number, pair):
        if pair.document == "tell":
            raise ArtifactError("/home/someone/secret is damaged.")
        return super().scored(number, pair)


async def test_what_goes_wrong_inside_is_told_to_the_log_only(caplog):
    async with serving(Telling()) as http:
        answers = [
            await http.post("/explain", json={"query": "q", "document": "d"}),
            await http.post("/v1/rerank", json={"query": "q", "documents": ["tell", "1"]}),
        ]
        backend = http.app.state.backend

        async def fails():
            raise ArtifactError("/home/someone/secret is gone.")

        backend.model.start = fails
        restart = asyncio.create_task(backend._restart())
        while (answer := await http.get("/ready")).status_code != 503:
            await asyncio.sleep(0.01)
        answers.append(answer)
        restart.cancel()
    assert [answer.status_code for answer in answers] == [500, 422, 503]
    assert not any("secret" in answer.text for answer in answers)
    assert "secret is gone" in caplog.text


# What can be seen


async def test_memory_and_files_can_be_seen():
    async with serving() as http:
        await http.post("/v1/rerank", json=RERANK)
        text = (await http.get("/metrics")).text
    if os.path.isdir("/proc/self"):  # noqa: PTH112
        assert sample(text, "process_resident_memory_bytes") > 1e6
        assert sample(text, "process_open_fds") > 2
        assert sample(text, "rsrank_model_process_resident_memory_bytes") > 1e6


async def test_xinferences_clients_find_the_model_by_any_name():
    async with serving() as http:
        for name in ("fake", "BAAI/bge"):
            found = (await http.get(f"/v1/models/{name}")).json()
            assert (found["id"], found["model_type"]) == ("fake", "rerank")


async def test_a_request_that_the_servers_end_cuts_off_is_answered_and_counted():
    reranker = Numbers()
    backend = scheduler(reranker)
    async with client_of(backend) as http:
        reranker.may_go_on.clear()
        sent, body = [], json.dumps(RERANK).encode()

        async def receive():
            if not sent:
                sent.append("request")
                return {"type": "http.request", "body": body}
            await asyncio.Event().wait()

        async def send(message):
            sent.append(message.get("status"))

        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/rerank",
            "headers": headers,
            "query_string": b"",
        }
        call = asyncio.create_task(http.app(scope, receive, send))
        while not reranker.batches:
            await asyncio.sleep(0.01)
        call.cancel()
        await call
        assert 503 in sent
        assert http.app.state.metrics.unanswered == 1
        reranker.may_go_on.set()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")  # noqa: PTH110
@pytest.mark.slow
def test_freed_memory_of_mixed_lengths_goes_back():
    code = (
        "import os, random, sys\n"
        "from rsrank_rag.service.worker import trim_regularly\n"
        "size = lambda: int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "pieces = [bytes(random.randint(1000, 100_000)) for _ in range(8000)]\n"
        "full = size(); kept = pieces[::100]; pieces.clear(); held = size()\n"
        "trim_regularly(0.05)\n"
        "import time\n"
        "ends = time.monotonic() + 60\n"
        "while size() > 0.3 * full and time.monotonic() < ends: time.sleep(0.05)\n"
        "print(full, held, size())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    full, _, left = map(int, done.stdout.split())
    assert left < 0.3 * full
