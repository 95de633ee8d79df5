"""Both adapters: one model per process and settings, one thread per model, picklable settings."""

import asyncio
import copy
import gc
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import DOCUMENTS, QUERY
from pydantic import ValidationError

import rsrank_rag
from rsrank_rag import Fallback, Reranker, RSRank
from rsrank_rag.adapters import model_thread as worker
from rsrank_rag.adapters.adapter import RerankerAdapter
from rsrank_rag.backends.options import LoadOptions, ModelSource
from rsrank_rag.errors import ArtifactError, InputError, RemoteError
from rsrank_rag.evaluation.datasets import LabelledDocument
from rsrank_rag.method.scoring import score_rows

pytest.importorskip("langchain_core")
pytest.importorskip("llama_index.core")

from langchain_core.documents import Document
from llama_index.core.schema import NodeWithScore, TextNode

from rsrank_rag.langchain import RSRankCompressor
from rsrank_rag.llama_index import RSRankPostprocessor

ADAPTERS = [RSRankCompressor, RSRankPostprocessor]


async def scores(made, query, texts, **limits):
    """Scores of what a framework's asynchronous method keeps, by text."""
    if isinstance(made, RSRankCompressor):
        actual = await made.acompress_documents([Document(text) for text in texts], query, **limits)
        return {document.page_content: document.metadata["relevance_score"] for document in actual}
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in texts]
    limited = made.model_copy(update=limits)
    actual = await limited.apostprocess_nodes(nodes, query_str=query)
    return {scored.node.text: scored.score for scored in actual}


def model_of(made):
    """The loaded reranker of an adapter."""
    return worker.submit(made._source(), lambda reranker: reranker).result()


both = pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.__name__)


class Overlap(Reranker):
    """Counts shared words and records when and where it ran. A run waits for the `gate`."""

    def __init__(self):
        self.threads, self.running, self.most, self.calls = set(), 0, 0, 0
        self.gate = threading.Event()
        self.gate.set()

    def score(self, query, documents):
        self.threads.add(threading.get_ident())
        self.running += 1
        self.most = max(self.most, self.running)
        self.calls += 1
        time.sleep(0)  # whoever else may run now should
        assert self.gate.wait(60)
        self.running -= 1
        return [len(set(query.split()) & set(text.split())) - 1 for text in documents]


def waiting(made):
    """Calls in an adapter's queue that have not begun."""
    return worker._thread(made._source())._work_queue.qsize()


def until(condition):
    """Wait for a state; the limit is only for what never comes."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


async def until_async(condition):
    """As `until`, in an event loop, which is thereby shown to be free."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


@pytest.fixture
def artifact(ranker, tmp_path):
    ranker.save_pretrained(tmp_path / "artifact", include_backbone=True)
    return tmp_path / "artifact"


@pytest.fixture
def loads(monkeypatch):
    """How often a model was loaded."""
    names, load = [], worker.load

    def counted(source):
        names.append(source.name)
        return load(source)

    monkeypatch.setattr(worker, "load", counted)
    return names


@pytest.fixture(autouse=True)
def _no_model_stays():
    yield
    for source in list(worker._models):
        worker.close(source)


def test_adapters_are_made_and_written_down_without_torch():
    code = """
import sys, json, pickle
from rsrank_rag import RSRankCompressor, RSRankPostprocessor
compressor = RSRankCompressor(model="some/where", device="cuda", dtype="nf4")
made = [compressor, RSRankPostprocessor(top_n=3)]
made[0].compress_documents([], "nothing"), made[1].postprocess_nodes([], query_str="nothing")
pickle.dumps(made), [m.model_dump() for m in made]
print(json.dumps([m for m in ("torch", "transformers") if m in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


@both
def test_an_adapter_can_be_imported_from_the_top(adapter):
    assert getattr(rsrank_rag, adapter.__name__) is adapter
    assert adapter.__name__ in dir(rsrank_rag)


@pytest.mark.parametrize(
    ("framework", "module", "extra"),
    [
        ("langchain_core", "langchain", "langchain"),
        ("llama_index.core", "llama_index", "llama-index"),
    ],
)
def test_a_missing_framework_gives_the_pip_command(framework, module, extra):
    code = f"""
import sys
import rsrank_rag  # which looks for frameworks itself
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name == {framework!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, NotInstalled())
try:
    import rsrank_rag.{module}
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"[{extra}]" in done.stdout.partition("pip install")[2]


@both
def test_settings_survive_every_way_of_writing_them_down(adapter):
    made = adapter(
        model=Path("folder"),
        device=torch.device("cpu"),
        dtype=torch.float32,
        threshold=None,
        fallback=None,
        max_gap=1.5,
        top_n=4,
    )
    settings = made.model_dump()
    assert settings["dtype"] == "float32"
    assert settings["device"] == "cpu"
    copies = [
        pickle.loads(pickle.dumps(made)),
        copy.copy(made),
        copy.deepcopy(made),
        made.model_copy(),
        adapter(**settings),
        adapter.model_validate_json(made.model_dump_json()),
    ]
    for actual in copies:
        assert type(actual) is adapter
        assert actual.model_dump() == settings


def test_llama_index_can_write_the_postprocessor_down():
    made = RSRankPostprocessor(model="a/b", revision="v1", threshold=None, top_n=3)
    settings = made.to_dict()
    assert settings["class_name"] == "RSRankPostprocessor"
    assert RSRankPostprocessor.from_dict(settings).to_dict() == settings
    assert RSRankPostprocessor.from_json(made.to_json()).to_dict() == settings


@both
def test_a_used_adapter_is_written_down_without_its_model_and_shows_no_progress_bar(
    adapter, artifact, capfd
):
    made = adapter(model=artifact, device="cpu", dtype="float32")
    made.warm_up()
    assert "Loading weights" not in "".join(capfd.readouterr())
    assert made._source() in worker._models
    assert len(pickle.dumps(made)) < 2000


@both
def test_a_model_object_is_shared_by_copies_but_never_written_down(adapter):
    reranker = Overlap()
    made = adapter(model=reranker)
    assert copy.deepcopy(made).model is reranker
    assert made.model_copy().model is reranker
    with pytest.raises(
        Exception, match=r"Overlap object, which cannot be written down\. Give model a name"
    ):
        made.model_dump()
    with pytest.raises(Exception, match="cannot be written down"):
        pickle.dumps(made)


@both
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"treshold": 1.0}, "There is no setting 'treshold'. Did you mean 'threshold'"),
        ({"top_n": 0}, "top_n must be a whole number of at least 1"),
        ({"max_gap": -1.0}, "max_gap must be a number of at least 0"),
        ({"threshold": None, "fallback": Fallback(1, 2)}, "no effect without a threshold"),
        ({"threshold": float("nan")}, "threshold must be a number, .* got nan"),
        ({"token": "hf_secret"}, "token"),
        ({"model": 3}, "model"),
        ({"top_n": "3"}, "top_n"),
        ({"threshold": True}, "threshold"),
        ({"threshold": "naive"}, "threshold"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(adapter, settings, message):
    with pytest.raises(ValidationError, match=message):
        adapter(**settings)


@both
def test_loading_settings_beside_a_loaded_model_are_refused(adapter):
    with pytest.raises(ValidationError, match="device would have no effect"):
        adapter(model=Overlap(), device="cpu")


@both
def test_a_changed_setting_is_checked_too(adapter):
    made = adapter()
    made.top_n = 3
    with pytest.raises(ValidationError, match="top_n"):
        made.top_n = 0
    assert made.top_n == 3
    made.device = "cpu"
    with pytest.raises(ValidationError, match="device would have no effect"):
        made.model = Overlap()
    assert made.model == "mini"


@both
async def test_settings_and_limits_may_be_numbers_of_numpy(adapter):
    made = adapter(model=Overlap(), top_n=np.int64(1), threshold=np.float32(0.5))
    assert (type(made.top_n), type(made.threshold)) == (int, float)
    assert await scores(made, "a b c", ["a b", "a b c"]) == {"a b c": 2.0}
    limits = {"threshold": np.float64(1.5), "top_n": np.int32(3)}
    if adapter is RSRankCompressor:
        assert await scores(made, "a b c", ["a b", "a b c"], **limits) == {"a b c": 2.0}


@both
async def test_a_reranker_with_a_method_named_start_is_no_service(adapter):
    class Engine(Overlap):
        def start(self, *arguments, **options):
            raise AssertionError("This starts an engine.")

    assert await scores(adapter(model=Engine()), "a b", ["a b", "c"]) == {"a b": 1.0}


@both
def test_a_copy_may_do_what_its_original_may(adapter):
    reranker = Overlap()
    for made in (
        adapter(),
        pickle.loads(pickle.dumps(adapter())),
        adapter(**adapter().model_dump()),
    ):
        made.model = reranker
        assert made.model is reranker


@both
def test_an_infinite_threshold_is_not_written_as_none(adapter):
    made = adapter(threshold=float("inf"), fallback=Fallback(0.0, float("inf")))
    copied = adapter.model_validate_json(made.model_dump_json())
    assert (copied.threshold, copied.fallback) == (made.threshold, made.fallback)


@both
def test_what_was_given_by_mistake_does_not_stand_in_the_error(adapter):
    with pytest.raises(ValidationError) as caught:
        adapter(token="hf_secret")
    assert "hf_secret" not in str(caught.value)


def test_a_deepcopy_keeps_the_callbacks_of_its_framework():
    made = RSRankPostprocessor()
    made.callback_manager.lock = threading.Lock()  # what exporters hold cannot be copied
    assert copy.deepcopy(made).callback_manager is made.callback_manager


def test_equal_settings_share_one_model_which_loads_at_first_use(artifact, loads):
    compressor = RSRankCompressor(model=artifact, device="cpu", dtype="float32")
    postprocessor = RSRankPostprocessor(
        model=str(artifact), device="cpu", dtype="float32", threshold=None
    )
    assert loads == []
    adapters = [
        compressor,
        postprocessor,
        copy.deepcopy(compressor),
        pickle.loads(pickle.dumps(postprocessor)),
    ]
    models = [model_of(made) for made in adapters]
    assert loads == [str(artifact)]
    assert all(model is models[0] for model in models)
    other = RSRankCompressor(model=artifact, device="cpu", dtype="float32", cache_size=0)
    assert model_of(other) is not models[0]
    assert len(loads) == 2
    pytest.importorskip("bitsandbytes")
    rounded = RSRankCompressor(model=artifact, device="cpu", dtype="int8")
    assert model_of(rounded).backbone.bits == 8
    assert len(loads) == 3


def test_close_frees_the_model_and_the_next_call_loads_it_again(artifact, loads):
    made = RSRankCompressor(model=artifact, device="cpu", dtype="float32")
    freed = weakref.ref(model_of(made))
    made.close()
    gc.collect()
    assert freed() is None
    made.close()  # nothing left to close
    assert made._rank(QUERY, DOCUMENTS, {}).query == QUERY
    assert len(loads) == 2


def test_close_ends_the_models_thread(artifact):
    before = set(threading.enumerate())
    made = RSRankCompressor(model=artifact, device="cpu", dtype="float32")
    made.warm_up()
    (thread,) = set(threading.enumerate()) - before
    made.close()
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_a_call_that_comes_while_the_model_is_being_closed_waits_for_it(loads, monkeypatch):
    reranker = Overlap()
    reranker.gate.clear()
    monkeypatch.setattr(worker, "load", lambda source: loads.append(source) or reranker)
    made = RSRankCompressor(model="some/model")
    calls = [threading.Thread(target=made._rank, args=(QUERY, DOCUMENTS, {})) for _ in range(2)]
    closing = threading.Thread(target=made.close)
    calls[0].start()
    until(lambda: reranker.running)
    for number, thread in enumerate((closing, calls[1]), start=1):
        thread.start()
        until(lambda number=number: waiting(made) == number)
    reranker.gate.set()
    for thread in (*calls, closing):
        thread.join(60)
    assert (reranker.calls, reranker.most, len(reranker.threads)) == (2, 1, 1)
    assert len(loads) == 2  # before and after the closing


def test_a_failed_load_is_reported_and_tried_again(artifact, loads, tmp_path):
    made = RSRankCompressor(model=tmp_path / "later", device="cpu", dtype="float32")
    with pytest.raises(ArtifactError, match="later"):
        made.warm_up()
    artifact.rename(tmp_path / "later")
    made.warm_up()
    assert len(loads) == 2


def test_a_rerankers_thread_ends_with_it():
    before = set(threading.enumerate())
    reranker = Overlap()
    made = RSRankCompressor(model=reranker)
    made.warm_up()
    (thread,) = set(threading.enumerate()) - before
    del made, reranker
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


@both
@pytest.mark.slow
async def test_64_concurrent_calls_load_one_model_and_score_as_one_call_after_another(
    adapter, artifact, loads, ranker
):
    adapters = [
        adapter(model=artifact, device="cpu", dtype="float32", threshold=None) for _ in range(8)
    ]
    batches = [[f"{text} {number % 5}" for text in DOCUMENTS] for number in range(64)]
    expected = [
        {
            document.text: document.score
            for document in ranker.rank(QUERY, texts, threshold=None).kept
        }
        for texts in batches
    ]
    actual = await asyncio.gather(
        *(scores(adapters[i % 8], QUERY, texts) for i, texts in enumerate(batches))
    )
    for one, wanted in zip(actual, expected, strict=True):
        assert one == pytest.approx(wanted, abs=1e-4)  # kept documents run in other batches
    assert len(loads) == 1


def test_a_model_never_runs_twice_at_the_same_time_whoever_calls():
    reranker = Overlap()
    made = RSRankCompressor(model=reranker)

    def call():
        made._rank(QUERY, DOCUMENTS, {})

    threads = [threading.Thread(target=call) for _ in range(16)]
    for thread in threads:
        thread.start()

    async def beside():
        await asyncio.gather(*(made._arank(QUERY, DOCUMENTS, {}) for _ in range(16)))

    asyncio.run(beside())
    for thread in threads:
        thread.join()
    assert reranker.calls == 32
    assert reranker.most == 1
    assert len(reranker.threads) == 1
    assert threading.get_ident() not in reranker.threads


@both
async def test_the_event_loop_stays_free_while_a_model_runs(adapter):
    reranker = Overlap()
    reranker.gate.clear()
    call = asyncio.create_task(scores(adapter(model=reranker), QUERY, DOCUMENTS))
    await until_async(lambda: reranker.running)
    reranker.gate.set()  # by the loop that waits for the model
    assert await call


@both
async def test_a_cancelled_call_gives_up_its_place_in_the_queue(adapter):
    reranker = Overlap()
    reranker.gate.clear()
    made = adapter(model=reranker)
    calls = [asyncio.create_task(scores(made, QUERY, DOCUMENTS)) for _ in range(3)]
    await until_async(lambda: reranker.running and waiting(made) == 2)
    calls[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls[1]
    reranker.gate.set()
    await asyncio.gather(calls[0], calls[2])
    assert reranker.calls == 2


@both
async def test_a_cancelled_call_that_runs_ends_before_its_next_batch(adapter, ranker, monkeypatch):
    parts = (ranker.backbone, ranker.prompts, ranker.projection, ranker.config)
    made = adapter(model=RSRank(*parts, ModelSource(token_budget=1, cache_size=0)), threshold=None)
    begun, gate, batches = threading.Event(), threading.Event(), []

    def gated(reader, projection, batch):
        batches.append(batch)
        begun.set()
        assert gate.wait(60)
        return score_rows(reader, projection, batch)

    monkeypatch.setattr("rsrank_rag.method.scoring.score_rows", gated)
    call = asyncio.create_task(scores(made, QUERY, DOCUMENTS))
    await until_async(begun.is_set)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    gate.set()
    assert len(await scores(made, QUERY, DOCUMENTS[:1])) == 1
    assert len(batches) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_can_go_on_using_an_adapter():
    made = RSRankCompressor(model=Overlap(), threshold=None)
    expected = made._rank(QUERY, DOCUMENTS, {})
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(made._rank(QUERY, DOCUMENTS, {})))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    assert answers.get() == expected


def test_limits_of_a_call_replace_those_of_the_adapter_one_by_one():
    made = RerankerAdapter(model=Overlap(), threshold=1.0, top_n=3, extract="sentences")

    def limits_of(adapter, **limits):
        options = adapter._options(limits)
        return options["threshold"], options["top_n"], options["max_gap"]

    assert limits_of(RerankerAdapter()) == ("native", None, "native")
    assert limits_of(made) == (1.0, 3, "native")
    assert limits_of(made, threshold=None) == (None, 3, "native")
    assert limits_of(made, threshold=0.0, top_n=None, max_gap=None) == (0.0, None, None)
    # A call without a threshold only ranks.
    gap = RerankerAdapter(model=Overlap(), max_gap=2.0, fallback=Fallback(0, float("inf")))
    assert limits_of(gap, threshold=None) == (None, None, "native")
    assert limits_of(gap, threshold=None, max_gap=1.0) == (None, None, 1.0)
    assert made._options({}) == {
        "threshold": 1.0,
        "max_gap": "native",
        "fallback": "native",
        "top_n": 3,
        "extract": "sentences",
        "context": 0,
        "long_documents": None,
        "metadata_fields": ("title",),
        "scores": "raw",
    }
    with pytest.raises(TypeError, match=r"no argument 'k'\. It takes threshold, max_gap, fallback"):
        made._options({"k": 3})
    for wrong in (
        {"top_n": 2.5},
        {"top_n": "3"},
        {"max_gap": "1"},
        {"threshold": "0"},
        {"threshold": True},
    ):
        with pytest.raises(InputError, match=f"{next(iter(wrong))} must be a (whole )?number"):
            made._options(wrong)


@both
async def test_the_threshold_of_a_reranker_and_of_a_service_is_the_default_and_a_given_one_wins(
    adapter, service
):
    reranker = Overlap()
    reranker.threshold = service.threshold = 0.5
    query, texts = "a b c", ["a", "a b", "a b c", "d"]  # score 0, 1, 2, -1
    for made in (adapter(model=reranker), adapter(base_url=service.address)):
        reranker.threshold = service.threshold = 1.0
        assert await scores(made, query, texts) == {"a b c": 2.0}
        assert await scores(made, query, texts, threshold=0.0) == {"a b c": 2.0, "a b": 1.0}
        made.threshold = -0.5
        assert len(await scores(made, query, texts)) == 3
        assert await scores(made, query, texts, threshold="native") == {"a b c": 2.0}
    reranker.threshold = service.threshold = None
    for made in (adapter(model=reranker), adapter(base_url=service.address)):
        with pytest.raises(InputError, match="has no native threshold"):
            await scores(made, query, texts)
        assert await scores(made, query, texts, top_n=1) == {"a b c": 2.0}


def test_options_of_loading_are_one_declaration():
    selected = LoadOptions(device="cpu", dtype="nf4", token="hf_secret")
    assert selected.quantised == "nf4"
    assert "hf_secret" not in repr(selected.source("mini"))
    assert RSRankCompressor(device="cpu", dtype="int8")._source() == ModelSource(
        device="cpu", dtype="int8"
    )


def test_an_adapter_takes_every_system_by_the_name_it_is_measured_by(tmp_path, loads, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    pytest.importorskip("bm25s")
    made = RerankerAdapter(model="bm25", top_n=1)
    assert made._rank(QUERY, DOCUMENTS, {}).texts == DOCUMENTS[:1]
    for settings, error, message in (
        ({"model": "bm25", "cache_size": "1MB"}, InputError, "cache_size would have no effect"),
        ({"model": "cross-encoder"}, InputError, "Write cross-encoder:NAME"),
        (
            {"model": "BAAI/bge-reranker-base"},
            ArtifactError,
            "cross-encoder:BAAI/bge-rera",
        ),
        (
            {"model": str(tmp_path)},
            ArtifactError,
            "If it is a reranker of another kind, adapters and commands take it as cross-encoder:",
        ),
    ):
        with pytest.raises(error, match=message):
            RerankerAdapter(**settings).warm_up()


class Recorder(Reranker):
    """Remembers what it read."""

    def score(self, query, documents):
        self.read = list(documents)
        return [1.0] * len(documents)


def read_by(adapter, *passages, **settings):
    """What the reranker reads of (text, metadata) pairs."""
    reranker = Recorder()
    made = adapter(model=reranker, **settings)
    if adapter is RSRankCompressor:
        given = [Document(text, metadata=metadata) for text, metadata in passages]
        made.compress_documents(given, QUERY)
    else:
        nodes = [TextNode(text=text, metadata=metadata) for text, metadata in passages]
        made.postprocess_nodes([NodeWithScore(node=node) for node in nodes], query_str=QUERY)
    return reranker.read


@both
def test_a_title_in_the_metadata_is_read_before_the_text_in_the_form_of_the_training(adapter):
    passages = [
        ("Coins and notes.", {"title": "Money", "page": 7}),
        ("Money is made.", {"title": "Money"}),
        ("No title.", {"page": 7}),
        ("An empty one.", {"title": " "}),
        ("None at all.", {"title": None}),
    ]
    assert read_by(adapter, *passages) == [
        "Money\nCoins and notes.",
        "Money is made.",
        "No title.",
        "An empty one.",
        "None at all.",
    ]
    labelled = LabelledDocument(id="0", text="Coins and notes.", title="Money", relevant=True)
    assert read_by(adapter, passages[0]) == [labelled.content()]


@both
def test_metadata_may_hold_what_cannot_be_copied_and_come_back_as_they_are(adapter):
    # A lock cannot be copied; an embedding would take time to copy.
    metadata = {"connection": threading.Lock(), "embedding": [0.0] * 1536}
    made = adapter(model=Recorder())
    if adapter is RSRankCompressor:
        actual = made.compress_documents([Document("text", metadata=metadata)], QUERY)[0].metadata
    else:
        nodes = [NodeWithScore(node=TextNode(text="text", metadata=metadata))]
        actual = made.postprocess_nodes(nodes, query_str=QUERY)[0].node.metadata
    assert actual["connection"] is metadata["connection"]
    assert actual["embedding"] is metadata["embedding"]
    assert "relevance_score" not in metadata


@both
def test_other_metadata_are_read_if_they_are_named_and_none_if_none_is(adapter):
    passage = ("text", {"title": "T", "year": 0, "none": None, "rest": "r"})
    assert read_by(adapter, passage, metadata_fields=["title", "year", "none"]) == ["T\n0\ntext"]
    assert read_by(adapter, passage, metadata_fields=[]) == ["text"]
    assert read_by(adapter, passage, extract="sentences") == ["text"]


def test_a_model_name_that_is_a_loaded_ranker_scores_as_itself(ranker):
    made = RerankerAdapter(model=ranker)
    assert made._rank(QUERY, DOCUMENTS, {}) == ranker.rank(QUERY, DOCUMENTS)
    assert isinstance(made.model, RSRank)


# A service instead of a model

SECRET = "sk-very-secret"


def kept(made, query, texts):
    """As `scores`, of the framework's synchronous method."""
    if isinstance(made, RSRankCompressor):
        actual = made.compress_documents([Document(text) for text in texts], query)
        return {document.page_content: document.metadata["relevance_score"] for document in actual}
    actual = made.postprocess_nodes(
        [NodeWithScore(node=TextNode(text=text)) for text in texts], query_str=query
    )
    return {scored.node.text: scored.score for scored in actual}


def threads_of_models():
    """Not the one in which all requests are sent."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("rsrank_")}


@both
async def test_with_base_url_a_service_is_asked_and_nothing_is_loaded_nor_queued(
    adapter, service, loads
):
    made = adapter(base_url=service.address, api_key=SECRET)
    local = adapter(model=Overlap())
    expected = await scores(local, QUERY, DOCUMENTS)
    before = threads_of_models()
    assert expected
    assert kept(made, QUERY, DOCUMENTS) == expected
    assert await scores(made, QUERY, DOCUMENTS) == expected
    assert await scores(made, QUERY, DOCUMENTS, threshold=None) == await scores(
        local, QUERY, DOCUMENTS, threshold=None
    )
    assert await scores(made, QUERY, DOCUMENTS, threshold=99, fallback=Fallback(0, 99)) == dict(
        [max(expected.items(), key=lambda x: x[1])]
    )
    assert threads_of_models() <= before
    assert loads == []
    assert len(service.seen) == 4
    assert all(request["documents"] == DOCUMENTS for request in service.seen)
    assert all(headers["authorization"] == f"Bearer {SECRET}" for headers in service.headers)


@both
async def test_64_calls_of_a_service_run_beside_each_other(adapter, service):
    made = adapter(base_url=service.address, threshold=None)
    service.together = 33
    batches = [[f"{text} {number}" for text in DOCUMENTS] for number in range(64)]
    actual = await asyncio.gather(*(scores(made, QUERY, texts) for texts in batches))
    assert [set(one) for one in actual] == [set(texts) for texts in batches]


@both
async def test_a_cancelled_call_of_a_service_closes_its_request(adapter, service):
    made = adapter(base_url=service.address)
    service.script += [20]
    call = asyncio.create_task(scores(made, QUERY, DOCUMENTS))
    await until_async(lambda: service.running)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until_async(lambda: service.left == 1)


@both
async def test_a_failing_service_gives_our_errors(adapter, service):
    made = adapter(base_url=service.address, max_retries=0, timeout=5)
    service.script += [
        (503, {"message": "Loading."}),
        (401, {"message": "No."}),
        lambda answer: {**answer, "results": []},
    ]
    with pytest.raises(RemoteError, match="503: Loading"):
        await scores(made, QUERY, DOCUMENTS)
    with pytest.raises(InputError, match=r"401: No\. Check base_url, and the key"):
        kept(made, QUERY, DOCUMENTS)
    with pytest.raises(RemoteError, match="not give exactly one score"):
        await scores(made, QUERY, DOCUMENTS)


@both
def test_the_address_survives_every_way_of_writing_it_down_and_the_key_none(adapter, monkeypatch):
    made = adapter(
        base_url="http://rerank.internal:8000/v1/",
        api_key=SECRET,
        timeout=5,
        max_retries=1,
        top_n=4,
    )
    settings = made.model_dump()
    assert (settings["base_url"], settings["timeout"]) == ("http://rerank.internal:8000", 5.0)
    assert "api_key" not in settings
    written = [
        made.model_dump_json(),
        str(made),
        repr(made),
        str(settings),
        pickle.dumps(made).decode("latin-1"),
    ]
    if adapter is RSRankPostprocessor:
        written += [made.to_json(), str(made.to_dict())]
    assert not any(SECRET in text for text in written)
    with_key = [copy.copy(made), copy.deepcopy(made), made.model_copy(), made.model_copy(deep=True)]
    without_key = [
        pickle.loads(pickle.dumps(made)),
        adapter(**settings),
        adapter.model_validate_json(written[0]),
    ]
    if adapter is RSRankPostprocessor:
        without_key += [adapter.from_dict(made.to_dict()), adapter.from_json(made.to_json())]
    for actual in (*with_key, *without_key):
        assert actual.model_dump() == settings
        assert actual._remote().base_url == "http://rerank.internal:8000"
        assert actual._remote().timeout == 5.0
        assert actual._remote().max_retries == 1
    assert {actual.api_key.get_secret_value() for actual in with_key} == {SECRET}
    assert {actual.api_key for actual in without_key} == {None}


@both
def test_the_key_may_come_from_the_environment_after_unpickling(adapter, service, monkeypatch):
    service.key = SECRET
    made = pickle.loads(pickle.dumps(adapter(base_url=service.address, api_key=SECRET)))
    with pytest.raises(InputError, match="the key in api_key or RSRANK_API_KEY"):
        kept(made, QUERY, DOCUMENTS)
    monkeypatch.setenv("RSRANK_API_KEY", SECRET)
    assert kept(made, QUERY, DOCUMENTS)


@both
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"base_url": "http://a", "device": "cpu", "dtype": "int8"},
            "so device, dtype would have no effect",
        ),
        ({"base_url": "http://a", "dtype": "int8"}, "so dtype would have no effect"),
        ({"base_url": "http://a", "cache_size": 0}, "so cache_size would have no effect"),
        ({"base_url": "http://a", "revision": "v1"}, "The service loads the model, so revision"),
        (
            {"base_url": "http://a", "model": Overlap()},
            "The model is a Overlap that is already loaded, so base_url would",
        ),
        (
            {"api_key": SECRET},
            "Without base_url there is no service, so api_key would have no effect",
        ),
        ({"timeout": 5}, "timeout would have no effect"),
        ({"max_retries": 0}, "max_retries would have no effect"),
        ({"base_url": "a:8000"}, "base_url must be an address"),
        ({"base_url": 8000}, "base_url"),
        ({"base_url": f"http://user:{SECRET}@a"}, "A key belongs into api_key"),
        ({"base_url": "http://a", "timeout": 0}, "timeout"),
        ({"base_url": "http://a", "timeout": float("inf")}, "timeout"),
        ({"base_url": "http://a", "max_retries": -1}, "max_retries"),
        ({"base_url": "http://a", "max_retries": True}, "max_retries"),
        ({"base_url": "http://a", "api_key": f"{SECRET}\x00"}, "api_key holds characters"),
    ],
)
def test_settings_of_a_service_that_make_no_sense_are_refused(adapter, settings, message):
    with pytest.raises(ValidationError, match=message) as caught:
        adapter(**settings)
    assert SECRET not in str(caught.value)


@both
def test_a_service_may_be_asked_for_a_model_by_name_which_traces_show(adapter, service):
    named = adapter(base_url=service.address, model="overlap")
    assert kept(named, QUERY, DOCUMENTS)
    assert service.seen[-1]["model"] == named.model_label == "overlap"
    unnamed = adapter(base_url=service.address)
    assert kept(unnamed, QUERY, DOCUMENTS)
    assert service.seen[-1]["model"] is None
    assert unnamed.model_label == service.address
    with pytest.raises(RemoteError, match=r"'large' was requested, and .* holds 'overlap'"):
        kept(adapter(base_url=service.address, model="large"), QUERY, DOCUMENTS)


@both
def test_warming_up_asks_the_service_and_closing_frees_nothing(adapter, service, monkeypatch):
    freed = []
    monkeypatch.setattr(worker, "close", freed.append)
    made = adapter(base_url=service.address)
    made.warm_up()
    assert kept(made, QUERY, DOCUMENTS)
    made.close()
    assert not freed
    assert kept(made, QUERY, DOCUMENTS)
    with pytest.raises(RemoteError, match="could not be reached"):
        adapter(base_url="http://127.0.0.1:9", max_retries=0).warm_up()


@both
async def test_a_remote_reranker_as_model_is_not_queued_either(adapter, service):
    from rsrank_rag.remote.client import RemoteReranker

    made = adapter(model=RemoteReranker(service.address))
    made.warm_up()
    service.together = 5
    await asyncio.gather(*(scores(made, QUERY, DOCUMENTS) for _ in range(8)))
    assert id(made.model) not in {owner for _, owner in worker._threads}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_can_go_on_asking_a_service(service):
    made = RSRankCompressor(base_url=service.address)
    expected = kept(made, QUERY, DOCUMENTS)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(kept(made, QUERY, DOCUMENTS)))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    assert answers.get() == expected
