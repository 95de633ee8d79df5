"""API schemas as pure functions: requests to pairs, outcomes to answers, scores in [0, 1]."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rsrank_rag.errors import problems_of
from rsrank_rag.ranking.results import normalise
from rsrank_rag.ranking.rule import BLANK_SCORE, Fallback, Rule
from rsrank_rag.reading.parts import Reading
from rsrank_rag.reranker import Pair, Scored
from rsrank_rag.service.messages import Description, Outcome, ServiceError
from rsrank_rag.service.middleware import error_response
from rsrank_rag.service.schemas.answers import answer_to, rule_of
from rsrank_rag.service.schemas.request import RankRequest
from rsrank_rag.service.settings import Settings

FINITE = st.floats(allow_nan=False, allow_infinity=False)
MODEL = Description(Rule(1.0))


def rerank(**fields):
    return RankRequest.model_validate({"query": "q", "documents": ["a", "b"], **fields})


def pairs(**fields):
    return rerank(**fields).pairs(MODEL)


def outcomes(*scores):
    return [Outcome(Scored(score, tokens=3)) for score in scores]


def answer(request, actual, **settings):
    return answer_to(request, actual, MODEL, "fake", Settings(**settings))


# Scores between 0 and 1


@given(FINITE, FINITE)
def test_a_half_means_exactly_the_threshold(score, threshold):
    actual = normalise(score, threshold)
    assert 0 <= actual <= 1
    assert np.sign(actual - 0.5) == (score > threshold) - (score < threshold)


@given(FINITE, FINITE, FINITE)
def test_a_higher_score_is_never_lower_between_0_and_1(first, second, threshold):
    low, high = sorted([first, second])
    assert normalise(low, threshold) <= normalise(high, threshold)


@given(st.floats(-30, 30))
def test_it_is_the_logistic_function(score):
    expected = 1 / (1 + math.exp(-(score + 2 - 2.0)))
    assert normalise(score + 2, 2.0) == pytest.approx(expected, rel=1e-12)


def test_without_a_threshold_the_middle_is_zero():
    assert normalise(0.0, None) == 0.5
    assert normalise(2.0, None) == normalise(2.0, 0.0)


@pytest.mark.parametrize(
    ("fields", "default", "expected"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"normalize": True}, False, True),
        ({"normalize": False}, True, False),
        ({"normalize": None}, True, True),
        ({"raw_scores": False}, False, True),
        ({"raw_scores": True}, True, False),
        ({"normalize": False, "raw_scores": False}, True, False),
    ],
)
def test_who_asks_for_scores_between_0_and_1_gets_them(fields, default, expected):
    actual = answer(rerank(**fields), outcomes(1, 2), normalize=default)
    assert actual["results"][1]["relevance_score"] == (0.5 if expected else 1.0)


# Requests


@given(st.lists(st.one_of(st.text(), st.fixed_dictionaries({"text": st.text()}))))
def test_every_document_gives_one_pair_with_its_own_text(documents):
    texts = [d if isinstance(d, str) else d["text"] for d in documents]
    for name in ("documents", "texts", "passages"):
        request = RankRequest.model_validate({"query": {"text": "q"}, name: documents})
        assert request.pairs(MODEL) == [Pair("q", text) for text in texts]


def test_unknown_fields_and_any_model_are_accepted():
    ignored = {"model": {"name": 3}, "truncate": False, "instruction": "i", "max_tokens_per_doc": 1}
    assert pairs(**ignored) == pairs()


@pytest.mark.parametrize(
    "fields",
    [
        {"query": 1},
        {"query": "x" * 10_001},
        {"documents": "a"},
        {"documents": [1]},
        {"documents": ["a", None]},
        {"documents": None},
        {"texts": ["a"]},
        {"top_n": "five"},
        {"top_n": 1.5},
        {"top_n": -1},
        {"threshold": math.nan},
        {"threshold": math.inf},
        {"threshold": "mine"},
        {"fallback": 3},
        {"normalize": "perhaps"},
        {"max_characters": 0},
    ],
)
def test_what_means_nothing_is_refused(fields):
    with pytest.raises(ValidationError):
        rerank(**fields)


@pytest.mark.parametrize(
    ("fields", "top_n", "returned"),
    [
        ({"top_n": "1", "return_documents": "true"}, 1, True),
        ({"top_n": 1.0, "return_documents": "false"}, 1, False),
        ({"top_k": 1, "return_text": True}, 1, True),
        ({"top_n": 0}, None, False),
    ],
)
def test_switches_and_numbers_are_read_as_programs_send_them(fields, top_n, returned):
    request = rerank(**fields)
    assert (request.most, request.return_documents) == (top_n, returned)


def test_long_documents_are_read_as_the_model_does_by_default():
    model = Description(Rule(1.0), 512, "windows")
    windows = Reading(long_documents="windows")
    assert rerank().pairs(model)[0].reading == windows
    assert rerank(long_documents=None).pairs(model)[0].reading == windows
    assert rerank(long_documents="cut").pairs(model)[0].reading == Reading()


def error_of(text):
    with pytest.raises(ValidationError) as caught:
        RankRequest.model_validate_json(text)
    return problems_of(caught.value)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("{", "Invalid JSON"),
        ("[]", "Input should be an object"),
        ('{"query": "q"}', "one of documents, texts and passages is required"),
        ('{"query": 1, "documents": []}', "query: Input should be a valid string"),
        ('{"query": {"text": 1}, "documents": []}', "query: Input should be a valid string"),
        ('{"query": "q", "texts": ["a", {}]}', "texts.1: Input should be a valid string"),
        ('{"query": "q", "documents": [], "threshold": 1e999}', "threshold"),
        ('{"query": "%s", "documents": []}' % ("x" * 10_001), "query: "),
        (r'{"query": "\ud800", "documents": []}', "Invalid JSON"),
    ],
)
def test_a_body_that_is_no_request_is_an_error_that_repeats_none_of_it(body, says):
    error = error_of(body)
    assert says in error
    assert len(error) < 300


# Answers


@pytest.mark.parametrize(
    ("fields", "drop", "expected"),
    [
        ({"top_n": 2}, True, None),
        ({"top_n": 1}, True, 1.0),
        ({"top_n": 3}, True, 1.0),
        ({"top_n": 2, "threshold": "native"}, False, 1.0),
        ({}, False, None),
        ({}, True, 1.0),
        ({"threshold": None}, True, None),
        ({"threshold": "native"}, False, 1.0),
        ({"threshold": 0}, True, 0.0),
        ({"threshold": -2.5}, False, -2.5),
        ({"top_n": 2}, "always", 1.0),
        ({"threshold": None}, "always", None),
        ({"extract": "sentences"}, False, 1.0),
        ({"texts": ["a", "b"], "documents": None}, True, None),
    ],
)
def test_the_request_decides_what_is_dropped_and_else_the_service(fields, drop, expected):
    assert rule_of(rerank(**fields), MODEL, Settings(drop=drop)).threshold == expected


@pytest.mark.parametrize(
    "fields", [{"threshold": 0, "max_gap": -1}, {"threshold": None, "fallback": Fallback(1.0, 2.0)}]
)
def test_limits_out_of_range_or_without_effect_are_refused(fields):
    with pytest.raises(ServiceError) as refused:
        rule_of(rerank(**fields), MODEL, Settings())
    assert refused.value.status_code == 422


def test_an_error_has_the_fields_of_every_client():
    body = json.loads(error_response(422, "Document 1 has no score.", {1: "has no score."}).body)
    assert body["error"] == body["message"] == body["detail"] == "Document 1 has no score."
    assert body["documents"] == [{"index": 1, "message": "has no score."}]


@given(st.data())
def test_rows_are_sorted_by_the_raw_score_and_hold_what_was_asked_for(data):
    scores = data.draw(st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=20))
    cutoff = data.draw(st.none() | st.integers(-6, 6).map(float))
    top_n = data.draw(st.none() | st.integers(0, 22))
    normalised = data.draw(st.booleans())
    texts = [f"text {i}" for i in range(len(scores))]
    fields = {"documents": texts, "top_n": top_n, "return_documents": True, "threshold": cutoff}
    request = rerank(**fields, normalize=normalised)
    rows = answer(request, outcomes(*scores))["results"]
    kept = [i for i, score in enumerate(scores) if cutoff is None or score > cutoff]
    expected = sorted(kept, key=lambda i: -scores[i])[: top_n or None]
    assert [row["index"] for row in rows] == expected
    assert [row["document"]["text"] for row in rows] == [f"text {i}" for i in expected]
    shown = [normalise(score, 1.0) if normalised else score for score in scores]
    assert [row["relevance_score"] for row in rows] == [shown[i] for i in expected]


def test_blank_documents_come_last_and_are_never_relevant():
    request = rerank(documents=[" ", "a", "b"])
    rows = answer(request, outcomes(0, -2, -1))["results"]
    assert [row["index"] for row in rows] == [2, 1, 0]
    assert rows[2]["relevance_score"] == BLANK_SCORE


def test_the_answer_has_the_fields_of_cohere_jina_infinity_and_vllm():
    actual = answer(rerank(), outcomes(1, 2))
    assert actual == {
        "id": actual["id"],
        "object": "rerank",
        "created": actual["created"],
        "model": "fake",
        "results": [
            {"index": 1, "relevance_score": 2.0, "truncated": False},
            {"index": 0, "relevance_score": 1.0, "truncated": False},
        ],
        "none_relevant": False,
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": 6, "output_tokens": 0},
        },
        "usage": {"prompt_tokens": 6, "total_tokens": 6},
        "threshold": 1.0,
    }


def test_tei_nvidia_voyage_and_weaviate_get_rows_of_their_own():
    texts = rerank(texts=["a", "b", ""], documents=None)
    assert answer(texts, outcomes(-3, 2, 0)) == [
        {"index": 1, "score": 2},
        {"index": 0, "score": -3},
        {"index": 2, "score": BLANK_SCORE},
    ]
    text = rerank(texts=["a"], documents=None, return_text=True)
    assert answer(text, outcomes(1)) == [{"index": 0, "score": 1, "text": "a"}]
    assert answer(rerank(texts=[], documents=None), []) == []
    passages = rerank(passages=[{"text": "a"}, {"text": "b"}], documents=None)
    rankings = answer(passages, outcomes(-3, 2), normalize=True, drop=True)["rankings"]
    assert [(row["index"], row["logit"]) for row in rankings] == [(1, 2), (0, -3)]
    assert [row["index"] for row in answer(rerank(top_k=1), outcomes(1, 2))["data"]] == [1]
    weaviate = answer(rerank(property=""), outcomes(1, 2))
    assert weaviate["scores"] == [{"document": "a", "score": 1}, {"document": "b", "score": 2}]
    assert answer(rerank(property="", documents=[]), [])["scores"] == []


@pytest.mark.parametrize(
    ("fields", "copies"),
    [
        ({}, 0),
        ({"return_documents": True}, 1),
        ({"return_documents": True, "extract": "sentences"}, 2),
        ({"return_documents": True, "top_k": 1}, 2),
        ({"property": ""}, 1),
    ],
)
def test_texts_in_an_answer_are_counted_before_it_is_made(fields, copies):
    request = rerank(documents=["\x01" * 10, "\u00e9"], **fields)
    assert request.copies == copies
    made = json.dumps(answer(request, outcomes(2, 2)), ensure_ascii=False).encode()
    if "extract" not in fields:
        assert made.count(b"\\u0001") == 10 * copies
