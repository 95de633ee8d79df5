"""Documents as callers pass them, and the title and other metadata before their texts."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from ..errors import InputError

# How pandas, JSON and `str` write a value that is missing.
MISSING = {"", "<na>", "nan", "nat", "none", "null"}

# What office programs and PDF printers write as the title of a file that has none.
NO_TITLE = re.compile(
    r"\(?anonymous\)?|untitled.*|(document|presentation|slide) ?\d*|powerpoint presentation"
    r"|microsoft (word|powerpoint|excel|office) - .*"
    r"|.*\.(csv|docx?|dotx?|dvi|html?|indd|key|md|od[pst]|pages|pdf|pptx?|ps|qxd|rtf|tex|txt|xlsx?)",
    re.IGNORECASE,
)


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
        InputError: It is one string, a table or mapping, or no iterable, or an entry has no text,
            or metadata that are no dictionary.
    """
    is_other = isinstance(documents, (str, bytes, Mapping, Table))
    if is_other or not isinstance(documents, Iterable):
        raise InputError(
            f"documents must be a list of strings, got one {type(documents).__name__}. "
            "Put the texts in a list."
        )
    read = []
    for place, entry in enumerate(documents):
        document = entry if isinstance(entry, InputDocument) else _as_document(place, entry)
        if fields and document.metadata:
            before = lines_before(document.text, document.metadata, fields)
            document = replace(document, before=before)
        read.append(document)
    return read


def _as_document(place: int, entry: Any) -> InputDocument:
    text, id_ = entry, None
    metadata: Mapping[str, Any] = {}
    if isinstance(entry, Mapping):
        rest = dict(entry)
        text, id_ = rest.pop("text", None), rest.pop("id", None)
        metadata = {**_metadata_of(place, rest.pop("metadata", None)), **rest}
    elif isinstance(entry, (HasText, HasPageContent)):
        text = entry.text if isinstance(entry, HasText) else entry.page_content
        id_ = getattr(entry, "id", None)
        metadata = _metadata_of(place, getattr(entry, "metadata", None))
    name = f"Document {place}" if text is entry else f"The text of document {place}"
    if not isinstance(text, str):
        raise InputError(f"{name} must be a string, got {type(text).__name__}.")
    return InputDocument(text, id_, metadata)


def _metadata_of(place: int, metadata: Any) -> Mapping[str, Any]:
    # An empty cell of a table is NaN, which is not equal to itself.
    if metadata is None or (isinstance(metadata, float) and metadata != metadata):
        return {}
    if not isinstance(metadata, Mapping):
        raise InputError(
            f"The metadata of document {place} must be a dictionary, got {metadata!r:.60}."
        )
    return metadata


def lines_before(text: str, metadata: Mapping[str, Any], fields: Sequence[str]) -> str:
    r"""What is read before a text: the values of metadata fields, one a line.

    These values are left out: missing ones (None, NaN, blank), those that the text begins with, and
    a ``title`` that is none: a file name, or what a program writes instead of a title.

    >>> lines_before("Coins.", {"title": "Money", "year": 1999}, ("title", "year"))
    'Money\n1999\n'
    >>> lines_before("Coins.", {"title": "Microsoft Word - final_v3.docx"}, ("title",))
    ''
    """
    lines = ""
    for name in fields:
        line = str(metadata.get(name, "")).strip()
        is_missing = line.lower() in MISSING or (name == "title" and NO_TITLE.fullmatch(line))
        # "Bee" is no beginning of "Beekeeping".
        if not is_missing and not re.match(re.escape(line) + r"(?!\w)", text):
            lines += line + "\n"
    return lines
