"""Answers, in the schemas of Cohere, Jina, vLLM, Infinity, Voyage, Weaviate, TEI and NVIDIA."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pydantic_core import to_json

from ...ranking.results import RankedDocument, RankResult, choose
from ...ranking.rule import Rule
from ...reading.parts import WHOLE, Reading
from ..messages import Description, Outcome, ServiceError
from .request import RankRequest

Drop: TypeAlias = bool | Literal["always"]
"""Whether irrelevant documents are left out; "always": even if a request asks for all."""

# Documents that Cohere bills as one search. Nothing is billed here, but clients read the number.
SEARCH_UNIT = 100


def text_bytes(request: RankRequest) -> int:
    """The most bytes that the documents' texts take in the answer to a request."""
    copies = request.return_documents + bool(request.extract)
    # Voyage gets the results twice.
    copies *= 1 if request.top_k is None else 2
    copies += request.weaviates is not None
    return copies and copies * sum(len(to_json(text)) for text in request.entries)


@dataclass(frozen=True)
class Answer:
    """The answer to a request.

    Attributes:
        request: The request.
        outcomes: One for each document, with a score.
        model: The model that scored.
        name: What the model is called.
        id: The request's.
        normalize: Whether scores lie between 0 and 1 by default.
        drop: Whether irrelevant documents are left out by default.
    """

    request: RankRequest
    outcomes: Sequence[Outcome]
    model: Description
    name: str = ""
    id: str = ""
    normalize: bool = False
    drop: Drop = False

    def ranked(self, rule: Rule | None = None, reading: Reading = WHOLE) -> RankResult:
        """Documents best first, those that a rule keeps; all of them without a rule."""
        scored = [outcome.scored for outcome in self.outcomes if outcome.scored]
        return choose("", self.request.entries, scored, rule or Rule(), reading=reading)

    def shown(self, ranked: RankResult) -> RankResult:
        """A result with raw scores, or with scores from 0 to 1, as the request wants them."""
        request = self.request
        normalised = request.normalize
        if normalised is None:
            raw = request.raw_scores
            normalised = self.normalize if raw is None else not raw
        return ranked.normalised(self.model.rule.threshold) if normalised else ranked

    @property
    def none_relevant(self) -> bool:
        """Whether no document scored above the native threshold."""
        return self.ranked(self.model.rule).none_relevant

    @property
    def tokens(self) -> int:
        """Tokens read, of queries and documents together; 0 if the model does not count."""
        return sum(outcome.scored.tokens for outcome in self.outcomes if outcome.scored)

    def rule(self) -> Rule:
        """The rule that decides which documents are left out.

        A program that requests as many documents as it sends may pair the scores with its own list.
        Such a request gets all documents, unless ``drop`` is "always".
        """
        request = self.request
        threshold = request.threshold
        count = len(request.entries)
        # Clients of TEI expect all rows unless they send a limit.
        most = request.most or (None if request.texts is None else count)
        drops = self.drop == "always" or (self.drop and most != count)
        if "threshold" not in request.model_fields_set and (drops or request.extract):
            threshold = "native"
        rule = self.model.rule
        if threshold == "native" and rule.threshold is None:
            raise ServiceError(
                422, f"{self.name} has no native threshold. Give a number, or null for none."
            )
        return rule.with_limits(request.limits(threshold))

    def body(self) -> Any:
        """The answer in the client's schema, best document first."""
        usage = {"prompt_tokens": self.tokens, "total_tokens": self.tokens}
        request, rule = self.request, self.model.rule
        if request.passages is not None:
            rankings = [
                {"index": one.index, "logit": one.score, "truncated": one.truncated}
                for one in self.ranked()
            ]
            return {"rankings": rankings, "usage": usage}
        reading = request.reading(self.model.long_documents)
        kept = self.shown(self.ranked(self.rule(), reading)).kept
        if request.texts is not None:
            return [
                _present(
                    index=one.index,
                    score=one.score,
                    text=one.text if request.return_documents else None,
                )
                for one in kept
            ]
        rows = [self._row(one) for one in kept]
        # All documents in the request's order, for Weaviate.
        every = self.shown(self.ranked()).in_order
        scores = [{"document": one.text, "score": one.score} for one in every]
        return _present(
            id=self.id,
            object="rerank",
            created=int(time.time()),
            model=self.name,
            results=rows,
            none_relevant=self.none_relevant,
            meta={
                "api_version": {"version": "2"},
                "billed_units": {"search_units": math.ceil(len(self.outcomes) / SEARCH_UNIT)},
                "tokens": {"input_tokens": self.tokens, "output_tokens": 0},
            },
            usage=usage,
            threshold=rule.threshold,
            max_gap=rule.max_gap,
            fallback=rule.fallback,
            query_truncated=any(one.query_truncated for one in self.outcomes) or None,
            # Voyage's clients read the results here.
            data=None if request.top_k is None else rows,
            scores=None if request.weaviates is None else scores,
        )

    def _row(self, document: RankedDocument) -> dict[str, Any]:
        request = self.request
        return _present(
            index=document.index,
            relevance_score=document.score,
            truncated=document.truncated,
            weak=document.weak or None,
            document={"text": document.extract} if request.return_documents else None,
            excerpts=document.excerpts if request.extract else None,
            # Some programs refuse a row with a field that they do not know.
            window=document.window if "long_documents" in request.model_fields_set else None,
        )


def _present(**fields: Any) -> dict[str, Any]:
    """The fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}
