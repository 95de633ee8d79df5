"""The LangChain adapter: LangChain's own objects around it, and what it does to documents."""

import asyncio
import sys

import pytest
from conftest import DOCUMENTS, QUERY

pytest.importorskip("langchain_core")

from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.prompts import PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough

from rsrank_rag import Fallback, Reranker, RSRankError
from rsrank_rag.errors import InputError, MissingDependencyError, ScoringError
from rsrank_rag.evaluation.systems.bm25 import BM25
from rsrank_rag.langchain import (
    RSRankCompressor,
    RSRankRetriever,
    create_rsrank_middleware,
    create_rsrank_tool,
)

try:
    from langchain_classic.retrievers import ContextualCompressionRetriever
    from langchain_classic.retrievers import document_compressors as compressors
except ImportError:  # before 1.0 they were in langchain itself
    try:
        from langchain.retrievers import ContextualCompressionRetriever
        from langchain.retrievers import document_compressors as compressors
    except ImportError:
        compressors = None

needs_classic = pytest.mark.skipif(compressors is None, reason="needs langchain-classic")


class Numbers(Reranker):
    """A document's score is the number it starts with."""

    def score(self, query, documents):
        return [float(text.split()[0]) for text in documents]


class Last(Reranker):
    """A document's score is the number that its last line starts with."""

    def score(self, query, documents):
        return [float(text.splitlines()[-1].split()[0]) for text in documents]


def documents(*scores):
    return [
        Document(f"{score} points", id=f"id{i}", metadata={"page": i})
        for i, score in enumerate(scores)
    ]


def texts(found):
    return [document.page_content for document in found]


@pytest.fixture
def compressor():
    return RSRankCompressor(model=Numbers())


async def compress(compressor, asynchronous, *args, **kwargs):
    if asynchronous:
        return await compressor.acompress_documents(*args, **kwargs)
    return await asyncio.to_thread(compressor.compress_documents, *args, **kwargs)


both_ways = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@both_ways
async def test_documents_below_zero_are_dropped_and_the_rest_is_sorted(compressor, asynchronous):
    actual = await compress(compressor, asynchronous, documents(1, -1, 3, 0), "q")
    assert texts(actual) == ["3 points", "1 points"]
    assert [document.metadata["relevance_score"] for document in actual] == [3.0, 1.0]


@both_ways
@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"threshold": None}, [3, 1, 0, -1]),
        ({"threshold": 2}, [3]),
        ({"threshold": 5}, []),
        ({"threshold": 5, "fallback": Fallback(2, 9)}, [3, 1]),
        ({"top_n": 1}, [3]),
        ({"top_n": 9}, [3, 1]),
        ({"threshold": None, "top_n": 3}, [3, 1, 0]),
    ],
)
async def test_limits_can_be_set_once_or_for_one_call(asynchronous, limits, expected):
    wanted = [f"{score} points" for score in expected]
    once = RSRankCompressor(model=Numbers(), **limits)
    assert texts(await compress(once, asynchronous, documents(1, -1, 3, 0), "q")) == wanted
    call = RSRankCompressor(model=Numbers(), threshold=2.5)
    if "threshold" in limits:
        assert (
            texts(await compress(call, asynchronous, documents(1, -1, 3, 0), "q", **limits))
            == wanted
        )


def test_an_unknown_argument_of_a_call_is_an_error_that_names_what_was_meant(compressor):
    with pytest.raises(TypeError, match=r"no argument 'k'. It takes threshold, max_gap, fallb"):
        compressor.compress_documents(documents(1), "q", k=3)
    with pytest.raises(TypeError, match=r"no argument 'top_k'. Did you mean 'top_n'"):
        compressor.compress_documents(documents(1), "q", top_k=3)


@both_ways
async def test_swapped_arguments_and_a_list_of_strings_are_errors_that_show_the_call(
    compressor, asynchronous
):
    for wrong in (("q", documents(1)), (["1 point"], "q")):
        with pytest.raises(InputError, match=r"Call compress_documents\(\[Document\(text\), "):
            await compress(compressor, asynchronous, *wrong)


def test_the_input_is_left_alone_and_what_comes_back_is_a_copy(compressor):
    given = documents(1, 2)
    given[0].metadata["relevance_score"] = 0.99
    before = [document.model_copy(deep=True) for document in given]
    actual = compressor.compress_documents(given, "q")
    assert given == before
    actual[0].metadata["page"] = "changed"
    assert given == before
    assert [document.id for document in actual] == ["id1", "id0"]
    assert actual[1].metadata == {"page": 0, "relevance_score": 1.0}  # the stale score is gone
    assert type(actual[0].metadata["relevance_score"]) is float


def test_documents_may_come_as_any_iterable(compressor):
    there = documents(1.0, -1.0, 2.0)
    expected = compressor.compress_documents(there, QUERY)
    assert compressor.compress_documents((one for one in there), QUERY) == expected != []
    assert compressor.compress_documents(dict(enumerate(there)).values(), QUERY) == expected


def test_a_subclass_of_document_keeps_its_class_and_fields(compressor):
    class Chunk(Document):
        state: dict = {}  # noqa: RUF012 - a pydantic default

    (actual,) = compressor.compress_documents(
        [Chunk(page_content="2", state={"embedded": [1.0]}, id="x")], "q"
    )
    assert type(actual) is Chunk
    assert actual.state == {"embedded": [1.0]}


@both_ways
async def test_no_documents_need_no_model(asynchronous):
    assert await compress(RSRankCompressor(model="no/such-model"), asynchronous, [], "q") == []


def test_when_all_is_dropped_the_list_is_empty(compressor):
    assert compressor.compress_documents(documents(-1, -2), "q") == []


@both_ways
async def test_a_document_that_cannot_be_scored_fails_the_call_and_is_named(
    compressor, asynchronous
):
    with pytest.raises(ScoringError, match="Document 1 scored nan"):
        await compress(compressor, asynchronous, documents(1, "nan"), "q")


def test_documents_that_were_cut_carry_it(ranker):
    given = [Document("word " * 2000), Document("short", metadata={"rsrank_truncated": True})]
    compressor = RSRankCompressor(model=ranker, threshold=None, long_documents="cut")
    actual = compressor.compress_documents(given, QUERY)
    marks = {
        document.page_content[:5]: document.metadata.get("rsrank_truncated") for document in actual
    }
    assert marks == {"word ": True, "short": None}


def test_a_system_without_a_native_threshold_needs_a_limit():
    pytest.importorskip("bm25s")
    given = [Document(text) for text in DOCUMENTS]
    with pytest.raises(InputError, match=r"bm25 has no native threshold.* threshold=None to rank"):
        RSRankCompressor(model="bm25").compress_documents(given, QUERY)
    for limits in ({"top_n": 1}, {"max_gap": 0.1}, {"threshold": None}):
        assert (
            RSRankCompressor(model="bm25", **limits)
            .compress_documents(given, QUERY)[0]
            .page_content
            == DOCUMENTS[0]
        )
    assert (
        RSRankCompressor(model=BM25(), top_n=1).compress_documents(given, QUERY)[0].page_content
        == DOCUMENTS[0]
    )


def test_scores_are_those_of_the_ranker(ranker):
    actual = RSRankCompressor(model=ranker, threshold=None).compress_documents(
        list(map(Document, DOCUMENTS)), QUERY
    )
    expected = ranker.rank(QUERY, DOCUMENTS, threshold=None).kept
    assert [(d.page_content, d.metadata["relevance_score"]) for d in actual] == [
        (d.text, d.score) for d in expected
    ]


# Callbacks


class Trace(BaseCallbackHandler):
    def __init__(self):
        self.events = []

    def on_chain_start(
        self, serialized, inputs, *, run_id, parent_run_id=None, name=None, **kwargs
    ):
        self.events.append(("start", name, run_id, parent_run_id, inputs))

    def on_chain_end(self, outputs, *, run_id, **kwargs):
        self.events.append(("end", run_id, outputs))

    def on_chain_error(self, error, *, run_id, **kwargs):
        self.events.append(("error", run_id, error))


class AsyncTrace(AsyncCallbackHandler):
    def __init__(self):
        self.events = []

    on_start, on_end, on_error = Trace.on_chain_start, Trace.on_chain_end, Trace.on_chain_error

    async def on_chain_start(self, *args, **kwargs):
        self.on_start(*args, **kwargs)

    async def on_chain_end(self, *args, **kwargs):
        self.on_end(*args, **kwargs)

    async def on_chain_error(self, *args, **kwargs):
        self.on_error(*args, **kwargs)


@pytest.mark.parametrize(
    ("asynchronous", "handler"), [(False, Trace), (True, Trace), (True, AsyncTrace)]
)
async def test_callbacks_see_a_run_with_inputs_and_outputs(compressor, asynchronous, handler):
    trace = handler()
    given = documents(1, -1)
    actual = await compress(compressor, asynchronous, given, "q", callbacks=[trace])
    (_, name, run, parent, inputs), (_, ended, outputs) = trace.events
    assert (name, parent, ended) == ("RSRankCompressor", None, run)
    assert inputs == {"query": "q", "documents": given}
    assert outputs == {
        "documents": actual,
        "dropped": [{"index": 1, "score": -1.0}],
        "threshold": 0.0,
        "model": "Numbers",
    }


@pytest.mark.parametrize(
    ("asynchronous", "handler"), [(False, Trace), (True, Trace), (True, AsyncTrace)]
)
async def test_callbacks_see_an_error(compressor, asynchronous, handler):
    trace = handler()
    with pytest.raises(ScoringError):
        await compress(compressor, asynchronous, documents("inf"), "q", callbacks=[trace])
    start, (_, failed, error) = trace.events
    assert failed == start[2]
    assert isinstance(error, RSRankError)


def test_a_call_inside_a_chain_is_a_child_of_the_chains_run(compressor):
    trace = Trace()
    RunnableLambda(
        lambda query: compressor.compress_documents(documents(1), query), name="outer"
    ).invoke("q", {"callbacks": [trace]})
    outer, inner = (event for event in trace.events if event[0] == "start")
    assert (outer[1], inner[1]) == ("outer", "RSRankCompressor")
    assert inner[3] == outer[2]


def test_open_inference_exports_the_run(spans_of_langchain):
    RSRankCompressor(model=Numbers()).compress_documents(documents(2, -2), "which?")
    (span,) = spans_of_langchain()
    assert span.name == "RSRankCompressor"
    assert '"score": -2.0' in span.attributes["output.value"]
    assert "which?" in span.attributes["input.value"]
    assert "2 points" in span.attributes["output.value"]
    assert "-2 points" not in span.attributes["output.value"]


# Chains


class Fixed(BaseRetriever):
    """Finds everything, or the first k."""

    found: list[Document]
    k: int | None = None

    def _get_relevant_documents(self, query, *, run_manager, k=None):
        return self.found[: k or self.k]

    async def _aget_relevant_documents(self, query, *, run_manager, k=None):
        return self.found[: k or self.k]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
async def test_the_retriever_keeps_what_is_relevant(compressor, asynchronous):
    retriever = RSRankRetriever(
        base_retriever=Fixed(found=documents(1, -1, 3)), compressor=compressor
    )

    async def ask(**kwargs):
        return texts(
            await retriever.ainvoke("q", **kwargs)
            if asynchronous
            else retriever.invoke("q", **kwargs)
        )

    assert await ask() == ["3 points", "1 points"]
    assert await ask(threshold=None, top_n=2) == ["3 points", "1 points"]
    assert await ask(threshold=None) == ["3 points", "1 points", "-1 points"]
    assert await ask(k=2) == ["1 points"]  # the base retriever's


def test_the_retriever_fits_a_chain(compressor):
    base = Fixed(found=documents(1, -1, 2))
    retriever = RSRankRetriever(base_retriever=base, compressor=compressor)
    chain = RunnablePassthrough.assign(context=RunnableLambda(lambda given: given["q"]) | retriever)
    assert texts(chain.invoke({"q": "q"})["context"]) == ["2 points", "1 points"]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
async def test_the_retriever_refuses_a_keyword_that_nobody_takes(compressor, asynchronous):
    class Takes(Fixed):
        """As a vector store's retriever: hands any keyword on."""

        def _get_relevant_documents(self, query, *, run_manager, **kwargs):
            return self.found

        async def _aget_relevant_documents(self, query, *, run_manager, **kwargs):
            return self.found

    async def ask(base, **kwargs):
        retriever = RSRankRetriever(base_retriever=base, compressor=compressor)
        if asynchronous:
            return texts(await retriever.ainvoke("q", **kwargs))
        return texts(retriever.invoke("q", **kwargs))

    with pytest.raises(TypeError, match="Unknown argument: treshold"):
        await ask(Fixed(found=documents(1)), treshold=1)
    with pytest.raises(TypeError, match=r"Unknown argument: score_threshold.*Fixed does not take"):
        await ask(Fixed(found=documents(1)), score_threshold=1)
    with pytest.raises(TypeError, match="Unknown argument: treshold"):
        await ask(Takes(found=documents(1)), treshold=1)
    assert await ask(Takes(found=documents(1)), score_threshold=1) == ["1 points"]
    runnable = RunnableLambda(lambda query: documents(2))
    with pytest.raises(TypeError, match="treshold"):
        await ask(runnable, treshold=1)


def test_an_unknown_setting_of_the_retriever_is_an_error(compressor):
    with pytest.raises(ValueError, match="compresor"):
        RSRankRetriever(base_retriever=Fixed(found=[]), compresor=compressor)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
async def test_a_tool_gives_an_agent_the_relevant_passages_and_their_documents(
    compressor, asynchronous
):
    base = Fixed(found=documents(1, -1, 3))
    retriever = RSRankRetriever(base_retriever=base, compressor=compressor)
    tool = create_rsrank_tool(retriever, "library", "Passages about points.", separator=" | ")
    call = {"name": "library", "args": {"query": "q"}, "id": "1", "type": "tool_call"}
    message = await tool.ainvoke(call) if asynchronous else tool.invoke(call)
    assert message.content == "3 points | 1 points"
    assert texts(message.artifact) == ["3 points", "1 points"]
    assert tool.description == "Passages about points."
    assert list(tool.args) == ["query"]


def test_a_tool_says_in_words_that_nothing_is_relevant(compressor):
    base = Fixed(found=documents(-1))
    retriever = RSRankRetriever(base_retriever=base, compressor=compressor)
    call = {"name": "library", "args": {"query": "q"}, "id": "1", "type": "tool_call"}
    message = create_rsrank_tool(retriever, "library", "Points.").invoke(call)
    assert (message.content, message.artifact) == ("No passage scored above the threshold.", [])
    tool = create_rsrank_tool(retriever, "library", "Points.", nothing_relevant="Ask somebody.")
    assert tool.invoke({"query": "q"}) == "Ask somebody."


def test_a_tool_shows_titles_and_hands_on_ids(compressor):
    base = Fixed(
        found=[
            Document("1 point", id="a", metadata={"title": "One"}),
            Document("2 points", id="b", metadata={"title": "Microsoft Word - two.docx"}),
        ]
    )
    retriever = RSRankRetriever(base_retriever=base, compressor=RSRankCompressor(model=Last()))
    call = {"name": "library", "args": {"query": "q"}, "id": "1", "type": "tool_call"}
    message = create_rsrank_tool(retriever, "library", "Points.").invoke(call)
    assert message.content == "2 points\n\nOne\n1 point"
    assert [document.id for document in message.artifact] == ["b", "a"]
    prompt = PromptTemplate.from_template("{title}: {page_content}")
    tool = create_rsrank_tool(retriever, "library", "Points.", document_prompt=prompt)
    assert tool.invoke(call).content.endswith("One: 1 point")


def test_a_tool_puts_a_compressor_after_another_retriever():
    actual = [Document(text) for text in DOCUMENTS]
    tool = create_rsrank_tool(Fixed(found=actual), "library", "All.")
    expected = RSRankCompressor().compress_documents(actual, QUERY)
    assert 0 < len(expected) < len(actual)
    assert tool.invoke({"query": QUERY}) == "\n\n".join(texts(expected))


def test_a_tools_run_holds_the_retrievers_run(compressor):
    trace = Trace()
    trace.on_tool_start = lambda serialized, text, *, run_id, **kwargs: trace.events.append(run_id)
    trace.on_retriever_start = lambda serialized, query, *, parent_run_id, **kwargs: (
        trace.events.append(parent_run_id)
    )
    retriever = RSRankRetriever(base_retriever=Fixed(found=[]), compressor=compressor)
    create_rsrank_tool(retriever, "library", "None.").invoke({"query": "q"}, {"callbacks": [trace]})
    assert trace.events[0] == trace.events[1]


def test_the_retrievers_runs_nest(compressor):
    trace = Trace()
    trace.on_retriever_start = (
        lambda serialized, query, *, run_id, name=None, parent_run_id=None, **kwargs: (
            trace.events.append(("start", name, run_id, parent_run_id))
        )
    )
    RSRankRetriever(base_retriever=Fixed(found=documents(1)), compressor=compressor).invoke(
        "q", {"callbacks": [trace]}
    )
    outer, base, inner = (event for event in trace.events if event[0] == "start")
    assert (outer[1], base[1], inner[1]) == ("RSRankRetriever", "Fixed", "RSRankCompressor")
    assert base[3] == inner[3] == outer[2]


@needs_classic
@both_ways
async def test_langchains_compression_retriever_takes_the_compressor(compressor, asynchronous):
    retriever = ContextualCompressionRetriever(
        base_compressor=compressor, base_retriever=Fixed(found=documents(1, -1, 3))
    )
    actual = await retriever.ainvoke("q") if asynchronous else retriever.invoke("q")
    assert texts(actual) == ["3 points", "1 points"]


@needs_classic
@both_ways
async def test_langchains_pipeline_takes_the_compressor(compressor, asynchronous):
    class Nothing(BaseDocumentCompressor):
        def compress_documents(self, documents, query, callbacks=None):
            return []

    for before, expected in ((None, ["3 points", "1 points"]), (Nothing(), [])):
        pipeline = compressors.DocumentCompressorPipeline(
            transformers=[*filter(None, [before]), compressor]
        )
        actual = await compress(pipeline, asynchronous, documents(1, -1, 3), "q")
        assert texts(actual) == expected


# LangChain's own standard tests

try:
    from langchain_tests.integration_tests import RetrieversIntegrationTests
except ImportError:
    RetrieversIntegrationTests = object  # skipped below


@pytest.mark.skipif(RetrieversIntegrationTests is object, reason="needs langchain-tests")
class TestStandard(RetrieversIntegrationTests):
    """A retriever of ours, by LangChain's standard tests."""

    @property
    def retriever_constructor(self):
        def construct(top_n=None):
            return RSRankRetriever(
                base_retriever=Fixed(found=documents(1, 2, -1, 3, 4)),
                compressor=RSRankCompressor(model=Numbers(), top_n=top_n),
            )

        return construct

    @property
    def retriever_query_example(self):
        return "which?"

    @property
    def num_results_arg_name(self):
        return "top_n"


def test_the_middleware_without_langchains_agents_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "langchain.agents.middleware", None)
    with pytest.raises(MissingDependencyError, match=r"langchain 1\.0 or newer: pip install"):
        create_rsrank_middleware()
