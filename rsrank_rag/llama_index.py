"""LlamaIndex: a node postprocessor that drops irrelevant nodes."""

from typing import Any

from pydantic import model_validator

from .adapters.adapter import MARKS, RerankerAdapter, Unranked
from .errors import InputError, needs
from .reading.documents import InputDocument
from .reranker import RankResult

with needs("rsrank_rag.llama_index needs llama-index-core.", "llama-index", "llama_index"):
    from llama_index.core.instrumentation import get_dispatcher
    from llama_index.core.instrumentation.events.exception import ExceptionEvent
    from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
    from llama_index.core.instrumentation.span import active_span_id
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle

__all__ = ["RSRankPostprocessor"]

dispatcher = get_dispatcher(__name__)


class RSRankPostprocessor(RerankerAdapter, BaseNodePostprocessor):
    """Keeps the relevant nodes, best first.

    A call returns copies; the input does not change. A title in the metadata is read as part of the
    node. If no node is kept, LlamaIndex's query engines answer "Empty Response" without
    asking the LLM; ``fallback=Fallback(max_gap=0, max_depth=math.inf)`` always keeps one. A call
    raises InputError for an empty question or none, and ScoringError for a node that could not be
    scored.

    >>> postprocessor = RSRankPostprocessor(top_n=5)
    >>> postprocessor.postprocess_nodes([], query_str="Nothing to do, nothing loaded")
    []
    """

    @model_validator(mode="before")
    @classmethod
    def _drop_class_name(cls, data: Any) -> Any:
        """LlamaIndex adds the class's name to the settings that it writes down."""
        if isinstance(data, dict):
            data = {name: value for name, value in data.items() if name != "class_name"}
        return data

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex writes it down."""
        return "RSRankPostprocessor"

    @dispatcher.span
    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        query = self._query(nodes, query_bundle)
        output: list[NodeWithScore] = []
        try:
            result = self._rank(query, self._read(nodes), {}, active_span_id.get())
            output = self._copies(nodes, result)
        finally:
            dispatcher.event(ReRankEndEvent(nodes=output))
        return output

    @dispatcher.span
    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        query = self._query(nodes, query_bundle)
        output: list[NodeWithScore] = []
        try:
            result = await self._arank(query, self._read(nodes), {}, active_span_id.get())
            output = self._copies(nodes, result)
        finally:
            dispatcher.event(ReRankEndEvent(nodes=output))
        return output

    def _query(self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None) -> str:
        """The question, after the event that announces the call."""
        if not isinstance(query_bundle, QueryBundle):
            raise InputError(
                f"The question is missing: got {type(query_bundle).__name__} as query_bundle. "
                "Call postprocess_nodes(nodes, query_str=question)."
            )
        query = query_bundle.query_str
        top_n = self.top_n or len(nodes)
        start = ReRankStartEvent(query=query, nodes=nodes, top_n=top_n, model_name=self.model_label)
        dispatcher.event(start)
        return query

    def _read(self, nodes: list[NodeWithScore]) -> list[InputDocument]:
        """What a reranker gets of nodes."""
        read = []
        for scored in nodes:
            node = scored.node
            read.append(InputDocument(node.get_content(), node.node_id, node.metadata))
        return read

    def _copies(self, nodes: list[NodeWithScore], result: RankResult) -> list[NodeWithScore]:
        if isinstance(result, Unranked):
            dispatcher.event(ExceptionEvent(exception=result.error))
        copies = []
        for ranked in result.kept:
            retrieved = nodes[ranked.index]
            node = _copy_with(retrieved.node, self._marked(retrieved.node.metadata, result, ranked))
            if ranked.excerpts:
                node.set_content(ranked.extract)
            score = retrieved.score if isinstance(result, Unranked) else ranked.score
            copies.append(NodeWithScore(node=node, score=score))
        return copies


def _copy_with(node: BaseNode, metadata: dict[str, Any]) -> BaseNode:
    """A copy of a node with other metadata, of whose marks neither embeddings nor LLMs read any."""
    marks = [name for name in MARKS if name in metadata]
    update = {
        "metadata": metadata,
        "excluded_embed_metadata_keys": [*node.excluded_embed_metadata_keys, *marks],
        "excluded_llm_metadata_keys": [*node.excluded_llm_metadata_keys, *marks],
    }
    return node.model_copy(update=update)
