"""LlamaIndex: a node postprocessor that drops what scores below zero."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import Field, model_validator
from typing_extensions import Unpack

from .adapters.settings import ERROR, RerankerAdapter, Unranked, kept_of, without_marks
from .errors import InputError, needs
from .reranker import Limits, RankResult

with needs("rsrank_rag.llama_index needs llama-index-core.", "llama-index", "llama_index"):
    from llama_index.core.callbacks.schema import CBEventType, EventPayload
    from llama_index.core.instrumentation import get_dispatcher
    from llama_index.core.instrumentation.events.exception import ExceptionEvent
    from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle

__all__ = ["RSRankPostprocessor"]

RETRIEVAL_SCORE = "retrieval_score"
dispatcher = get_dispatcher(__name__)


class RSRankPostprocessor(RerankerAdapter, BaseNodePostprocessor):
    """Keeps the nodes that score above zero, best first.

    The result is copies, down to the lists in their metadata; nothing that was given is changed. If no node is left,
    LlamaIndex's query engines answer "Empty Response" without asking the LLM; ``min_docs=1`` avoids it.

    >>> RSRankPostprocessor(top_n=5).postprocess_nodes([], query_str="Nothing to do, nothing loaded")
    []
    """

    metadata_mode: MetadataMode = Field(
        default=MetadataMode.EMBED, description="Which metadata are read with a node."
    )
    keep_retrieval_score: bool = Field(
        default=False,
        description="Put the retriever's score into the metadata of copied nodes, hidden from embedding and LLM.",
    )

    @model_validator(mode="before")
    @classmethod
    def _class_name_is_no_setting(cls, data: Any) -> Any:
        """LlamaIndex adds the class's name to what it writes down."""
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
        """Rank nodes and keep the relevant ones. Besides the question come ``threshold``, ``top_n`` and ``min_docs``.

        Raises:
            InputError: No question, an empty or too long one, or a limit out of range.
            ScoringError: A node could not be scored; it is named.
        """
        return self._postprocess_nodes(nodes, _bundle(query_bundle, query_str), **limits)

    async def apostprocess_nodes(
        self,
        nodes: list[NodeWithScore],
        query_bundle: QueryBundle | None = None,
        query_str: str | None = None,
        **limits: Unpack[Limits],
    ) -> list[NodeWithScore]:
        """As `postprocess_nodes`, without blocking the event loop; a cancelled call leaves the model's queue."""
        return await self._apostprocess_nodes(nodes, _bundle(query_bundle, query_str), **limits)

    @dispatcher.span
    def _postprocess_nodes(
        self,
        nodes: list[NodeWithScore],
        query_bundle: QueryBundle | None = None,
        **limits: Unpack[Limits],
    ) -> list[NodeWithScore]:
        query, chosen = _query(query_bundle), self._limits(limits)
        with self._traced(query, nodes, chosen) as kept:
            kept += self._scored(nodes, self._rank(query, self._texts(nodes), chosen))
        return kept

    @dispatcher.span
    async def _apostprocess_nodes(
        self,
        nodes: list[NodeWithScore],
        query_bundle: QueryBundle | None = None,
        **limits: Unpack[Limits],
    ) -> list[NodeWithScore]:
        query, chosen = _query(query_bundle), self._limits(limits)
        with self._traced(query, nodes, chosen) as kept:
            kept += self._scored(nodes, await self._arank(query, self._texts(nodes), chosen))
        return kept

    @contextmanager
    def _traced(
        self, query: str, nodes: list[NodeWithScore], limits: Limits
    ) -> Iterator[list[NodeWithScore]]:
        """Events around one call, in both of LlamaIndex's systems; each start gets its end, also after an error."""
        kept: list[NodeWithScore] = []
        top_n = limits["top_n"] or len(nodes)
        told = {} if self.instruction is None else {"instruction": self.instruction}
        payload: dict[str, Any] = {
            EventPayload.NODES: nodes,
            EventPayload.MODEL_NAME: self.model_label,
            EventPayload.QUERY_STR: query,
            EventPayload.TOP_K: top_n,
            **({EventPayload.ADDITIONAL_KWARGS: told} if told else {}),
        }
        with self.callback_manager.event(CBEventType.RERANKING, payload=payload) as event:
            start = ReRankStartEvent(
                query=query, nodes=nodes, top_n=top_n, model_name=self.model_label, tags=told
            )
            dispatcher.event(start)
            try:
                yield kept
            finally:
                dispatcher.event(ReRankEndEvent(nodes=kept))
            event.on_end(payload={EventPayload.NODES: kept})

    def _texts(self, nodes: list[NodeWithScore]) -> list[tuple[str, str]]:
        """Each node's text, and the metadata that are read before it."""
        texts = []
        for node in (scored.node for scored in nodes):
            own, content = node.get_content(), node.get_content(metadata_mode=self.metadata_mode)
            # Where metadata stand behind a text that is kept in parts, it is read without them.
            whole = self.extract is None and self.long_documents != "windows"
            texts.append(
                (content.removesuffix(own), own)
                if content.endswith(own)
                else ("", content if whole else own)
            )
        return texts

    def _scored(self, nodes: list[NodeWithScore], result: RankResult) -> list[NodeWithScore]:
        if isinstance(result, Unranked):
            dispatcher.event(ExceptionEvent(exception=result.error))
            with self.callback_manager.event(
                CBEventType.EXCEPTION, payload={EventPayload.EXCEPTION: result.error}
            ):
                pass  # nothing lasts
        found = []
        for ranked, marks in self._handed_on(result):
            given = nodes[ranked.index]
            retrieval = {RETRIEVAL_SCORE: given.score} if self.keep_retrieval_score else {}
            text, places = kept_of(ranked, given.node.get_content())
            node = _copied(given.node, {**retrieval, **marks, **places})
            if text != given.node.get_content():
                node.set_content(text)
            found.append(
                NodeWithScore(node=node, score=given.score if ERROR in marks else ranked.score)
            )
        return found


def _copied(node: BaseNode, hidden: dict[str, Any]) -> BaseNode:
    """A copy of a node with more metadata, where neither an embedding nor an LLM reads them."""
    excluded = {
        name: list(dict.fromkeys([*getattr(node, name), *hidden]))
        for name in ("excluded_embed_metadata_keys", "excluded_llm_metadata_keys")
    }
    return node.model_copy(
        update={"metadata": {**without_marks(node.metadata), **hidden}, **excluded}
    )


def _bundle(query_bundle: QueryBundle | None, query_str: str | None) -> QueryBundle | None:
    if query_bundle is not None and query_str is not None:
        raise InputError("Cannot specify both query_str and query_bundle. Give one of them.")
    return query_bundle if query_str is None else QueryBundle(query_str)


def _query(query_bundle: QueryBundle | None) -> str:
    if query_bundle is None:
        raise InputError("Missing query bundle in extra info. Give query_bundle or query_str.")
    return query_bundle.query_str
