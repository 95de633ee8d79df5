"""A query and passages, as clients of NVIDIA's ranking services send them; and the list of models they ask for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel

from .common import QueryObject, Question, Scores, ScoringRequest, TextObject, Usage, few_wrong


def _is_object_with_text(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("text"), str)


class RankingRequest(ScoringRequest):
    """As NVIDIA's ranking services take it."""

    query: QueryObject
    passages: Annotated[list[TextObject], few_wrong(_is_object_with_text)]

    @property
    def count(self) -> int:  # noqa: D102 - inherited
        return len(self.passages)

    def asked(self) -> Question:  # noqa: D102
        return self.question([self.query.text] * len(self.passages), [passage.text for passage in self.passages])

    def answer(self, scores: Scores) -> RankingResponse:
        """Every passage, best first, with its raw score."""
        rows = [Ranking(index=d.index, logit=d.score, truncated=d.truncated) for d in scores.ranked().kept]
        return RankingResponse(rankings=rows, usage=scores.usage)


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
