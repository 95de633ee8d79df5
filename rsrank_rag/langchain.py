"""LangChain: a document compressor that drops irrelevant documents, and a retriever around it."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, Field
from typing_extensions import Unpack

from .adapters.adapter import RerankerAdapter, Unranked
from .errors import InputError, needs
from .reading.documents import InputDocument
from .reranker import Limits, RankResult

with needs("rsrank_rag.langchain needs langchain-core.", "langchain", "langchain_core"):
    from langchain_core.callbacks import (
        AsyncCallbackManagerForRetrieverRun,
        CallbackManagerForRetrieverRun,
        Callbacks,
    )
    from langchain_core.documents import BaseDocumentCompressor, Document
    from langchain_core.prompts import BasePromptTemplate
    from langchain_core.retrievers import BaseRetriever, RetrieverLike
    from langchain_core.runnables.config import (
        ensure_config,
        get_async_callback_manager_for_config,
        get_callback_manager_for_config,
    )
    from langchain_core.tools import StructuredTool

    from .adapters.agents import Pruning, ToolText

__all__ = [
    "RSRankCompressor",
    "RSRankRetriever",
    "create_rsrank_middleware",
    "create_rsrank_tool",
]

# A keyword this similar to a limit's name is a misspelling of it: `treshold` is, and
# `score_threshold`, which vector stores take, is not.
MISSPELLING = 0.85

# The metadata key of a score, as LangChain's other rerankers name it.
SCORE = "relevance_score"

NOTHING_RELEVANT = "No passage scored above the threshold."
WEAK_ONLY = "Nothing scored above the threshold. The nearest passages:"


class RSRankCompressor(RerankerAdapter, BaseDocumentCompressor):
    """Keeps the relevant documents, best first.

    A call returns copies with their score in the metadata; the input does not change. A title in
    the metadata is read as part of the document. Each call is a run in LangChain's callbacks. The
    outputs of the run are the documents, the threshold, the scores of dropped documents and the
    name of the model.

    >>> compressor = RSRankCompressor(model="mini", top_n=5)
    >>> compressor.compress_documents([], "Nothing to do, nothing loaded")
    []
    """

    def compress_documents(
        self,
        documents: Sequence[Document],
        query: str,
        callbacks: Callbacks | None = None,
        **limits: Unpack[Limits],
    ) -> list[Document]:
        """Return copies of the relevant documents, best first, with their ``relevance_score``.

        Args:
            documents: What was retrieved.
            query: The question.
            callbacks: Receive one run with inputs, outputs and errors.
            **limits: ``threshold``, ``max_gap``, ``fallback`` and ``top_n`` for this call only.

        Raises:
            InputError: The query is empty, or a limit is out of range.
            ScoringError: A document could not be scored; its position is given.
            RSRankError: The model cannot be loaded, or the service cannot be used.
            TypeError: A keyword is not the name of a limit.
        """
        documents = list(documents)
        manager = get_callback_manager_for_config(ensure_config({"callbacks": callbacks}))
        run = manager.on_chain_start(
            None, {"query": query, "documents": documents}, name=type(self).__name__
        )
        try:
            result = self._rank(query, self._read(documents), limits, str(run.run_id))
            compressed = self._copies(documents, result)
        except BaseException as error:
            run.on_chain_error(error)
            raise
        run.on_chain_end(self._traced(result, compressed))
        return compressed

    async def acompress_documents(
        self,
        documents: Sequence[Document],
        query: str,
        callbacks: Callbacks | None = None,
        **limits: Unpack[Limits],
    ) -> list[Document]:
        """As `compress_documents`, without blocking the event loop.

        A cancelled call leaves the model's queue, or ends before its next batch.
        """
        documents = list(documents)
        manager = get_async_callback_manager_for_config(ensure_config({"callbacks": callbacks}))
        run = await manager.on_chain_start(
            None, {"query": query, "documents": documents}, name=type(self).__name__
        )
        try:
            result = await self._arank(query, self._read(documents), limits, str(run.run_id))
            compressed = self._copies(documents, result)
        except BaseException as error:
            await run.on_chain_error(error)
            raise
        await run.on_chain_end(self._traced(result, compressed))
        return compressed

    def _read(self, documents: Sequence[Document]) -> list[InputDocument]:
        """What a reranker gets of documents.

        Raises:
            InputError: An entry is no document, as where the arguments are swapped.
        """
        read = []
        for place, document in enumerate(documents):
            if not isinstance(document, Document):
                raise InputError(
                    f"Document {place} is of type {type(document).__name__}, not a LangChain "
                    "Document. Call compress_documents([Document(text), ...], query)."
                )
            read.append(InputDocument(document.page_content, document.id, document.metadata))
        return read

    def _traced(self, result: RankResult, compressed: list[Document]) -> dict[str, Any]:
        """The outputs of a call's run in LangChain's callbacks."""
        return {
            "documents": compressed,
            "dropped": [{"index": one.index, "score": one.score} for one in result.dropped],
            "threshold": result.rule.threshold,
            "model": self.model_label,
        }

    def _copies(self, documents: Sequence[Document], result: RankResult) -> list[Document]:
        copies = []
        for ranked in result.kept:
            document = documents[ranked.index]
            metadata = self._marked(document.metadata, result, ranked)
            if not isinstance(result, Unranked):
                metadata[SCORE] = ranked.score
            update = {"page_content": ranked.extract, "metadata": metadata}
            copies.append(document.model_copy(update=update))
        return copies


class RSRankRetriever(BaseRetriever, extra="forbid"):
    """A retriever with a compressor after it: retrieve many documents, keep the relevant ones.

    The compressor gets the keywords ``threshold``, ``max_gap``, ``fallback`` and ``top_n`` of
    ``invoke``. The base retriever gets the other keywords. A keyword that neither takes raises
    TypeError, and so does a misspelling of one of the four.

    Attributes:
        base_retriever: Any retriever, or a Runnable from a query to documents.
        compressor: Keeps the relevant documents; by default an `RSRankCompressor`.
    """

    base_retriever: RetrieverLike
    compressor: RSRankCompressor = Field(default_factory=RSRankCompressor)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        limits = self._split_limits(kwargs)
        callbacks = run_manager.get_child()
        documents = self.base_retriever.invoke(query, {"callbacks": callbacks}, **kwargs)
        return self.compressor.compress_documents(documents, query, callbacks, **limits)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        limits = self._split_limits(kwargs)
        callbacks = run_manager.get_child()
        documents = await self.base_retriever.ainvoke(query, {"callbacks": callbacks}, **kwargs)
        return await self.compressor.acompress_documents(documents, query, callbacks, **limits)

    def _split_limits(self, kwargs: dict[str, Any]) -> Limits:
        """Take the compressor's limits out of a call's keywords.

        Raises:
            TypeError: A keyword that the base retriever does not take either.
        """
        limits = Limits()
        for name in Limits.__annotations__.keys() & kwargs.keys():
            limits[name] = kwargs.pop(name)  # type: ignore[literal-required]
        # A Runnable raises TypeError itself. `BaseRetriever.invoke` silently drops keywords that
        # `_get_relevant_documents` does not take.
        if isinstance(self.base_retriever, BaseRetriever):
            parameters = inspect.signature(self.base_retriever._get_relevant_documents).parameters
            kinds = {parameter.kind for parameter in parameters.values()}
            for name in sorted(kwargs.keys() - parameters.keys()):
                similar = get_close_matches(name, Limits.__annotations__, cutoff=MISSPELLING)
                if similar or inspect.Parameter.VAR_KEYWORD not in kinds:
                    raise TypeError(
                        f"Unknown argument: {name}. The compressor takes "
                        f"{', '.join(Limits.__annotations__)}, and the base retriever "
                        f"{type(self.base_retriever).__name__} does not take it."
                    )
        return limits


class ToolInput(BaseModel):
    """What an agent gives to a tool of `create_rsrank_tool`."""

    query: str = Field(description="What to look up, as a question.")


def create_rsrank_tool(
    retriever: RetrieverLike,
    name: str,
    description: str,
    *,
    document_prompt: BasePromptTemplate[str] | None = None,
    nothing_relevant: str = NOTHING_RELEVANT,
    weak_only: str = WEAK_ONLY,
    separator: str = "\n\n",
) -> StructuredTool:
    """A tool with which an agent looks something up and gets the relevant passages only.

    The tool's content is the text of the relevant documents, and its artifact the documents with
    their ids.

    Args:
        retriever: An `RSRankRetriever`. Another retriever gets a default `RSRankCompressor`.
        name: The tool's name, for the agent.
        description: What can be looked up, for the agent.
        document_prompt: How a document is written, as in LangChain's ``create_retriever_tool``,
            such as ``PromptTemplate.from_template("{source}: {page_content}")``. By default the
            title on a line, if there is one, and then the text.
        nothing_relevant: The content if no document is kept.
        weak_only: Stands before the documents if no document scored above the threshold and the
            fallback kept these.
        separator: Stands between documents.
    """
    if not isinstance(retriever, RSRankRetriever):
        retriever = RSRankRetriever(base_retriever=retriever)
    text = ToolText(document_prompt, nothing_relevant, weak_only, separator)

    def look_up(query: str, callbacks: Callbacks = None) -> tuple[str, list[Document]]:
        documents = retriever.invoke(query, {"callbacks": callbacks})
        return text.of(documents), documents

    async def alook_up(query: str, callbacks: Callbacks = None) -> tuple[str, list[Document]]:
        documents = await retriever.ainvoke(query, {"callbacks": callbacks})
        return text.of(documents), documents

    return StructuredTool(
        name=name,
        description=description,
        func=look_up,
        coroutine=alook_up,
        args_schema=ToolInput,
        response_format="content_and_artifact",
    )


def create_rsrank_middleware(
    compressor: RSRankCompressor | None = None,
    *,
    tools: Sequence[str] = (),
    query_key: str = "query",
    document_prompt: BasePromptTemplate[str] | None = None,
    nothing_relevant: str = NOTHING_RELEVANT,
    weak_only: str = WEAK_ONLY,
    separator: str = "\n\n",
) -> Any:
    """A middleware for LangChain's agents that drops irrelevant passages of retrieval tools.

    The middleware changes the answers of tools that return a list of documents as their artifact,
    and of tools that LangChain's ``create_retriever_tool`` made. It keeps the documents that are
    relevant to the query that the agent gave to the tool. If an answer is text alone, its passages
    are pruned. Other messages stay as they are, and so do answers to a blank query.

    Args:
        compressor: Keeps the relevant documents; by default an `RSRankCompressor`.
        tools: Names of the tools whose answers are pruned, whether text or documents; by default
            all retrieval tools. If the agent lacks a tool of such a name, the log has a warning.
        query_key: The tool's argument with the query.
        document_prompt: As in `create_rsrank_tool`.
        nothing_relevant: The content if no document is kept.
        weak_only: As in `create_rsrank_tool`.
        separator: Stands between passages.

    Raises:
        MissingDependencyError: langchain 1.0 or newer is not installed.
    """
    message = "The middleware needs langchain 1.0 or newer: pip install -U langchain"
    with needs(message, "", "langchain"):
        from langchain.agents.middleware import AgentMiddleware
    keeper = compressor or RSRankCompressor()
    text = ToolText(document_prompt, nothing_relevant, weak_only, separator)
    pruning = Pruning(tools, query_key, text)

    class RSRankMiddleware(AgentMiddleware):  # type: ignore[misc, unused-ignore]
        """See `create_rsrank_middleware`."""

        @property
        def name(self) -> str:
            """The class and the tools, because an agent refuses two middlewares of one name."""
            return f"RSRankMiddleware[{', '.join(tools)}]" if tools else "RSRankMiddleware"

        def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
            """Check the names of tools."""
            pruning.check_tools(request)
            return handler(request)

        async def awrap_model_call(
            self, request: Any, handler: Callable[[Any], Awaitable[Any]]
        ) -> Any:
            """As `wrap_model_call`."""
            pruning.check_tools(request)
            return await handler(request)

        def wrap_tool_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
            """Run a tool and prune its answer."""
            message = handler(request)
            documents = pruning.passages(request, message)
            if not documents:
                return message
            kept = keeper.compress_documents(documents, pruning.query(request))
            return pruning.answer(message, kept)

        async def awrap_tool_call(
            self, request: Any, handler: Callable[[Any], Awaitable[Any]]
        ) -> Any:
            """As `wrap_tool_call`, without blocking the event loop."""
            message = await handler(request)
            documents = pruning.passages(request, message)
            if not documents:
                return message
            kept = await keeper.acompress_documents(documents, pruning.query(request))
            return pruning.answer(message, kept)

    return RSRankMiddleware()
