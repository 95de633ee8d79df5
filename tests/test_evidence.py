"""What is sent to the LLM: positions, evidence and tokens by hand."""

import pytest

from rsrank_rag.errors import InputError
from rsrank_rag.evaluation.calibration import select_above, select_top
from rsrank_rag.evaluation.evidence import evidence, sent_above, sent_top
from rsrank_rag.evaluation.metrics import ScoredQuery

QUERIES = [
    ScoredQuery([0.5, 2.0, -1.0], [True, False, True]),
    ScoredQuery([-1.0, -2.0], [True, False]),
    ScoredQuery([-1.0], [False]),
]
TOKENS = [[10, 30, 5], [7, 8], [9]]


def test_evidence_and_tokens_equal_the_numbers_by_hand():
    found = evidence(QUERIES, sent_above(QUERIES, [0.0, 0.0, 0.0]), TOKENS)
    assert found.documents == [2.0, 0.0, 0.0]
    assert found.tokens == [40.0, 0.0, 0.0]
    assert found.recall == [0.5, 0.0, 1.0]
    assert found.precision == [0.5, 0.0, 1.0]
    assert found.token_precision == [0.25, 0.0, 1.0]
    assert found.complete == [0.0, 0.0, 1.0]


def test_sending_everything_finds_all_evidence():
    found = evidence(QUERIES, sent_top(QUERIES, 99), TOKENS)
    assert found.complete == found.recall == [1.0, 1.0, 1.0]
    assert found.tokens == [45.0, 15.0, 9.0]
    assert found.precision == pytest.approx([2 / 3, 0.5, 0.0])


def test_each_query_has_its_own_threshold():
    assert sent_above(QUERIES, [1.0, -1.5, -9.0]) == [[1], [0], [0]]


def test_what_is_sent_is_what_the_calibration_measures_select():
    for sent, chosen in (
        (sent_above(QUERIES, [0.0] * 3), select_above(QUERIES, 0.0)),
        (sent_top(QUERIES, 2), select_top(QUERIES, 2)),
    ):
        found = evidence(QUERIES, sent, TOKENS)
        assert found.documents == chosen.kept
        assert found.recall == chosen.recall or chosen.recall[2] == 0.0  # nothing relevant: nothing to be missed
        assert found.precision == chosen.precision


def test_no_queries_give_no_numbers():
    assert evidence([], [], []).tokens == []


def test_token_counts_must_fit_the_documents():
    with pytest.raises(InputError, match="Query 0 has 3 documents but 2 token counts"):
        evidence(QUERIES[:1], [[0]], [[1, 2]])
