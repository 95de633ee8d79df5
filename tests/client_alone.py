# ruff: noqa: E402, PT017, T201 - imports are what is tested, without pytest, and print is the answer
"""Ask a service in every way, in an environment with rsrank-rag-client only.

Prints, as JSON, the texts and scores that each way keeps; what has to be absent or to fail is
checked here.
"""

import asyncio
import json
import sys
from importlib.util import find_spec

for name in (
    "torch",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "safetensors",
    "typer",
    "fastapi",
    "uvicorn",
):
    assert find_spec(name) is None, f"{name} is installed"

import rsrank_rag.remote.client

assert "rsrank_rag_client" not in rsrank_rag.__file__
assert {"numpy", "langchain_core", "llama_index"} & set(
    sys.modules
) == set()  # one is enough of the frameworks

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode

from rsrank_rag import Reranker, RSRankCompressor, RSRankPostprocessor
from rsrank_rag.errors import MissingDependencyError, pip_install
from rsrank_rag.langchain import RSRankRetriever
from rsrank_rag.remote.client import RemoteReranker

address, query, texts = sys.argv[1], sys.argv[2], sys.argv[3:]
LINE = f"pip uninstall -y rsrank-rag-client && {pip_install()}"


class Everything(BaseRetriever):
    """Finds all."""

    def _get_relevant_documents(self, query, *, run_manager):
        return [Document(text) for text in texts]


def of_langchain(found):
    return [[document.page_content, document.metadata["relevance_score"]] for document in found]


def of_llama_index(found):
    return [[scored.node.text, scored.score] for scored in found]


async def main():
    """All ways, without and with an event loop."""
    compressor, postprocessor = (
        RSRankCompressor(base_url=address),
        RSRankPostprocessor(base_url=address),
    )
    retriever = RSRankRetriever(base_retriever=Everything(), compressor=compressor)
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in texts]
    remote = RemoteReranker(address)
    assert isinstance(remote, Reranker)
    compressor.warm_up()
    return [
        [[document.text, document.score] for document in remote.rank(query, texts).kept],
        [[document.text, document.score] for document in (await remote.arank(query, texts)).kept],
        of_langchain(retriever.invoke(query)),
        of_langchain(await retriever.ainvoke(query)),
        of_llama_index(postprocessor.postprocess_nodes(nodes, query_str=query)),
        of_llama_index(await postprocessor.apostprocess_nodes(nodes, query_str=query)),
    ]


found = asyncio.run(main())

for load in (
    lambda: rsrank_rag.RSRank,
    RSRankCompressor().warm_up,
    RSRankPostprocessor(model="owner/name").warm_up,
):
    try:
        load()
    except MissingDependencyError as error:
        assert str(error).endswith(LINE), error
    else:
        raise AssertionError("a model was loaded")
(kept,) = RSRankCompressor(on_error="keep").compress_documents([Document("a text")], query)
assert LINE in kept.metadata["rsrank_error"]

print(json.dumps(found))
