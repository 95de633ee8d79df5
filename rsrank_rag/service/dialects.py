"""What clients send and what they are answered: the requests of several well-known services, read as pairs to score.

Requests become a `Question`, outcomes become an answer; both ways are pure functions. Fields that nobody here knows are
ignored, because every client library sends some of its own; a known field of the wrong type is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    FiniteFloat,
    Tag,
    field_validator,
    model_validator,
)
from typing_extensions import Self

from ..errors import InputError, RSRankError
from ..method.explanation import Explanation
from ..reranker import Pair, RankedDocument, Scored, check_limits, choose
from .backend import Description, Outcome

SEARCH_UNIT = 100
"""Documents that Cohere bills as one search; nothing is billed here, but its clients read the number."""


MOST_NAMED = 100
"""Entries of a wrong type that an error names one by one."""

MOST_FIELDS, LONGEST_FIELD = 100, 200
"""Fields to read of each document, and characters of a field's name: they stand in errors about each document."""


class DocumentError(BaseModel):
    """A document that could not be used or scored."""

    index: int
    message: str


class Error(BaseModel):
    """What every error looks like, on every route: each client finds the field that it reads."""

    error: str = Field(description="What is the matter (read by clients of TEI).")
    error_type: str = Field(description="What kind of error.")
    message: str = Field(description="The same as error (read by clients of Cohere).")
    detail: str = Field(description="The same as error (read by clients of Jina and NVIDIA).")
    documents: list[DocumentError] | None = Field(default=None, description="The documents that it is about.")


ERROR_TYPES = {
    400: "Validation",
    401: "Unauthorized",
    404: "NotFound",
    405: "NotFound",
    408: "Timeout",
    413: "Validation",
    422: "Validation",
    429: "Overloaded",
    503: "Unhealthy",
    504: "Timeout",
}
"""``error_type`` by status; "Backend" for all others."""


class RefusedError(RSRankError):
    """A request that is answered with an error.

    Attributes:
        status: HTTP status.
        documents: What is wrong with which document.
    """

    def __init__(self, status: int, message: str, documents: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.documents = status, dict(documents or {})


def error_body(status: int, message: str, documents: Mapping[int, str] | None = None) -> Error:
    """The body of an error.

    >>> error_body(429, "Full.").error_type
    'Overloaded'
    """
    text = message.encode("utf-8", "replace").decode()
    body = Error(error=text, error_type=ERROR_TYPES.get(status, "Backend"), message=text, detail=text)
    if documents:
        body.documents = [DocumentError(index=index, message=documents[index]) for index in sorted(documents)]
    return body


# Requests


_BROKEN = "holds half of a surrogate pair, which is no character."


def _encodable(text: str) -> bool:
    """False for half of a surrogate pair, which JSON can spell and nothing can encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True)


def _is_unicode(text: str) -> str:
    if not _encodable(text):
        raise ValueError(_BROKEN.removesuffix("."))
    return text


Query = Annotated[str, AfterValidator(_is_unicode)]
"""Text that can be encoded."""


def _few_wrong(right: Callable[[Any], bool]) -> BeforeValidator:
    """Refuse a list with many entries that are not right as a whole: an error for each could fill the memory."""

    def check(value: Any) -> Any:
        wrong = 0 if not isinstance(value, list) else sum(not right(entry) for entry in value)
        if wrong > MOST_NAMED:
            raise ValueError(f"{wrong:,} of {len(value):,} entries are of a wrong type")
        return value

    return BeforeValidator(check)


def _is_text(entry: Any) -> bool:
    return isinstance(entry, str)


def _is_text_or_object(entry: Any) -> bool:
    return isinstance(entry, (str, dict))


def _is_object_with_text(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("text"), str)


class TextObject(_Shape):
    """A text in an object, as Jina and NVIDIA write it."""

    text: str


class QueryObject(_Shape):
    """A query in an object, as Jina and NVIDIA write it."""

    text: Query


class Options(_Shape):
    """What every request may ask for."""

    model: Any = Field(default=None, description="Whatever it is: there is one model, and the answer names it.")
    max_tokens_per_doc: int | None = Field(
        default=None, ge=1, description="Read at most so many tokens of each document."
    )
    truncate: bool | Literal["NONE", "END"] | None = Field(
        default=None, description="False or NONE: a document that is too long is an error instead of being cut."
    )
    truncate_prompt_tokens: int | None = Field(
        default=None, ge=-1, description="As max_tokens_per_doc; -1 for what the model reads."
    )
    truncation_direction: Literal["Right", "right", "Left", "left"] | None = Field(
        default=None,
        validation_alias=AliasChoices("truncation_direction", "truncation_side"),
        description="Right: documents are cut at their end and nowhere else.",
    )

    @field_validator("truncation_direction")
    @classmethod
    def _only_the_end_is_cut(cls, value: str | None) -> str | None:
        if value in ("Left", "left"):
            raise ValueError("documents are cut at their end only, not on the left")
        return value

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _nothing_is_no_document(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("must be at least 1, or -1 for what the model reads")
        return value

    @property
    def most_tokens(self) -> int | None:
        """Tokens to read of a document; None for as many as the model can."""
        given = (self.max_tokens_per_doc, self.truncate_prompt_tokens)
        return min((limit for limit in given if limit is not None and limit > 0), default=None)

    @property
    def may_be_cut(self) -> bool | None:
        """Whether documents may be cut; None if nothing is said."""
        if self.truncate is None:
            return None
        return self.truncate not in (False, "NONE")

    def question(
        self, queries: Sequence[str], texts: Sequence[str], faults: Mapping[int, str] | None = None
    ) -> Question:
        """Pairs of queries and texts, with this request's options."""
        most = self.most_tokens
        pairs = [Pair(query, text, most) for query, text in zip(queries, texts, strict=True)]
        broken = {place: _BROKEN for place, text in enumerate(texts) if not _encodable(text)}
        return Question(pairs, {**broken, **(faults or {})}, self.may_be_cut)


class _Scale(Options):
    """Options of the requests whose scores may be asked for in either scale."""

    normalize: bool | None = Field(default=None, description="Scores between 0 and 1; 0.5 is the native threshold.")
    raw_scores: bool | None = Field(default=None, description="False means normalize (TEI, Infinity).")
    use_activation: bool | None = Field(default=None, description="True means normalize (vLLM).")

    def normalised(self, default: bool) -> bool:
        """Whether scores are to be mapped to between 0 and 1."""
        if self.normalize is not None:
            return self.normalize
        if self.raw_scores is not None:
            return not self.raw_scores
        return default if self.use_activation is None else self.use_activation


def _is_short(name: str) -> str:
    if len(name) > LONGEST_FIELD:
        raise ValueError(f"a field's name may have {LONGEST_FIELD} characters")
    return name


_FieldName = Annotated[str, AfterValidator(_is_unicode), AfterValidator(_is_short)]


class RerankRequest(_Scale):
    """As Cohere, Jina, vLLM, Infinity, Xinference and SiliconFlow take it."""

    query: Query | QueryObject
    documents: Annotated[list[str | dict[str, Any]], _few_wrong(_is_text_or_object)] = Field(
        description='Strings, or objects with a "text", or with the fields that rank_fields names.'
    )
    rank_fields: Annotated[list[_FieldName] | None, _few_wrong(_is_text)] = Field(
        default=None, max_length=MOST_FIELDS, description="Fields to read of objects, in this order (Cohere v1)."
    )
    top_n: int | None = Field(default=None, ge=0, description="Answer with at most so many documents; 0 for all.")
    return_documents: bool | None = Field(default=None, description="Answer with the documents' texts.")
    threshold: FiniteFloat | Literal["native"] | None = Field(
        default=None,
        description="Leave out documents that do not score above this, on the raw scale; native for the model's own; "
        "null for none. Without it the service's setting applies.",
    )
    min_docs: int | None = Field(default=None, ge=0, description="The best so many stay, even below the threshold.")
    partial: bool | None = Field(
        default=None, description="If documents cannot be scored, answer with the others and name those in errors."
    )

    @model_validator(mode="after")
    def _limits_make_sense(self) -> Self:
        check_limits(None, self.top_n or None, self.min_docs or 0)
        return self

    @property
    def query_text(self) -> str:
        """The query."""
        return self.query if isinstance(self.query, str) else self.query.text

    @property
    def count(self) -> int:
        """How many documents there are to score."""
        return len(self.documents)

    def asked(self) -> Question:
        """What is to be scored."""
        texts, faults = texts_of(self.documents, self.rank_fields)
        return self.question([self.query_text] * len(texts), texts, faults)

    def cutoff(self, description: Description, drop: bool) -> float | None:
        """Documents must score above this; None if all stay.

        Args:
            description: Of the model.
            drop: Whether the service leaves irrelevant documents out by itself.

        Raises:
            RefusedError: The native threshold of a model that has none.
        """
        chosen = self.threshold if "threshold" in self.model_fields_set else "native" if drop else None
        if chosen != "native":
            return chosen
        if description.threshold is None:
            raise RefusedError(422, f"{description.name} has no native threshold. Give a number, or null for none.")
        return description.threshold


class TextsRequest(_Scale):
    """As TEI (text-embeddings-inference) takes it."""

    query: Query
    texts: Annotated[list[str], _few_wrong(_is_text)]
    return_text: bool | None = Field(default=None, description="Answer with the texts.")

    @property
    def count(self) -> int:
        """How many documents there are to score."""
        return len(self.texts)

    def asked(self) -> Question:
        """What is to be scored."""
        return self.question([self.query] * len(self.texts), self.texts)


class ScoreRequest(_Scale):
    """As vLLM takes it: one query and any number of documents, or as many queries as documents."""

    text_1: Annotated[Query | list[Query], _few_wrong(_is_text)] = Field(
        validation_alias=AliasChoices("text_1", "queries", "data_1"), description="Queries. Or as queries, data_1."
    )
    text_2: Annotated[str | list[str], _few_wrong(_is_text)] = Field(
        validation_alias=AliasChoices("text_2", "documents", "items", "data_2"),
        description="Documents. Or as documents, items, data_2.",
    )

    @model_validator(mode="after")
    def _one_query_or_one_each(self) -> Self:
        queries, documents = _listed(self.text_1), _listed(self.text_2)
        if len(queries) not in (1, len(documents)):
            raise ValueError(
                f"{len(queries)} queries and {len(documents)} documents: give one query, or one for each document"
            )
        return self

    @property
    def count(self) -> int:
        """How many documents there are to score."""
        return len(_listed(self.text_2))

    def asked(self) -> Question:
        """What is to be scored."""
        queries, documents = _listed(self.text_1), _listed(self.text_2)
        return self.question(queries * len(documents) if len(queries) == 1 else queries, documents)


class RankingRequest(Options):
    """As NVIDIA's ranking services take it."""

    query: QueryObject
    passages: Annotated[list[TextObject], _few_wrong(_is_object_with_text)]

    @property
    def count(self) -> int:
        """How many documents there are to score."""
        return len(self.passages)

    def asked(self) -> Question:
        """What is to be scored."""
        return self.question([self.query.text] * len(self.passages), [passage.text for passage in self.passages])


class ExplainRequest(_Shape):
    """One score to be taken apart."""

    query: Query
    document: Query


def _kind(body: Any) -> str:
    return "TEI" if isinstance(body, dict) and "texts" in body else "rerank"


AnyRerankRequest = Annotated[
    Annotated[TextsRequest, Tag("TEI")] | Annotated[RerankRequest, Tag("rerank")], Discriminator(_kind)
]
"""What ``/rerank`` takes: TEI's shape if there are texts, else that of the others."""


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def texts_of(
    documents: Sequence[str | Mapping[str, Any]], fields: Sequence[str] | None = None
) -> tuple[list[str], dict[int, str]]:
    r"""What is to be read of each document.

    Args:
        documents: Strings or objects.
        fields: Names of the objects' fields to read, each once, one a line; ``text`` if None.

    Returns:
        A text a document, and what is wrong with those that have none.

    >>> texts_of(["one", {"text": "two"}, {"title": "three", "year": 3}], ["title", "year", "text"])
    (['one', 'two', 'three\n3'], {})
    >>> texts_of([{"body": "one"}])
    ([''], {0: 'has no "text".'})
    """
    names = list(dict.fromkeys(fields)) if fields else ["text"]
    texts, faults = [], {}
    for index, document in enumerate(documents):
        try:
            texts.append(document if isinstance(document, str) else _text_of(document, names))
        except InputError as error:
            texts.append("")
            faults[index] = str(error)
    return texts, faults


def _text_of(document: Mapping[str, Any], names: Sequence[str]) -> str:
    found = [(name, document[name]) for name in names if document.get(name) is not None]
    if not found:
        raise InputError("has no " + " and no ".join(f'"{name}"' for name in names) + ".")
    for name, value in found:
        if not isinstance(value, (str, int, float)):
            raise InputError(f'has a "{name}" that is no text.')
    return "\n".join(str(value) for _, value in found)


@dataclass(frozen=True)
class Question:
    """What a request asks to be scored, whatever shape it came in.

    Attributes:
        pairs: In the request's order.
        faults: What is wrong with pairs that cannot be scored, by their position.
        may_be_cut: Whether long documents may be cut; None if the request does not say.
    """

    pairs: list[Pair]
    faults: dict[int, str] = field(default_factory=dict)
    may_be_cut: bool | None = None

    def bounded(self, most: int | None) -> Question:
        """The same under a service's limit of tokens: a longer document is refused, unless the request wants it cut.

        Args:
            most: Tokens of a document; None for no limit.
        """
        if most is None:
            return self
        within = all(pair.max_tokens is not None and pair.max_tokens <= most for pair in self.pairs)
        pairs = [replace(pair, max_tokens=min(pair.max_tokens or most, most)) for pair in self.pairs]
        return replace(self, pairs=pairs, may_be_cut=within if self.may_be_cut is None else self.may_be_cut)

    @property
    def usable(self) -> list[Pair]:
        """Pairs that can be scored."""
        return [pair for place, pair in enumerate(self.pairs) if place not in self.faults]

    def outcomes(self, found: Sequence[Outcome]) -> list[Outcome]:
        """One outcome a pair, from those of the usable ones."""
        rest = iter(found)
        return [
            Outcome(None, fault="input", error=self.faults[place]) if place in self.faults else next(rest)
            for place in range(len(self.pairs))
        ]


def complaints(question: Question, outcomes: Sequence[Outcome]) -> tuple[dict[int, str], int]:
    """What is wrong with which document, and the HTTP status that a request deserves for it.

    Args:
        question: What was asked.
        outcomes: One a pair.
    """
    wrong = {place: outcome.error for place, outcome in enumerate(outcomes) if outcome.score is None}
    cut = {
        place: f"was cut: it has more tokens than are read{_limit(question.pairs[place])}."
        for place, outcome in enumerate(outcomes)
        if outcome.truncated and question.may_be_cut is False
    }
    if wrong and all(outcome.fault == "internal" for outcome in outcomes):
        return wrong, 500
    return {**cut, **wrong}, 422 if wrong else 413


def _limit(pair: Pair) -> str:
    return "" if pair.max_tokens is None else f" ({pair.max_tokens})"


def refusal(faults: Mapping[int, str], status: int) -> RefusedError:
    """The error of a request with documents that have no score."""
    texts = set(faults.values())
    if len(texts) == 1 and (text := next(iter(texts))).startswith(("The query", "A query")):
        return RefusedError(status, text)
    first = min(faults)
    more = f" So it is with {len(faults) - 1} more." if len(faults) > 1 else ""
    return RefusedError(status, f"Document {first} {faults[first]}{more}", faults)


# Answers


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


class ReturnedDocument(BaseModel):
    """A document's text as it was read."""

    text: str


class RerankedDocument(BaseModel):
    """One row of an answer."""

    index: int
    relevance_score: float
    truncated: bool
    document: ReturnedDocument | None = None


class Usage(BaseModel):
    """Tokens read, of queries and documents together; 0 if the model does not count."""

    prompt_tokens: int
    total_tokens: int


class ApiVersion(BaseModel):
    """As Cohere's clients expect it."""

    version: str


class BilledUnits(BaseModel):
    """As Cohere's clients expect it."""

    search_units: int


class Meta(BaseModel):
    """As Cohere's clients expect it."""

    api_version: ApiVersion
    billed_units: BilledUnits


class RerankResponse(BaseModel):
    """The fields of Cohere, Jina, Infinity and vLLM at once."""

    id: str
    object: Literal["rerank"] = "rerank"
    created: int
    model: str
    results: list[RerankedDocument] = Field(description="Best first; documents without text last.")
    meta: Meta
    usage: Usage
    threshold: float | None = Field(description="The model's native threshold, on the raw scale.")
    errors: list[DocumentError] | None = Field(default=None, description="Documents without a score, if partial.")


class TextScore(BaseModel):
    """One row of TEI's answer."""

    index: int
    score: float
    text: str | None = None


class ScoreRow(BaseModel):
    """One row of vLLM's answer."""

    index: int
    object: Literal["score"] = "score"
    score: float
    truncated: bool


class ScoreResponse(BaseModel):
    """vLLM's answer, in input order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreRow]
    usage: Usage


class Ranking(BaseModel):
    """One row of NVIDIA's answer."""

    index: int
    logit: float
    truncated: bool


class RankingResponse(BaseModel):
    """NVIDIA's answer, best first."""

    rankings: list[Ranking]
    usage: Usage


class ModelCard(BaseModel):
    """One model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "rsrank-rag"


class ModelList(BaseModel):
    """All models: one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ExplainResponse(BaseModel):
    """The exact parts of one score: see `Explanation`."""

    query: str
    document: str
    score: float
    truncated: bool
    tokens: list[str] = Field(description="The T scored tokens of the query.")
    layers: list[int] = Field(description="The L layers read.")
    parts: list[list[float]] = Field(description="T x L; all together they are the score.")


@dataclass(frozen=True)
class Heading:
    """What stands at the top of answers.

    Attributes:
        id: Of the request.
        created: When, in seconds since 1970.
        description: Of the model.
    """

    id: str
    created: int
    description: Description


def usage(outcomes: Iterable[Outcome]) -> Usage:
    """Tokens of all outcomes."""
    tokens = sum(outcome.tokens for outcome in outcomes)
    return Usage(prompt_tokens=tokens, total_tokens=tokens)


def _scored(outcomes: Iterable[Outcome]) -> list[Scored]:
    return [Scored(o.score, o.truncated, tokens=o.tokens) for o in outcomes if o.score is not None]


def _ranked(question: Question, outcomes: Sequence[Outcome]) -> tuple[RankedDocument, ...]:
    texts = [pair.document for pair in question.pairs]
    return choose("", texts, _scored(outcomes), None).kept


def rerank_response(
    request: RerankRequest,
    question: Question,
    outcomes: Sequence[Outcome],
    heading: Heading,
    *,
    cutoff: float | None,
    normalised: bool,
    faults: Mapping[int, str],
) -> RerankResponse:
    """The answer to a `RerankRequest`.

    Args:
        request: What was asked.
        question: The same as pairs.
        outcomes: One a pair.
        heading: What stands at the top.
        cutoff: Documents must score above this; None if all stay.
        normalised: Scores between 0 and 1.
        faults: Documents that are left out, and why.
    """
    native = heading.description.threshold
    places = [place for place in range(len(outcomes)) if place not in faults]
    kept = choose(
        request.query_text,
        [question.pairs[place].document for place in places],
        _scored(outcomes[place] for place in places),
        cutoff,
        top_n=request.top_n or None,
        min_docs=request.min_docs or 0,
    ).kept
    rows = []
    for document in kept:
        score = normalise(document.score, native) if normalised else document.score
        row = RerankedDocument(index=places[document.index], relevance_score=score, truncated=document.truncated)
        if request.return_documents:
            row.document = ReturnedDocument(text=document.text)
        rows.append(row)
    response = RerankResponse(
        id=heading.id,
        object="rerank",
        created=heading.created,
        model=heading.description.name,
        results=rows,
        meta=Meta(
            api_version=ApiVersion(version="2"),
            billed_units=BilledUnits(search_units=math.ceil(len(outcomes) / SEARCH_UNIT)),
        ),
        usage=usage(outcomes),
        threshold=native,
    )
    if faults:
        response.errors = [DocumentError(index=index, message=faults[index]) for index in sorted(faults)]
    return response


def texts_response(
    request: TextsRequest, question: Question, outcomes: Sequence[Outcome], native: float | None, normalised: bool
) -> list[TextScore]:
    """The answer to a `TextsRequest`: every text, best first."""
    rows = []
    for document in _ranked(question, outcomes):
        score = normalise(document.score, native) if normalised else document.score
        row = TextScore(index=document.index, score=score)
        if request.return_text:
            row.text = document.text
        rows.append(row)
    return rows


def score_response(outcomes: Sequence[Outcome], heading: Heading, normalised: bool) -> ScoreResponse:
    """The answer to a `ScoreRequest`: every pair, in input order."""
    native = heading.description.threshold
    return ScoreResponse(
        id=heading.id,
        object="list",
        created=heading.created,
        model=heading.description.name,
        data=[
            ScoreRow(
                index=index,
                object="score",
                score=normalise(found.score, native) if normalised else found.score,
                truncated=found.truncated,
            )
            for index, found in enumerate(_scored(outcomes))
        ],
        usage=usage(outcomes),
    )


def ranking_response(question: Question, outcomes: Sequence[Outcome]) -> RankingResponse:
    """The answer to a `RankingRequest`: every passage, best first, with its raw score."""
    rows = _ranked(question, outcomes)
    return RankingResponse(
        rankings=[Ranking(index=row.index, logit=row.score, truncated=row.truncated) for row in rows],
        usage=usage(outcomes),
    )


def model_list(heading: Heading) -> ModelList:
    """The answer to ``GET /v1/models``."""
    card = ModelCard(id=heading.description.name, object="model", created=heading.created, owned_by="rsrank-rag")
    return ModelList(object="list", data=[card])


def explain_response(explanation: Explanation) -> ExplainResponse:
    """The answer to an `ExplainRequest`."""
    return ExplainResponse(
        query=explanation.query,
        document=explanation.document,
        score=explanation.score,
        truncated=explanation.truncated,
        tokens=list(explanation.tokens),
        layers=list(explanation.layers),
        parts=[list(row) for row in explanation.parts],
    )
