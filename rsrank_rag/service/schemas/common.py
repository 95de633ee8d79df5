"""What all API schemas share: options, texts that can be encoded, scores on either scale."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    BaseModel,
    Field,
    PositiveInt,
    WithJsonSchema,
    model_validator,
)

from ...passages.parts import WHOLE, Reading, encodable
from ...passages.ranked import RankResult, Scored, choose, normalise
from ...passages.rule import Rule
from ...reranker import LongQueries, Pair
from ..backend import Description, Outcome
from ..error_responses import request_error


def _is_unicode(text: str) -> str:
    if encodable(text) != text:
        raise ValueError("holds half of a surrogate pair, which is no character")
    return text


Text = Annotated[str, AfterValidator(_is_unicode)]
"""A text that can be encoded."""


_AS_SENT = WithJsonSchema({"type": ["boolean", "number", "string"]})

Flag = Annotated[bool, Field(strict=False), _AS_SENT]
"""A boolean. Programs also send a boolean as text ("true") or as a number (1)."""

Count = Annotated[int, Field(strict=False, ge=0), _AS_SENT]
"""A whole number of at least 0. Programs also send such a number as "1" or 1.0."""


Drop: TypeAlias = bool | Literal["always"]
"""Whether irrelevant documents are left out; "always": even if a request asks for all."""


class Usage(BaseModel):
    """Tokens read, of queries and documents together; 0 if the model does not count."""

    prompt_tokens: int
    total_tokens: int


@dataclass(frozen=True)
class Scores:
    """The scores of a request's documents, and what else stands in answers.

    Attributes:
        documents: The documents.
        outcomes: One for each document, with a score.
        model: The model that scored.
        normalised: Whether answers have scores between 0 and 1.
        id: The request's.
        drop: The service's setting; see `drops`.
    """

    documents: Sequence[str]
    outcomes: Sequence[Outcome]
    model: Description
    normalised: bool = False
    id: str = ""
    drop: Drop = False

    @property
    def scored(self) -> list[Scored]:
        """The raw scores."""
        return [outcome.scored for outcome in self.outcomes if outcome.scored is not None]

    @property
    def none_relevant(self) -> bool:
        """Whether no document scored above the native threshold."""
        return self.ranked(self.model.rule).none_relevant

    @property
    def usage(self) -> Usage:
        """Tokens of all documents."""
        tokens = sum(one.tokens for one in self.scored)
        return Usage(prompt_tokens=tokens, total_tokens=tokens)

    def drops(self, most: int | None) -> bool:
        """Whether an answer leaves out irrelevant documents.

        A program that requests as many documents as it sends may pair the scores with its own list.
        Such a request gets all documents, unless the setting ``drop`` is "always".

        Args:
            most: The most documents that the request wants; None without a limit.
        """
        return self.drop == "always" or (self.drop and most != len(self.documents))

    def ranked(self, rule: Rule | None = None, reading: Reading = WHOLE) -> RankResult:
        """Documents best first, those that a rule keeps; all of them without a rule."""
        rule = rule or Rule()
        return choose("", self.documents, self.scored, rule, reading=reading)

    def shown(self, score: float) -> float:
        """A raw score as the answer shows it: raw, or from 0 to 1 if the request asks for that."""
        return normalise(score, self.model.threshold) if self.normalised else score


class Strict(BaseModel, strict=True, use_attribute_docstrings=True):
    """A model that converts no value from another type, unless a field allows it."""


class TextObject(Strict):
    """A text in an object."""

    text: Text


def text_of(text: str | TextObject) -> str:
    """A text, by itself or in an object."""
    return text if isinstance(text, str) else text.text


def _refuse_instruction(text: str | None) -> None:
    if text:
        raise ValueError("not taken, because B and its zero point are trained with one prompt")


# Fields whose empty string is a text. Weaviate sends an empty property.
MAY_BE_EMPTY = ("query", "document", "property")


def _allow_empty_strings(schema: dict[str, Any]) -> None:
    """Describe that every optional field may be an empty string, see `ScoringRequest`."""
    fields = schema["properties"]
    for name in fields.keys() - schema["required"]:
        fields[name] = {"anyOf": [fields[name], {"const": ""}]}


class ScoringRequest(Strict, ABC, json_schema_extra=_allow_empty_strings):
    """A request for the scores of documents for one query, with the options of all schemas.

    A field of a subclass must not have the name of a method or property of this class. If clients
    send such a name (``answer``), give the field another name and a ``validation_alias``.

    ``explain`` says whether the answer explains the scores.
    """

    explain: ClassVar = False

    @model_validator(mode="before")
    @classmethod
    def _empty_is_absent(cls, body: Any) -> Any:
        """Leave out empty strings, which programs send where a user has set nothing.

        Texts may be empty.
        """
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value != "" or name in MAY_BE_EMPTY}

    model: Any = None
    """Any: there is one model, and the answer names it."""
    max_tokens_per_doc: Count | None = Field(default=None, ge=1)
    """Read at most so many tokens of each."""
    truncate: Flag | Literal["NONE", "END"] | None = None
    """False or NONE: a document that is too long is an error instead of being cut."""
    truncate_prompt_tokens: Literal[-1] | PositiveInt | None = None
    """As max_tokens_per_doc; -1: all."""
    truncation_direction: Literal["Right", "right"] | None = None
    """Documents are cut at their end and nowhere else."""
    instruction: Annotated[str | None, AfterValidator(_refuse_instruction)] = Field(
        default=None,
        validation_alias=AliasChoices(
            "instruction", "instruct", AliasPath("chat_template_kwargs", "instruction")
        ),
        json_schema_extra={"maxLength": 0},
    )
    """Refused, also as instruct (SGLang) and in chat_template_kwargs (vLLM)."""
    long_queries: LongQueries = "cut"
    """Of a query that is too long: cut reads the first and the last part; error refuses the
    request."""
    normalize: Flag | None = None
    """Scores between 0 and 1; 0.5 is the native threshold."""
    raw_scores: Flag | None = None
    """False means normalize (TEI, Infinity)."""

    @abstractmethod
    def query_and_documents(self) -> tuple[str, list[str]]:
        """The query and the documents."""

    @abstractmethod
    def answer(self, scores: Scores) -> Any:
        """The body of the answer.

        The log counts the rows of its attribute ``results`` as kept documents. Without this
        attribute, the log counts all documents.
        """

    @property
    def reading(self) -> Reading:
        """How documents are to be read."""
        return WHOLE

    def pairs(self, salt: str = "") -> list[Pair]:
        """The pairs to be scored, with this request's options."""
        query, documents = self.query_and_documents()
        limits = [self.max_tokens_per_doc or -1, self.truncate_prompt_tokens or -1]
        most = min((limit for limit in limits if limit > 0), default=None)
        cut = self.long_queries == "cut"
        options = (most, self.reading, salt, cut)
        return [Pair(query, text, *options) for text in documents]

    def normalised(self, default: bool) -> bool:
        """Whether scores are to be mapped to between 0 and 1."""
        if self.normalize is not None:
            return self.normalize
        return default if self.raw_scores is None else not self.raw_scores

    def check(self, outcomes: Sequence[Outcome]) -> None:
        """Check that every document has a score, and that no document was cut against the request.

        Raises:
            RequestError: Status 500 if the model failed on every document, 422 if another document
                has no score, 413 if a document was cut and the request forbids that.
        """
        faults = {n: one.error for n, one in enumerate(outcomes) if one.scored is None}
        is_internal = all(one.fault == "internal" for one in outcomes)
        status = 500 if is_internal else 422
        # LiteLLM always sends false, and Right.
        if not faults and self.truncate in (False, "NONE") and self.truncation_direction is None:
            status = 413
            for number, one in enumerate(outcomes):
                if one.scored and one.scored.truncated:
                    faults[number] = "was cut: it has more tokens than are read."
        if faults:
            raise request_error(faults, status)
