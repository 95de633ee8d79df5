"""Metrics against hand-computed fractions and slow, exhaustive references."""

import gzip
import json
import math
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measures import f1_at

from rsrank_rag.errors import InputError, MissingDependencyError, ScoringError
from rsrank_rag.evaluation import datasets
from rsrank_rag.evaluation.datasets import LabelledDocument, read_labelled
from rsrank_rag.evaluation.evaluate import (
    recommend,
    score_dataset,
    shared_threshold,
    summarise,
)
from rsrank_rag.evaluation.metrics import (
    Rule,
    ScoredQuery,
    ThresholdSweep,
    apply_rule,
    best_first,
    best_threshold,
    present_means,
    ranking_measures,
    rules,
    selection_measures,
)
from rsrank_rag.evaluation.systems.bm25 import BM25
from rsrank_rag.reranker import BLANK_SCORE, Reranker

# scores, best first: 3+ 2- 1+ 0-   (+ relevant)
MIXED = ScoredQuery([0.0, 3.0, 1.0, 2.0], [False, True, True, False])

documents = st.lists(
    st.tuples(st.integers(-3, 3).map(float), st.booleans()), min_size=1, max_size=6
)
query_lists = st.lists(
    documents.map(lambda rows: ScoredQuery([s for s, _ in rows], [r for _, r in rows])),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (3.0, 0.0),
        (2.5, 2 * 1 / (1 + 2)),
        (1.5, 2 * 1 / (2 + 2)),
        (0.5, 2 * 2 / (3 + 2)),
        (-1.0, 2 * 2 / (4 + 2)),
    ],
)
def test_f1_at_a_threshold_equals_the_fraction_by_hand(threshold, expected):
    assert f1_at(MIXED, threshold) == pytest.approx(expected)


def test_a_query_with_nothing_kept_and_something_relevant_counts_zero():
    sure = ScoredQuery([1.0], [True])
    missed = ScoredQuery([-1.0], [True])
    assert summarise([sure, missed])["f1@tau"] == pytest.approx(1 / 2)


def test_a_query_without_relevant_documents_is_right_when_nothing_is_kept():
    assert f1_at(ScoredQuery([-1.0], [False]), 0.0) == 1.0
    assert f1_at(ScoredQuery([1.0], [False]), 0.0) == 0.0


def test_the_best_threshold_lies_between_the_last_kept_and_the_first_dropped_score():
    assert best_threshold([MIXED]) == (pytest.approx(0.5), pytest.approx(4 / 5))


@settings(max_examples=200, deadline=None)
@given(query_lists)
def test_the_best_threshold_equals_an_exhaustive_search(queries):
    scores = sorted({score for query in queries for score in query.scores})
    tries = [scores[0] - 1, scores[-1] + 1, *[(a + b) / 2 for a, b in pairwise(scores)]]
    expected = max(math.fsum(f1_at(query, t) for query in queries) / len(queries) for t in tries)
    threshold, value = best_threshold(queries)
    assert value == pytest.approx(expected)
    assert math.fsum(f1_at(query, threshold) for query in queries) / len(queries) == pytest.approx(
        expected
    )


@settings(max_examples=100, deadline=None)
@given(query_lists, st.sampled_from(["precision", "recall", "f1", "left_with_nothing"]), st.data())
def test_a_sweep_has_the_measures_mean_at_every_threshold_and_weighs_queries(queries, metric, data):
    counts = st.lists(st.integers(0, 3), min_size=len(queries), max_size=len(queries))
    weights = data.draw(counts.filter(any))
    drawn = [query for query, count in zip(queries, weights, strict=True) for _ in range(count)]
    thresholds, means = ThresholdSweep(queries, metric).means(np.array(weights, dtype=float))
    scores = sorted({score for query in drawn for score in query.scores})
    assert thresholds.tolist() == sorted(thresholds, reverse=True)
    assert len(thresholds) == len(scores) + 1
    for threshold, mean in zip(thresholds, means, strict=True):
        values = selection_measures(drawn, Rule(threshold))
        assert mean == pytest.approx(present_means(values).get(metric, math.nan), nan_ok=True)


@settings(max_examples=100, deadline=None)
@given(query_lists)
def test_no_query_does_better_than_at_its_own_best_threshold(queries):
    threshold, _ = best_threshold(queries)
    for query in queries:
        assert best_threshold([query])[1] >= f1_at(query, threshold) - 1e-12


def test_the_best_threshold_moves_with_the_scores_even_where_all_or_nothing_is_best():
    everything, nothing = (
        ScoredQuery([0.2, 0.1], [True, True]),
        ScoredQuery([0.2, 0.1], [False, False]),
    )
    assert best_threshold([everything]) == (pytest.approx(0.0999), 1.0)
    assert f1_at(everything, best_threshold([everything])[0]) == 1.0
    assert best_threshold([nothing]) == (0.2, 1.0)
    assert f1_at(nothing, 0.2) == 1.0


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_never_reaches_a_metric(score):
    with pytest.raises(ScoringError, match="Document 1 scored"):
        ScoredQuery([0.0, score], [True, False])
    with pytest.raises(InputError, match="1 for 2"):
        ScoredQuery([0.0], [True, False])


def test_the_shared_threshold_counts_each_set_the_same_whatever_its_size():
    large = [ScoredQuery([0.0], [False])] * 9 + [ScoredQuery([1.0], [True])]
    small = [ScoredQuery([5.0, 0.5], [True, True])]
    # Only a threshold below 0.5 gets the small set right. It drops the large set's 0.0, too.
    assert 0.0 <= shared_threshold([large, small]) < 0.5


def test_ranking_metrics_equal_the_published_formulas():
    # Ranked labels: 1 0 1 0 0 | 1 ; three relevant, two of them within the first five.
    query = ScoredQuery([6.0, 5.0, 4.0, 3.0, 2.0, 1.0], [True, False, True, False, False, True])
    ideal = 1 + 1 / math.log2(3) + 1 / math.log2(4)
    found = ranking_measures([query])
    assert found["ndcg@5"].item() == pytest.approx((1 + 1 / math.log2(4)) / ideal)
    assert found["recall@5"].item() == pytest.approx(2 / 3)


def test_equal_scores_rank_by_input_order():
    first, last = (
        ScoredQuery([1.0] * 7, [True] + [False] * 6),
        ScoredQuery([1.0] * 7, [False] * 6 + [True]),
    )
    assert ranking_measures([first, last])["recall@5"].tolist() == [1.0, 0.0]


def test_every_query_counts_in_the_mean_of_the_ranking_metrics():
    found, lost = ScoredQuery([1.0], [True]), ScoredQuery([1.0], [False])
    assert summarise([found, lost])["ndcg@5"] == pytest.approx(1 / 2)


def test_the_mean_of_the_ranking_measures_is_over_its_queries_values():
    queries = [MIXED, ScoredQuery([1.0], [False]), ScoredQuery([2.0, 1.0], [False, True])]
    values = ranking_measures(queries)
    assert values["recall@5"].tolist() == [1.0, 0.0, 1.0]
    assert values["ndcg@5"][2] == pytest.approx(1 / math.log2(3))
    assert summarise(queries)["ndcg@5"] == pytest.approx(math.fsum(values["ndcg@5"]) / 3)


def test_missing_ir_measures_is_an_error_with_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ir_measures", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[eval\]"):
        ranking_measures([MIXED])


def test_a_title_stands_in_front_of_a_text_that_does_not_start_with_it():
    bare = LabelledDocument(id="1", text="It rains.", title="Weather", relevant=True)
    titled = LabelledDocument(id="1", text="Weather\nIt rains.", title="Weather", relevant=True)
    assert bare.content() == titled.content() == "Weather\nIt rains."


LINE = {
    "id": "q",
    "query": "Is it wet?",
    "documents": [{"id": "a", "text": "It rains.", "relevant": True, "x": 1}],
}


def test_plain_and_gzipped_lines_read_the_same(tmp_path):
    text = json.dumps(LINE) + "\n\n" + json.dumps({**LINE, "id": "2"}) + "\n"
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    plain = read_labelled(tmp_path / "a.jsonl")
    assert plain == read_labelled(tmp_path / "a.jsonl.gz")
    assert [query.query for query in plain] == ["Is it wet?"] * 2


def test_a_copy_of_a_query_is_refused_because_it_would_be_measured_on_itself(tmp_path):
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(LINE)}\n" * 2, encoding="utf-8")
    with pytest.raises(InputError, match="line 2: another query has the id"):
        read_labelled(tmp_path / "a.jsonl")


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(LINE), encoding="utf-8-sig")
    assert [query.query for query in read_labelled(tmp_path / "a.jsonl")] == ["Is it wet?"]


def test_a_line_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "LONGEST_LINE", 1000)
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(bytes(10_000)))
    with pytest.raises(InputError, match="line 1 is longer than 1,000 bytes"):
        read_labelled(tmp_path / "bomb.jsonl.gz")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no queries"),
        ("{}\nnot json", "line 1"),
        (json.dumps(LINE) + "\nnot json", "line 2"),
        (json.dumps(LINE).replace("true", '"yes"'), r"line 1: documents\.0\.relevant"),
    ],
)
def test_a_bad_data_file_is_an_error_that_names_the_place(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_labelled(path)


def test_a_damaged_or_missing_data_file_is_an_error(tmp_path):
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(json.dumps(LINE).encode())[:-12])
    with pytest.raises(InputError, match=r"cut\.jsonl\.gz could not be read"):
        read_labelled(tmp_path / "cut.jsonl.gz")
    with pytest.raises(InputError, match=r"none\.jsonl could not be read: .*No such file"):
        read_labelled(tmp_path / "none.jsonl")


class Length(Reranker):
    """Longer texts are more relevant."""

    def score(self, query, documents):
        return [float(len(text)) for text in documents]


def test_a_reranker_is_scored_on_the_titled_texts_of_every_query(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(LINE), encoding="utf-8")
    queries = read_labelled(tmp_path / "a.jsonl")
    (found,) = score_dataset(Length(), queries)
    assert found == ScoredQuery([9.0], [True])


class Words(Reranker):
    """Reads four words of a document. Later words are worth more."""

    long_documents = "windows"

    def score(self, query, documents):
        return [float(max(map(ord, text[:8]), default=0)) for text in documents]

    def token_ends(self, document):
        return range(2, len(document) + 1, 2), 4


def test_long_documents_are_measured_as_rank_reads_them():
    text = "a b c d e f g h i j "
    document = LabelledDocument(id="d", text=text, relevant=True)
    query = datasets.LabelledQuery(id="q", query="?", documents=(document,))
    (found,) = score_dataset(Words(), [query])
    (ranked,) = Words().rank("?", [text])
    assert ranked.window.count > 1
    assert list(found.scores) == [ranked.score]
    assert ranked.score > Words().score("?", [text])[0]


class Broken(Reranker):
    """Gives no number."""

    def score(self, query, documents):
        return [math.nan] * len(documents)


def test_a_reranker_that_gives_no_number_is_an_error_that_names_the_query(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(LINE), encoding="utf-8")
    with pytest.raises(ScoringError, match="Document 0 of query 'q' scored nan"):
        score_dataset(Broken(), read_labelled(tmp_path / "a.jsonl"))


def test_bm25_equals_okapi_by_hand():
    texts = ["apple apple pear", "pear plum", "cherry"]
    k1, b, average = 1.5, 0.75, 2.0  # of the library; three documents of 3, 2 and 1 words

    def okapi(count, length, containing):
        idf = math.log(1 + (3 - containing + 0.5) / (containing + 0.5))
        return idf * count / (count + k1 * (1 - b + b * length / average))

    expected = [okapi(2, 3, 1) + okapi(1, 3, 2), okapi(1, 2, 2), 0.0]
    assert BM25().score("apple pear", texts) == pytest.approx(expected, rel=1e-4)


def test_bm25_scores_zero_where_nothing_is_shared_or_there_are_no_words():
    assert BM25().score("moon", ["sun", ""]) == [0.0, 0.0]
    assert BM25().score("the", ["sun"]) == [0.0]
    assert BM25().score("moon", []) == []


def test_a_summary_says_what_is_kept_what_is_empty_and_what_is_kept_in_error():
    found = summarise(
        [
            ScoredQuery([2.0, 1.0, -1.0], [True, False, True]),  # precision 1/2, recall 1/2
            ScoredQuery([-1.0, -2.0], [True, False]),  # empty: no precision, recall and F1 0
            ScoredQuery([1.0, 2.0, -3.0], [False, False, False]),  # no answer, two kept in error
            ScoredQuery([-1.0], [False]),  # no answer, and none given: F1 1
        ]
    )
    assert found["precision@tau"] == pytest.approx((1 / 2 + 0) / 2)
    assert found["recall@tau"] == pytest.approx((1 / 2 + 0) / 2)
    assert found["f1@tau"] == pytest.approx((1 / 2 + 1) / 4)
    assert (found["kept_per_query"], found["empty"], found["answerable"]) == (1.0, 0.5, 2)
    assert found["false_keeps"] == 1.0


def test_where_every_query_has_an_answer_nothing_can_be_kept_in_error():
    assert summarise([ScoredQuery([1.0], [True])])["false_keeps"] is None


def test_what_means_nothing_for_any_query_has_no_value():
    found = summarise([ScoredQuery([-1.0], [False])])
    assert (found["precision@tau"], found["recall@tau"], found["f1@tau"]) == (None, None, 1.0)


def test_a_query_without_documents_counts_nothing():
    found = summarise([ScoredQuery([], []), ScoredQuery([1.0, -1.0], [True, False])])
    assert (found["f1@tau"], found["f1@best"]) == (0.5, 0.5)
    assert (found["precision@tau"], found["recall@tau"]) == (1.0, 1.0)


# Input order:  -   +   -   +   with one score above zero, which is irrelevant.
BELOW = ScoredQuery([1.0, -1.0, -3.0, -2.0], [False, True, False, True])
NO_ANSWER = ScoredQuery([0.5, -0.5], [False, False])


@pytest.mark.parametrize(
    ("rule", "kept", "f1", "left_with_nothing"),
    [
        (Rule(0.0), [0], 0.0, True),
        (Rule(2.0), [], 0.0, True),
        (Rule(2.0, min_docs=2), [0, 1], 2 * 1 / (2 + 2), False),
        (Rule(-9.0, top_n=3, min_docs=1), [0, 1, 3], 2 * 2 / (3 + 2), False),
        (Rule(top_n=1), [0], 0.0, True),
        (Rule(top_n=3), [0, 1, 3], 2 * 2 / (3 + 2), False),
        (Rule(top_n=5), [0, 1, 3, 2], 2 * 2 / (4 + 2), False),
        (Rule(top_n=3, by_score=False), [0, 1, 2], 2 * 1 / (3 + 2), False),
    ],
)
def test_a_rule_keeps_what_rank_would_keep_with_the_same_arguments(
    rule, kept, f1, left_with_nothing
):
    assert rule.select(BELOW.scores) == kept
    values = selection_measures([BELOW], rule)
    assert values["f1"].item() == f1
    assert values["kept"].item() == len(kept)
    assert values["left_with_nothing"].item() == left_with_nothing


class Listed(Reranker):
    """Gives the scores of `BELOW`."""

    threshold = 0.0

    def score(self, query, documents):
        return list(BELOW.scores)


@pytest.mark.parametrize("name", [name for name, rule in rules(0.0).items() if rule.by_score])
def test_the_rules_of_an_evaluation_are_those_of_rank(name):
    rule = rules(0.0)[name]
    result = Listed().rank(
        "q",
        ["a", "b", "c", "d"],
        threshold=rule.threshold,
        top_n=rule.top_n,
        min_docs=rule.min_docs,
    )
    assert [document.index for document in result] == rule.select(BELOW.scores)


def test_a_query_without_an_answer_is_never_left_with_nothing():
    values = selection_measures([NO_ANSWER, ScoredQuery([], [])], Rule(0.0))
    assert np.isnan(values["left_with_nothing"]).all()
    assert apply_rule([NO_ANSWER], Rule(0.0)).left_with_nothing == 0


def test_a_rule_on_several_queries_gives_means_and_counts_lost_answers():
    result = apply_rule([MIXED, BELOW, NO_ANSWER], Rule(top_n=1))
    # MIXED keeps its relevant best: F1 = 2 * 1 / (1 + 2). The others keep an irrelevant one.
    assert result == (pytest.approx(2 / 9), 1, 1.0)


def test_a_summary_has_the_alternatives_to_the_threshold():
    summary = summarise([MIXED, BELOW, NO_ANSWER])
    assert (summary["answerable"], summary["left_with_nothing"]) == (2, 1)
    assert summary["kept_per_query"] == pytest.approx((3 + 1 + 1) / 3)
    assert summary["top1_f1"] == pytest.approx(2 / 9)
    assert summary["top3_left_with_nothing"] == summary["first3_left_with_nothing"] == 0
    # The first of the file is irrelevant in each.
    assert (summary["first1_left_with_nothing"], summary["first1_f1"]) == (2, 0.0)
    assert summary["top5_kept_per_query"] == pytest.approx((4 + 4 + 2) / 3)


def test_the_recommendation_names_the_rule_that_loses_fewest_answers_and_what_zero_loses():
    # Each relevant document is the best of ten. In six of fourteen queries it scores below zero.
    queries = [
        ScoredQuery([place - 8.5 - 9.0 * (number < 6) for place in range(10)], [False] * 9 + [True])
        for number in range(14)
    ]
    assert recommend(queries) == (
        "On these queries zero with min_docs=1 loses 0 of 14 answers and keeps 1.00 passages a "
        "query, with F1 1.000; zero loses 6 and keeps 0.57, with F1 0.571. Recommended: zero with "
        "min_docs=1. Of the rules by score that lose at most 10% of the answers, none has a better "
        "F1. It may lose more answers to other queries: 0 of 14 does not prove that at most 10% "
        "are lost."
    )


@pytest.mark.parametrize(
    ("lost", "answers", "is_proof"),
    # By the binomial distribution: a rule that loses 10% loses so few with 5.2%, 4.7%, 5.7%, 4.6%.
    [(0, 28, False), (0, 29, True), (2, 59, False), (2, 62, True)],
)
def test_a_recommendation_says_if_the_rule_may_lose_more_on_other_queries(lost, answers, is_proof):
    kept = ScoredQuery([1.0, -1.0], [True, False])
    # A rule with more documents would keep the relevant one, but has a worse F1.
    below = ScoredQuery([5.0, *[-2.0] * 8, -3.0], [False] * 9 + [True])
    advice = recommend([kept] * (answers - lost) + [below] * lost)
    assert f"On these queries zero loses {lost} of {answers} answers" in advice
    assert ("does not prove" in advice) is not is_proof


def test_where_every_rule_loses_many_answers_the_recommendation_says_so():
    # The relevant document is the last of ten.
    worst = ScoredQuery([4.5 - place for place in range(10)], [False] * 9 + [True])
    assert recommend([worst] * 29).endswith(
        "Recommended: zero. Of the rules by score that lose fewest answers (every one loses more "
        "than 10%), none has a better F1."
    )


def test_the_recommendation_is_zero_where_it_loses_few_answers_and_has_the_best_f1():
    queries = [ScoredQuery([1.0, -1.0, -2.0], [True, False, False])] * 9
    queries.append(ScoredQuery([-1.0, -2.0, -3.0], [False, False, True]))
    assert recommend([*queries, NO_ANSWER]).startswith(
        "On these queries zero loses 1 of 10 answers and keeps 0.91 passages a query, with F1 "
        "0.818; top 5 above zero with min_docs=1 loses 1"
    )


def test_the_recommendation_says_where_the_order_of_the_file_decided():
    words = "equal scores were taken in the file's order"
    assert words not in recommend([ScoredQuery([1.0, -1.0], [True, False])] * 3)
    # The order of documents with equal scores and equal labels changes nothing.
    assert words not in recommend([ScoredQuery([1.0, 1.0, -1.0], [True, True, False])] * 3)
    assert words in recommend([ScoredQuery([1.0, 1.0], [True, False])] * 3)


def test_where_no_query_has_an_answer_nothing_is_recommended():
    assert "no rule is advised" in recommend([NO_ANSWER])


@pytest.mark.parametrize(
    "content",
    [b"\x89PNG\r\n", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + bytes(range(200, 240))],
)
@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz"])
def test_a_file_of_other_bytes_is_an_error_that_names_it(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=rf"{name}(, line 1| could not be read): "):
        read_labelled(tmp_path / name)


def test_blank_documents_rank_last_for_a_reranker_with_lower_scores_too():
    scores = [BLANK_SCORE, -20_000.0, -30_000.0]
    assert best_first(scores) == [1, 2, 0]
    assert Rule(-25_000.0, min_docs=1).select(scores) == [1]
    query = ScoredQuery(scores, [False, True, False])
    assert ranking_measures([query])["ndcg@5"].tolist() == [1.0]
    assert best_threshold([query]) == (-25_000.0, 1.0)
