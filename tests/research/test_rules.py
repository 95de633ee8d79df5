"""research.rules: validation queries, figures of rules, and the tables."""

import gzip
import json

import pytest
from measures import scored_lists

from research import rules, selection
from rsrank_rag.evaluation.metrics import ScoredQuery
from rsrank_rag.ranking.rule import Rule

pytest.importorskip("sklearn")


def rows(count, source):
    document = {"id": "d", "text": "It rains.", "relevant": True}
    for number in range(count):
        yield {
            "id": f"{source}-{number // 5}-{number % 5}",
            "query": f"question {number}?",
            "documents": [document],
        }


def test_validation_queries_are_cut_by_source_or_by_hash_and_without_nfcorpus(tmp_path):
    for name, count in (("everyday.passage", 1000), ("fiqa", 100), ("nfcorpus", 100)):
        lines = "\n".join(map(json.dumps, rows(count, name)))
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    sets = selection.validation(tmp_path)
    assert set(sets) == {"everyday.passage", "fiqa"}
    assert len(sets["fiqa"]) == selection.PUBLIC_COUNT
    # All five queries of an entry validate, or none of them.
    entries = [query.id.rpartition("-")[0] for query in sets["everyday.passage"]]
    assert {entries.count(entry) for entry in entries} == {5}
    assert 10 <= len(set(entries)) <= 30


def test_figures_are_shares_and_means_over_typed_and_other_sets():
    sets = {
        "everyday.passage": [
            ScoredQuery([1.0, -1.0], [True, False]),
            ScoredQuery([1.0, -1.0], [False, False]),
        ],
        "fiqa": [ScoredQuery([-1.0, -2.0], [True, True])],
        "fever.sentence": [ScoredQuery([1.0, 2.0], [True, True])],
    }
    figures = rules.compared(sets, [Rule(0.0)])["zero"]
    assert figures["typed"] == {
        "lost": 0.0,
        "kept": 1.0,
        "recall": 1.0,
        "f1": 0.5,
        "called_relevant": 1.0,
    }
    assert (figures["public"]["lost"], figures["public"]["kept"]) == (0.5, 1.0)
    assert figures["public"]["called_relevant"] is None


def test_every_rule_has_a_row_in_the_tables(monkeypatch):
    monkeypatch.setattr(rules, "SIZES", (20,))
    monkeypatch.setattr(rules, "SEEDS", 1)
    names = ("everyday.passage", "fiqa")
    own = {
        part: {name: scored_lists(36, seed) for seed, name in enumerate(names, start)}
        for part, start in (("validation", 0), ("dev", 2))
    }
    figures = rules.measure(own, own["dev"])
    lines = rules.table(figures).splitlines()
    # Two calibrations, and the cosine's rule.
    assert len(lines) == 2 + len(figures["dev"]) + 3
    assert str(rules.DEFAULT) in lines[2]
    assert rules.tuned_table(figures).splitlines()[-1].startswith("| 20 | 2 | ")


def test_a_calibration_ranks_by_what_it_learned():
    sets = {"a": scored_lists(60)}
    (scored,) = rules.Calibration(sets)(sets).values()
    before = sum(max(query.scores) == query.scores[0] for query in sets["a"])
    after = sum(max(query.scores) == query.scores[0] for query in scored)
    assert after == before
    assert [query.relevant for query in scored] == [query.relevant for query in sets["a"]]
