"""Documents as callers pass them: strings, dictionaries, or objects with a text."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from ..errors import InputError
from .titles import lines_before


@runtime_checkable
class HasText(Protocol):
    """An object with a text, and perhaps with ``id`` and ``metadata``."""

    @property
    def text(self) -> str:
        """The text."""


@runtime_checkable
class HasPageContent(Protocol):
    """The same as LangChain names it."""

    @property
    def page_content(self) -> str:
        """The text."""


@runtime_checkable
class Table(Protocol):
    """A data frame. Its iteration gives the names of its columns."""

    columns: Any


@dataclass(frozen=True, slots=True)
class InputDocument:
    """A document to rank.

    Attributes:
        text: The text.
        id: The document's id, if there is one.
        metadata: Whatever else belongs to it.
        before: Lines that are read before the text, such as the title.
    """

    text: str
    id: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    before: str = ""

    @property
    def read(self) -> str:
        """What a reranker reads."""
        return self.before + self.text


DocumentLike = str | Mapping[str, Any] | HasText | HasPageContent
"""A text; a dictionary with "text" and perhaps "id" and "metadata", whose other entries count as
metadata, too; or an object with such attributes."""


def as_documents(
    documents: Iterable[DocumentLike], fields: Sequence[str] = ()
) -> list[InputDocument]:
    """The documents of any iterable, with the values of metadata fields before their texts.

    Raises:
        InputError: It is one string, a table or mapping, or no iterable, or an entry has no text.
    """
    is_other = isinstance(documents, (str, bytes, Mapping, Table))
    if is_other or not isinstance(documents, Iterable):
        raise InputError(
            f"documents must be a list of strings, got one {type(documents).__name__}. "
            "Put the texts in a list."
        )
    read = [_as_document(place, entry) for place, entry in enumerate(documents)]
    if not fields:
        return read
    before = [lines_before(one.text, one.metadata, fields) for one in read]
    return [replace(one, before=lines) for one, lines in zip(read, before, strict=True)]


def _as_document(place: int, entry: Any) -> InputDocument:
    text, id_, metadata = entry, None, {}
    if isinstance(entry, InputDocument):
        return entry
    if isinstance(entry, Mapping):
        rest = dict(entry)
        text, id_ = rest.pop("text", None), rest.pop("id", None)
        metadata = {**(rest.pop("metadata", None) or {}), **rest}
    elif isinstance(entry, (HasText, HasPageContent)):
        text = entry.text if isinstance(entry, HasText) else entry.page_content
        id_, metadata = getattr(entry, "id", None), getattr(entry, "metadata", None) or {}
    name = f"Document {place}" if text is entry else f"The text of document {place}"
    if not isinstance(text, str):
        raise InputError(f"{name} must be a string, got {type(text).__name__}.")
    return InputDocument(text, id_, metadata)
