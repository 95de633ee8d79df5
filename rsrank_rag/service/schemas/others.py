"""Queries and documents as clients of TEI and NVIDIA send them."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, FailFast

from ...passages.explanation import Explanation
from ...passages.rule import Rule
from .common import Count, Flag, Scores, ScoringRequest, Text, TextObject, Usage


class TextScore(BaseModel):
    """One row of TEI's answer."""

    index: int
    score: float
    text: str | None = None


class TextsRequest(ScoringRequest):
    """As TEI (text-embeddings-inference) takes it."""

    query: Text
    texts: Annotated[list[Text], FailFast()]
    top_n: Count | None = None
    """As for documents; LiteLLM and Elasticsearch send it."""
    return_text: Flag | None = None
    """Answer with the texts."""

    def query_and_documents(self) -> tuple[str, list[str]]:  # noqa: D102 - inherited
        return self.query, self.texts

    def answer(self, scores: Scores) -> list[TextScore]:
        """Texts best first: all of them, unless the request or the service wants fewer."""
        most = self.top_n or len(self.texts)
        rule = scores.model.rule if scores.drops(most) else Rule()
        return [
            TextScore(
                index=one.index,
                score=scores.shown(one.score),
                text=one.text if self.return_text else None,
            )
            for one in scores.ranked(replace(rule, top_n=most or None)).kept
        ]


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

    query: TextObject
    passages: Annotated[list[TextObject], FailFast()]

    def query_and_documents(self) -> tuple[str, list[str]]:  # noqa: D102 - inherited
        return self.query.text, [passage.text for passage in self.passages]

    def answer(self, scores: Scores) -> RankingResponse:
        """Every passage, best first, with its raw score."""
        rows = [
            Ranking(index=one.index, logit=one.score, truncated=one.truncated)
            for one in scores.ranked().kept
        ]
        return RankingResponse(rankings=rows, usage=scores.usage)


class ExplainRequest(ScoringRequest):
    """One score to be taken apart."""

    explain: ClassVar = True
    query: Text
    document: Text

    def query_and_documents(self) -> tuple[str, list[str]]:  # noqa: D102 - inherited
        return self.query, [self.document]

    def answer(self, scores: Scores) -> Explanation:
        """The parts of the score, of all heads together."""
        explanation = scores.outcomes[0].explanation
        assert explanation is not None
        return replace(explanation, head_parts=())


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
