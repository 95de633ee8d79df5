"""Pairs of queries and documents, as clients of vLLM's scores send them: answered in input order."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, Field, model_validator
from typing_extensions import Self

from .common import Query, Question, ScaledRequest, Scores, Usage, few_wrong, is_text


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


class ScoreRequest(ScaledRequest):
    """As vLLM takes it: one query and any number of documents, or as many queries as documents."""

    text_1: Annotated[Query | list[Query], few_wrong(is_text)] = Field(
        validation_alias=AliasChoices("text_1", "queries", "data_1"), description="Queries. Or as queries, data_1."
    )
    text_2: Annotated[str | list[str], few_wrong(is_text)] = Field(
        validation_alias=AliasChoices("text_2", "documents", "items", "data_2"),
        description="Documents. Or as documents, items, data_2.",
    )

    @model_validator(mode="after")
    def _one_query_or_one_each(self) -> Self:
        queries = _listed(self.text_1)
        if len(queries) not in (1, self.count):
            raise ValueError(
                f"{len(queries)} queries and {self.count} documents: give one query, or one for each document"
            )
        return self

    @property
    def count(self) -> int:  # noqa: D102 - inherited
        return len(_listed(self.text_2))

    def asked(self) -> Question:  # noqa: D102
        queries, documents = _listed(self.text_1), _listed(self.text_2)
        return self.question(queries * len(documents) if len(queries) == 1 else queries, documents)

    def answer(self, scores: Scores) -> ScoreResponse:
        """Every pair, in input order."""
        rows = [
            ScoreRow(index=index, object="score", score=scores.shown(found.score), truncated=found.truncated)
            for index, found in enumerate(scores.scored)
        ]
        name = scores.model.name
        return ScoreResponse(
            id=scores.id, object="list", created=scores.created, model=name, data=rows, usage=scores.usage
        )


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
