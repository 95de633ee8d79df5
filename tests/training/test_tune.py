"""Rules tuned on labelled queries: what is chosen, what is refused, and what is written."""

import json
import math
from dataclasses import replace

import pytest
from conftest import DOCUMENTS, QUERIES
from training_helpers import labelled, run, written

from rsrank_rag import RSRank
from rsrank_rag.adapters.kinds import TunedRule, load
from rsrank_rag.artifact import hub
from rsrank_rag.artifact.config import RSRankConfig
from rsrank_rag.backends.options import ModelSource
from rsrank_rag.errors import InputError
from rsrank_rag.evaluation.best_rule import Goal, best_rule
from rsrank_rag.evaluation.metrics import ScoredQuery, apply_rule
from rsrank_rag.evaluation.statistics import Estimate, folds
from rsrank_rag.ranking.rule import Fallback, Rule
from rsrank_rag.training import tune as tune_module
from rsrank_rag.training.tune import find_rule, goal_for

ZERO = Rule(0.0)
LABELS = [True, False, False]


def typed(count=40):
    """Zero keeps three documents of half of the lists and loses the answer of the others."""
    queries = []
    for number in range(count):
        wide = [3.0 + number / count, 1.0, 0.5]
        low = [-1.0 - number / count, -3.0, -3.5]
        queries.append(ScoredQuery(low if number % 2 else wide, LABELS))
    return queries


def test_a_rule_that_loses_fewer_answers_and_keeps_fewer_passages_has_no_problem():
    tuned = find_rule(typed(), Goal(), ZERO)
    assert (tuned.result.lost, tuned.result.kept) == (0, 1.0)
    assert tuned.problem is None
    assert set(tuned.verdict.gains) == {"lost", "kept", "recall"}
    assert tuned.summary.startswith(f"The best rule for {Goal()}: {tuned.rule}. So far: zero. ")
    assert "loses 0 of 40 answers and keeps 1.00 passages a query" in tuned.summary


def test_a_rule_is_judged_on_queries_that_did_not_choose_it():
    queries = typed()
    tuned = find_rule(queries, Goal(lost=0.0), ZERO)
    lost = 0
    for numbers in folds(len(queries), 5):
        others = [query for number, query in enumerate(queries) if number not in numbers]
        rule = best_rule(others, Goal(lost=0.0))
        lost += apply_rule([queries[number] for number in numbers], rule).lost
    assert lost > tuned.result.lost
    assert tuned.verdict.after["lost"].mean == lost / len(queries)


def test_a_rule_is_chosen_with_a_margin_for_answers_lost():
    # One answer in ten lies so low that to keep it costs two passages a query.
    queries = [ScoredQuery([2.0, 0.0, 0.0], LABELS)] * 18
    queries += [ScoredQuery([-2.0, 0.0, 0.0], LABELS)] * 2
    assert apply_rule(queries, best_rule(queries, Goal(lost=0.1))).lost == 2
    assert find_rule(queries, Goal(lost=0.1), ZERO).result.lost == 0


def test_a_rule_that_keeps_the_same_documents_stays_and_is_not_written():
    queries = [ScoredQuery([2.0, -1.0], [True, False])] * 20
    tuned = find_rule(queries, Goal(), Rule(0.3))
    assert tuned.rule == Rule(0.3)
    assert tuned.problem == "the rule so far is the best one"


def changed(tuned, **differences):
    """The same tuned rule, with other differences and results on queries that were left out."""
    estimates = {**tuned.verdict.difference}
    after = {**tuned.verdict.after}
    for name, (mean, low, high) in differences.items():
        estimates[name] = Estimate(mean=mean, low=low, high=high)
        moved = tuned.verdict.before[name].mean + mean
        after[name] = Estimate(mean=moved, low=moved, high=moved)
    verdict = tuned.verdict.model_copy(update={"difference": estimates, "after": after})
    return replace(tuned, verdict=verdict)


@pytest.mark.parametrize(
    ("differences", "problem"),
    [
        ({"lost": (0.02, 0.01, 0.03)}, "answers would be lost beyond chance"),
        ({"lost": (0.01, -0.1, 0.1)}, "the goal is missed: the share of answers lost is 0.510"),
        # Fewer answers are lost, although more than the goal allows.
        ({"lost": (-0.2, -0.3, -0.1)}, None),
        ({"recall": (-0.2, -0.3, -0.1)}, "the goal is missed: recall is 0.300"),
        (
            {"lost": (-0.5, -1, 0), "kept": (-0.5, -1, 0), "recall": (0.3, 0, 1)},
            "nothing is better beyond chance",
        ),
        ({"lost": (-0.5, -1, 0), "kept": (0.5, 0.1, 1), "recall": (0.3, 0.1, 1)}, None),
    ],
)
def test_a_rule_that_may_do_harm_is_a_problem(differences, problem):
    tuned = changed(find_rule(typed(), Goal(), ZERO), **differences)
    if problem is None:
        assert tuned.problem is None
    else:
        assert tuned.problem.startswith(problem)


def test_more_recall_is_a_reason_only_where_the_goal_asks_for_it():
    tuned = find_rule(typed(), Goal(), ZERO)
    change = {"lost": (-0.5, -1, 0), "kept": (0.5, 0.1, 1), "recall": (0.3, 0.1, 1)}
    assert changed(tuned, **change).problem is None
    satisfied = replace(tuned, goal=Goal(0.5, 0.5))
    assert changed(satisfied, **change).problem == "nothing is better beyond chance"


def test_few_answers_are_enough_only_to_show_that_fewer_are_lost():
    kept = [ScoredQuery([2.0, 1.0, 0.5], LABELS)] * 28
    tuned = find_rule(kept, Goal(), ZERO)
    assert tuned.verdict.gains == ["kept"]
    assert tuned.problem.startswith("28 queries with a relevant document (fewer than 29)")
    assert find_rule([*kept, kept[0]], Goal(), ZERO).problem is None
    assert find_rule(typed(28), Goal(), ZERO).problem is None


def test_a_system_that_keeps_everything_may_lose_as_many_answers_as_the_goal_allows():
    tuned = find_rule(typed(), Goal(), Rule())
    assert (tuned.result.kept, tuned.problem) == (1.0, None)
    few = changed(tuned, lost=(0.05, 0.01, 0.1))
    assert few.problem is None
    assert changed(tuned, lost=(0.11, 0.01, 0.2)).problem.startswith("the goal is missed")
    assert changed(replace(tuned, before=ZERO), lost=(0.05, 0.01, 0.1)).problem is not None


def test_a_goal_asks_for_what_the_rule_so_far_reaches_but_not_for_more_than_a_tenth_and_80():
    queries = typed()
    assert goal_for(queries, ZERO, None, None) == Goal(Goal.lost, 0.5)
    assert goal_for(queries[::2], ZERO, None, None) == Goal(0.0, Goal.recall)
    assert goal_for(queries, Rule(), None, None) == Goal()
    assert goal_for(queries, ZERO, 0.2, 0.9) == Goal(0.2, 0.9)


def test_too_few_queries_or_none_to_answer_are_named():
    with pytest.raises(InputError, match="1 labelled queries cannot be"):
        find_rule([ScoredQuery([1.0], [True])], Goal(), ZERO)
    with pytest.raises(InputError, match="no query has a relevant document"):
        find_rule([ScoredQuery([1.0], [False])] * 4, Goal(), ZERO)


# The command


def test_the_command_writes_what_it_says(fused, tmp_path):
    data = written(tmp_path / "own.jsonl", labelled(6))
    output = tmp_path / "tuned"
    arguments = ("tune", "--model", fused, "--data", data, "--output", output)
    message = run(*arguments, "--recall", 1.0, "--lost", 0, "--force")
    ranker = RSRank.from_pretrained(output, device="cpu", dtype="float32")
    before = RSRank.from_pretrained(fused, device="cpu", dtype="float32")
    config = hub.read_config(output)
    rule = ranker.native_rule
    assert (config.threshold, config.max_gap, config.fallback) == (
        rule.threshold,
        rule.max_gap,
        rule.fallback,
    )
    assert rule != before.native_rule
    assert f"written: {rule}, in" in message
    assert "at most 0% of the answers lost, a recall of at least 100%" in message
    assert "Measured on queries that were left out: 6" in message
    assert ranker.score(QUERIES[0], DOCUMENTS) == before.score(QUERIES[0], DOCUMENTS)
    assert ranker.rank(QUERIES[0], DOCUMENTS).rule == rule


def test_the_rule_is_printed_before_it_is_written(fused, tmp_path, monkeypatch):
    def full(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub, "write_derived", full)
    data = written(tmp_path / "own.jsonl", labelled(6))
    arguments = ("tune", "--model", fused, "--data", data, "--output", tmp_path / "tuned")
    message = run(*arguments, "--force", code=1)
    assert "The best rule for at most " in message
    assert "error: No space left on device." in message


def test_the_command_writes_nothing_that_may_do_harm_unless_it_is_forced(fused, tmp_path):
    data = written(tmp_path / "own.jsonl", labelled(6))
    arguments = ("tune", "--model", fused, "--data", data, "--output", tmp_path / "tuned")
    message = run(*arguments, code=1)
    assert "Nothing was written: 6 queries with a relevant document (fewer than 29)" in message
    assert not (tmp_path / "tuned").exists()
    assert "written: " in run(*arguments, "--force")
    assert "It was forced: 6 queries" in hub.read_config(tmp_path / "tuned").training.notes


# Other systems


@pytest.fixture(scope="module")
def tuned_bm25(tmp_path_factory):
    """The file with BM25's best rule on `labelled`."""
    pytest.importorskip("bm25s")
    folder = tmp_path_factory.mktemp("tuned")
    data = written(folder / "own.jsonl", labelled(6))
    output = folder / "bm25.json"
    arguments = ("tune", "--model", "bm25", "--data", data, "--output", output, "--lost", 0.5)
    assert "written: " in run(*arguments, "--force")
    return output


def test_a_file_stands_for_the_system_with_another_rule(tuned_bm25):
    file = json.loads(tuned_bm25.read_text("utf-8"))
    assert (file["model"], file["data"]) == ("bm25", ["own"])
    assert "at most 50% of the answers lost" in file["notes"]
    assert "on 6 labelled queries of own.jsonl" in file["notes"]
    plain = load(ModelSource(name="bm25"))
    tuned = load(ModelSource(name=str(tuned_bm25)))
    scores = plain.score(QUERIES[0], DOCUMENTS)
    assert tuned.score(QUERIES[0], DOCUMENTS) == scores
    assert (plain.threshold, tuned.threshold) == (None, file["threshold"])
    kept = [document.index for document in tuned.rank(QUERIES[0], DOCUMENTS).kept]
    assert kept == tuned.native_rule.select(scores)


def test_a_file_holds_all_parts_of_a_rule(tmp_path):
    rule = Rule(0.3, max_gap=0.1, fallback=Fallback(0.05, math.inf))
    file = tmp_path / "x.json"
    tuned = TunedRule(model="bm25", threshold=0.3, max_gap=0.1, fallback=Fallback(0.05, math.inf))
    file.write_text(tuned.model_dump_json(), "utf-8")
    assert load(ModelSource(name=str(file))).native_rule == rule


def test_a_file_tuned_from_a_file_names_the_system_and_may_replace_the_first(tuned_bm25, tmp_path):
    data = written(tmp_path / "more.jsonl", labelled(6))
    output = tmp_path / "again.json"
    output.write_bytes(tuned_bm25.read_bytes())
    run("tune", "--model", output, "--data", data, "--output", output, "--force")
    file = json.loads(output.read_text("utf-8"))
    assert (file["model"], file["data"]) == ("bm25", ["more", "own"])
    # The same labels again are no other labels.
    run("tune", "--model", output, "--data", data, "--output", output, "--force")
    assert json.loads(output.read_text("utf-8"))["data"] == ["more", "own"]
    assert "of more.jsonl" in file["notes"]
    assert load(ModelSource(name=str(output))).threshold == file["threshold"]


def test_a_tuned_file_keeps_its_revision_unless_another_is_given(tuned_bm25, tmp_path):
    data = written(tmp_path / "own.jsonl", labelled(6))
    first = json.loads(tuned_bm25.read_text("utf-8"))
    start = tmp_path / "first.json"
    start.write_text(json.dumps({**first, "revision": "v1"}), "utf-8")
    output = tmp_path / "again.json"
    command = ("tune", "--model", start, "--data", data, "--output", output, "--force")
    run(*command)
    assert json.loads(output.read_text("utf-8"))["revision"] == "v1"
    run(*command, "--revision", "v2")
    assert json.loads(output.read_text("utf-8"))["revision"] == "v2"


def test_a_tuned_system_can_be_named_wherever_a_model_can(tuned_bm25, tmp_path):
    langchain = pytest.importorskip("rsrank_rag.langchain")
    from langchain_core.documents import Document

    tuned = load(ModelSource(name=str(tuned_bm25)))
    compressor = langchain.RSRankCompressor(model=str(tuned_bm25))
    documents = [Document(page_content=text) for text in DOCUMENTS]
    kept = compressor.compress_documents(documents, QUERIES[0])
    assert [document.page_content for document in kept] == tuned.rank(QUERIES[0], DOCUMENTS).texts
    passages = tmp_path / "passages.txt"
    passages.write_text("\n".join(DOCUMENTS), encoding="utf-8")
    message = run("rank", "--model", tuned_bm25, "-q", QUERIES[0], "-d", passages, "--json")
    assert json.loads(message)["rule"]["threshold"] == tuned.threshold


def test_labels_that_chose_the_rule_before_are_named(tuned_bm25, tmp_path, caplog):
    caution = "own has the name of a labelled set that is recorded in"
    other = written(tmp_path / "other.jsonl", labelled(6))
    own = written(tmp_path / "own.jsonl", labelled(6))
    for command in (("evaluate",), ("tune", "--output", tmp_path / "again.json", "--force")):
        run(*command, "--model", tuned_bm25, "--data", other)
        assert caution not in caplog.text
        run(*command, "--model", tuned_bm25, "--data", own)
        assert caution in caplog.text
        caplog.clear()


def test_a_tuned_file_is_for_other_systems_and_a_folder_for_artifacts(fused, tmp_path):
    data = written(tmp_path / "own.jsonl", labelled(6))
    common = ("tune", "--data", data, "--output")
    assert "Name a folder" in run(*common, tmp_path / "x.json", "--model", fused, code=2)
    assert "ends in .json" in run(*common, tmp_path / "x", "--model", "bm25", code=2)


@pytest.mark.parametrize("text", [None, "{}", '{"model": "bm25", "threshold": 1, "scale": 1}'])
def test_a_file_that_tune_did_not_write_is_refused(text, tmp_path):
    file = tmp_path / "zero.json"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"zero\.json is no file that rsrank tune wrote"):
        load(ModelSource(name=str(file)))


def test_the_threshold_is_zero_unless_the_config_gives_another(fused):
    config = hub.read_config(fused)
    assert config.threshold == 0.0
    moved = config.model_copy(update={"threshold": -0.5})
    assert RSRankConfig.parse(moved.model_dump_json(), source="x").threshold == -0.5


def test_figures_of_another_rule_leave_the_artifact(ranker, tmp_path):
    training = ranker.config.training.model_copy(update={"metrics": {"held out": {"f1": 0.9}}})
    config = ranker.config.model_copy(update={"training": training})
    measured = RSRank(ranker.backbone, ranker.prompts, ranker.projection, config)
    measured.save_pretrained(tmp_path / "base")
    data = written(tmp_path / "own.jsonl", labelled(12))
    source = ModelSource(name=str(tmp_path / "base"))
    tune_module.tune(source, data, tmp_path / "tuned", force=True)
    assert hub.read_config(tmp_path / "base").training.metrics
    assert hub.read_config(tmp_path / "tuned").training.metrics == {}
