"""Programs that speak rerank: requests as their sources send them, answers as they read them.

`apps.json` beside this file has, for each program and provider, the source, the commit of it that
was read, and the request. `reads` says where the rows are, and the names of index and score in a
row. `zips`: the program sorts the rows by index and pairs them with its own documents. `missing`:
the score it gives to a document without a row. `only`: it refuses a row with another field. `also`:
other fields that it reads. `checks`: what it asks before its first request. `apps_settings.json`
says where the names of the settings in `rsrank_rag/service/apps.json` were looked up.
"""

import asyncio
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from click.testing import CliRunner
from service_helpers import Numbers, client_of, scheduler

from rsrank_rag.cli import app
from rsrank_rag.cli import service as cli_service
from rsrank_rag.cli.service import APPS, ServeOptions
from rsrank_rag.ranking.results import normalise
from rsrank_rag.service.app import Server, Settings

ROOT = Path(__file__).parents[2]
REQUESTS = json.loads(Path(__file__).with_name("apps.json").read_text("utf-8"))
SETTINGS = json.loads(Path(__file__).with_name("apps_settings.json").read_text("utf-8"))
SEND_NO_KEY = {"ragflow-HuggingFace", "weaviate-reranker-transformers"}
RAW = [1.0, -4.0, 3.0, 2.0]
ABOVE_THRESHOLD = {2, 3}


class Counting(Numbers):
    """Says how many tokens it reads, as RSRank does."""

    def token_ends(self, document):
        return range(len(document.split())), 10


def names(request):
    return f"{request['app']}-{request['provider']}"


def at(body, path):
    for name in filter(None, path.split(".")):
        body = body[name]
    return body


def as_the_program_reads(request, text):
    """The score of each document, in the request's order; None where there is none."""
    body, reads = json.loads(text), request["reads"]
    for path in reads.get("also", []):
        assert at(body, path) is not None
    documents = at_documents(request["body"])
    rows = at(body, reads["rows"])
    if reads["index"] is None:
        rows = [{**row, "index": place} for place, row in enumerate(rows)]
        reads = {**reads, "index": "index"}
    elif not reads.get("zips"):
        shown = [row[reads["score"]] for row in rows]
        assert shown == sorted(shown, reverse=True)
    for row in rows:
        assert isinstance(row[reads["score"]], float)
        assert set(row) <= set(reads.get("only", row))
        if "text" in reads:
            assert at(row, reads["text"]) == documents[row[reads["index"]]]
    if reads.get("zips"):
        rows = sorted(rows, key=lambda row: row[reads["index"]])
        return [row[reads["score"]] for row in rows]
    scores = [reads.get("missing")] * len(documents)
    for row in rows:
        scores[row[reads["index"]]] = row[reads["score"]]
    return scores


def at_documents(body):
    documents = next(body[name] for name in ("documents", "texts", "passages") if name in body)
    return [text if isinstance(text, str) else text["text"] for text in documents]


def expected(request, settings):
    """The scores that reach the program, in the request's order."""
    body = request["body"]
    normalised = settings["normalize"] or body.get("raw_scores") is False
    if request["reads"]["score"] == "logit":
        normalised = False
    scores = [normalise(score, 1.0) if normalised else score for score in RAW]
    count = body.get("top_n") or body.get("top_k")
    kept = set(range(len(RAW)))
    if "passages" not in body:
        wants_all = count == len(RAW) or ("texts" in body and count is None) or "property" in body
        if settings["drop"] == "always" or (settings["drop"] and not wants_all):
            kept = ABOVE_THRESHOLD
        kept = set(sorted(kept, key=lambda place: -RAW[place])[:count])
    missing = request["reads"].get("missing")
    return [score if place in kept else missing for place, score in enumerate(scores)]


@pytest.mark.parametrize("with_its_settings", [False, True])
@pytest.mark.parametrize("request_", REQUESTS, ids=names)
async def test_a_program_reads_the_answer_to_its_own_request(request_, with_its_settings):
    settings = {"normalize": False, "drop": False}
    if with_its_settings:
        settings = {"normalize": True, "drop": APPS[request_["app"]]["drop"]}
    async with client_of(scheduler(Counting()), **settings) as http:
        for path, fields in request_.get("checks", {}).items():
            answer = await http.get(path)
            assert answer.status_code == 200
            assert None not in [at(answer.json(), field) for field in fields]
        answer = await http.post(
            request_["path"], headers=request_["headers"], json=request_["body"]
        )
    assert answer.status_code == 200
    scores = as_the_program_reads(request_, answer.text)
    assert scores == expected(request_, settings)
    if with_its_settings and request_["reads"]["score"] != "logit":
        assert all(0 <= score <= 1 for score in scores if score is not None)


@pytest.mark.parametrize(
    "request_",
    [one for one in REQUESTS if one["reads"].get("zips") and names(one) != "milvus-vllm"],
    ids=names,
)
async def test_a_program_that_asks_for_all_documents_loses_none_to_a_service_that_drops(request_):
    async with client_of(scheduler(Numbers()), drop=True) as http:
        answer = await http.post(request_["path"], json=request_["body"])
    assert as_the_program_reads(request_, answer.text) == RAW


@pytest.mark.parametrize(
    "request_", [one for one in REQUESTS if APPS[one["app"]]["drop"] == "always"], ids=names
)
async def test_a_program_that_reads_indices_gets_only_relevant_documents_if_it_asks_for_all(
    request_,
):
    # Dify's semantic search asks for as many documents as it sends.
    body = {**request_["body"], "top_n": len(RAW)}
    settings = {"normalize": True, "drop": "always"}
    async with client_of(scheduler(Counting()), **settings) as http:
        answer = await http.post(request_["path"], json=body)
    scores = as_the_program_reads(request_, answer.text)
    assert scores == expected({**request_, "body": body}, settings)


@pytest.mark.parametrize("request_", REQUESTS, ids=names)
async def test_a_program_opens_a_closed_service_with_the_key_that_it_sends(request_):
    async with client_of(scheduler(Counting()), api_keys=["KEY"]) as http:
        for path in request_.get("checks", {}):
            answer = await http.get(path, headers=request_["headers"])
            assert answer.status_code == 200
        answer = await http.post(
            request_["path"], headers=request_["headers"], json=request_["body"]
        )
        wrong = {name: value.replace("KEY", "NO") for name, value in request_["headers"].items()}
        refused = await http.post(request_["path"], headers=wrong, json=request_["body"])
    assert answer.status_code == (401 if names(request_) in SEND_NO_KEY else 200)
    assert refused.status_code == 401


async def test_litellms_truncate_false_does_not_refuse_long_documents():
    request = next(one for one in REQUESTS if names(one) == "litellm-huggingface")
    body = {**request["body"], "texts": ["1 " + "word " * 20]}
    async with client_of(scheduler(Numbers())) as http:
        assert (await http.post(request["path"], json=body)).status_code == 200


async def test_an_answer_says_whether_nothing_is_relevant():
    async with client_of(scheduler(Numbers())) as http:
        for documents, none in ((["1", "0"], True), (["1", "2"], False), ([], True)):
            body = {"query": "q", "documents": documents}
            assert (await http.post("/v1/rerank", json=body)).json()["none_relevant"] is none


@pytest.mark.parametrize("name", APPS)
def test_serve_for_a_program_sets_what_it_needs_and_says_what_to_enter(name, monkeypatch):
    arguments = {}

    def run(backend, settings, options, enter):
        arguments.update(settings=settings, enter=enter)

    monkeypatch.setattr(cli_service, "run", run)
    assert CliRunner().invoke(app, ["serve", "--model", "bm25", "--for", name]).exit_code == 0
    settings = arguments["settings"]
    assert (settings.normalize, settings.drop) == (True, APPS[name]["drop"])
    assert arguments["enter"] == APPS[name]["enter"]


@pytest.mark.parametrize("keys", [(), ("sesame",)])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_what_to_enter_is_printed_with_an_address_that_leads_to_the_service(
    host, keys, monkeypatch, capfd
):
    def run(self, sockets):
        async def start():
            app = self.config.app
            async with app.router.lifespan_context(app):
                return

        asyncio.run(start())

    monkeypatch.setattr(Server, "run", run)
    monkeypatch.setattr("rsrank_rag.service.logs.configure", lambda: None)
    enter = ["Base URL: {url}/v1; API Key: {key}"]
    options = ServeOptions(host=host, port=0)
    cli_service.run(scheduler(Numbers()), Settings(api_keys=keys), options, enter)
    first, line = capfd.readouterr().out.splitlines()
    url = re.fullmatch(r"fake answers at (http://\S+:\d+) when it is loaded\.", first)[1]
    # Another key would be refused.
    assert line == f"  Base URL: {url}/v1; API Key: {'KEY-OF-THIS-SERVICE' if keys else 'any'}"


def test_serve_for_an_unknown_program_names_the_known_ones():
    done = CliRunner().invoke(app, ["serve", "--for", "open-web-ui"], env={"COLUMNS": "200"})
    assert (done.exit_code, "is not one of 'open-webui', 'dify'" in done.stderr) == (2, True)


def sections():
    """The programs' sections of docs/apps.md."""
    url = "http://localhost:8080"
    parts = []
    for name, program in APPS.items():
        tested = {}
        for one in REQUESTS:
            if one["app"] == name:
                tested.setdefault(one["version"], []).append(one["provider"])
        requests = "; ".join(f"{', '.join(names)} `{commit}`" for commit, names in tested.items())
        lines = [f"## {program['program']}", "", f"    rsrank serve --for {name}", ""]
        entered = [line.replace("{url}", url).replace("{key}", "any") for line in program["enter"]]
        lines += [f"- {line}" for line in entered]
        lines += ["", f"Requests: {requests}. Settings: {SETTINGS[name]}.", ""]
        parts += lines
    return "\n".join(parts)


def test_every_program_of_the_docs_is_tested_and_the_docs_hold_every_program():
    assert {one["app"] for one in REQUESTS} == set(APPS) == set(SETTINGS)
    page = (ROOT / "docs" / "apps.md").read_text("utf-8")
    assert sections() in page, f"docs/apps.md must hold:\n{sections()}"


def test_the_address_that_a_program_is_given_leads_to_the_path_that_is_tested():
    for name, program in APPS.items():
        lines = " ".join(program["enter"])
        paths = {one["path"] for one in REQUESTS if one["app"] == name}
        full = set(re.findall(r"\{url\}(/[\w/]*rerank)", lines))
        assert full <= paths, name
