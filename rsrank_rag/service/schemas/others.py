"""Queries and documents as clients of TEI, vLLM and NVIDIA send them; answers hold all of them."""

from typing import Annotated, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, FailFast, Field, model_validator
from typing_extensions import Self

from .common import (
    Flag,
    Query,
    QueryObject,
    Question,
    ScaledRequest,
    Scores,
    ScoringRequest,
    TextObject,
    Usage,
)

OneOrMore = BeforeValidator(
    lambda texts: [texts] if isinstance(texts, str) else texts,
    json_schema_input_type=str | list[str],
)
"""Lets a single text stand for a list of one."""


class TextScore(BaseModel):
    """One row of TEI's answer."""

    index: int
    score: float
    text: str | None = None


class TextsRequest(ScaledRequest):
    """As TEI (text-embeddings-inference) takes it."""

    query: Query
    texts: Annotated[list[str], FailFast()]
    return_text: Flag | None = Field(default=None, description="Answer with the texts.")

    def pairs_to_score(self) -> Question:  # noqa: D102 - inherited
        return self.question([self.query] * len(self.texts), self.texts)

    def answer(self, scores: Scores) -> list[TextScore]:
        """Every text, best first."""
        return [
            TextScore(
                index=one.index,
                score=scores.shown(one.score),
                text=one.text if self.return_text else None,
            )
            for one in scores.ranked().kept
        ]


class ScoreRow(BaseModel):
    """One row of vLLM's answer."""

    index: int
    object: Literal["score"]
    score: float
    truncated: bool


class ScoreResponse(BaseModel):
    """vLLM's answer, in input order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreRow]
    usage: Usage


class ScoreRequest(ScaledRequest):
    """As vLLM takes it: one query and any number of documents, or as many queries as documents."""

    text_1: Annotated[list[Query], FailFast(), OneOrMore] = Field(
        validation_alias=AliasChoices("text_1", "queries", "data_1"),
        description="Queries. Or as queries, data_1.",
    )
    text_2: Annotated[list[str], FailFast(), OneOrMore] = Field(
        validation_alias=AliasChoices("text_2", "documents", "items", "data_2"),
        description="Documents. Or as documents, items, data_2.",
    )

    @model_validator(mode="after")
    def _one_query_or_one_each(self) -> Self:
        queries, documents = len(self.text_1), len(self.text_2)
        if queries not in (1, documents):
            raise ValueError(
                f"{queries} queries and {documents} documents: "
                "give one query, or one for each document"
            )
        return self

    def pairs_to_score(self) -> Question:  # noqa: D102 - inherited
        queries = self.text_1 * len(self.text_2) if len(self.text_1) == 1 else self.text_1
        return self.question(queries, self.text_2)

    def answer(self, scores: Scores) -> ScoreResponse:
        """Every pair, in input order."""
        rows = [
            ScoreRow(
                index=index,
                object="score",
                score=scores.shown(one.score),
                truncated=one.truncated,
            )
            for index, one in enumerate(scores.scored)
        ]
        return ScoreResponse(object="list", data=rows, **scores.heading)


class Ranking(BaseModel):
    """One row of NVIDIA's answer."""

    index: int
    logit: float
    truncated: bool


class RankingResponse(BaseModel):
    """NVIDIA's answer, best first."""

    rankings: list[Ranking]
    usage: Usage


class RankingRequest(ScoringRequest):
    """As NVIDIA's ranking services take it."""

    query: QueryObject
    passages: Annotated[list[TextObject], FailFast()]

    def pairs_to_score(self) -> Question:  # noqa: D102 - inherited
        return self.question(
            [self.query.text] * len(self.passages), [passage.text for passage in self.passages]
        )

    def answer(self, scores: Scores) -> RankingResponse:
        """Every passage, best first, with its raw score."""
        rows = [
            Ranking(index=d.index, logit=d.score, truncated=d.truncated)
            for d in scores.ranked().kept
        ]
        return RankingResponse(rankings=rows, usage=scores.usage)


class ExplainRequest(ScoringRequest):
    """One score to be taken apart."""

    explain: ClassVar = True
    query: Query
    document: Query

    def pairs_to_score(self) -> Question:  # noqa: D102 - inherited
        return self.question([self.query], [self.document])

    def answer(self, scores: Scores) -> "ExplainResponse":
        """The parts of the score."""
        return ExplainResponse.model_validate(scores.outcomes[0].explanation, from_attributes=True)


class ExplainResponse(BaseModel):
    """The exact parts of one score: see `Explanation`."""

    query: str
    document: str
    score: float
    truncated: bool
    tokens: tuple[str, ...] = Field(description="The T scored tokens of the query.")
    layers: tuple[int, ...] = Field(description="The L layers read.")
    parts: tuple[tuple[float, ...], ...] = Field(
        description="T x L shift terms; with the similarity terms, they add up to the score."
    )
    agreement: float = Field(
        description="The similarity terms together; 0 where the artifact has none."
    )
    matches: tuple[float, ...] = Field(
        description="T: the MaxSim term of each query token; or empty."
    )


class ModelCard(BaseModel):
    """One model, as OpenAI and NVIDIA list it; Xinference reads its type."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "rsrank-rag"
    model_type: Literal["rerank"] = "rerank"


class ModelList(BaseModel):
    """All models: one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
