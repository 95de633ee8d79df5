"""`on_error` of the adapters: no model loads, a service is down, or a document has no score."""

import asyncio
import copy
import logging
import pickle
import threading
from concurrent.futures import CancelledError

import pytest
from conftest import DOCUMENTS, QUERY
from pydantic import ValidationError

from rsrank_rag import Reranker
from rsrank_rag.errors import ArtifactError, InputError, RemoteError, ScoringError

pytest.importorskip("langchain_core")
pytest.importorskip("llama_index.core")
pytest.importorskip("uvicorn")

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from llama_index.core import MockEmbedding, Settings, VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import MockLLM
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode
from stub_service import Service, listening

from rsrank_rag.langchain import RSRankCompressor, RSRankRetriever
from rsrank_rag.llama_index import RSRankPostprocessor

both = pytest.mark.parametrize(
    "adapter", [RSRankCompressor, RSRankPostprocessor], ids=lambda kind: kind.__name__
)
both_ways = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


class Failing(Reranker):
    """Raises what it holds; if it holds nothing, the longer document scores higher."""

    def __init__(self, error=None):
        self.error = error

    def score(self, query, documents):
        if self.error is not None:
            raise self.error
        return [float(len(text)) for text in documents]


async def process(made, asynchronous, texts=DOCUMENTS, **limits):
    """What an adapter hands on: (text, metadata, score) of each, whatever the framework."""
    if isinstance(made, RSRankCompressor):
        given = [Document(text, metadata={"from": "store"}) for text in texts]
        call = made.acompress_documents if asynchronous else made.compress_documents
        actual = call(given, QUERY, **limits)
        actual = await actual if asynchronous else actual
        assert [document.metadata for document in given] == [{"from": "store"}] * len(texts)
        return [(d.page_content, d.metadata, d.metadata.get("relevance_score")) for d in actual]
    given = [
        NodeWithScore(node=TextNode(text=text, metadata={"from": "store"}), score=0.5 - place)
        for place, text in enumerate(texts)
    ]
    call = made.apostprocess_nodes if asynchronous else made.postprocess_nodes
    actual = call(given, query_str=QUERY, **limits)
    actual = await actual if asynchronous else actual
    assert [scored.node.metadata for scored in given] == [{"from": "store"}] * len(texts)
    return [(scored.node.text, scored.node.metadata, scored.score) for scored in actual]


ONE_DOCUMENT = {
    "message": "Document 0 does not fit.",
    "documents": [{"index": 0, "message": "does not fit."}],
}

OUTAGES = {
    "loading": ((503, {"message": "Loading."}), RemoteError, "answered 503: Loading"),
    "slow": (30, RemoteError, "did not answer in 0.2 seconds"),
    "key": ((401, {"message": "No."}), InputError, "the key in api_key"),
    "nonsense": (
        lambda answer: {**answer, "results": []},
        RemoteError,
        "not give exactly one score",
    ),
    "one document": ((422, ONE_DOCUMENT), ScoringError, "does not fit"),
}


@both
@both_ways
@pytest.mark.parametrize("outage", OUTAGES)
async def test_when_a_service_fails_documents_are_raised_about_or_kept(
    adapter, asynchronous, outage, service, caplog
):
    step, kind, message = OUTAGES[outage]
    how = {
        "base_url": service.address,
        "max_retries": 0,
        "timeout": 0.2 if outage == "slow" else 20,
    }
    service.script += [step, step]
    with pytest.raises(kind, match=message):
        await process(adapter(**how), asynchronous)
    made = adapter(**how, on_error="keep")
    with caplog.at_level(logging.WARNING, "rsrank_rag"):
        actual = await process(made, asynchronous)
    assert [text for text, _, _ in actual] == DOCUMENTS
    for place, (_, metadata, score) in enumerate(actual):
        assert metadata.pop("rsrank_error").startswith(f"{kind.__name__}: ")
        assert metadata == {"from": "store"}
        assert score == (None if adapter is RSRankCompressor else 0.5 - place)  # the retriever's
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert message in record.message
    assert f"{service.address} failed, {len(DOCUMENTS)} documents stay unranked" in record.message
    made.timeout = 60
    await process(made, asynchronous)  # the service is back


@both
@both_ways
@pytest.mark.parametrize(
    "error",
    [
        ScoringError("scored nan.", 0),
        InputError("The query is too long."),
        ZeroDivisionError(),
    ],
)
async def test_whatever_a_local_model_raises_is_kept_with_its_name(
    adapter, asynchronous, error, caplog
):
    with pytest.raises(type(error)):
        await process(adapter(model=Failing(error)), asynchronous)
    made = adapter(model=Failing(error), on_error="keep")
    actual = await process(made, asynchronous)
    assert [text for text, _, _ in actual] == DOCUMENTS
    assert {metadata["rsrank_error"] for _, metadata, _ in actual} == {
        f"{type(error).__name__}: {error}"
    }
    (record,) = caplog.records
    assert (record.exc_info is not None) == isinstance(
        error, ZeroDivisionError
    )  # only a stranger's needs its place


@both
@both_ways
async def test_a_question_that_is_too_long_is_cut_with_a_warning(
    adapter, asynchronous, ranker, caplog, monkeypatch
):
    monkeypatch.setitem(globals(), "QUERY", f"{QUERY} " * 1000)
    actual = await process(adapter(model=ranker, threshold=None), asynchronous)
    assert len(actual) == len(DOCUMENTS)
    assert "its first and its last part were read" in caplog.text


@both
@both_ways
async def test_one_document_without_a_score_loses_none(adapter, asynchronous):
    class OneIsBroken(Failing):
        def score(self, query, documents):
            return [float("nan") if place == 1 else 1.0 for place in range(len(documents))]

    actual = await process(adapter(model=OneIsBroken(), on_error="keep"), asynchronous)
    assert [text for text, _, _ in actual] == DOCUMENTS
    assert all("Document 1 scored nan" in metadata["rsrank_error"] for _, metadata, _ in actual)


@both
@both_ways
async def test_a_model_that_cannot_be_loaded_is_tried_again_and_warming_up_raises(
    adapter, asynchronous, ranker, tmp_path
):
    made = adapter(
        model=tmp_path / "later", device="cpu", dtype="float32", threshold=None, on_error="keep"
    )
    with pytest.raises(ArtifactError, match="later"):
        made.warm_up()
    actual = await process(made, asynchronous)
    assert all(metadata["rsrank_error"].startswith("ArtifactError: ") for _, metadata, _ in actual)
    ranker.save_pretrained(tmp_path / "later", include_backbone=True)
    actual = await process(made, asynchronous)
    assert len(actual) == len(DOCUMENTS)
    assert not any("rsrank_error" in metadata for _, metadata, _ in actual)
    made.close()


@both
@both_ways
async def test_nobody_listens_from_the_start(adapter, asynchronous):
    with listening(Service()) as address:
        pass
    made = adapter(base_url=address, max_retries=0, on_error="keep", top_n=2)
    with pytest.raises(RemoteError, match="could not be reached"):
        made.warm_up()
    actual = await process(made, asynchronous)
    assert [text for text, _, _ in actual] == DOCUMENTS[:2]
    assert "could not be reached" in actual[0][1]["rsrank_error"]


@both
@both_ways
async def test_top_n_cuts_what_is_kept(adapter, asynchronous):
    broken = Failing(ScoringError("has no score.", 0))
    actual = await process(
        adapter(model=broken, on_error="keep", top_n=2, threshold=9), asynchronous
    )
    assert [text for text, _, _ in actual] == DOCUMENTS[:2]


@both
@both_ways
async def test_who_stops_a_call_is_obeyed(adapter, asynchronous, caplog):
    for stop in (KeyboardInterrupt(), SystemExit(3), CancelledError()):
        made = adapter(model=Failing(stop), on_error="keep")
        with pytest.raises(CancelledError if isinstance(stop, CancelledError) else type(stop)):
            made._rank(QUERY, DOCUMENTS, {})
    if asynchronous:
        begun, go_on = threading.Event(), threading.Event()

        class Waiting(Failing):
            def score(self, query, documents):
                begun.set()
                assert go_on.wait(60)
                return super().score(query, documents)

        made = adapter(model=Waiting(), on_error="keep")
        call = asyncio.create_task(process(made, asynchronous))
        await asyncio.to_thread(begun.wait, 60)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        go_on.set()
    assert not caplog.records


@both
async def test_a_cancelled_call_of_a_service_is_no_outage(adapter, service, caplog):
    made = adapter(base_url=service.address, on_error="keep")
    service.script += [30]
    call = asyncio.create_task(process(made, True))
    while service.running < 1:
        await asyncio.sleep(0.001)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not caplog.records


@both
@both_ways
async def test_what_the_adapter_itself_refuses_stays_an_error(adapter, asynchronous):
    class Cosine(Failing):
        threshold = None

    made = adapter(model=Cosine(), on_error="keep")
    with pytest.raises(InputError, match="no native threshold"):
        await process(made, asynchronous)
    if adapter is RSRankCompressor:
        with pytest.raises(TypeError, match="no argument 'tpo_n'"):
            await process(made, asynchronous, tpo_n=3)
        with pytest.raises(InputError, match="top_n must be a whole number of at least 1"):
            await process(made, asynchronous, top_n=0)


@both
def test_the_choice_is_checked_and_written_down(adapter):
    with pytest.raises(ValidationError, match="on_error"):
        adapter(on_error="ignore")
    made = adapter(on_error="keep")
    for actual in (
        pickle.loads(pickle.dumps(made)),
        copy.deepcopy(made),
        adapter(**made.model_dump()),
    ):
        assert actual.on_error == "keep"
    assert adapter().on_error == "raise"


@both_ways
async def test_the_mark_of_an_outage_is_gone_after_the_next_call_that_works(asynchronous):
    reranker = Failing(ScoringError("has no score.", 0))
    made = RSRankCompressor(model=reranker, on_error="keep")
    kept = made.compress_documents([Document("a"), Document("bb")], QUERY)
    reranker.error = None
    actual = (
        await made.acompress_documents(kept, QUERY)
        if asynchronous
        else made.compress_documents(kept, QUERY)
    )
    assert [document.metadata for document in actual] == [
        {"relevance_score": 2.0},
        {"relevance_score": 1.0},
    ]
    assert all("rsrank_error" in document.metadata for document in kept)


def test_neither_embedding_nor_llm_reads_the_error_of_a_node():
    made = RSRankPostprocessor(model=Failing(ScoringError("has no score.", 0)), on_error="keep")
    (actual,) = made.postprocess_nodes(
        [NodeWithScore(node=TextNode(text="a"), score=0.25)], query_str=QUERY
    )
    assert actual.node.metadata == {
        "rsrank_error": "ScoringError: Document 0 has no score.",
    }
    assert actual.score == 0.25
    for mode in (MetadataMode.EMBED, MetadataMode.LLM):
        assert actual.node.get_content(metadata_mode=mode) == "a"


# Traces


class Trace(BaseCallbackHandler):
    def __init__(self):
        self.events = []

    def on_chain_start(
        self, serialized, inputs, *, run_id, parent_run_id=None, name=None, **kwargs
    ):
        self.events.append(("start", name, parent_run_id, run_id))

    def on_chain_end(self, outputs, *, run_id, **kwargs):
        self.events.append(("end", run_id, outputs))

    def on_chain_error(self, error, *, run_id, **kwargs):
        self.events.append(("error", run_id, error))


@both_ways
async def test_the_run_in_langchains_callbacks_ends_with_documents_that_hold_the_error(
    asynchronous,
):
    error, trace = ScoringError("has no score.", 0), Trace()
    made = RSRankCompressor(model=Failing(error), on_error="keep")
    given = [Document(text) for text in DOCUMENTS]
    call = made.acompress_documents if asynchronous else made.compress_documents
    actual = call(given, QUERY, callbacks=[trace])
    actual = await actual if asynchronous else actual
    started, (kind, run, outputs) = trace.events
    assert started == ("start", "RSRankCompressor", None, run)
    assert (kind, outputs["documents"], outputs["dropped"]) == ("end", actual, [])
    assert actual[0].metadata["rsrank_error"] == "ScoringError: Document 0 has no score."


def test_open_inference_exports_the_error_of_langchains_documents(spans_of_langchain):
    made = RSRankCompressor(model=Failing(ScoringError("has no score.", 0)), on_error="keep")
    made.compress_documents([Document("a")], QUERY)
    (span,) = spans_of_langchain()
    assert (span.name, span.status.status_code.name) == ("RSRankCompressor", "OK")
    assert "ScoringError: Document 0 has no score." in span.attributes["output.value"]


class Events(BaseEventHandler):
    seen: list = []  # noqa: RUF012 - a pydantic default

    def handle(self, event, **kwargs):
        self.seen.append(event)


@both_ways
async def test_llama_indexs_events_hold_the_error(asynchronous):
    error = ScoringError("has no score.", 0)
    made = RSRankPostprocessor(model=Failing(error), on_error="keep")
    dispatcher, handler = get_dispatcher("rsrank_rag.llama_index"), Events(seen=[])
    dispatcher.add_event_handler(handler)
    try:
        await process(made, asynchronous)
    finally:
        dispatcher.event_handlers.remove(handler)
    start, exception, end = handler.seen
    assert [type(event).__name__ for event in handler.seen] == [
        "ReRankStartEvent",
        "ExceptionEvent",
        "ReRankEndEvent",
    ]
    assert exception.exception is error
    assert start.span_id == exception.span_id == end.span_id is not None
    assert [scored.node.metadata["rsrank_error"] for scored in end.nodes] == [
        "ScoringError: Document 0 has no score."
    ] * len(DOCUMENTS)


# Whole applications


class Everything(BaseRetriever):
    def _get_relevant_documents(self, query, *, run_manager):
        return [Document(text) for text in DOCUMENTS]


@both_ways
async def test_retrievers_of_langchain_answer_while_the_service_is_down(asynchronous, service):
    service.script += [(503, {"message": "Loading."})] * 2
    compressor = RSRankCompressor(base_url=service.address, max_retries=0, on_error="keep", top_n=3)
    retrievers = [RSRankRetriever(base_retriever=Everything(), compressor=compressor)]
    try:
        from langchain_classic.retrievers import ContextualCompressionRetriever
    except ImportError:
        from langchain.retrievers import ContextualCompressionRetriever
    retrievers += [
        ContextualCompressionRetriever(base_retriever=Everything(), base_compressor=compressor)
    ]
    for retriever in retrievers:
        actual = await retriever.ainvoke(QUERY) if asynchronous else retriever.invoke(QUERY)
        assert [document.page_content for document in actual] == DOCUMENTS[:3]


@both_ways
async def test_a_query_engine_of_llama_index_answers_while_the_service_is_down(
    asynchronous, service
):
    before = Settings._embed_model, Settings._llm
    service.script += [(503, {"message": "Loading."})]
    try:
        index = VectorStoreIndex(
            [TextNode(text=text) for text in DOCUMENTS], embed_model=MockEmbedding(8)
        )
        postprocessor = RSRankPostprocessor(
            base_url=service.address, max_retries=0, on_error="keep", top_n=2
        )
        retrieved = index.as_retriever(similarity_top_k=len(DOCUMENTS)).retrieve(QUERY)
        engine = index.as_query_engine(
            llm=MockLLM(), similarity_top_k=len(DOCUMENTS), node_postprocessors=[postprocessor]
        )
        answer = await engine.aquery(QUERY) if asynchronous else engine.query(QUERY)
    finally:
        Settings._embed_model, Settings._llm = before
    assert [scored.node.text for scored in answer.source_nodes] == [
        scored.node.text for scored in retrieved
    ][:2]
    assert "rsrank_error" not in str(answer)
    assert answer.source_nodes[0].node.text in str(answer)
