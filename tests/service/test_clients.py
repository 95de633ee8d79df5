"""The client classes that people use, against the running service.

They want versions of their libraries that do not go together: `make test-clients` makes an
environment for each group.
"""

import os

os.environ.update(
    NVIDIA_USAGE_TELEMETRY_ENABLED="false",
    HAYSTACK_TELEMETRY_ENABLED="false",
    ANONYMIZED_TELEMETRY="false",
)

import pytest

pytest.importorskip("starlette")

from service_helpers import Numbers, address_of, scheduler

from rsrank_rag.ranking.results import normalise

TEXTS = ["1 one", "-4 four", "3 three", "2 two"]
BEST_FIRST = [(2, 3.0), (3, 2.0), (0, 1.0), (1, -4.0)]
KEY = "some-key"


@pytest.fixture(scope="module")
def service():
    with address_of(scheduler(Numbers()), api_keys=[KEY]) as url:
        yield url


@pytest.fixture(scope="module")
def open_service():
    """For clients that send no key."""
    with address_of(scheduler(Numbers())) as url:
        yield url


@pytest.fixture(scope="module")
def dropping():
    """A service that leaves out what does not score above the native threshold of 1."""
    with address_of(scheduler(Numbers()), drop=True) as url:
        yield url


def between_0_and_1(rows):
    return [(index, pytest.approx(normalise(score, 1.0))) for index, score in rows]


# Cohere's own client


def cohere_client(url):
    return pytest.importorskip("cohere").ClientV2(api_key=KEY, base_url=url)


def test_coheres_client(service):
    result = cohere_client(service).rerank(model="any", query="q", documents=TEXTS)
    assert [(row.index, row.relevance_score) for row in result.results] == BEST_FIRST
    assert result.meta.billed_units.search_units == 1
    result = cohere_client(service).rerank(
        model="any", query="q", documents=TEXTS, top_n=1, max_tokens_per_doc=1
    )
    assert [(row.index, row.relevance_score) for row in result.results] == BEST_FIRST[:1]


def test_coheres_first_client(service):
    cohere = pytest.importorskip("cohere")
    documents = [{"text": text} for text in TEXTS]
    result = cohere.Client(api_key=KEY, base_url=service).rerank(
        model="any", query="q", documents=documents, return_documents=True
    )
    assert [(row.index, row.relevance_score) for row in result.results] == BEST_FIRST
    assert result.results[0].document.text == "3 three"


def test_coheres_client_understands_errors(service):
    cohere = pytest.importorskip("cohere")
    errors = pytest.importorskip("cohere.errors")
    with pytest.raises(errors.UnprocessableEntityError, match=r"Document 1 scored nan"):
        cohere_client(service).rerank(model="any", query="q", documents=["1", "nan"])
    with pytest.raises(errors.UnauthorizedError, match="needs an API key"):
        cohere.ClientV2(api_key="wrong", base_url=service).rerank(
            model="any", query="q", documents=["1"]
        )


# LangChain


def compress(compressor, texts=TEXTS):
    documents = pytest.importorskip("langchain_core.documents")
    given = []
    for index, text in enumerate(texts):
        given.append(documents.Document(page_content=text, metadata={"index": index}))
    rows = [document.metadata for document in compressor.compress_documents(given, "q")]
    return [(row["index"], row["relevance_score"]) for row in rows]


def test_langchains_cohere_rerank(service, dropping):
    library = pytest.importorskip("langchain_cohere")

    def rerank(url):
        return library.CohereRerank(base_url=url, cohere_api_key=KEY, model="any", top_n=3)

    assert compress(rerank(service)) == BEST_FIRST[:3]
    assert compress(rerank(dropping)) == BEST_FIRST[:2]


def test_langchains_infinity_rerank(service, open_service, dropping):
    client = pytest.importorskip("infinity_client")
    library = pytest.importorskip("langchain_community.document_compressors.infinity_rerank")

    def rerank(url, headers=None):
        made = client.Client(base_url=url, headers=headers or {})
        return library.InfinityRerank(client=made, model="any", top_n=3)

    # It asks for scores that are not raw.
    assert compress(rerank(open_service)) == between_0_and_1(BEST_FIRST[:3])
    assert compress(rerank(dropping)) == between_0_and_1(BEST_FIRST[:2])
    assert compress(rerank(service, {"Authorization": f"Bearer {KEY}"}))


def test_infinitys_client(service):
    client = pytest.importorskip("infinity_client")
    from infinity_client.api.default import rerank
    from infinity_client.models import RerankInput

    body = RerankInput(query="q", documents=TEXTS, raw_scores=True, top_n=2)
    result = rerank.sync(client=client.AuthenticatedClient(base_url=service, token=KEY), body=body)
    assert [(row.index, row.relevance_score) for row in result.results] == BEST_FIRST[:2]
    assert result.usage.total_tokens == 12


def test_langchains_jina_rerank(service, dropping, monkeypatch):
    library = pytest.importorskip("langchain_community.document_compressors.jina_rerank")
    rerank = library.JinaRerank(jina_api_key=KEY, top_n=3)
    monkeypatch.setattr(library, "JINA_API_URL", f"{service}/v1/rerank")  # it takes no address
    assert compress(rerank) == BEST_FIRST[:3]
    with pytest.raises(RuntimeError, match="Document 1 scored nan"):
        compress(rerank, ["1", "nan"])
    monkeypatch.setattr(library, "JINA_API_URL", f"{dropping}/v1/rerank")
    assert compress(rerank) == BEST_FIRST[:2]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_langchains_nvidia_rerank(service):
    library = pytest.importorskip("langchain_nvidia_ai_endpoints")
    rerank = library.NVIDIARerank(
        base_url=f"{service}/v1",
        model="fake",
        api_key=KEY,
        top_n=3,
        truncate="END",
        usage_telemetry_enabled=False,
    )
    assert compress(rerank) == BEST_FIRST[:3]
    assert "fake" in [model.id for model in rerank.available_models]


# LlamaIndex


def postprocess(postprocessor, texts=TEXTS):
    schema = pytest.importorskip("llama_index.core.schema")
    nodes = []
    for index, text in enumerate(texts):
        node = schema.TextNode(text=text, id_=str(index))
        nodes.append(schema.NodeWithScore(node=node, score=0))
    actual = postprocessor.postprocess_nodes(nodes, query_str="q")
    return [(int(row.node.node_id), row.score) for row in actual]


def llama_index(name):
    return pytest.importorskip(f"llama_index.postprocessor.{name}")


def test_llama_indexs_cohere_rerank(service, dropping):
    library = llama_index("cohere_rerank")
    for url, count in ((service, 3), (dropping, 2)):
        rerank = library.CohereRerank(base_url=url, api_key=KEY, top_n=3)
        assert postprocess(rerank) == BEST_FIRST[:count]


def test_llama_indexs_jina_rerank(service, dropping):
    library = llama_index("jinaai_rerank")
    for url, count in ((service, 3), (dropping, 2)):
        rerank = library.JinaRerank(base_url=f"{url}/v1", api_key=KEY, top_n=3)
        assert postprocess(rerank) == BEST_FIRST[:count]


def test_llama_indexs_tei_rerank(service, dropping):
    library = llama_index("tei_rerank")
    rerank = library.TextEmbeddingInference(base_url=service, auth_token=f"Bearer {KEY}", top_n=3)
    assert postprocess(rerank) == BEST_FIRST[:3]
    # It needs every row.
    rerank = library.TextEmbeddingInference(base_url=dropping, top_n=4)
    assert postprocess(rerank) == BEST_FIRST


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_llama_indexs_nvidia_rerank(service):
    library = llama_index("nvidia_rerank")
    for model in ({}, {"model": "fake"}):  # it asks for the list of models, and takes no other
        rerank = library.NVIDIARerank(base_url=f"{service}/v1", api_key=KEY, top_n=3, **model)
        assert postprocess(rerank) == BEST_FIRST[:3]


def test_llama_indexs_siliconflow_rerank(service, dropping):
    library = llama_index("siliconflow_rerank")
    for url, count in ((service, 3), (dropping, 2)):
        rerank = library.SiliconFlowRerank(base_url=f"{url}/v1/rerank", api_key=KEY, top_n=3)
        assert postprocess(rerank) == BEST_FIRST[:count]


# Others


def test_haystacks_tei_ranker(service):
    library = pytest.importorskip("haystack_integrations.components.rankers.huggingface_api")
    from haystack import Document
    from haystack.utils import Secret

    documents = [Document(content=text, meta={"index": i}) for i, text in enumerate(TEXTS)]
    for raw in (True, False):
        ranker = library.HuggingFaceTEIRanker(
            url=service, token=Secret.from_token(KEY), raw_scores=raw, max_retries=1
        )
        actual = ranker.run(query="q", documents=documents)["documents"]
        rows = [(document.meta["index"], document.score) for document in actual]
        assert rows == (BEST_FIRST if raw else between_0_and_1(BEST_FIRST))
    cut = ranker.run(
        query="q", documents=documents, truncation_direction=library.TruncationDirection.RIGHT
    )
    assert len(cut["documents"]) == 4
    with pytest.raises(RuntimeError, match="Document 1 scored nan"):
        ranker.run(query="q", documents=[Document(content="1"), Document(content="nan")])


@pytest.mark.parametrize(
    ("provider", "path"),
    [("cohere", "/v1/rerank"), ("jina", "/v1/rerank"), ("text-embeddings-inference", "/rerank")],
)
def test_the_api_ranker_of_rerankers(service, provider, path):
    library = pytest.importorskip("rerankers.models.api_rankers")
    ranker = library.APIRanker("any", KEY, provider, verbose=0, url=service + path)
    result = ranker.rank("q", TEXTS)
    assert [(row.document.doc_id, row.score) for row in result.results] == BEST_FIRST
