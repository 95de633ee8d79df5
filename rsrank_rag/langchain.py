"""LangChain: a document compressor that drops what scores below zero, and a retriever around it."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pydantic import Field
from typing_extensions import Unpack

from .adapters.settings import ERROR, RerankerAdapter, Unranked, kept_of, without_marks
from .errors import InputError, needs
from .reranker import Limits, RankResult

with needs("rsrank_rag.langchain needs langchain-core.", "langchain", "langchain_core"):
    from langchain_core.callbacks import (
        AsyncCallbackManagerForRetrieverRun,
        CallbackManagerForRetrieverRun,
        Callbacks,
    )
    from langchain_core.documents import BaseDocumentCompressor, Document
    from langchain_core.retrievers import BaseRetriever, RetrieverLike
    from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda

if TYPE_CHECKING:
    from .adapters.cross_encoder import RSRankCrossEncoder as RSRankCrossEncoder

logger = logging.getLogger(__name__)

# Without RSRankCrossEncoder: not every langchain-core has its base class.
__all__ = ["RSRankCompressor", "RSRankRetriever"]


class RSRankCompressor(RerankerAdapter, BaseDocumentCompressor):
    """Keeps the documents that score above zero, best first.

    Kept documents are copies with their score in the metadata; the input stays as it was. Each call is a run in
    LangChain's callbacks, with a run inside that says what decided. For chains, see `as_runnable`.

    >>> compressor = RSRankCompressor(model="mini", top_n=5)
    >>> compressor.compress_documents([], "Nothing to do, nothing loaded")
    []
    """

    score_key: str = Field(
        default="relevance_score", min_length=1, description="Metadata key of the score."
    )
    metadata_fields: tuple[str, ...] = Field(
        default=(),
        description="Metadata read as part of the document: their values, one a line, before its text.",
    )

    def compress_documents(
        self,
        documents: Sequence[Document],
        query: str,
        callbacks: Callbacks | None = None,
        **limits: Unpack[Limits],
    ) -> list[Document]:
        """Rank documents and give copies of the relevant ones, best first, with a Python float under ``score_key``.

        ``callbacks`` see one run with inputs, outputs and errors. ``threshold``, ``top_n`` and ``min_docs`` may be
        given for this call only.

        Raises:
            InputError: An empty or too long query, or a limit out of range.
            ScoringError: A document could not be scored; it is named.
        """
        return self.as_runnable().invoke(
            {"query": query, "documents": documents}, {"callbacks": callbacks}, **limits
        )

    async def acompress_documents(
        self,
        documents: Sequence[Document],
        query: str,
        callbacks: Callbacks | None = None,
        **limits: Unpack[Limits],
    ) -> list[Document]:
        """As `compress_documents`, without blocking the event loop; a cancelled call leaves the model's queue."""
        inputs, config = (
            {"query": query, "documents": documents},
            RunnableConfig(callbacks=callbacks),
        )
        return await self.as_runnable().ainvoke(inputs, config, **limits)

    def as_runnable(
        self, query_key: str = "query", documents_key: str = "documents"
    ) -> Runnable[dict[str, Any], list[Document]]:
        """A Runnable for chains: takes a dictionary, gives documents. Calls take the three limits, too.

        >>> RSRankCompressor().as_runnable().invoke({"query": "Where is everybody?", "documents": []})
        []
        """

        def unpack(inputs: dict[str, Any]) -> tuple[str, list[Document]]:
            try:
                return inputs[query_key], list(inputs[documents_key])
            except (KeyError, TypeError):
                found = (
                    f"keys {sorted(map(str, inputs))}"
                    if isinstance(inputs, dict)
                    else type(inputs).__name__
                )
                raise InputError(
                    f"{type(self).__name__} needs a dictionary with {query_key!r} and {documents_key!r}, got {found}."
                ) from None

        def run(
            inputs: dict[str, Any], config: RunnableConfig, **limits: Unpack[Limits]
        ) -> list[Document]:
            query, documents = unpack(inputs)
            chosen = self._limits(limits)
            result = self._rank(query, self._texts(documents), chosen)
            with _survived(result):
                self._trace(result).invoke(chosen, config)
            return self._copies(documents, result)

        async def arun(
            inputs: dict[str, Any], config: RunnableConfig, **limits: Unpack[Limits]
        ) -> list[Document]:
            query, documents = unpack(inputs)
            chosen = self._limits(limits)
            result = await self._arank(query, self._texts(documents), chosen)
            with _survived(result):
                await self._trace(result).ainvoke(chosen, config)
            return self._copies(documents, result)

        return RunnableLambda(run, arun, name=type(self).__name__)

    def _trace(self, result: RankResult) -> Runnable[Limits, dict[str, Any]]:
        """A run that says what a trace would not show otherwise: what decided, and the scores of what was dropped.

        Where nothing could be ranked, it fails for that reason.
        """
        documents = (*result.kept, *result.dropped)
        summary = {
            "model": self.model_label,
            **({} if self.instruction is None else {"instruction": self.instruction}),
            "threshold": result.threshold,
            "documents": len(documents),
            "kept": len(result.kept),
            "truncated": sum(document.truncated for document in documents),
            "dropped": [
                {"index": document.index, "score": document.score} for document in result.dropped
            ],
        }

        def tell(asked: Limits) -> dict[str, Any]:
            if isinstance(result, Unranked):
                raise result.error
            return summary

        return RunnableLambda(tell, name="RSRankRanking")

    def _texts(self, documents: Sequence[Document]) -> list[tuple[str, str]]:
        """Each document's text, and the metadata that are read before it."""
        there = {name for document in documents for name in document.metadata}
        unknown = [name for name in self.metadata_fields if name not in there]
        if unknown and documents:
            logger.warning(
                "None of %d documents has the metadata field %s; there are: %s.",
                len(documents),
                ", ".join(map(repr, unknown)),
                ", ".join(sorted(there)) or "none",
            )
        fields = (
            [document.metadata.get(name) for name in self.metadata_fields] for document in documents
        )
        before = (
            "".join(f"{value}\n" for value in values if value is not None) for values in fields
        )
        return [
            (text, document.page_content) for text, document in zip(before, documents, strict=True)
        ]

    def _copies(self, documents: Sequence[Document], result: RankResult) -> list[Document]:
        copies = []
        for ranked, marks in self._handed_on(result):
            document = documents[ranked.index]
            text, places = kept_of(ranked, document.page_content)
            score = {} if ERROR in marks else {self.score_key: ranked.score}
            metadata = {**without_marks(document.metadata), **score, **marks, **places}
            copies.append(document.model_copy(update={"page_content": text, "metadata": metadata}))
        return copies


def _survived(result: RankResult) -> suppress:
    """Keeps the error of a run that is there to be seen in a trace from ending a call that goes on."""
    return suppress(*([type(result.error)] if isinstance(result, Unranked) else []))


class RSRankRetriever(BaseRetriever, extra="forbid"):
    """A retriever whose results have been through a compressor: retrieve widely, keep what is relevant.

    ``threshold``, ``top_n`` and ``min_docs`` given to ``invoke`` go to the compressor, everything else to the base
    retriever.
    """

    base_retriever: RetrieverLike
    compressor: RSRankCompressor = Field(default_factory=RSRankCompressor)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        limits: Any = {name: kwargs.pop(name) for name in Limits.__annotations__ if name in kwargs}
        callbacks = run_manager.get_child()
        documents = self.base_retriever.invoke(query, {"callbacks": callbacks}, **kwargs)
        return self.compressor.compress_documents(documents, query, callbacks, **limits)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        limits: Any = {name: kwargs.pop(name) for name in Limits.__annotations__ if name in kwargs}
        callbacks = run_manager.get_child()
        documents = await self.base_retriever.ainvoke(query, {"callbacks": callbacks}, **kwargs)
        return await self.compressor.acompress_documents(documents, query, callbacks, **limits)


def __getattr__(name: str) -> Any:
    """`RSRankCrossEncoder`'s base class is not in every langchain-core, so it is looked for when it is wanted."""
    if name == "RSRankCrossEncoder":
        from .adapters.cross_encoder import RSRankCrossEncoder

        return RSRankCrossEncoder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
