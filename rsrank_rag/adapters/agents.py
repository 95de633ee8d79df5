"""What LangChain's agents read of documents, and which answers of their tools are pruned."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import ToolMessage
from langchain_core.prompts import BasePromptTemplate, format_document
from langchain_core.tools import BaseTool
from langchain_core.tools.retriever import RetrieverInput

from ..errors import nearest
from ..reading.documents import lines_before
from .adapter import WEAK

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToolText:
    """How documents become the text that an agent reads; see `create_rsrank_tool`."""

    document_prompt: BasePromptTemplate[str] | None
    nothing_relevant: str
    weak_only: str
    separator: str

    def of(self, documents: Sequence[Document]) -> str:
        """The text for these documents."""
        texts = [self._one(document) for document in documents]
        if any(document.metadata.get(WEAK) for document in documents):
            texts.insert(0, self.weak_only)
        return self.separator.join(texts) or self.nothing_relevant

    def _one(self, document: Document) -> str:
        if self.document_prompt is not None:
            return format_document(document, self.document_prompt)
        text = document.page_content
        return lines_before(text, document.metadata, ("title",)) + text


class Pruning:
    """Prunes the answers of an agent's tools; see `create_rsrank_middleware`."""

    def __init__(self, tools: Sequence[str], query_key: str, text: ToolText) -> None:
        self.tools = tools
        self.query_key = query_key
        self.text = text
        self._unchecked = set(tools)

    def check_tools(self, request: Any) -> None:
        """Warn once of names that no tool of the agent has."""
        names = {tool.name for tool in request.tools if isinstance(tool, BaseTool)}
        for name in sorted(self._unchecked - names):
            logger.warning(
                "The answers of the tool %r are to be pruned, and the agent lacks it.%s",
                name,
                nearest(name, names),
            )
        self._unchecked.clear()

    def passages(self, request: Any, message: Any) -> list[Document]:
        """The passages of a tool's answer; empty if the answer is not to be pruned."""
        is_named = request.tool_call["name"] in self.tools
        is_other = bool(self.tools) and not is_named
        if not isinstance(message, ToolMessage) or is_other or not self.query(request).strip():
            return []
        artifact = message.artifact
        if isinstance(artifact, list) and all(isinstance(one, Document) for one in artifact):
            return artifact
        tool = request.tool
        is_retriever = isinstance(tool, BaseTool) and tool.args_schema is RetrieverInput
        if message.status == "error" or not (is_named or is_retriever):
            return []
        return [Document(text) for text in message.text.split(self.text.separator)]

    def query(self, request: Any) -> str:
        """The query of a tool's call; empty if it has none."""
        query = request.tool_call["args"].get(self.query_key)
        return query if isinstance(query, str) else ""

    def answer(self, message: ToolMessage, documents: list[Document]) -> ToolMessage:
        """A tool's answer with these documents instead of its own."""
        update = {"content": self.text.of(documents), "artifact": documents}
        return message.model_copy(update=update)
