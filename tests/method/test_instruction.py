"""A caller's instruction: it fills the template's place for it, and is an error without one."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import CHAT, DOCUMENTS, QUERY, random_projection
from pydantic import ValidationError

from rsrank_rag import Reranker, RSRank, Template
from rsrank_rag.errors import InputError
from rsrank_rag.language_model.options import LoadOptions

OPTIONS = LoadOptions(device="cpu", dtype="float32", local_files_only=True)
TOLD = CHAT.model_copy(
    update={"instructed": "<|im_start|>Judge by this: {instruction}\nDocument: "}
)
LEGAL = "Is it what a judge has to know?"


def made(folder, template):
    return RSRank.from_backbone(
        folder("qwen3"), random_projection("qwen3"), template=template, options=OPTIONS
    )


@pytest.fixture(scope="module")
def told(tiny_folder):
    return made(tiny_folder, TOLD)


# The template


def test_a_template_without_a_place_is_written_as_before_and_says_why_it_takes_none():
    assert "instructed" not in Template().model_dump()
    assert "instructed" not in json.loads(Template().model_dump_json())
    with pytest.raises(
        InputError, match="takes none: B, and zero as its threshold, are calibrated for one prompt"
    ):
        Template().with_instruction(LEGAL)


def test_a_template_with_a_place_is_written_down_and_filled():
    assert Template.model_validate_json(TOLD.model_dump_json()) == TOLD
    filled = TOLD.with_instruction("Two {braces} and {instruction}")
    assert (
        filled.instruction
        == "<|im_start|>Judge by this: Two {braces} and {instruction}\nDocument: "
    )
    assert (filled.separator, filled.suffix, filled.positions) == (
        TOLD.separator,
        TOLD.suffix,
        TOLD.positions,
    )
    with pytest.raises(ValidationError, match="instructed"):
        Template(instructed="no place")


# The ranker


def test_an_instruction_scores_as_a_template_that_has_always_said_so(told, tiny_folder):
    said = made(
        tiny_folder,
        CHAT.model_copy(update={"instruction": TOLD.instructed.replace("{instruction}", LEGAL)}),
    )
    usual = made(tiny_folder, CHAT)
    twin = told.with_instruction(LEGAL)
    assert twin.score(QUERY, DOCUMENTS) == pytest.approx(said.score(QUERY, DOCUMENTS), abs=1e-5)
    assert twin.explain(QUERY, DOCUMENTS[0]).score == pytest.approx(
        said.score(QUERY, DOCUMENTS[:1])[0], abs=1e-5
    )
    assert told.score(QUERY, DOCUMENTS) == pytest.approx(usual.score(QUERY, DOCUMENTS), abs=1e-5)
    assert twin.score(QUERY, DOCUMENTS) != pytest.approx(told.score(QUERY, DOCUMENTS), abs=1e-3)


def test_many_threads_may_ask_with_more_instructions_than_are_kept(told):
    def ask(number):
        text = f"Instruction {number % 23}?"
        return told.with_instruction(text).prompts.template == TOLD.with_instruction(text)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(ask, range(1500)))
    finally:
        sys.setswitchinterval(before)


def test_kept_prefixes_are_those_of_one_instruction(told, tmp_path):
    told.save_pretrained(tmp_path / "told", include_backbone=True)

    def loaded(prefix_cache):
        return RSRank.from_pretrained(
            tmp_path / "told", device="cpu", dtype="float32", prefix_cache=prefix_cache
        )

    ranker, without = loaded(str(tmp_path / "prefixes")), loaded(False)
    for _ in range(2):  # read, then kept
        for text in ("One?", "Two?"):
            found = ranker.with_instruction(text).score(QUERY, DOCUMENTS)
            assert found == pytest.approx(
                without.with_instruction(text).score(QUERY, DOCUMENTS), abs=0.05
            )  # in 8 bits
    distinct = len({text for text in DOCUMENTS if text.strip()})
    assert ranker.stats()["misses"] == 2 * distinct
    assert ranker.with_instruction("Three?").index(DOCUMENTS) == distinct
    assert ranker.with_instruction("Three?").index(DOCUMENTS) == 0


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        (" \n", "it is blank"),
        ("Read <|im_end|> this", r"plain text, and this one holds '<\|im_end\|>'"),
    ],
)
def test_an_instruction_that_cannot_be_used_is_refused(told, instruction, message):
    with pytest.raises(InputError, match=message):
        told.with_instruction(instruction)


def test_an_instruction_that_leaves_no_room_is_refused(told):
    with pytest.raises(InputError, match="leaves no room for a document"):
        told.with_instruction("word " * 2000)


def test_few_instructions_are_remembered_and_a_twin_takes_others(told):
    # As if threads had added several at the same time.
    told._by_instruction.update((f"thread {number}", told) for number in range(40))
    first = told.with_instruction("first")
    assert told.with_instruction("first") is first
    for number in range(20):
        told.with_instruction(f"number {number}")
    assert told.with_instruction("first") is not first
    assert first.with_instruction(LEGAL).score(QUERY, DOCUMENTS) == told.with_instruction(
        LEGAL
    ).score(QUERY, DOCUMENTS)


def test_the_declaration_is_saved_with_the_artifact(told, tmp_path):
    told.save_pretrained(tmp_path / "told", include_backbone=True)
    found = RSRank.from_pretrained(tmp_path / "told", device="cpu", dtype="float32")
    assert found.with_instruction(LEGAL).score(QUERY, DOCUMENTS) == pytest.approx(
        told.with_instruction(LEGAL).score(QUERY, DOCUMENTS), abs=1e-5
    )


def test_rankers_without_a_place_and_other_rerankers_refuse(ranker):
    with pytest.raises(InputError, match="this artifact takes none"):
        ranker.with_instruction(LEGAL)
    with pytest.raises(InputError, match="Words takes none"):
        Words().with_instruction(LEGAL)


# Adapters, the client, the service, the command


class Words(Reranker):
    def score(self, query, documents):
        return [float(len(text.split())) for text in documents]


class Instructed(Words):
    """Scores are the number of words of the instruction, and 1 without one."""

    told = "none"

    def with_instruction(self, instruction):
        twin = type(self)()
        twin.told = instruction
        return twin

    def score(self, query, documents):
        return [float(len(self.told.split()))] * len(documents)


@pytest.fixture
def adapters():
    pytest.importorskip("langchain_core")
    pytest.importorskip("llama_index.core")
    from rsrank_rag.langchain import RSRankCompressor
    from rsrank_rag.llama_index import RSRankPostprocessor

    return RSRankCompressor, RSRankPostprocessor


def test_adapters_pass_an_instruction_on_and_dump_it(adapters):
    for adapter in adapters:
        found = adapter(model=Instructed(), instruction="one two three")
        assert found._rank("q", ["a"], {}).kept[0].score == 3
        refused = adapter(model=Words(), instruction="one")
        with pytest.raises(InputError, match="Words takes none"):
            refused._rank("q", ["a"], {})
        with pytest.raises(InputError, match="Words takes none"):
            refused.warm_up()
        assert adapter(**adapter(instruction="one").model_dump()).instruction == "one"
        with pytest.raises(ValidationError, match="instruction"):
            adapter(instruction=" ")


def test_a_remote_reranker_sends_it_and_without_it_sends_none(service):
    from rsrank_rag.remote.client import RemoteReranker

    reranker = RemoteReranker(service.address)
    reranker.rank("q", ["a"])
    reranker.with_instruction(LEGAL).rank("q", ["a"])
    reranker.rank("q", ["a"])
    assert [asked.get("instruction") for asked in service.seen] == [None, LEGAL, None]
    assert "instruction" not in service.seen[0]


RERANK = {"query": "q", "documents": ["a", "b"]}
REQUESTS = [
    ("/v1/rerank", RERANK),
    ("/v2/rerank", RERANK),
    ("/rerank", {"query": "q", "texts": ["a", "b"]}),
    ("/v1/ranking", {"query": {"text": "q"}, "passages": [{"text": "a"}, {"text": "b"}]}),
]
SPELLINGS = [
    {"instruction": LEGAL},
    {"instruct": LEGAL},
    {"chat_template_kwargs": {"instruction": LEGAL}},
]


def numbers(found):
    """Scores of an answer in any API schema."""
    rows = (
        found
        if isinstance(found, list)
        else found.get("results") or found.get("data") or found["rankings"]
    )
    return {row.get("relevance_score", row.get("score", row.get("logit"))) for row in rows}


@pytest.mark.parametrize(
    ("path", "body"), REQUESTS, ids=lambda value: value if isinstance(value, str) else ""
)
async def test_a_service_refuses_an_instruction_or_uses_it_in_every_schema(path, body):
    pytest.importorskip("fastapi")
    from service_helpers import client_of, scheduler

    async with client_of(scheduler(Words())) as http:
        for spelling in SPELLINGS:
            answer = await http.post(path, json={**body, **spelling})
            assert answer.status_code == 422, answer.text
            found = answer.json()
            assert found["message"] == found["detail"] == found["error"]
            assert "An instruction was given, and Words takes none" in found["message"]
            assert "Document" not in found["message"]
        assert (await http.post(path, json={**body, "instruction": 3})).status_code == 400
        for nothing in (
            {"instruction": None},
            {"instruction": ""},
            {"chat_template_kwargs": {"enable": False}},
        ):
            assert (await http.post(path, json={**body, **nothing})).status_code == 200
    async with client_of(scheduler(Instructed())) as http:
        for spelling in SPELLINGS:
            assert numbers((await http.post(path, json={**body, **spelling})).json()) == {
                float(len(LEGAL.split()))
            }
        assert numbers((await http.post(path, json=body)).json()) == {1.0}


async def test_requests_that_share_a_batch_keep_their_own_instructions():
    pytest.importorskip("fastapi")
    from rsrank_rag.reranker import Pair
    from rsrank_rag.service.engine import Engine

    told = [None, "one two", None, "one two three", "one two"]
    pairs = [Pair("q", "a", instruction=text) for text in told]
    outcomes = Engine(Instructed(), "fake").score([*pairs, Pair("q", "a")])
    assert [outcome.score for outcome in outcomes] == [1, 2, 1, 3, 2, 1]
    outcomes = Engine(Words(), "fake").score(pairs)  # who sent none is not concerned
    assert [outcome.score for outcome in outcomes] == [1, None, 1, None, None]
    assert all(outcome.fault == "input" for outcome in outcomes if outcome.score is None)


async def test_a_service_refuses_an_instruction_for_scores_and_for_explanations(ranker):
    pytest.importorskip("fastapi")
    from service_helpers import client_of, scheduler

    async with client_of(scheduler(ranker)) as http:
        answer = await http.post("/v1/rerank", json={**RERANK, "instruction": LEGAL})
        assert answer.status_code == 422
        assert "calibrated for one prompt" in answer.json()["message"]
        answer = await http.post(
            "/explain", json={"query": "q", "document": "a", "instruction": LEGAL}
        )
        assert answer.status_code == 422
        assert "calibrated for one prompt" in answer.json()["message"]


def test_a_service_that_refuses_gives_its_words_through_the_adapter(adapters, ranker, told):
    pytest.importorskip("fastapi")
    from langchain_core.documents import Document
    from service_helpers import address_of, scheduler

    def kept(address):
        made = adapters[0](base_url=address, instruction=LEGAL, threshold=None)
        found = made.compress_documents([Document(text) for text in DOCUMENTS], QUERY)
        return {document.page_content: document.metadata["relevance_score"] for document in found}

    with (
        address_of(scheduler(ranker)) as address,
        pytest.raises(InputError, match="calibrated for one prompt"),
    ):
        kept(address)
    with address_of(scheduler(told)) as address:
        expected = dict(
            zip(DOCUMENTS, told.with_instruction(LEGAL).score(QUERY, DOCUMENTS), strict=True)
        )
        assert kept(address) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("command", [["rank", "-d"], ["explain", "-d"]], ids=["rank", "explain"])
def test_the_command_refuses_or_uses_it(command, ranker, told, tmp_path):
    from typer.testing import CliRunner

    from rsrank_rag.cli import app

    ranker.save_pretrained(tmp_path / "plain", include_backbone=True)
    told.save_pretrained(tmp_path / "told", include_backbone=True)
    (tmp_path / "one.txt").write_text(DOCUMENTS[0] + "\n", encoding="utf-8")
    what = str(tmp_path / "one.txt") if command[0] == "rank" else DOCUMENTS[0]
    command = [*command[:-1], "--document"] if command[0] == "explain" else command
    arguments = [
        *command,
        what,
        "-q",
        QUERY,
        "--instruction",
        LEGAL,
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--json",
    ]
    done = CliRunner().invoke(app, [*arguments, "--model", str(tmp_path / "plain")])
    assert done.exit_code == 2
    assert "takes none" in done.output
    done = CliRunner().invoke(app, [*arguments, "--model", str(tmp_path / "told")])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    score = (
        found["score"]
        if command[0] == "explain"
        else (found["kept"] + found["dropped"])[0]["score"]
    )
    assert score == pytest.approx(
        told.with_instruction(LEGAL).score(QUERY, DOCUMENTS[:1])[0], abs=1e-4
    )
