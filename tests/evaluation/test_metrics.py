"""Metrics against hand-computed fractions and slow, exhaustive references."""

import gzip
import json
import math
import sys

import numpy as np
import pytest
from measures import f1_at

from rsrank_rag.errors import InputError, MissingDependencyError, ScoringError
from rsrank_rag.evaluation import datasets
from rsrank_rag.evaluation.datasets import LabelledDocument, read_labelled
from rsrank_rag.evaluation.evaluate import (
    lost_answers,
    score_dataset,
    summarise,
)
from rsrank_rag.evaluation.metrics import (
    ScoredQuery,
    apply_rule,
    ranking_measures,
    selection_measures,
)
from rsrank_rag.evaluation.systems.bm25 import BM25
from rsrank_rag.ranking.rule import BLANK_SCORE, Fallback, Rule, best_first
from rsrank_rag.reranker import Reranker

# scores, best first: 3+ 2- 1+ 0-   (+ relevant)
MIXED = ScoredQuery([0.0, 3.0, 1.0, 2.0], [False, True, True, False])


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
    assert apply_rule([sure, missed], Rule(0.0)).f1 == pytest.approx(1 / 2)


def test_a_query_without_relevant_documents_is_right_when_nothing_is_kept():
    assert f1_at(ScoredQuery([-1.0], [False]), 0.0) == 1.0
    assert f1_at(ScoredQuery([1.0], [False]), 0.0) == 0.0


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_never_reaches_a_metric(score):
    with pytest.raises(ScoringError, match="Document 1 scored"):
        ScoredQuery([0.0, score], [True, False])
    with pytest.raises(InputError, match="1 for 2"):
        ScoredQuery([0.0], [True, False])


def test_ranking_metrics_equal_the_published_formulas():
    # Ranked labels: 1 0 1 0 0 | 1 ; three relevant, two of them within the first five.
    query = ScoredQuery([6.0, 5.0, 4.0, 3.0, 2.0, 1.0], [True, False, True, False, False, True])
    ideal = 1 + 1 / math.log2(3) + 1 / math.log2(4)
    actual = ranking_measures([query])
    assert actual["ndcg@5"].item() == pytest.approx((1 + 1 / math.log2(4)) / ideal)
    assert actual["recall@5"].item() == pytest.approx(2 / 3)


def test_equal_scores_rank_by_input_order():
    first, last = (
        ScoredQuery([1.0] * 7, [True] + [False] * 6),
        ScoredQuery([1.0] * 7, [False] * 6 + [True]),
    )
    assert ranking_measures([first, last])["recall@5"].tolist() == [1.0, 0.0]


def test_every_query_counts_in_the_mean_of_the_ranking_metrics():
    actual, lost = ScoredQuery([1.0], [True]), ScoredQuery([1.0], [False])
    assert summarise([actual, lost], Rule(0.0))["ndcg@5"] == pytest.approx(1 / 2)


def test_the_mean_of_the_ranking_measures_is_over_its_queries_values():
    queries = [MIXED, ScoredQuery([1.0], [False]), ScoredQuery([2.0, 1.0], [False, True])]
    values = ranking_measures(queries)
    assert values["recall@5"].tolist() == [1.0, 0.0, 1.0]
    assert values["ndcg@5"][2] == pytest.approx(1 / math.log2(3))
    assert summarise(queries, Rule(0.0))["ndcg@5"] == pytest.approx(math.fsum(values["ndcg@5"]) / 3)


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
    (actual,) = score_dataset(Length(), queries)
    assert actual == ScoredQuery([9.0], [True])


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
    (actual,) = score_dataset(Words(), [query])
    (ranked,) = Words().rank("?", [text])
    assert ranked.window.count > 1
    assert list(actual.scores) == [ranked.score]
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


def test_a_rule_on_several_queries_says_what_is_kept_what_is_lost_and_what_is_kept_in_error():
    actual = apply_rule(
        [
            ScoredQuery([2.0, 1.0, -1.0], [True, False, True]),  # precision 1/2, recall 1/2
            ScoredQuery([-1.0, -2.0], [True, False]),  # empty: no precision, recall and F1 0
            ScoredQuery([1.0, 2.0, -3.0], [False, False, False]),  # no answer, two kept in error
            ScoredQuery([-1.0], [False]),  # no answer, and none given: F1 1
        ],
        Rule(0.0),
    )
    assert actual.precision == pytest.approx((1 / 2 + 0) / 2)
    assert actual.recall == pytest.approx((1 / 2 + 0) / 2)
    assert actual.f1 == pytest.approx((1 / 2 + 1) / 4)
    assert (actual.kept, actual.lost, actual.called_relevant) == (1.0, 1, 1)
    assert actual.kept_unanswerable == 1.0


def test_what_means_nothing_for_any_query_has_no_value():
    actual = apply_rule([ScoredQuery([-1.0], [False])], Rule(0.0))
    assert (actual.precision, actual.recall, actual.f1) == (None, None, 1.0)
    assert apply_rule([ScoredQuery([1.0], [True])], Rule(0.0)).kept_unanswerable is None


def test_a_query_without_documents_counts_nothing():
    queries = [ScoredQuery([], []), ScoredQuery([1.0, -1.0], [True, False])]
    actual = apply_rule(queries, Rule(0.0))
    assert (actual.f1, actual.precision, actual.recall) == (0.5, 1.0, 1.0)


def test_what_the_fallback_keeps_of_an_unanswerable_query_is_not_called_relevant():
    queries = [ScoredQuery([-1.0, -5.0], [False, False]), ScoredQuery([1.0], [False])]
    fallback = Rule(0.0, fallback=Fallback(max_gap=1.0, max_depth=2.0))
    for rule, kept, called_relevant in ((fallback, 1.0, 1), (Rule(top_n=1), 1.0, 2)):
        result = apply_rule(queries, rule)
        assert (result.kept_unanswerable, result.called_relevant) == (kept, called_relevant)


# Input order:  -   +   -   +   with one score above zero, which is irrelevant.
BELOW = ScoredQuery([1.0, -1.0, -3.0, -2.0], [False, True, False, True])
NO_ANSWER = ScoredQuery([0.5, -0.5], [False, False])


@pytest.mark.parametrize(
    ("rule", "kept", "f1", "lost"),
    [
        (Rule(0.0), [0], 0.0, True),
        (Rule(2.0), [], 0.0, True),
        (Rule(2.0, fallback=Fallback(2.0, 4.0)), [0, 1], 2 * 1 / (2 + 2), False),
        (Rule(-9.0, max_gap=3.0), [0, 1, 3], 2 * 2 / (3 + 2), False),
        (Rule(top_n=1), [0], 0.0, True),
        (Rule(top_n=3), [0, 1, 3], 2 * 2 / (3 + 2), False),
    ],
)
def test_a_rule_keeps_what_rank_would_keep_with_the_same_arguments(rule, kept, f1, lost):
    assert rule.select(BELOW.scores) == kept
    values = selection_measures([BELOW], rule)
    assert values["f1"].item() == f1
    assert values["kept"].item() == len(kept)
    assert values["lost"].item() == lost


def test_a_query_without_an_answer_is_never_lost():
    values = selection_measures([NO_ANSWER, ScoredQuery([], [])], Rule(0.0))
    assert np.isnan(values["lost"]).all()


def test_a_summary_has_the_same_measures_for_the_rule_in_use_and_for_others():
    native = Rule(0.0, max_gap=0.5)
    summary = summarise([MIXED, BELOW, NO_ANSWER], native)
    assert (summary["queries"], summary["answerable"]) == (3, 2)
    actual = summary["rules"]
    tops = ["top1", "top3", "top5"]
    firsts = ["first1", "first3", "first5"]
    assert list(actual) == ["in_use", "threshold", *tops, *firsts]
    assert actual["in_use"]["rule"] == "zero and within 0.5 of the best"
    assert (actual["in_use"]["kept"], actual["threshold"]["kept"]) == (1.0, pytest.approx(5 / 3))
    # MIXED keeps its relevant best: F1 = 2 * 1 / (1 + 2). The others keep an irrelevant one.
    assert actual["top1"]["f1"] == pytest.approx(2 / 9)
    # The first of the file is irrelevant in each.
    assert [actual[name]["lost"] for name in ("first1", "first3", "top3")] == [2, 0, 0]
    assert actual["top5"]["kept"] == pytest.approx((4 + 4 + 2) / 3)


def test_lost_answers_are_named_by_the_ids_of_their_queries():
    queries = [datasets.LabelledQuery(id=name, query="?", documents=()) for name in "abc"]
    assert lost_answers(queries, [MIXED, BELOW, NO_ANSWER], Rule(0.0)) == ["b"]


def test_sets_that_share_a_name_go_by_their_paths(tmp_path):
    paths = []
    for name in ("a/one.jsonl", "b/one.jsonl", "b/two.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(LINE), encoding="utf-8")
        paths.append(path)
    sets = datasets.read_sets([*paths, paths[0]])
    assert list(sets) == ["one", str(paths[1]), "two"]
    assert sets["two"] == read_labelled(paths[0])


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
    assert Rule(-25_000.0).select(scores) == [1]
    query = ScoredQuery(scores, [False, True, False])
    assert ranking_measures([query])["ndcg@5"].tolist() == [1.0]
