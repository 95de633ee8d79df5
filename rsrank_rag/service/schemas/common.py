"""What all requests and answers have in common: options, texts that can be encoded, scores on either scale."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, AliasPath, BaseModel, Field, PositiveInt

from ...passages.parts import WHOLE, Reading, encodable
from ...reranker import Pair, RankResult, Scored, choose
from ..backend import Description, Outcome

_BROKEN = "holds half of a surrogate pair, which is no character."


def _is_unicode(text: str) -> str:
    if encodable(text) != text:
        raise ValueError(_BROKEN.removesuffix("."))
    return text


Query = Annotated[str, AfterValidator(_is_unicode)]  # text that can be encoded


@dataclass(frozen=True)
class Question:
    """What a request asks to be scored, whatever client sent it."""

    pairs: list[Pair]
    faults: dict[int, str] = field(
        default_factory=dict
    )  # what is wrong with pairs that cannot be scored, by position
    may_be_cut: bool | None = (
        None  # whether long documents may be; None if the request does not tell
    )

    def outcomes(self, found: Sequence[Outcome]) -> list[Outcome]:
        """One outcome a pair, from those of the usable ones."""
        rest = iter(found)
        return [
            Outcome(None, fault="input", error=self.faults[place])
            if place in self.faults
            else next(rest)
            for place in range(len(self.pairs))
        ]

    def complaints(self, outcomes: Sequence[Outcome]) -> tuple[dict[int, str], int]:
        """What is wrong with which document, and the HTTP status that a request deserves for it."""
        wrong, cut = {}, {}
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
    """A score between 0 and 1, by the logistic function; 0.5 if it equals the threshold (0 where there is none).

    It is 0.5 only then: what is so near that it would be rounded to 0.5 becomes the next number above or below.

    >>> normalise(0.5, 0.5), normalise(1e-300, 0.0) > 0.5, normalise(-800.0, 0.0), normalise(2.0, None)
    (0.5, True, 0.0, 0.8807970779778823)
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
    """A question with its outcomes, one a pair, and what else stands in answers."""

    question: Question
    outcomes: Sequence[Outcome]
    model: Description
    normalised: bool = False
    faults: Mapping[int, str] = field(default_factory=dict)  # pairs that are left out, and why
    id: str = ""
    created: int = 0  # in seconds since 1970

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
        """Pairs that are in the answer, by their position in the question."""
        return [place for place in range(len(self.outcomes)) if place not in self.faults]

    @property
    def scored(self) -> list[Scored]:
        """The raw scores of these pairs."""
        found = (self.outcomes[place] for place in self.places)
        return [
            Scored(o.score, o.truncated, o.tokens, o.window, o.sentences)
            for o in found
            if o.score is not None
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
        """A raw score on the scale of the answer."""
        return normalise(score, self.model.threshold) if self.normalised else score


class Strict(BaseModel, strict=True):
    """Takes no value of another type for its own."""


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


class ScoringRequest(Strict, ABC):
    """A request for scores, with the options that every one may have."""

    model: Any = Field(
        default=None, description="Whatever it is: there is one model, and the answer names it."
    )
    max_tokens_per_doc: int | None = Field(
        default=None, ge=1, description="Read at most so many tokens of each."
    )
    truncate: bool | Literal["NONE", "END"] | None = Field(
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

    @abstractmethod
    def asked(self) -> Question:
        """What is to be scored."""

    @abstractmethod
    def answer(self, scores: Scores) -> BaseModel | Sequence[BaseModel]:
        """What the client reads."""

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
        told = self.instruction or None
        pairs = [
            Pair(query, text, most, reading, told)
            for query, text in zip(queries, texts, strict=True)
        ]
        broken = {place: _BROKEN for place, text in enumerate(texts) if encodable(text) != text}
        may_be_cut = None if self.truncate is None else self.truncate not in (False, "NONE")
        return Question(pairs, {**broken, **(faults or {})}, may_be_cut)


class ScaledRequest(ScoringRequest):
    """A request whose scores may be asked for in either scale."""

    normalize: bool | None = Field(
        default=None, description="Scores between 0 and 1; 0.5 is the native threshold."
    )
    raw_scores: bool | None = Field(
        default=None, description="False means normalize (TEI, Infinity)."
    )
    use_activation: bool | None = Field(default=None, description="True means normalize (vLLM).")

    def normalised(self, default: bool) -> bool:
        """Whether scores are to be mapped to between 0 and 1."""
        if self.normalize is not None:
            return self.normalize
        if self.raw_scores is not None:
            return not self.raw_scores
        return default if self.use_activation is None else self.use_activation
