"""API schemas as pure functions: requests to pairs, outcomes to answers, scores in [0, 1]."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from rsrank_rag.reranker import BLANK_SCORE, Pair, Rule, Scored
from rsrank_rag.service.app import AnyRerankRequest
from rsrank_rag.service.backend import Description, Outcome
from rsrank_rag.service.error_responses import RequestError, error_response, request_error
from rsrank_rag.service.schemas.cohere import RerankRequest
from rsrank_rag.service.schemas.common import Scores, normalise
from rsrank_rag.service.schemas.others import RankingRequest, TextsRequest

FINITE = st.floats(allow_nan=False, allow_infinity=False)
MODEL = Description("fake", Rule(1.0), False)


def rerank(**fields):
    return RerankRequest.model_validate({"query": "q", "documents": ["a", "b"], **fields})


def outcomes(*scores):
    return [
        Outcome(Scored(score, tokens=3))
        if score is not None
        else Outcome(None, fault="unscored", error="has no score.")
        for score in scores
    ]


def scored(request, found, **fields):
    _, documents = request.query_and_documents()
    return Scores(documents, found, MODEL, id="some-id", **fields)


def answer(request, found, *, normalised=False, **limits):
    request = request.model_copy(update={"threshold": None, **limits})
    return request.answer(scored(request, found, normalised=normalised))


# Scores between 0 and 1


@given(FINITE, FINITE)
def test_a_half_means_exactly_the_threshold(score, threshold):
    found = normalise(score, threshold)
    assert 0 <= found <= 1
    assert (found > 0.5, found == 0.5, found < 0.5) == (
        score > threshold,
        score == threshold,
        score < threshold,
    )


@given(FINITE, FINITE, FINITE)
def test_a_higher_score_is_never_lower_between_0_and_1(first, second, threshold):
    low, high = sorted([first, second])
    assert normalise(low, threshold) <= normalise(high, threshold)


@given(st.floats(-30, 30))
def test_it_is_the_logistic_function(score):
    assert normalise(score + 2, 2.0) == pytest.approx(
        1 / (1 + math.exp(-(score + 2 - 2.0))), rel=1e-12
    )


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
    assert rerank(**fields).normalised(default) is expected


# Documents


@given(st.lists(st.one_of(st.text(), st.fixed_dictionaries({"text": st.text()}))))
def test_every_document_gives_one_pair_with_its_own_text(documents):
    pairs = rerank(documents=documents).pairs()
    assert [pair.document for pair in pairs] == [
        d if isinstance(d, str) else d["text"] for d in documents
    ]


# Requests


def test_jinas_query_may_be_an_object():
    assert rerank(query={"text": "who?"}, documents=["a"]).pairs() == [Pair("who?", "a")]


def test_texts_mean_tei_and_documents_the_others():
    read = TypeAdapter(AnyRerankRequest).validate_python
    assert isinstance(read({"query": "q", "texts": ["a"]}), TextsRequest)
    assert isinstance(read({"query": "q", "documents": ["a"]}), RerankRequest)


def test_unknown_fields_and_any_model_are_accepted():
    found = rerank(
        model={"name": 3}, priority=1, max_chunks_per_doc=10, overlap_tokens="x", user=None
    )
    assert found.pairs() == rerank().pairs()


@pytest.mark.parametrize(
    "fields",
    [
        {"query": 1},
        {"documents": "a"},
        {"documents": [1]},
        {"documents": ["a", None]},
        {"top_n": "five"},
        {"top_n": 1.5},
        {"top_n": -1},
        {"max_gap": -1},
        {"fallback": {"max_gap": 1}},
        {"threshold": math.nan},
        {"threshold": math.inf},
        {"threshold": "mine"},
        {"normalize": "perhaps"},
        {"max_tokens_per_doc": 0},
        {"truncate_prompt_tokens": 0},
        {"truncate": "START"},
        {"truncation_direction": "Left"},
    ],
)
def test_what_means_nothing_is_refused(fields):
    with pytest.raises(ValidationError):
        rerank(**fields)


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (RerankRequest, {"query": "q", "documents": ["a"]}),
        (TextsRequest, {"query": "q", "texts": ["a"]}),
        (RankingRequest, {"query": {"text": "q"}, "passages": [{"text": "a"}]}),
    ],
)
def test_an_instruction_is_refused_in_every_schema_and_an_empty_one_is_none(schema, body):
    for instruction in (
        {"instruction": "Find what a lawyer would cite."},
        {"instruct": "Find what a lawyer would cite."},
        {"chat_template_kwargs": {"instruction": "Find what a lawyer would cite."}},
    ):
        with pytest.raises(ValidationError, match="trained with one prompt"):
            schema.model_validate({**body, **instruction})
    for nothing in ({"instruction": None}, {"instruct": ""}, {"chat_template_kwargs": {"a": 1}}):
        assert schema.model_validate({**body, **nothing}).pairs() == [Pair("q", "a")]


@pytest.mark.parametrize("schema", [RerankRequest, TextsRequest, RankingRequest])
def test_the_description_allows_empty_strings_where_they_are_taken_for_absent_fields(schema):
    described = schema.model_json_schema()
    fields = described["properties"]
    allowed = {name for name in fields if {"const": ""} in fields[name].get("anyOf", [])}
    assert allowed == set(fields) - set(described["required"])
    texts = {"query": "q", "documents": ["a"], "texts": ["a"], "passages": [{"text": "a"}]}
    if schema is RankingRequest:
        texts["query"] = {"text": "q"}
    body = {name: texts[name] for name in described["required"]}
    empty = dict.fromkeys(allowed, "")
    assert schema.model_validate({**empty, **body}).pairs() == [Pair("q", "a")]


@pytest.mark.parametrize(
    ("fields", "top_n", "returned"),
    [
        ({"top_n": "1", "return_documents": "true"}, 1, True),
        ({"top_n": 1.0, "return_documents": "false"}, 1, False),
        ({"top_n": "", "return_documents": "", "instruction": ""}, None, None),
        ({"top_k": 1, "return_documents": True}, 1, True),
        ({"top_k": "", "max_tokens_per_doc": ""}, None, None),
    ],
)
def test_switches_and_numbers_are_read_as_programs_send_them(fields, top_n, returned):
    request = rerank(**fields)
    assert (request.most, request.return_documents) == (top_n, returned)


def test_voyages_clients_find_the_results_in_data():
    request = rerank(top_k=1)
    assert [row.index for row in answer(request, outcomes(1.0, 2.0)).data] == [1]
    assert answer(rerank(), outcomes(1.0, 2.0)).data is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"max_tokens_per_doc": 7}, 7),
        ({"truncate_prompt_tokens": 5}, 5),
        ({"truncate_prompt_tokens": -1}, None),
        ({"max_tokens_per_doc": 7, "truncate_prompt_tokens": 5}, 5),
    ],
)
def test_limits_of_tokens_reach_every_pair(fields, expected):
    assert [pair.max_tokens for pair in rerank(**fields).pairs()] == [expected] * 2


@pytest.mark.parametrize(
    ("fields", "may_be_cut"),
    [
        ({}, True),
        ({"truncate": True}, True),
        ({"truncate": "END"}, True),
        ({"truncate": "NONE"}, False),
        ({"truncate": False}, False),
        # LiteLLM always sends both.
        ({"truncate": False, "truncation_direction": "Right"}, True),
    ],
)
def test_a_document_that_was_cut_is_an_error_only_if_it_may_not_be(fields, may_be_cut):
    cut = [Outcome(Scored(1.0)), Outcome(Scored(2.0, truncated=True))]
    if may_be_cut:
        rerank(**fields).check(cut)
        return
    with pytest.raises(RequestError) as caught:
        rerank(**fields).check(cut)
    assert (list(caught.value.documents), caught.value.status_code) == ([1], 413)


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
    ],
)
def test_the_request_decides_what_is_dropped_and_else_the_service(fields, drop, expected):
    scores = Scores(["a", "b"], outcomes(1.0, 2.0), MODEL, drop=drop)
    assert rerank(**fields).rule(scores).threshold == expected


def test_the_native_threshold_of_a_model_without_one_is_refused():
    with pytest.raises(RequestError, match="fake has no native threshold"):
        rerank(threshold="native").rule(Scores([], [], Description("fake", Rule(), False)))


# Outcomes


def test_bad_documents_are_the_requests_fault_and_a_model_that_always_fails_is_not():
    internal = Outcome(None, fault="internal", error="The model failed.")

    def status(*found):
        with pytest.raises(RequestError) as caught:
            rerank().check(found)
        return caught.value.status_code

    assert status(*outcomes(None), internal) == 422
    assert status(*outcomes(1.0), internal) == 422
    assert status(internal, internal) == 500


def test_a_query_that_cannot_be_used_is_said_once_and_no_document_is_blamed():
    error = request_error({0: "The query is empty.", 1: "The query is empty."}, 422)
    assert (error.detail, error.documents) == ("The query is empty.", {})
    error = request_error({4: "has no score.", 2: "scored nan."}, 422)
    assert error.detail == "Document 2 scored nan."
    assert error.documents == {4: "has no score.", 2: "scored nan."}


def test_an_error_has_the_fields_of_every_client():
    body = json.loads(error_response(422, "Document 1 has no score.", {1: "has no score."}).body)
    assert body["error"] == body["message"] == body["detail"] == "Document 1 has no score."
    assert body["documents"] == [{"index": 1, "message": "has no score."}]
    assert json.loads(error_response(500, "\ud800").body)["error"] == "?"


# Answers


@given(st.data())
def test_rows_are_sorted_by_the_raw_score_and_hold_what_was_asked_for(data):
    scores = data.draw(st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=20))
    cutoff = data.draw(st.none() | st.integers(-6, 6).map(float))
    top_n = data.draw(st.none() | st.integers(0, 22))
    normalised = data.draw(st.booleans())
    request = rerank(
        documents=[f"text {i}" for i in range(len(scores))], top_n=top_n, return_documents=True
    )
    rows = answer(request, outcomes(*scores), threshold=cutoff, normalised=normalised).results

    expected = sorted(
        (i for i, score in enumerate(scores) if cutoff is None or score > cutoff),
        key=lambda i: -scores[i],
    )
    expected = expected[:top_n] if top_n else expected
    assert [row.index for row in rows] == expected
    assert [row.document.text for row in rows] == [f"text {i}" for i in expected]
    assert [row.relevance_score for row in rows] == [
        normalise(scores[i], 1.0) if normalised else scores[i] for i in expected
    ]


def test_rows_that_the_fallback_keeps_are_weak():
    request = rerank(documents=["a", "b", "c"], fallback={"max_gap": 1.0, "max_depth": 9.0})
    rows = answer(request, outcomes(1, 3, 2), threshold=5.0).results
    assert [(row.index, row.weak) for row in rows] == [(1, True), (2, True)]


def test_blank_documents_come_last_and_are_never_relevant():
    request = rerank(documents=[" ", "a", "b"])
    assert [row.index for row in answer(request, outcomes(0, -2, -1)).results] == [2, 1, 0]
    assert [row.index for row in answer(request, outcomes(0, -2, -1), threshold=-5.0).results] == [
        2,
        1,
    ]


def test_the_answer_has_the_fields_of_cohere_jina_infinity_and_vllm():
    found = answer(rerank(), outcomes(1, 2)).model_dump(exclude_defaults=True)
    assert found == {
        "id": "some-id",
        "object": "rerank",
        "created": found["created"],
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


def test_tei_and_nvidia_get_all_rows_best_first():
    texts = TextsRequest(query="q", texts=["a", "b", ""])
    rows = texts.answer(scored(texts, outcomes(-3, 2, 0)))
    assert [(row.index, row.score) for row in rows] == [(1, 2), (0, -3), (2, BLANK_SCORE)]
    ranking = RankingRequest.model_validate(
        {"query": {"text": "q"}, "passages": [{"text": "a"}, {"text": "b"}]}
    )
    found = ranking.answer(scored(ranking, outcomes(-3, 2))).rankings
    assert [(row.index, row.logit) for row in found] == [(1, 2), (0, -3)]
