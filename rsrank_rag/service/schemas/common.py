"""What all API schemas share: options, texts that can be encoded, scores on either scale."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

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
from ...reranker import LongQueries, Pair, RankResult, Scored, choose
from ..backend import Description, Outcome

_BROKEN = "holds half of a surrogate pair, which is no character."


def _is_unicode(text: str) -> str:
    if encodable(text) != text:
        raise ValueError(_BROKEN.removesuffix("."))
    return text


Query = Annotated[str, AfterValidator(_is_unicode)]
"""A text that can be encoded."""


_AS_SENT = WithJsonSchema({"type": ["boolean", "number", "string"]})

Flag = Annotated[bool, Field(strict=False), _AS_SENT]
"""A switch, also as programs send it: "true", 1."""

Count = Annotated[int, Field(strict=False), _AS_SENT]
"""A whole number, also as programs send it: "1", 1.0."""


@dataclass(frozen=True)
class Question:
    """The pairs that a request asks to be scored.

    Attributes:
        pairs: Queries and documents.
        faults: What is wrong with pairs that cannot be scored, by position.
        may_be_cut: Whether long documents may be cut; None if the request does not say.
    """

    pairs: list[Pair]
    faults: dict[int, str] = field(default_factory=dict)
    may_be_cut: bool | None = None

    def outcomes(self, usable: Sequence[Outcome]) -> list[Outcome]:
        """One outcome for each pair, from those of the usable pairs."""
        rest = iter(usable)
        outcomes = []
        for place in range(len(self.pairs)):
            if place in self.faults:
                outcomes.append(Outcome(None, fault="input", error=self.faults[place]))
            else:
                outcomes.append(next(rest))
        return outcomes

    def complaints(self, outcomes: Sequence[Outcome]) -> tuple[dict[int, str], int]:
        """What is wrong, by document, and the HTTP status that the request deserves for it."""
        wrong = {}
        cut = {}
        for place, (pair, outcome) in enumerate(zip(self.pairs, outcomes, strict=True)):
            if outcome.score is None:
                wrong[place] = outcome.error
            elif outcome.truncated and self.may_be_cut is False:
                limit = "" if pair.max_tokens is None else f" ({pair.max_tokens})"
                cut[place] = f"was cut: it has more tokens than are read{limit}."
        if wrong and all(outcome.fault == "internal" for outcome in outcomes):
            return wrong, 500
        return {**cut, **wrong}, 422 if wrong else 413


def normalise(score: float, threshold: float | None) -> float:
    """A score between 0 and 1, by the logistic function; 0.5 if it equals the threshold.

    The threshold None counts as 0. A score so near the threshold that 0.5 would be the rounded
    result becomes the next number above or below 0.5.

    >>> normalise(0.5, 0.5), normalise(1e-300, 0.0) > 0.5, normalise(2.0, None)
    (0.5, True, 0.8807970779778823)
    """
    distance = score - (threshold or 0.0)
    if distance == 0:
        return 0.5
    small = math.exp(-abs(distance))
    share = 1 / (1 + small) if distance > 0 else small / (1 + small)
    return math.nextafter(0.5, 1.0 if distance > 0 else 0.0) if share == 0.5 else share


class Usage(BaseModel):
    """Tokens read, of queries and documents together; 0 if the model does not count."""

    prompt_tokens: int
    total_tokens: int


@dataclass(frozen=True)
class Scores:
    """A question with its outcomes, and what else stands in answers.

    Attributes:
        question: What was asked.
        outcomes: One for each pair.
        model: The model that scored.
        normalised: Whether answers have scores between 0 and 1.
        faults: Why pairs are left out, by position.
        id: The request's.
        created: Seconds since 1970.
        drop: Whether the service leaves documents out that are not relevant.
    """

    question: Question
    outcomes: Sequence[Outcome]
    model: Description
    normalised: bool = False
    faults: Mapping[int, str] = field(default_factory=dict)
    id: str = ""
    created: int = 0
    drop: bool = False

    @property
    def none_relevant(self) -> bool:
        """Whether no document scored above the native threshold."""
        return self.ranked(self.model.threshold).none_relevant

    @property
    def usage(self) -> Usage:
        """Tokens of all outcomes."""
        tokens = sum(outcome.tokens for outcome in self.outcomes)
        return Usage(prompt_tokens=tokens, total_tokens=tokens)

    @property
    def heading(self) -> dict[str, Any]:
        """Fields that the answers of Cohere and vLLM share."""
        return {
            "id": self.id,
            "created": self.created,
            "model": self.model.name,
            "usage": self.usage,
        }

    @cached_property
    def places(self) -> list[int]:
        """Positions in the question of the pairs that are in the answer."""
        return [place for place in range(len(self.outcomes)) if place not in self.faults]

    @property
    def scored(self) -> list[Scored]:
        """The raw scores of these pairs."""
        outcomes = (self.outcomes[place] for place in self.places)
        return [
            Scored(one.score, one.truncated, one.tokens, one.window, one.sentences)
            for one in outcomes
            if one.score is not None
        ]

    def ranked(
        self,
        cutoff: float | None = None,
        top_n: int | None = None,
        min_docs: int = 0,
        reading: Reading = WHOLE,
    ) -> RankResult:
        """Documents best first, numbered as in `places`; see `choose`."""
        texts = [self.question.pairs[place].document for place in self.places]
        return choose(
            "", texts, self.scored, cutoff, top_n=top_n, min_docs=min_docs, reading=reading
        )

    def shown(self, score: float) -> float:
        """A raw score as the answer shows it: raw, or from 0 to 1 if the request asks for that."""
        return normalise(score, self.model.threshold) if self.normalised else score


class Strict(BaseModel, strict=True):
    """A model that converts no value from another type, unless a field allows it."""


class TextObject(Strict):
    """A text in an object."""

    text: str


class QueryObject(Strict):
    """A query in an object, as Jina and NVIDIA write it."""

    text: Query


Instruction = Annotated[
    Query | None,
    Field(
        validation_alias=AliasChoices(
            "instruction", "instruct", AliasPath("chat_template_kwargs", "instruction")
        ),
        description="What to judge by. Or as instruct (SGLang), or in chat_template_kwargs (vLLM).",
    ),
]


# Fields that programs send as an empty string where a user has set nothing.
OPTIONS = frozenset(
    {"instruction", "instruct", "max_tokens_per_doc", "return_documents", "top_k", "top_n"}
)


class ScoringRequest(Strict, ABC):
    """A request for scores, with the options that every request may have.

    ``explain``: whether the scores are to be taken apart.
    """

    explain: ClassVar = False

    @model_validator(mode="before")
    @classmethod
    def _empty_is_absent(cls, body: Any) -> Any:
        """Leave out options that are an empty string: programs send those for empty settings."""
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value != "" or name not in OPTIONS}

    model: Any = Field(
        default=None, description="Any: there is one model, and the answer names it."
    )
    max_tokens_per_doc: Count | None = Field(
        default=None, ge=1, description="Read at most so many tokens of each."
    )
    truncate: Flag | Literal["NONE", "END"] | None = Field(
        default=None,
        description="False or NONE: a document that is too long is an error instead of being cut.",
    )
    truncate_prompt_tokens: Literal[-1] | PositiveInt | None = Field(
        default=None, description="Likewise; -1: all."
    )
    truncation_direction: Literal["Right", "right"] | None = Field(
        default=None,
        validation_alias=AliasChoices("truncation_direction", "truncation_side"),
        description="Documents are cut at their end and nowhere else.",
    )
    instruction: Instruction = None
    long_queries: LongQueries = Field(
        default="cut",
        description="Of a query that is too long: cut reads the first and the last part; error "
        "refuses the request.",
    )

    @abstractmethod
    def pairs_to_score(self) -> Question:
        """The pairs to be scored."""

    @abstractmethod
    def answer(self, scores: Scores) -> BaseModel | Sequence[BaseModel]:
        """The body of the answer."""

    def normalised(self, default: bool) -> bool:
        """Whether scores are to be mapped to between 0 and 1."""
        return False

    def question(
        self,
        queries: Sequence[str],
        texts: Sequence[str],
        faults: Mapping[int, str] | None = None,
        reading: Reading = WHOLE,
    ) -> Question:
        """Pairs of queries and texts, with this request's options."""
        limits = (self.max_tokens_per_doc, self.truncate_prompt_tokens)
        most = min((limit for limit in limits if limit is not None and limit > 0), default=None)
        instruction = self.instruction or None
        pairs = [
            Pair(query, text, most, reading, instruction, cut_query=self.long_queries == "cut")
            for query, text in zip(queries, texts, strict=True)
        ]
        broken = {place: _BROKEN for place, text in enumerate(texts) if encodable(text) != text}
        # LiteLLM always sends false, and Right.
        says_where = self.truncation_direction is not None
        may_be_cut = None if self.truncate is None else says_where or self.truncate in (True, "END")
        return Question(pairs, {**broken, **(faults or {})}, may_be_cut)


class ScaledRequest(ScoringRequest):
    """A request whose scores may be asked for in either scale."""

    normalize: Flag | None = Field(
        default=None, description="Scores between 0 and 1; 0.5 is the native threshold."
    )
    raw_scores: Flag | None = Field(
        default=None, description="False means normalize (TEI, Infinity)."
    )
    use_activation: Flag | None = Field(default=None, description="True means normalize (vLLM).")

    def normalised(self, default: bool) -> bool:
        """Whether scores are to be mapped to between 0 and 1."""
        if self.normalize is not None:
            return self.normalize
        if self.raw_scores is not None:
            return not self.raw_scores
        return default if self.use_activation is None else self.use_activation
