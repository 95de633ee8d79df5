"""benchmarks.few_queries: draws, and a run that goes on."""

import json
import sys
from types import SimpleNamespace

import pytest

from benchmarks import few_queries
from rsrank_rag.artifact import hub

OUTCOME = {"trained": {}, "written": False}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Function: run the command for ten made-up queries -> the draws that it measured."""
    measured = []

    def measure(_features, _base, _rule, numbers):
        measured.append(numbers)
        if len(measured) == run.killed_at:
            raise KeyboardInterrupt
        return dict(OUTCOME)

    (tmp_path / "notes.jsonl.gz").write_bytes(b"")
    monkeypatch.setattr(few_queries, "measure", measure)
    monkeypatch.setattr(few_queries, "table", lambda *_: "a row")
    monkeypatch.setattr(few_queries, "tables", lambda *_: "")
    extract = SimpleNamespace(extract=lambda: list(range(10)))
    monkeypatch.setattr(few_queries, "ResearchRun", lambda *_, **__: extract)

    def run(*more):
        measured.clear()
        arguments = ["--data", tmp_path, "--sets", "notes", "--sizes", 3, 5, "--seeds", 2]
        arguments += ["--work", tmp_path / "work", "--output", tmp_path / "found.json", *more]
        monkeypatch.setattr(sys, "argv", ["few_queries", *map(str, arguments)])
        few_queries.main()
        return measured

    run.killed_at = 0
    return run


def test_a_run_that_was_killed_goes_on_after_its_last_draw(run, tmp_path):
    run.killed_at = 3
    with pytest.raises(KeyboardInterrupt):
        run()
    file = tmp_path / "found.json"
    first = json.loads(file.read_text())["rows"]
    assert [(row["queries"], row["seed"]) for row in first] == [(3, 0), (3, 1)]

    run.killed_at = 0
    assert [len(own) for own, _ in run()] == [5, 5]
    rows = json.loads(file.read_text())["rows"]
    assert rows[:2] == first
    assert [(row["queries"], row["seed"]) for row in rows] == [(3, 0), (3, 1), (5, 0), (5, 1)]
    assert run() == []


def test_draws_of_other_weights_or_with_another_limit_are_made_anew(run, monkeypatch):
    assert len(run()) == 4
    assert len(run("--queries", 8)) == 4
    config = hub.read_config(hub.resolve("mini"))
    other = config.model_copy(update={"threshold": 1.0})
    assert other.digest != config.digest
    monkeypatch.setattr(hub, "read_config", lambda _folder: other)
    assert len(run("--queries", 8)) == 4


def test_a_larger_draw_of_a_seed_holds_the_smaller_one():
    own, others = few_queries.draw(10, 3, seed=1)
    assert few_queries.draw(10, 5, seed=1)[0][:3] == own
    assert sorted(own + others) == list(range(10))
