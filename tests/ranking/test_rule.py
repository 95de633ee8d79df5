"""The rule that keeps documents of a list: threshold, gap, fallback, and a limit."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsrank_rag import Fallback, Reranker, Rule
from rsrank_rag.errors import InputError
from rsrank_rag.ranking.rule import BLANK_SCORE

SHIPPED = Rule(0.0, 2.0, Fallback(1.0, 2.0))


class Scores(Reranker):
    """Gives the number that each text holds, and has a native rule of three parts."""

    threshold = 0.0
    max_gap = 2.0
    fallback = Fallback(1.0, 2.0)

    def score(self, query, documents):
        return [float(text.strip() or 0) for text in documents]

    def token_ends(self, document):
        return list(range(1, len(document) + 1)), 8


def kept(scores, **options):
    result = Scores().rank("q", list(map(str, scores)), **options)
    return [document.index for document in result.kept]


@pytest.mark.parametrize(
    ("scores", "places"),
    [
        ([5.0, 3.0, 2.9, 0.5], [0, 1]),  # a document exactly at the gap is kept
        ([0.1, -0.1], [0]),  # the gap does not reach below the threshold
        ([-0.5, -1.5, -1.6], [0, 1]),  # nothing above the threshold: the fallback
        ([-1.5, -1.9, -2.0, -2.4], [0, 1]),  # the fallback ends above its depth
        ([-2.0, -3.0], []),  # too far below the threshold even for the fallback
        ([0.0], [0]),  # zero is not above the threshold, and the fallback keeps it
        ([1.0], [0]),
        ([1.0, 1.0, -9.0], [0, 1]),  # ties are kept together
        ([BLANK_SCORE, -0.5], [1]),
        ([BLANK_SCORE], []),
        ([], []),
    ],
)
def test_a_list_keeps_what_is_near_its_best_or_else_what_the_fallback_keeps(scores, places):
    assert SHIPPED.select(scores) == places


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    scores=st.lists(st.floats(-20, 20), min_size=1, max_size=12),
    threshold=st.floats(-5, 5),
    max_gap=st.none() | st.floats(0, 8),
    fallback=st.none() | st.builds(Fallback, st.floats(0, 8), st.floats(0, 8)),
    top_n=st.none() | st.integers(1, 5),
)
def test_the_rule_is_what_its_three_sentences_say(scores, threshold, max_gap, fallback, top_n):
    best = max(scores)
    if best > threshold:
        gap = math.inf if max_gap is None else max_gap
        expected = [s for s in scores if s > threshold and s >= best - gap]
    elif fallback is None:
        expected = []
    else:
        lowest = threshold - fallback.max_depth
        expected = [s for s in scores if s > lowest and s >= best - fallback.max_gap]
    expected = sorted(expected, reverse=True)[:top_n]
    places = Rule(threshold, max_gap, fallback, top_n).select(scores)
    assert [scores[place] for place in places] == expected


def test_what_the_fallback_keeps_is_weak_and_nothing_is_relevant():
    ranked = Scores().rank("q", ["-3", "-0.5", "-1"])
    assert [(one.index, one.weak) for one in ranked.kept] == [(1, True), (2, True)]
    assert not any(one.weak for one in ranked.dropped)
    assert ranked.none_relevant
    assert "threshold 0, the fallback kept 2" in str(ranked)
    assert str(ranked).splitlines()[1].startswith("~")
    strong = Scores().rank("q", ["1", "-0.5"])
    assert not strong.none_relevant
    assert not any(one.weak for one in strong.kept)


def test_each_part_can_be_set_or_switched_off():
    scores = [5.0, 4.0, 1.0, -0.5]
    assert kept(scores) == [0, 1]
    assert kept(scores, max_gap=None) == [0, 1, 2]
    assert kept(scores, max_gap=0.5) == [0]
    assert kept(scores, threshold=9.0) == []  # 5 is more than 2 below the threshold
    assert kept(scores, threshold=6.0) == [0]  # by the fallback: 5 is above 6 - 2, and 4 is not
    assert kept(scores, threshold=9.0, fallback=Fallback(1.0, math.inf)) == [0, 1]
    assert kept([-0.5, -9.0], max_gap=None, fallback=None) == []
    assert kept(scores, top_n=1) == [0]


def test_without_a_threshold_the_native_gap_and_fallback_do_not_apply():
    assert kept([5.0, -9.0, 1.0], threshold=None) == [0, 2, 1]
    assert kept([5.0, -9.0, 4.0], threshold=None, max_gap=1.0) == [0, 2]


def test_a_fallback_of_infinite_depth_always_keeps_the_best_document_with_text():
    always = Fallback(0.0, math.inf)
    assert kept([-50.0, -60.0], fallback=always) == [0]
    assert Scores().rank("q", ["", " "], fallback=always).texts == []


def test_sentences_are_kept_by_the_bar_of_their_list():
    reranker = Scores()
    reranker.score = lambda query, texts: [
        {"Five.": 5.0, "Four.": 4.0, "One.": 1.0, "Below.": -0.5, "Low.": -1.4}[t] for t in texts
    ]
    documents = ["Five. One.", "Four. Below."]
    ranked = reranker.rank("q", documents, extract="sentences")
    assert ranked.texts == ["Five.", "Four."]
    ranked = reranker.rank("q", documents, extract="sentences", max_gap=None)
    assert ranked.texts == ["Five. One.", "Four."]
    ranked = reranker.rank("q", ["Below. Low.", "Low."], extract="sentences")
    assert ranked.texts == ["Below. Low.", "Low."]
    assert all(document.weak for document in ranked.kept)


def test_windows_count_with_their_best_score():
    reranker = Scores()
    reranker.score = lambda query, texts: [3.0 if "z" in text else -1.0 for text in texts]
    ranked = reranker.rank("q", ["short", "a. b. c. d. e. z."], long_documents="windows")
    assert [(one.index, one.score) for one in ranked.kept] == [(1, 3.0)]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"threshold": math.nan}, "threshold must be a number, .* got nan"),
        ({"threshold": "0"}, "threshold must be a number"),
        ({"threshold": True}, "threshold must be a number"),
        ({"max_gap": -1.0}, "max_gap must be a number of at least 0, got -1.0"),
        ({"fallback": (1.0, 2.0)}, "fallback must be a Fallback"),
        ({"threshold": None, "fallback": Fallback(1, 2)}, "no effect without a threshold"),
        ({"top_n": 0}, "top_n must be a whole number of at least 1, got 0"),
    ],
)
def test_a_part_that_is_out_of_range_is_an_error(limits, message):
    with pytest.raises(InputError, match=message):
        Scores().rank("q", ["1"], **limits)
    with pytest.raises(InputError, match=r"fallback\.max_depth must be a number of at least 0"):
        Fallback(1.0, -2.0)


def test_a_rule_in_words_names_all_its_parts():
    assert str(SHIPPED) == "zero and within 2 of the best, else within 1 of the best and above -2"
    assert str(Rule(0.5, top_n=3)) == "top 3 of threshold 0.5"
    assert (str(Rule()), str(Rule(top_n=3)), str(Rule(0.0))) == ("all", "top 3", "zero")
