"""A query and its texts, as clients of TEI (text-embeddings-inference) send them: every text is in the answer."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from .common import Query, Question, ScaledRequest, Scores, few_wrong, is_text


class TextsRequest(ScaledRequest):
    """As TEI (text-embeddings-inference) takes it."""

    query: Query
    texts: Annotated[list[str], few_wrong(is_text)]
    return_text: bool | None = Field(default=None, description="Answer with the texts.")

    @property
    def count(self) -> int:  # noqa: D102 - inherited
        return len(self.texts)

    def asked(self) -> Question:  # noqa: D102
        return self.question([self.query] * len(self.texts), self.texts)

    def answer(self, scores: Scores) -> list[TextScore]:
        """Every text, best first."""
        rows = []
        for document in scores.ranked().kept:
            row = TextScore(index=document.index, score=scores.shown(document.score))
            if self.return_text:
                row.text = document.text
            rows.append(row)
        return rows


class TextScore(BaseModel):
    """One row of TEI's answer."""

    index: int
    score: float
    text: str | None = None
