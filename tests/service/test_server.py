"""The HTTP service: requests, answers, limits, errors, keys, metrics, logs, and its process."""

import asyncio
import gc
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from click.testing import CliRunner
from conftest import load_ranker
from service_helpers import (
    JSON,
    RERANK,
    Numbers,
    Words,
    client_of,
    metrics,
    scheduler,
    scope_of,
    serving,
    until,
    wait_until,
)  # fmt: skip

from rsrank_rag import RSRank
from rsrank_rag.adapters.kinds import load as load_reranker
from rsrank_rag.backends.options import LoadOptions, ModelSource
from rsrank_rag.cli import app
from rsrank_rag.cli.service import KEYS
from rsrank_rag.prefixes.cache import CachedPrefixes, PrefixTiers
from rsrank_rag.ranking.rule import Rule
from rsrank_rag.reranker import BLANK_SCORE
from rsrank_rag.service import app as app_module
from rsrank_rag.service.logs import line_of
from rsrank_rag.service.messages import Description

PASSAGES_OF_NVIDIA = [{"text": "3"}, {"text": "1"}, {"text": "2"}]
REQUESTS = [
    ("/v1/rerank", RERANK),
    ("/v2/rerank", RERANK),
    ("/rerank", RERANK),
    ("/rerank", {"query": "q", "texts": ["3", "1", "2"]}),
    ("/v1/ranking", {"query": {"text": "q"}, "passages": PASSAGES_OF_NVIDIA}),
    ("/explain", {"query": "q", "documents": ["3"]}),
]

CPU = LoadOptions(device="cpu", dtype="float32", local_files_only=True)


def scores(result):
    """Index and score of every row, whatever the client."""
    rows = result
    if isinstance(result, dict):
        rows = result.get("results") or result["rankings"]
    pairs = []
    for row in rows:
        (score,) = row.keys() & {"relevance_score", "score", "logit"}
        pairs.append((row["index"], row[score]))
    return pairs


# Clients


@pytest.mark.parametrize(
    "path", ["/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/api/rerank"]
)
async def test_documents_come_back_best_first_under_every_path(path):
    async with serving() as http:
        actual = (await http.post(path, json=RERANK)).json()
    assert scores(actual) == [(0, 3), (2, 2), (1, 1)]
    assert (actual["object"], actual["model"], actual["threshold"]) == ("rerank", "fake", 1.0)
    assert actual["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert actual["meta"]["billed_units"]["search_units"] == 1
    assert not any("document" in row for row in actual["results"])


async def test_nvidia_gets_rankings_and_the_list_of_models():
    async with serving(normalize=True) as http:
        body = {"query": {"text": "q"}, "passages": [{"text": "1"}, {"text": "2"}]}
        # Logits are raw.
        assert scores((await http.post("/v1/ranking", json=body)).json()) == [(1, 2), (0, 1)]
        assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == ["fake"]


async def test_irrelevant_documents_are_dropped_only_where_somebody_asked_for_it():
    async with serving() as http:

        async def rows(**fields):
            return len((await http.post("/v1/rerank", json={**RERANK, **fields})).json()["results"])

        assert await rows() == 3
        assert await rows(threshold="native") == 2
        assert await rows(threshold=2) == 1
        assert await rows(threshold=2, max_gap=None) == 1
        assert await rows(threshold=4, fallback={"max_gap": 9, "max_depth": 3}) == 2
        assert await rows(threshold=1.5, top_n=1) == 1
        assert await rows(threshold=9) == 0
        assert await rows(top_n=0) == 3


@pytest.mark.parametrize(("path", "body"), REQUESTS[:-1])
async def test_dropping_as_a_setting_concerns_only_clients_that_allow_it(path, body):
    async with serving(drop=True) as http:
        actual = (await http.post(path, json=body)).json()
    assert len(scores(actual)) == (2 if "documents" in body and "rerank" in path else 3)


async def test_a_model_without_a_native_threshold_cannot_drop_by_it():
    ranker = Numbers()
    ranker.threshold = None
    async with serving(ranker) as http:
        answer = await http.post("/v1/rerank", json={**RERANK, "threshold": "native"})
        assert (answer.status_code, "no native threshold" in answer.text) == (422, True)
        assert "threshold" not in (await http.post("/v1/rerank", json=RERANK)).json()


async def test_an_explanation_has_its_exact_parts():
    body = {"query": "q", "documents": ["3"]}
    async with serving() as http:
        actual = (await http.post("/explain", json=body)).json()
    parts = {"tokens": ["a", "b"], "layers": [1, 2], "parts": [[1.0, 0.5], [1.0, 0.5]]}
    parts |= {"similarity": 0.0, "matches": [], "similarity_window": None, "head_parts": []}
    assert actual == {"query": "q", "document": "3", "score": 3.0, "truncated": False, **parts}
    async with serving(Words()) as http:
        response = await http.post("/explain", json=body)
    assert response.status_code == 422
    assert "cannot take its scores apart" in response.text


async def test_the_service_says_what_it_serves():
    async with serving() as http:
        actual = (await http.get("/info")).json()
    assert (actual["model_id"], actual["threshold"]) == ("fake", 1.0)
    assert "reranker" in actual["model_type"]
    assert "max_input_length" not in actual  # this model does not count; Dify fails on a null


async def test_the_page_is_served_without_a_key():
    async with serving(api_keys=["secret"]) as http:
        response = await http.get("/")
        assert response.text == app_module.PAGE.read_text(encoding="utf-8")
        assert response.headers["content-type"] == "text/html; charset=utf-8"


async def test_a_blank_document_scores_lowest_and_the_answer_is_json():
    async with serving(Words()) as http:
        actual = (
            await http.post("/v1/rerank", json={"query": "q", "documents": [" ", "x"]})
        ).json()
        assert scores(actual) == [(1, -0.5), (0, BLANK_SCORE)]
        actual = (
            await http.post("/rerank", json={"query": "q", "texts": ["", "x"], "raw_scores": False})
        ).json()
        assert scores(actual)[1] == (0, 0.0)


# One bad document


@pytest.mark.parametrize("bad", ["no score", "nan", "broken"])
@pytest.mark.parametrize(("path", "body"), REQUESTS[:-1])
async def test_a_bad_document_is_named_to_every_client_and_nothing_else_is_answered(
    path, body, bad
):
    body = json.loads(json.dumps(body).replace('"1"', f'"{bad}"'))
    async with serving() as http:
        response = await http.post(path, json=body)
    assert response.status_code == 422
    assert [document["index"] for document in response.json()["documents"]] == [1]
    assert response.json()["error"].startswith("Document 1 ")


async def test_a_refused_query_blames_no_document():
    async with serving() as http:
        response = await http.post("/v1/rerank", json={**RERANK, "query": "refused"})
    assert (response.status_code, response.json()["error"]) == (422, "The query is refused.")
    assert "documents" not in response.json()


async def test_a_model_that_fails_on_everything_is_the_services_fault():
    async with serving() as http:
        body = {"query": "q", "documents": ["broken", "broken"]}
        response = await http.post("/v1/rerank", json=body)
    assert response.status_code == 500


# Long documents


LONG = " ".join(["5"] * 12)


async def test_documents_that_are_too_long_are_cut_and_marked():
    async with serving() as http:
        body = {"query": "q", "documents": ["1", LONG]}
        actual = (await http.post("/v1/rerank", json=body)).json()
        assert [row["truncated"] for row in actual["results"]] == [True, False]


# Limits and errors


LIMITED = {"max_documents": 3, "max_body": 300}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"documents": ["1"] * 4}, "The request has 4 documents; it may have 3"),
        ({"user": "x" * 300}, "The body is too large; it may have 300 bytes"),
    ],
)
async def test_what_is_too_large_is_413_and_says_what(fields, message):
    async with serving(**LIMITED) as http:
        response = await http.post("/v1/rerank", json={**RERANK, **fields})
        assert (response.status_code, message in response.json()["message"]) == (413, True)
        assert (await http.post("/v1/rerank", json=RERANK)).status_code == 200


async def test_a_body_without_a_length_is_measured_as_it_comes():
    sent = []

    async def chunks(count):
        for _ in range(count):
            sent.append(100)
            yield b" " * 100
        yield json.dumps(RERANK).encode()

    async with serving(max_body=1000) as http:
        assert (await http.post("/v1/rerank", content=chunks(5), headers=JSON)).status_code == 200
        sent.clear()
        response = await http.post("/v1/rerank", content=chunks(1000), headers=JSON)
        assert response.status_code == 413
        assert sum(sent) <= 1200


async def test_a_body_that_does_not_come_is_not_waited_for():
    async def slowly():
        yield b'{"query": '
        await asyncio.Event().wait()

    async with serving(timeout=0.1) as http:
        answer = await http.post("/v1/rerank", content=slowly(), headers=JSON)
    assert (answer.status_code, answer.headers["connection"]) == (408, "close")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", "/rerank", 405), ("DELETE", "/", 405)],
)
async def test_every_error_has_one_body(method, path, status):
    async with serving() as http:
        response = await http.request(method, path)
    assert response.status_code == status
    assert response.json().keys() == {"error", "message", "detail"}


async def test_a_deadline_is_504_and_the_work_is_cancelled():
    ranker = Numbers()
    backend = scheduler(ranker)
    async with client_of(backend, timeout=3.0) as http:
        ranker.may_go_on.clear()
        responses = await asyncio.gather(*(http.post("/v1/rerank", json=RERANK) for _ in range(2)))
        assert [response.status_code for response in responses] == [504, 504]
        assert backend.stats()["waiting_documents"] == 0
        ranker.may_go_on.set()
        actual = [(await http.post("/v1/rerank", json=RERANK)).status_code for _ in range(5)]
        assert 200 in actual  # on a loaded machine even a free model may be late


async def test_a_client_that_leaves_takes_its_work_with_it(caplog):
    # Objects of earlier tests, which would be collected and reported below.
    gc.collect()
    caplog.clear()
    caplog.set_level(logging.INFO, "rsrank_rag")
    ranker = Numbers()
    backend = scheduler(ranker)
    async with client_of(backend) as http:
        ranker.may_go_on.clear()
        running = asyncio.create_task(http.post("/v1/rerank", json=RERANK))
        await until(lambda: ranker.batches)
        left = asyncio.Event()
        messages = [{"type": "http.request", "body": json.dumps(RERANK).encode()}]

        async def receive():
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            pass

        scope = scope_of(messages[0]["body"])
        call = asyncio.create_task(http.app(scope, receive, send))
        await until(lambda: backend.stats()["waiting_documents"] == 6)
        left.set()
        await call
        assert backend.stats()["waiting_documents"] == 3
        lines = [line for line in lines_of(caplog) if line["message"] == "request"]
        assert [line["status"] for line in lines] == [499]
        gc.collect()
        # It is nobody's error.
        assert "asyncio" not in {record.name for record in caplog.records}
        ranker.may_go_on.set()
        assert (await running).status_code == 200


async def test_a_stopping_service_is_503_with_a_time_to_come_back():
    backend = scheduler(Numbers())
    async with client_of(backend) as http:
        await backend.stop()
        response = await http.post("/v1/rerank", json=RERANK)
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/health")).status_code == 200


class Broken:
    """A backend with an error that nobody thought of."""

    name = "broken"
    description = Description(Rule())

    async def start(self):
        pass

    stop = start

    async def score(self, *pairs, **options):
        raise ZeroDivisionError("secret passage")

    is_ready = True

    def stats(self):
        return {}


async def test_an_error_that_nobody_thought_of_is_500_and_says_nothing_of_its_inside(caplog):
    async with client_of(Broken()) as http:
        response = await http.post("/v1/rerank", json=RERANK)
    assert response.status_code == 500
    assert "passage" not in response.text
    assert "A request failed." in caplog.text


# Keys


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer one", 200),
        ("bearer two", 200),
        ("Bearer three", 401),
        ("Bearer ", 401),
        ("Basic one", 401),
        ("one", 401),
        ("Bearer onetwo", 401),
    ],
)
async def test_with_keys_only_they_open_the_service(header, status):
    async with serving(api_keys=["one", "two"]) as http:
        headers = {} if header is None else {"Authorization": header}
        for path, body in REQUESTS:
            assert (await http.post(path, json=body, headers=headers)).status_code == status
        for path in ("/v1/models", "/info", "/metrics"):
            assert (await http.get(path, headers=headers)).status_code == status
        unknown = await http.get("/nothing", headers=headers)
        assert unknown.status_code == (404 if status == 200 else 401)
        for path in ("/health", "/ready"):
            assert (await http.get(path)).status_code == 200


async def test_nobody_without_a_key_gets_a_body_read():
    async def never():
        raise AssertionError("it was read")
        yield b""

    async with serving(api_keys=["one"]) as http:
        response = await http.post("/v1/rerank", content=never(), headers=JSON)
    assert response.status_code == 401


async def test_clients_with_different_keys_share_the_model():
    ranker = Numbers()
    backend = scheduler(ranker)
    async with client_of(backend, api_keys=["a", "b"]) as http:
        ranker.may_go_on.clear()
        done = []

        async def ask(key, count):
            # Long enough that one client's documents do not fit into one batch.
            texts = [f"{n} {'x' * 40}" for n in range(count)]
            body = {"query": "q", "documents": texts}
            await http.post("/v1/rerank", json=body, headers={"Authorization": f"Bearer {key}"})
            done.append(key)

        tasks = [asyncio.create_task(ask("a", 900))]
        await until(lambda: ranker.batches)
        tasks.append(asyncio.create_task(ask("b", 5)))
        await until(lambda: backend.stats()["waiting_documents"] == 905)
        ranker.may_go_on.set()
        await asyncio.gather(*tasks)
    assert done == ["b", "a"]


# Metrics and logs


async def test_prometheus_reads_what_was_counted():
    async with serving() as http:
        await http.post("/v1/rerank", json={"query": "q", "documents": ["1", LONG, "2"]})
        await http.post("/v1/rerank", json={"query": "q", "documents": ["nan", "1"]})
        await http.get("/some/path")
        response = await http.get("/metrics")
    actual = metrics(response.text)
    assert response.headers["content-type"].startswith("text/plain")
    assert actual["rsrank_documents_total",] == 5
    assert actual["rsrank_tokens_total",] == 17
    assert actual["rsrank_waiting_documents",] == 0
    assert actual["rsrank_ready",] == 1
    assert actual["rsrank_request_seconds_count", ("route", "/v1/rerank"), ("status", "200")] == 1
    assert actual["rsrank_request_seconds_count", ("route", "/v1/rerank"), ("status", "422")] == 1
    assert actual["rsrank_request_seconds_count", ("route", "other"), ("status", "404")] == 1


async def test_two_services_in_one_process_count_apart():
    async with serving() as one, serving() as two:
        await one.post("/v1/rerank", json=RERANK)
        assert metrics((await one.get("/metrics")).text)["rsrank_documents_total",] == 3
        assert metrics((await two.get("/metrics")).text)["rsrank_documents_total",] == 0


def keep_prefixes(ranker, folder=None):
    core = ranker.backbone
    tiers = PrefixTiers.of(None, folder, device=core.device, dtype=core.dtype)
    ranker.cache = ranker.reader.cache = CachedPrefixes({}, tiers)


async def test_a_real_models_prefixes_are_counted(tiny_folder):
    own = load_ranker(tiny_folder("qwen3"), "qwen3")
    keep_prefixes(own)
    async with serving(own) as http:
        body = {"query": "When?", "documents": ["In 1932.", "Never."]}
        for _ in range(2):
            await http.post("/v1/rerank", json=body)
        actual = metrics((await http.get("/metrics")).text)
    assert actual["rsrank_prefix_misses_total",] == 2
    assert actual["rsrank_prefix_device_hits_total",] == 2
    assert 0 < actual["rsrank_prefix_device_bytes",] < actual["rsrank_prefix_device_limit",]


def lines_of(caplog):
    """What the service writes to standard error for records."""
    return [json.loads(line_of(record)) for record in caplog.records]


async def test_a_request_is_one_line_with_what_it_cost_and_without_a_word_of_it(caplog):
    caplog.set_level(logging.DEBUG, "rsrank_rag")
    async with serving(api_keys=["secretkey"]) as http:
        headers = {"Authorization": "Bearer secretkey"}
        body = {"query": "secretquery", "documents": ["3 secretpassage", "1"], "threshold": 2}
        await http.post("/v1/rerank", json=body, headers=headers)
        for bad in (
            {"query": "refused", "documents": ["secretpassage"]},
            {"query": "secretquery", "documents": ["secretpassage"]},
            {"secretfield": "secretpassage"},
            {"query": "secretquery", "documents": [{"secretkey": "secretpassage"}]},
        ):
            await http.post("/v1/rerank", json=bad, headers=headers)
        await http.post("/v1/rerank", content=b'{"secretpassage', headers={**JSON, **headers})
        await http.get("/secretpassage?secretquery", headers=headers)
    requests = [line for line in lines_of(caplog) if line["message"] == "request"]
    first = requests[0]
    assert (first["route"], first["status"], first["documents"]) == ("/v1/rerank", 200, 2)
    assert first["milliseconds"] > 0
    assert [line["status"] for line in requests] == [200, 422, 500, 400, 400, 400, 404]
    assert "secret" not in json.dumps(lines_of(caplog))


async def test_errors_are_logged_by_kind_and_place_without_their_message(caplog):
    async with client_of(Broken()) as http:
        await http.post("/v1/rerank", json=RERANK)
    (line,) = [line for line in lines_of(caplog) if line["level"] == "ERROR"]
    assert "ZeroDivisionError" in line["exc_info"]
    assert "in score" in line["exc_info"]
    line_of_source = 'raise ZeroDivisionError("secret passage")'
    assert "passage" not in f"{line}".replace(line_of_source, "")


# The command


def test_systems_of_any_kind_are_loaded(ranker, tmp_path):
    assert type(load_reranker(ModelSource(name="bm25"))).__name__ == "BM25"
    ranker.save_pretrained(tmp_path)
    load = LoadOptions(device="cpu", dtype="float32", local_files_only=True)
    loaded = load_reranker(load.source(tmp_path, cache_size=0))
    assert isinstance(loaded, RSRank)
    assert not loaded.cache.tiers.is_on


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "nothing"], "There is no system 'nothing'"),
        (["--max-body", "much"], "max_body: could not parse"),
        (["--max-body", "0"], "max_body"),
        (["--timeout", "nan"], "timeout"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(arguments, says):
    done = CliRunner().invoke(app, ["serve", "--port", "0", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_address_where_nobody_can_listen_is_said_in_one_line():
    arguments = ["serve", "--port", "0", "--host", "203.0.113.1"]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1)
    assert "203.0.113.1" in done.stderr


@pytest.mark.slow
def test_the_models_process_logs_as_the_service_does():
    code = (
        "import logging, warnings\nfrom rsrank_rag.backends.options import ModelSource\n"
        "from rsrank_rag.cli.service import load_in_process\n"
        "load_in_process(ModelSource(name='bm25'))\n"
        "logging.getLogger('rsrank_rag.method.batches').info('one')\n"
        "logging.getLogger('transformers.models').warning('two')\n"
        "logging.getLogger('urllib3').info('too much'); warnings.warn('three')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True
    )
    messages = [json.loads(line)["message"] for line in done.stderr.splitlines()]
    assert messages[:2] == ["one", "two"]
    assert "three" in messages[2]
    assert len(messages) == 3


def in_fresh_python(*arguments, **environment):
    command = [sys.executable, "-m", "rsrank_rag", "serve", "--port", "0", *arguments]
    environment = {**os.environ, "COLUMNS": "200", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_said_in_one_line_too(tmp_path):
    (tmp_path / "config.json").write_text("{")
    done = in_fresh_python("--model", str(tmp_path))
    assert done.returncode == 1
    *log, error = done.stderr.splitlines()
    assert all(json.loads(line) for line in log)
    assert re.fullmatch(r"error: .*config\.json.*", error)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_without_the_extra_the_command_to_install_it_is_named(tmp_path, package):
    (tmp_path / f"{package}.py").write_text(
        f"raise ModuleNotFoundError('gone', name='{package}')", encoding="utf-8"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = in_fresh_python(PYTHONPATH=path)
    assert "[serve]" in done.stderr.partition("pip install")[2]
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)


# The process


@contextmanager
def process(*arguments, ready=True):
    """A running `rsrank serve`, by default when it is ready: the process and a client of it."""
    command = [sys.executable, "-m", "rsrank_rag", "serve", "--model", "mini", "--port", "0"]
    command += ["--dtype", "float32", "--device", "cpu", *arguments]
    environment = {**os.environ, KEYS: "secretkey", "COLUMNS": "200"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as service:
        service.log = []
        reader = threading.Thread(target=lambda: service.log.extend(service.stderr), daemon=True)
        reader.start()
        try:
            line = service.stdout.readline()
            pattern = r"mini answers at (http://127\.0\.0\.1:\d+) when it is loaded\.\n"
            (address,) = re.fullmatch(pattern, line).groups()
            headers = {"Authorization": "Bearer secretkey"}
            with httpx.Client(base_url=address, headers=headers, timeout=300) as http:
                if ready:
                    wait_until(lambda: listens(address) and http.get("/ready").status_code == 200)
                yield service, http
        finally:
            service.kill()
            reader.join(10)


def listens(address):
    """Whether a connection to the service is accepted. Only a refusal counts as no."""
    url = httpx.URL(address)
    try:
        socket.create_connection((url.host, url.port), timeout=300).close()
    except ConnectionRefusedError:
        return False
    return True


def worker_of(service):
    """The process that the model is in."""
    children = Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text().split()
    for child in children:
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError("there is none")


@pytest.fixture(scope="module")
def service():
    if not Path("/proc/self/task").is_dir():
        pytest.skip("needs /proc")
    with process("--timeout", "300") as made:  # on a loaded machine a model takes long to load
        yield made


WAGGLE = "A bee's waggle dance tells the hive where flowers are."
PASSAGES = [WAGGLE, "Trains run on rails.", "", "Honey keeps."]
BEES = {"query": "How do bees tell each other where flowers are?", "documents": PASSAGES}


@pytest.mark.slow
def test_a_served_model_is_ready_and_scores_as_in_python(service):
    _, http = service
    assert http.get("/ready").json() == {"status": "ready"}
    actual = http.post("/v1/rerank", json=BEES).json()
    ranker = RSRank.from_pretrained("mini", dtype="float32", device="cpu")
    expected = ranker.rank(**BEES, threshold=None)
    rows = [(row.index, pytest.approx(row.score, abs=1e-4)) for row in expected.kept]
    assert scores(actual) == rows


@pytest.mark.slow
def test_no_request_is_lost_when_the_models_process_is_killed(service):
    process_, http = service
    expected = dict(scores(http.post("/v1/rerank", json=BEES).json()))
    answers, stop = [], threading.Event()

    def ask():
        while not stop.is_set():
            answers.append(http.post("/v1/rerank", json=BEES))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(answers) > 4)
    before, first = len(answers), worker_of(process_)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: len(answers) >= before + 20)
    stop.set()
    for thread in threads:
        thread.join()
    assert {answer.status_code for answer in answers} == {200}
    for answer in answers:
        assert dict(scores(answer.json())) == pytest.approx(expected, abs=1e-4)
    assert worker_of(process_) != first
    assert metrics(http.get("/metrics").text)["rsrank_restarts_total",] == 1


@pytest.mark.slow
def test_the_log_is_json_without_texts_or_keys(service):
    process_, http = service
    http.post("/v1/rerank", json=BEES)
    # A thread reads what it writes.
    wait_until(lambda: any('"documents": 4' in line for line in process_.log))
    lines = [json.loads(line) for line in process_.log]
    assert any(line["message"] == "request" and line["documents"] == 4 for line in lines)
    # Whole words: an identifier in hexadecimal digits may well contain "bee".
    words = r"\b(bees?|flowers?|rails?|honey|secretkey)\b"
    assert not re.search(words, "".join(process_.log), re.IGNORECASE)


@pytest.mark.slow
def test_sigterm_ends_the_service_when_what_is_in_flight_has_been_answered():
    documents = [f"{number} {' '.join(PASSAGES * 8)}" for number in range(30)]
    with process("--cache-size", "0") as (process_, http):
        answers = []

        def ask():
            answers.append(http.post("/v1/rerank", json={**BEES, "documents": documents}))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        # In flight: both requests have come, and neither has been answered.
        wait_until(lambda: metrics(http.get("/metrics").text)["rsrank_waiting_documents",] == 60)
        process_.send_signal(signal.SIGTERM)
        wait_until(lambda: not listens(http.base_url))
        for thread in threads:
            thread.join(300)
        assert [len(answer.json()["results"]) for answer in answers] == [30, 30]
        assert process_.wait(300) == 0
    assert all(json.loads(line) for line in process_.log)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_end_while_the_model_is_loaded_is_no_failure(number):
    with process(ready=False) as (process_, _):
        wait_until(lambda: any("startup" in line for line in process_.log))
        process_.send_signal(number)
        assert process_.wait(300) == 0
    assert all(json.loads(line) for line in process_.log)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_end_that_was_asked_for_is_no_failure_and_leaves_no_traceback(number):
    with process() as (process_, http):
        if number == signal.SIGTERM:  # nor does a process that was killed before it
            os.kill(worker_of(process_), signal.SIGKILL)
            wait_until(lambda: metrics(http.get("/metrics").text)["rsrank_restarts_total",] == 1)
            wait_until(lambda: http.get("/ready").status_code == 200)
        process_.send_signal(number)
        assert process_.wait(300) == 0
    assert all(json.loads(line) for line in process_.log)
