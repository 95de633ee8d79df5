"""The request of all clients: a query and documents, under the names that each client uses."""

from typing import Annotated, Any

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    Field,
    FiniteFloat,
    PositiveInt,
    model_validator,
)
from typing_extensions import Self

from ...ranking.rule import Fallback, Native
from ...reading.parts import MAX_CHARACTERS, Extract, LongDocuments, Reading
from ...reranker import Pair
from ..messages import Description

Text = Annotated[
    str, BeforeValidator(lambda one: one.get("text", one) if isinstance(one, dict) else one)
]
"""A text, by itself or in an object with a "text"."""

Texts = Annotated[list[Text], Field(fail_fast=True)]

Flag = Annotated[bool, Field(strict=False)]
"""A boolean. Programs also send a boolean as text ("true") or as a number (1)."""

Count = Annotated[int, Field(strict=False, ge=0)]
"""A whole number of at least 0. Programs also send such a number as "1" or 1.0."""


class RankRequest(BaseModel, strict=True):
    """A query and documents. One of ``documents``, ``texts`` and ``passages`` is there.

    The name of the documents decides in which schema the answer is.
    """

    query: Text = Field(max_length=10_000)
    documents: Texts | None = None
    """As clients of Cohere, Jina, vLLM, Infinity, Xinference, Voyage and SiliconFlow send them."""
    texts: Texts | None = None
    """As clients of TEI (text-embeddings-inference) send them."""
    passages: Texts | None = None
    """As clients of NVIDIA send them."""
    top_n: Count | None = None
    """Answer with at most so many documents; 0 for all."""
    top_k: Count | None = None
    """As top_n (Voyage)."""
    return_documents: Flag = Field(
        default=False, validation_alias=AliasChoices("return_documents", "return_text")
    )
    """Answer with the documents' texts."""
    normalize: Flag | None = None
    """Scores between 0 and 1; 0.5 is the native threshold."""
    raw_scores: Flag | None = None
    """False means normalize (TEI, Infinity)."""
    threshold: FiniteFloat | Native | None = None
    """Leave out documents that do not score above this, on the raw scale; native for the model's
    own; null for none. Without it the service's setting applies."""
    max_gap: FiniteFloat | Native | None = "native"
    """Leave out documents further below the best one; null for no gap."""
    fallback: Fallback | Native | None = "native"
    """What stays if no document scores above the threshold; null for nothing."""
    extract: Extract | None = None
    """sentences: keep, of each document, the sentences that reach the rule's bar (by default the
    model's own rule), with their offsets; documents without such a sentence are left out."""
    long_documents: LongDocuments | None = None
    """windows: read long documents in parts; the best part's score counts. cut: read the
    beginning. Without it, the model's default applies."""
    max_characters: PositiveInt | None = MAX_CHARACTERS
    """Of a document in parts, read at most so many characters; null for all."""
    weaviates: Any = Field(default=None, validation_alias="property")
    """Weaviate sends it, and reads scores."""

    @model_validator(mode="after")
    def _has_documents(self) -> Self:
        if [self.documents, self.texts, self.passages].count(None) != 2:
            raise ValueError("one of documents, texts and passages is required")
        return self

    @property
    def entries(self) -> list[str]:
        """The documents."""
        return self.documents or self.texts or self.passages or []

    @property
    def most(self) -> int | None:
        """The most documents in the answer; None for all."""
        return self.top_n or self.top_k or None

    @property
    def copies(self) -> int:
        """How often the answer may hold each document's text."""
        copies = self.return_documents + bool(self.extract)
        # Voyage gets the results twice.
        if self.top_k is not None:
            copies *= 2
        return copies + (self.weaviates is not None)

    def reading(self, default: LongDocuments) -> Reading:
        """How documents are read; ``default`` says how long ones are read by default."""
        return Reading(
            extract=self.extract,
            long_documents=self.long_documents or default,
            max_characters=self.max_characters,
        )

    def pairs(self, model: Description) -> list[Pair]:
        """The pairs to be scored, with this request's options."""
        reading = self.reading(model.long_documents)
        return [Pair(self.query, text, reading=reading) for text in self.entries]
