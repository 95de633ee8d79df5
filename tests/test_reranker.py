"""Ranking, threshold and errors that every reranker inherits, with a five-line fake."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsrank_rag import Fallback, RankedDocument, RankResult, Reranker, Rule
from rsrank_rag.errors import InputError, RSRankError, ScoringError
from rsrank_rag.reranker import BLANK_SCORE, Pair, Scored


class Fake(Reranker):
    """Gives the scores it was made with."""

    def __init__(self, scores):
        self.scores = scores

    def score(self, query, documents):
        return self.scores


def rank(scores, **options):
    return Fake(scores).rank("query", [f"text {i}" for i in range(len(scores))], **options)


def order(result):
    return [doc.index for doc in (*result.kept, *result.dropped)]


def kept(result):
    return [doc.index for doc in result.kept]


def test_documents_are_sorted_by_score_and_split_at_zero():
    result = rank([-1.0, 2.0, 0.5, -3.0])
    assert result.kept == (RankedDocument(1, "text 1", 2.0), RankedDocument(2, "text 2", 0.5))
    assert result.dropped == (RankedDocument(0, "text 0", -1.0), RankedDocument(3, "text 3", -3.0))
    assert (result.query, result.threshold) == ("query", 0.0)
    assert result.texts == ["text 1", "text 2"]


def test_ties_keep_the_input_order():
    assert order(rank([1.0, 2.0, 1.0, 2.0, 1.0], threshold=None)) == [1, 3, 0, 2, 4]


def test_positive_and_negative_zero_are_a_tie():
    assert order(rank([-0.0, 0.0, -0.0])) == [0, 1, 2]


def test_a_score_of_exactly_zero_is_dropped_at_threshold_zero():
    assert kept(rank([0.0, 1e-30, -0.0])) == [1]


def test_a_score_equal_to_the_threshold_is_dropped():
    assert kept(rank([0.7, 0.7000001], threshold=0.7)) == [1]


def test_threshold_none_keeps_everything_and_zero_is_a_threshold():
    assert kept(rank([-5.0, -1.0], threshold=None)) == [1, 0]
    assert rank([-5.0, -1.0], threshold=None).threshold is None
    assert kept(rank([-5.0, -1.0], threshold=0.0)) == []
    assert kept(rank([-5.0, -1.0], threshold=0)) == []


def test_a_negative_threshold_lets_more_through_and_infinite_ones_all_or_none():
    assert kept(rank([-5.0, -1.0], threshold=-2.0)) == [1]
    assert kept(rank([-5.0, -1.0], threshold=-math.inf)) == [1, 0]
    assert kept(rank([5.0, 1.0], threshold=math.inf)) == []


def test_top_n_is_applied_after_the_threshold():
    scores = [3.0, 2.0, 1.0, -1.0]
    assert kept(rank(scores, top_n=2)) == [0, 1]
    assert kept(rank(scores, top_n=10)) == [0, 1, 2]
    assert kept(rank(scores, threshold=None, top_n=3)) == [0, 1, 2]


def test_no_documents_give_an_empty_result():
    result = rank([])
    assert (result.kept, result.dropped, result.texts) == ((), (), [])


@pytest.mark.parametrize("documents", ["one string", b"bytes", {"id1": "text"}])
def test_one_string_or_a_mapping_instead_of_a_list_is_refused(documents):
    with pytest.raises(InputError, match="list of strings"):
        Fake([0.0] * len(documents)).rank("query", documents)


def test_a_data_frame_is_refused_instead_of_ranking_the_names_of_its_columns():
    pandas = pytest.importorskip("pandas")
    with pytest.raises(InputError, match="got one DataFrame"):
        Fake([0.0]).rank("query", pandas.DataFrame({"text": ["a"]}))


def test_a_result_is_a_sequence_of_what_is_kept_and_false_where_nothing_is():
    result = rank([1.0, 3.0, -1.0])
    assert (result[0], result[-1], list(reversed(result))) == (
        result.kept[0],
        result.kept[1],
        [*result.kept][::-1],
    )
    assert result[:1] == result.kept[:1]
    assert (len(result), list(result)) == (2, list(result.kept))
    assert not rank([-1.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("threshold", [0.0, None])
def test_a_score_that_is_not_finite_names_its_document_and_returns_nothing(bad, threshold):
    with pytest.raises(ScoringError, match="Document 2 scored") as caught:
        rank([1.0, 2.0, bad, 3.0], threshold=threshold)
    assert caught.value.index == 2
    assert isinstance(caught.value, RSRankError)


def test_too_few_or_too_many_scores_are_an_error():
    with pytest.raises(InputError, match="reranker gave 1 scores for 2 documents"):
        Fake([1.0]).rank("query", ["a", "b"])
    with pytest.raises(InputError, match="gave 3 scores"):
        Fake([1.0, 2.0, 3.0]).rank("query", ["a", "b"])


def test_a_reranker_without_score_cannot_be_made():
    with pytest.raises(TypeError, match="score"):
        type("Half", (Reranker,), {})()


def test_truncated_documents_are_marked():
    class Cutting(Fake):
        def score_pairs(self, pairs):
            return [
                Scored(score, truncated=pair.document == "b")
                for score, pair in zip([1.0, 2.0], pairs, strict=True)
            ]

    result = Cutting([1.0, 2.0]).rank("query", ["a", "b"])
    assert [(doc.text, doc.truncated) for doc in result.kept] == [("b", True), ("a", False)]


def test_inputs_are_not_changed():
    scores, documents = [1.0, -1.0, 2.0], ["a", "b", "c"]
    Fake(scores).rank("query", documents)
    assert (scores, documents) == ([1.0, -1.0, 2.0], ["a", "b", "c"])


def test_results_cannot_be_changed():
    result = rank([1.0])
    with pytest.raises(AttributeError):
        result.kept = ()
    with pytest.raises(AttributeError):
        result.kept[0].score = 5.0


finite = st.floats(allow_nan=False, allow_infinity=False).filter(lambda score: score != BLANK_SCORE)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    scores=st.lists(finite | st.sampled_from([0.0, -0.0, 1.0]), max_size=12),
    threshold=st.none() | finite,
    top_n=st.none() | st.integers(1, 15),
)
def test_every_document_is_in_exactly_one_list_best_first(scores, threshold, top_n):
    result = rank(scores, threshold=threshold, top_n=top_n)
    assert sorted(order(result)) == list(range(len(scores)))
    assert [scores[i] for i in order(result)] == sorted(scores, reverse=True)
    assert all(
        doc.text == f"text {doc.index}" and doc.score == scores[doc.index] for doc in result.kept
    )


def test_the_printed_result_shows_scores_signs_and_cuts():
    result = RankResult(
        "why?",
        Rule(0.0),
        (RankedDocument(1, "a  b\n\tc", 1.234, truncated=True),),
        (RankedDocument(0, "x" * 200, -0.5),),
    )
    first, second, third = str(result).splitlines()
    assert first == "'why?': 1 kept, 1 dropped (threshold 0)"
    assert second == "+    +1.23  [1] a b c (truncated)"
    assert third == "-    -0.50  [0] " + "x" * 87 + "…"
    assert str(rank([-1.0], threshold=None)).startswith("'query': 1 kept, 0 dropped (ranked only)")


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, "threshold 1"),
        ({"threshold": 0.0, "top_n": 1}, "threshold 0, 1 above it dropped"),
        ({"threshold": 0.0, "max_gap": 1.0}, "threshold 0, 1 above it dropped"),
        ({"threshold": None, "top_n": 1}, "top 1"),
        ({"threshold": -math.inf}, "threshold -inf"),
        ({"threshold": 3.0, "fallback": Fallback(2, 3)}, "threshold 3, the fallback kept 2"),
    ],
)
def test_the_printed_result_says_what_the_rule_did(options, rule):
    shown = str(rank([0.5, 2.0, BLANK_SCORE], **{"threshold": 1.0, **options}))
    assert shown.splitlines()[0].endswith(f"({rule})")


class Half(Reranker):
    """Finds nothing relevant, and what is blank least irrelevant."""

    def score(self, query, documents):
        return [-0.5 if text.strip() else 0.0 for text in documents]


BLANKS = [" ", "almost", "\n\t\u2003", "nearly", ""]


def test_documents_without_text_come_last_in_their_order_and_pass_no_threshold():
    for threshold in (-1.0, 2 * BLANK_SCORE, -math.inf):
        result = Half().rank("q", BLANKS, threshold=threshold)
        assert result.texts == ["almost", "nearly"]
        assert [document.score for document in result.dropped] == [BLANK_SCORE] * 3
    everything = Half().rank("q", BLANKS, threshold=None)
    assert everything.texts == ["almost", "nearly", " ", "\n\t\u2003", ""]
    assert order(rank([-2.0 * abs(BLANK_SCORE), BLANK_SCORE], threshold=None)) == [0, 1]


def test_documents_without_text_have_that_score_among_pairs_too():
    actual = Half().score_pairs([Pair("q", text) for text in BLANKS])
    assert [scored.score for scored in actual] == [
        BLANK_SCORE,
        -0.5,
        BLANK_SCORE,
        -0.5,
        BLANK_SCORE,
    ]


def test_the_score_of_a_blank_document_survives_json_and_half_precision():
    assert json.loads(json.dumps(BLANK_SCORE)) == BLANK_SCORE
    assert float(np.float16(BLANK_SCORE)) == float(np.float32(BLANK_SCORE)) == BLANK_SCORE


def result_of(*scores):
    return rank(list(scores))


def test_a_result_gives_all_documents_in_the_order_in_which_they_were_passed():
    result = result_of(2.0, -1.0, 3.0)
    assert [document.score for document in result.in_order] == [2.0, -1.0, 3.0]
    assert rank([]).in_order == []


def test_a_result_says_whether_nothing_was_relevant_and_how_near_the_best_came():
    assert (result_of(2.0, -1.0).none_relevant, result_of(2.0, -1.0).best_score) == (False, 2.0)
    nothing = rank([-1.0, -0.25])
    assert (nothing.none_relevant, nothing.best_score) == (True, -0.25)
    assert rank([0.0]).none_relevant
    assert not rank([-1.0], threshold=None).none_relevant
    assert (rank([]).none_relevant, rank([]).best_score) == (True, None)
    for scores in ("raw", "normalised"):
        blank = Fake([3.0]).rank("q", [" "], scores=scores)
        assert (blank.none_relevant, blank.best_score) == (True, None)


def test_a_result_as_plain_values_holds_every_document_once():
    result = result_of(2.0, -1.0, 3.0)
    plain = json.loads(json.dumps(result.to_dict()))
    assert (plain["query"], plain["rule"]["threshold"]) == ("query", 0.0)
    assert [document["index"] for document in plain["kept"] + plain["dropped"]] == [2, 0, 1]


def test_pairs_are_plain_tuples_too():
    fake = Fake([1.5])
    assert fake.score_pairs([("q", "d")]) == fake.score_pairs([Pair("q", "d")]) == [Scored(1.5)]
    for wrong in (["qd"], [("q",)], [("q", "d", None, 1)], [None]):
        with pytest.raises(InputError, match=r"Pair 0 must be \(query, document\)"):
            fake.score_pairs(wrong)
