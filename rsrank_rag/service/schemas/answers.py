"""Answers, in the schemas of Cohere, Jina, vLLM, Infinity, Voyage, Weaviate, TEI and NVIDIA."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from ...errors import InputError
from ...ranking.results import RankedDocument, RankResult, blanks_last, choose
from ...ranking.rule import Limits, Rule
from ...reading.documents import as_documents
from ...reading.parts import WHOLE, Reading
from ..messages import Description, Outcome, ServiceError
from ..settings import Settings
from .request import RankRequest


def rule_of(request: RankRequest, model: Description, settings: Settings) -> Rule:
    """The rule that decides which documents are left out of an answer.

    A program that requests as many documents as it sends may pair the scores with its own list.
    Such a request gets all documents, unless ``settings.drop`` is "always".

    Raises:
        ServiceError: A limit is out of range or has no effect, or the request needs a native
            threshold and the model has none.
    """
    threshold = request.threshold
    count = len(request.entries)
    # Clients of TEI expect all rows unless they send a limit.
    most = request.most or (None if request.texts is None else count)
    drops = settings.drop == "always" or (settings.drop and most != count)
    if "threshold" not in request.model_fields_set and (drops or request.extract):
        threshold = "native"
    if threshold == "native" and model.rule.threshold is None:
        raise ServiceError(422, "The model has no native threshold. Give a number, or null.")
    limits = Limits(
        threshold=threshold, max_gap=request.max_gap, fallback=request.fallback, top_n=request.most
    )
    try:
        return model.rule.with_limits(limits)
    except InputError as error:
        raise ServiceError(422, str(error)) from None


def is_normalised(request: RankRequest, settings: Settings) -> bool:
    """Whether the scores of an answer lie between 0 and 1. NVIDIA's clients read logits."""
    if request.passages is not None:
        return False
    if request.normalize is not None:
        return request.normalize
    if request.raw_scores is not None:
        return not request.raw_scores
    return settings.normalize


def answer_to(
    request: RankRequest,
    outcomes: Sequence[Outcome],
    model: Description,
    name: str,
    settings: Settings,
) -> Any:
    """The answer in the client's schema, best document first.

    Args:
        request: The request.
        outcomes: One for each document, with a score.
        model: The model that scored.
        name: What the model is called.
        settings: How scores are shown, and what is left out, by default.
    """
    scored = [outcome.scored for outcome in outcomes if outcome.scored]
    tokens = sum(one.tokens for one in scored)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    native = model.rule
    documents = as_documents(request.entries)
    scored = blanks_last(request.entries, scored)

    def ranked(rule: Rule, reading: Reading = WHOLE) -> RankResult:
        result = choose("", documents, scored, rule, reading=reading)
        if is_normalised(request, settings):
            return result.normalised(native.threshold)
        return result

    if request.passages is not None:
        rankings = [{"index": one.index, "logit": one.score} for one in ranked(Rule())]
        return {"rankings": rankings, "usage": usage}
    kept = ranked(rule_of(request, model, settings), request.reading(model.long_documents))
    if request.texts is not None:
        rows = []
        for one in kept:
            text = one.text if request.return_documents else None
            rows.append(_present(index=one.index, score=one.score, text=text))
        return rows
    rows = [_row(request, one) for one in kept]
    return _present(
        id=uuid.uuid4().hex,
        object="rerank",
        created=int(time.time()),
        model=name,
        results=rows,
        none_relevant=ranked(native).none_relevant,
        meta={
            "api_version": {"version": "2"},
            # Nothing is billed, but clients read the number.
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": tokens, "output_tokens": 0},
        },
        usage=usage,
        threshold=native.threshold,
        max_gap=native.max_gap,
        fallback=native.fallback,
        query_truncated=any(one.query_truncated for one in outcomes) or None,
        # Voyage's clients read the results here.
        data=None if request.top_k is None else rows,
        # Weaviate reads all scores, in the request's order.
        scores=None
        if request.weaviates is None
        else [{"document": one.text, "score": one.score} for one in ranked(Rule()).in_order],
    )


def _row(request: RankRequest, document: RankedDocument) -> dict[str, Any]:
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
