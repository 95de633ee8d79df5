"""LlamaIndex: a node postprocessor that drops what scores below zero."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import Field, model_validator
from typing_extensions import Unpack

from .adapters.settings import RerankerAdapter, Unranked, without_marks
from .errors import InputError, needs
from .reranker import Limits, RankResult

with needs("rsrank_rag.llama_index needs llama-index-core.", "llama-index", "llama_index"):
    from llama_index.core.callbacks.schema import CBEventType, EventPayload
    from llama_index.core.instrumentation import get_dispatcher
    from llama_index.core.instrumentation.events.exception import ExceptionEvent
    from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle

__all__ = ["RSRankPostprocessor"]

RETRIEVAL_SCORE = "retrieval_score"
dispatcher = get_dispatcher(__name__)


class RSRankPostprocessor(RerankerAdapter, BaseNodePostprocessor):
    """Keeps the nodes that score above zero, best first.

    It returns copies; the input does not change. A title in the metadata is read as part
    of the node. If no node is kept, LlamaIndex's query engines answer "Empty Response" without
    asking the LLM; ``min_docs=1`` always keeps one.

    >>> postprocessor = RSRankPostprocessor(top_n=5)
    >>> postprocessor.postprocess_nodes([], query_str="Nothing to do, nothing loaded")
    []
    """

    keep_retrieval_score: bool = Field(
        default=False,
        description="Put the retriever's score into the metadata, hidden from embedding and LLM.",
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_class_name(cls, data: Any) -> Any:
        """LlamaIndex adds the class's name to the settings that it writes down."""
        if isinstance(data, dict) and data.get("class_name") == cls.class_name():
            return {name: value for name, value in data.items() if name != "class_name"}
        return data

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex writes it down."""
        return "RSRankPostprocessor"

    def postprocess_nodes(
        self,
        nodes: list[NodeWithScore],
        query_bundle: QueryBundle | None = None,
        query_str: str | None = None,
        **limits: Unpack[Limits],
    ) -> list[NodeWithScore]:
        """Return copies of the relevant nodes, best first, with their scores.

        Args:
            nodes: What was retrieved.
            query_bundle: The question, or
            query_str: the question as text.
            **limits: ``threshold``, ``top_n`` and ``min_docs`` for this call only.

        Raises:
            InputError: No question, two, an empty or too long one, or a limit out of range.
            ScoringError: A node could not be scored; its position is given.
        """
        return self._postprocess_nodes(nodes, _bundle(query_bundle, query_str), **limits)

    async def apostprocess_nodes(
        self,
        nodes: list[NodeWithScore],
        query_bundle: QueryBundle | None = None,
        query_str: str | None = None,
        **limits: Unpack[Limits],
    ) -> list[NodeWithScore]:
        """As `postprocess_nodes`, without blocking the event loop.

        A cancelled call leaves the model's queue.
        """
        return await self._apostprocess_nodes(nodes, _bundle(query_bundle, query_str), **limits)

    @dispatcher.span
    def _postprocess_nodes(
        self,
        nodes: list[NodeWithScore],
        query_bundle: QueryBundle | None = None,
        **limits: Unpack[Limits],
    ) -> list[NodeWithScore]:
        query = _query(query_bundle)
        merged = self._limits(limits)
        with self._traced(query, nodes, merged) as output:
            result = self._rank(query, self._read(nodes), merged)
            output.extend(self._copies(nodes, result))
        return output

    @dispatcher.span
    async def _apostprocess_nodes(
        self,
        nodes: list[NodeWithScore],
        query_bundle: QueryBundle | None = None,
        **limits: Unpack[Limits],
    ) -> list[NodeWithScore]:
        query = _query(query_bundle)
        merged = self._limits(limits)
        with self._traced(query, nodes, merged) as output:
            result = await self._arank(query, self._read(nodes), merged)
            output.extend(self._copies(nodes, result))
        return output

    @contextmanager
    def _traced(
        self, query: str, nodes: list[NodeWithScore], limits: Limits
    ) -> Iterator[list[NodeWithScore]]:
        """Events around one call, in both of LlamaIndex's systems.

        Gives the list that the call fills with its output. Each start event gets an end event, also
        after an error.
        """
        output: list[NodeWithScore] = []
        top_n = limits["top_n"] or len(nodes)
        payload: dict[str, Any] = {
            EventPayload.NODES: nodes,
            EventPayload.MODEL_NAME: self.model_label,
            EventPayload.QUERY_STR: query,
            EventPayload.TOP_K: top_n,
        }
        tags = {}
        if self.instruction is not None:
            tags["instruction"] = self.instruction
            payload[EventPayload.ADDITIONAL_KWARGS] = tags
        with self.callback_manager.event(CBEventType.RERANKING, payload=payload) as event:
            start = ReRankStartEvent(
                query=query, nodes=nodes, top_n=top_n, model_name=self.model_label, tags=tags
            )
            dispatcher.event(start)
            try:
                yield output
            finally:
                dispatcher.event(ReRankEndEvent(nodes=output))
            event.on_end(payload={EventPayload.NODES: output})

    def _read(self, nodes: list[NodeWithScore]) -> list[str]:
        """What a reranker reads."""
        return self._texts([(scored.node.metadata, scored.node.get_content()) for scored in nodes])

    def _copies(self, nodes: list[NodeWithScore], result: RankResult) -> list[NodeWithScore]:
        if isinstance(result, Unranked):
            dispatcher.event(ExceptionEvent(exception=result.error))
            payload: dict[str, Any] = {EventPayload.EXCEPTION: result.error}
            with self.callback_manager.event(CBEventType.EXCEPTION, payload=payload):
                # An event without duration.
                pass
        texts = [scored.node.get_content() for scored in nodes]
        copies = []
        for output in self._outputs(result, texts):
            retrieved = nodes[output.index]
            marks = dict(output.marks)
            if self.keep_retrieval_score:
                marks[RETRIEVAL_SCORE] = retrieved.score
            node = _copy_with(retrieved.node, marks)
            if output.text != texts[output.index]:
                node.set_content(output.text)
            score = retrieved.score if output.score is None else output.score
            copies.append(NodeWithScore(node=node, score=score))
        return copies


def _copy_with(node: BaseNode, marks: dict[str, Any]) -> BaseNode:
    """A copy of a node with more metadata, which neither embeddings nor LLMs read."""
    update: dict[str, Any] = {"metadata": {**without_marks(node.metadata), **marks}}
    for name in ("excluded_embed_metadata_keys", "excluded_llm_metadata_keys"):
        update[name] = list(dict.fromkeys([*getattr(node, name), *marks]))
    return node.model_copy(update=update)


def _bundle(query_bundle: QueryBundle | None, query_str: str | None) -> QueryBundle | None:
    if query_bundle is not None and query_str is not None:
        raise InputError("Cannot specify both query_str and query_bundle. Give one of them.")
    return query_bundle if query_str is None else QueryBundle(query_str)


def _query(query_bundle: QueryBundle | None) -> str:
    if query_bundle is None:
        raise InputError("Missing query bundle in extra info. Give query_bundle or query_str.")
    return query_bundle.query_str
