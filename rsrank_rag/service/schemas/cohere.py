"""A query and documents, as clients of Cohere, Jina, vLLM, Infinity and others send them."""

import math
import time
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    FailFast,
    Field,
    FiniteFloat,
    TypeAdapter,
    model_validator,
)
from typing_extensions import Self

from ...passages import shadow
from ...passages.parts import MAX_CHARACTERS, Excerpt, LongDocuments, Reading, Window
from ...passages.rule import Fallback, Limits, Native, Rule
from ...reranker import RankedDocument
from ..error_responses import RequestError
from .common import Count, Flag, Scores, ScoringRequest, Text, TextObject, Usage, text_of

# Documents that Cohere bills as one search. Nothing is billed here, but clients read the number.
SEARCH_UNIT = 100


def _fallback(value: Any) -> Any:
    """A fallback of an object's fields: a strict model takes objects for its own models only."""
    return TypeAdapter(Fallback).validate_python(value)


FallbackField = Annotated[Fallback, BeforeValidator(_fallback)]


class RerankedDocument(BaseModel, use_attribute_docstrings=True):
    """One row of an answer."""

    index: int
    relevance_score: float
    truncated: bool
    weak: bool = False
    """No document scored above the threshold, and the fallback kept this one."""
    document: TextObject | None = None
    """Its text, or the sentences that are kept."""
    excerpts: list[Excerpt] | None = None
    """The sentences kept; offsets in characters."""
    window: Window | None = None
    """The best window, and of how many."""


class DocumentScore(BaseModel):
    """One row of Weaviate's answer."""

    document: str
    score: float


class RerankResponse(BaseModel, use_attribute_docstrings=True):
    """The fields of Cohere, Jina, Infinity and vLLM at once."""

    id: str
    object: Literal["rerank"]
    created: int
    model: str
    results: list[RerankedDocument]
    """Best first; documents without text last."""
    none_relevant: bool
    """Whether no document scored above the native threshold."""
    meta: dict[str, dict[str, str | int]]
    """As Cohere's clients expect it."""
    usage: Usage
    threshold: float | None
    """The model's native threshold, on the raw scale."""
    max_gap: float | None = None
    """The model's native gap, on the raw scale."""
    fallback: Fallback | None = None
    """The model's native fallback, on the raw scale."""
    data: list[RerankedDocument] | None = None
    """The results again, for a request with top_k (Voyage)."""
    scores: list[DocumentScore] | None = None
    """All documents in the request's order (Weaviate)."""
    query_truncated: bool = False
    """Only the first and the last part of the query were read."""


class RerankRequest(ScoringRequest):
    """As Cohere, Jina, vLLM, Infinity, Xinference and SiliconFlow take it."""

    query: Text | TextObject
    documents: Annotated[list[Text | TextObject], FailFast()]
    """Strings, or objects with a "text"."""
    top_n: Count | None = None
    """Answer with at most so many documents; 0 for all."""
    top_k: Count | None = None
    """As top_n (Voyage)."""
    return_documents: Flag | None = None
    """Answer with the documents' texts."""
    weaviates: Any = Field(default=None, validation_alias="property")
    """Weaviate sends it, and reads scores."""
    threshold: FiniteFloat | Native | None = None
    """Leave out documents that do not score above this, on the raw scale; native for the model's
    own; null for none. Without it the service's setting applies."""
    max_gap: FiniteFloat | Native | None = "native"
    """Leave out documents further below the best one; null for no gap."""
    fallback: FallbackField | Native | None = "native"
    """What stays if no document scores above the threshold; null for nothing."""
    mode: Literal["drop", "shadow"] = "drop"
    """shadow: answer as if nothing were dropped, and log what would have been."""
    extract: Literal["sentences"] | None = None
    """sentences: keep, of each document, the sentences that score above the threshold (by default
    the model's own; null: all), with their offsets; documents without such a sentence are left
    out."""
    context: Count = 0
    """Keep so many sentences around each such sentence, too."""
    heading: Flag = False
    """Documents begin with a line that is kept with any of their sentences."""
    long_documents: LongDocuments | None = None
    """windows: read long documents in parts; the best part's score counts."""
    max_characters: Count | None = Field(default=MAX_CHARACTERS, ge=1)
    """Of a document in parts, read at most so many characters; null for all."""

    @property
    def most(self) -> int | None:
        """The most documents in the answer; None for all."""
        return self.top_n or self.top_k or None

    @model_validator(mode="after")
    def _limits_make_sense(self) -> Self:
        # Both raise for options that are out of range or without effect.
        Rule(threshold=0.0).with_limits(self._limits("native"))
        _ = self.reading
        return self

    @property
    def reading(self) -> Reading:
        """How documents are to be read."""
        long_documents = self.long_documents or "cut"
        reading = (self.extract, self.context, self.heading, long_documents)
        return Reading(*reading, self.max_characters)

    def query_and_documents(self) -> tuple[str, list[str]]:  # noqa: D102 - inherited
        return text_of(self.query), [text_of(document) for document in self.documents]

    def rule(self, scores: Scores) -> Rule:
        """The rule that decides which documents are left out."""
        threshold = self.threshold
        if "threshold" not in self.model_fields_set and (
            scores.drops(self.most) or self.extract or self.mode == "shadow"
        ):
            threshold = "native"
        model = scores.model
        if threshold == "native" and model.threshold is None:
            raise RequestError(
                422, f"{model.name} has no native threshold. Give a number, or null for none."
            )
        return model.rule.with_limits(self._limits(threshold))

    def _limits(self, threshold: float | Native | None) -> Limits:
        return Limits(
            threshold=threshold, max_gap=self.max_gap, fallback=self.fallback, top_n=self.most
        )

    def answer(self, scores: Scores) -> RerankResponse:
        """Rows best first, without those that are to be dropped."""
        ranked = scores.ranked(self.rule(scores), self.reading)
        if self.mode == "shadow":
            shadow.log(replace(ranked, query=text_of(self.query)), scores.id)
            ranked = scores.ranked(Rule(top_n=self.most))
        rows = [self._row(scores, document) for document in ranked.kept]
        every = None
        if self.weaviates is not None:
            every = [
                DocumentScore(document=one.text, score=scores.shown(one.score))
                for one in scores.ranked().in_order
            ]
        usage = scores.usage
        units = math.ceil(len(scores.outcomes) / SEARCH_UNIT)
        return RerankResponse(
            id=scores.id,
            object="rerank",
            created=int(time.time()),
            model=scores.model.name,
            results=rows,
            none_relevant=scores.none_relevant,
            meta={
                "api_version": {"version": "2"},
                "billed_units": {"search_units": units},
                "tokens": {"input_tokens": usage.total_tokens, "output_tokens": 0},
            },
            usage=usage,
            threshold=scores.model.threshold,
            max_gap=scores.model.rule.max_gap,
            fallback=scores.model.rule.fallback,
            query_truncated=any(outcome.query_truncated for outcome in scores.outcomes),
            data=None if self.top_k is None else rows,
            scores=every,
        )

    def _row(self, scores: Scores, document: RankedDocument) -> RerankedDocument:
        shown = [replace(one, score=scores.shown(one.score)) for one in document.excerpts]
        return RerankedDocument(
            index=document.index,
            relevance_score=scores.shown(document.score),
            truncated=document.truncated,
            weak=document.weak,
            document=TextObject(text=document.extract) if self.return_documents else None,
            excerpts=shown if self.extract else None,
            window=document.window,
        )
