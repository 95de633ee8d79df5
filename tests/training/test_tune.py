"""Thresholds tuned on labelled queries: their values, their verdicts and their reports."""

import json
import random
import statistics
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from conftest import DOCUMENTS, QUERIES
from training_helpers import labelled, means, run, scorings, written

from rsrank_rag import RSRank
from rsrank_rag.adapters.systems import load
from rsrank_rag.artifact import hub
from rsrank_rag.artifact.config import RSRankConfig
from rsrank_rag.errors import InputError
from rsrank_rag.evaluation.metrics import ScoredQuery, ThresholdSweep, best_threshold
from rsrank_rag.evaluation.statistics import Estimate
from rsrank_rag.language_model.options import ModelSource
from rsrank_rag.reranker import BLANK_SCORE
from rsrank_rag.training import tune as tune_module
from rsrank_rag.training.batches import folds
from rsrank_rag.training.tune import Goal, find_threshold


def tuning(count=12):
    _, queries = scorings(count, help=0.6, seed=4)
    return [*queries, ScoredQuery([0.4, -2.0], [False, False])]


def shifted(queries, by):
    return [
        ScoredQuery([score + by for score in query.scores], query.relevant) for query in queries
    ]


def test_a_threshold_is_the_lowest_of_a_precision_the_highest_of_a_recall_or_of_the_best_f1():
    queries = tuning()
    scores = sorted({score for query in queries for score in query.scores})
    tried = [scores[0] - 1, *(statistics.fmean(pair) for pair in pairwise(scores)), scores[-1]]
    measured = {threshold: means(queries, threshold) for threshold in tried}
    precise = find_threshold(queries, Goal("precision", 0.7))
    expected = min(t for t in tried if measured[t].get("precision", 0) >= 0.7)
    assert precise.threshold == pytest.approx(expected)
    assert precise.value.mean == pytest.approx(measured[expected]["precision"])
    complete = find_threshold(queries, Goal("recall", 0.7))
    expected = max(t for t in tried if measured[t]["recall"] >= 0.7)
    assert complete.threshold == pytest.approx(expected)
    best = find_threshold(queries, Goal())
    assert best.threshold == pytest.approx(best_threshold(queries)[0])


@pytest.mark.parametrize("metric", ["precision", "recall"])
def test_where_the_goal_was_reached_before_that_is_said(metric):
    queries = tuning()
    value = means(queries, 0.0)[metric]
    easier, harder = (find_threshold(queries, Goal(metric, value + by)) for by in (-0.1, 0.1))
    assert (
        f"at the threshold so far (0) it is {value:.3f}, which reaches the goal already."
        in easier.summary
    )
    assert "already" not in harder.summary


def test_a_threshold_that_keeps_the_same_documents_stays():
    queries = [ScoredQuery([2.0, -1.0], [True, False])] * 4
    for goal in (Goal(), Goal("precision", 0.8), Goal("recall", 0.8)):
        tuned = find_threshold(queries, goal, before=0.3)
        assert (tuned.threshold, tuned.problem) == (0.3, None)
        # It was not chosen, so it has no interval.
        assert f"threshold with {goal} that keeps the " in tuned.summary
        assert "documents: 0.3. On the " in tuned.summary


def test_a_small_threshold_is_shown_as_it_is_and_not_as_zero():
    queries, _ = scorings(20)
    small = [
        ScoredQuery([score / 100_000 for score in query.scores], query.relevant)
        for query in queries
    ]
    shown = []
    for scored in (queries, small):
        tuned = find_threshold(scored, Goal(), before=None)
        words = tuned.summary.partition("documents: ")[2].partition(". On the ")[0]
        shown.append([float(part.strip("()")) for part in words.split() if part != "to"])
    assert shown[1] == pytest.approx([number / 100_000 for number in shown[0]], rel=0.1)


def test_a_threshold_that_stays_is_no_loss_on_other_queries():
    queries, _ = scorings(20)
    first = find_threshold(queries, Goal(), before=None)
    again = find_threshold(queries, Goal(), before=first.threshold)
    assert again.verdict.difference["f1"].mean < 0
    assert (again.threshold, again.problem) == (first.threshold, None)
    assert "the threshold stays as it was" in again.summary
    assert "changes by" not in again.summary


def test_the_summary_says_how_many_queries_a_precision_counts():
    queries = [ScoredQuery([9.0, 1.0], [True, False])]
    queries += [ScoredQuery([2.0, 1.0], [False, True])] * 11
    tuned = find_threshold(queries, Goal("precision", 0.9))
    assert (tuned.value.mean, tuned.counted) == (1.0, 1)
    assert "On the 1 of 12 queries that count, precision is 1.000" in tuned.summary


def test_a_system_without_a_threshold_is_compared_with_keeping_everything():
    queries = [ScoredQuery([2.0, 1.0], [True, False])] * 4
    tuned = find_threshold(queries, Goal(), before=None)
    assert tuned.threshold == 1.5
    kept = "with 4 of 8 documents kept; with everything kept it is 0.667."
    assert f"F1 is 1.000, {kept}" in tuned.summary
    assert "so far" not in tuned.summary
    assert "so far" not in find_threshold(queries, Goal("recall", 0.9), before=None).summary


def test_the_goal_that_was_asked_for_is_judged_on_queries_that_did_not_choose_the_threshold():
    queries, _ = scorings(40)
    tuned = find_threshold(queries, Goal("recall", 0.9))
    held_out = tuned.verdict.after["recall"]
    assert tuned.verdict.queries == 40
    assert tuned.value.mean >= 0.9
    recalls = []
    for numbers in folds(40, 5):
        others = [query for number, query in enumerate(queries) if number not in numbers]
        threshold = Goal("recall", 0.9).choose(ThresholdSweep(others, "recall"))
        for number in numbers:
            recalls.append(means([queries[number]], threshold)["recall"])
    assert held_out.mean == pytest.approx(statistics.fmean(recalls))
    assert held_out.low < held_out.mean < held_out.high
    # F1 may fall where a recall was asked for: that is no reason to keep the threshold.
    assert tuned.problem is None


def test_a_threshold_for_f1_is_a_problem_where_f1_falls_on_other_queries():
    queries, _ = scorings(20)
    better = find_threshold(shifted(queries, 5.0), Goal())
    assert "f1" in better.verdict.gains
    assert better.problem is None
    assert "beyond chance. There, each part" in better.summary
    loss = {"f1": Estimate(mean=-0.1, low=-0.3, high=0.05)}
    verdict = better.verdict.model_copy(update={"difference": loss})
    worse = replace(better, verdict=verdict)
    held_out, before = verdict.after["f1"], verdict.before["f1"].mean
    assert worse.problem == (
        f"on queries that did not choose the threshold, F1 is {held_out}, below {before:.3f} at "
        "the threshold so far (0)"
    )
    assert "-0.100 (-0.300 to 0.050), which may be chance." in worse.summary


def test_queries_that_all_agree_are_no_proof_that_the_goal_is_reached():
    queries = [ScoredQuery([2.0, -1.0], [True, False])] * 12
    tuned = find_threshold(queries, Goal("precision", 0.99))
    open_words = "whether precision 0.99 holds for new queries stays open"
    assert f"it is 1.000: {open_words}" in tuned.summary


def test_a_threshold_that_keeps_everything_says_so_and_keeps_it_in_other_units():
    # A word search gives 0 where no word matches. Moved and scaled, such a score is still kept.
    queries = [ScoredQuery([4.0, 0.0, 0.0], [True, True, False])] * 4
    tuned = find_threshold(queries, Goal("recall", 1.0), before=None)
    assert "with 12 of 12 documents kept" in tuned.summary
    assert tuned.threshold < 0 < (0.0 - tuned.threshold) / 1e3
    assert f"{tuned.threshold:.3f}" == "-0.004"


def test_a_threshold_that_drops_one_document_of_many_does_not_claim_to_keep_all():
    # As a share, it would be rounded to 100.0%.
    queries = [ScoredQuery([4.0] * 1500, [True] * 1500)] * 3
    queries.append(ScoredQuery([4.0] * 1500 + [-1.0], [True] * 1500 + [False]))
    tuned = find_threshold(queries, Goal("recall", 1.0))
    assert "with 6,000 of 6,001 documents kept" in tuned.summary


def test_a_threshold_of_few_queries_has_no_interval():
    assert find_threshold(tuning(8), Goal("recall", 0.8)).estimate.low is None
    assert find_threshold(tuning(9), Goal("recall", 0.8)).estimate.low is not None


def test_a_threshold_has_the_interval_of_the_thresholds_of_bootstrap_samples():
    queries = tuning(20)
    tuned = find_threshold(queries, Goal("recall", 0.8))
    noise = random.Random(1)
    drawn = []
    for _ in range(300):
        sample = noise.choices(queries, k=len(queries))
        drawn.append(Goal("recall", 0.8).choose(ThresholdSweep(sample, "recall")))
    low, high = np.percentile(drawn, [2.5, 97.5])
    width = high - low
    assert (tuned.estimate.low, tuned.estimate.high) == pytest.approx((low, high), abs=width / 4)
    assert tuned.estimate.low < tuned.threshold < tuned.estimate.high
    said = f"{tuned.threshold:.3f} ({tuned.estimate.low:.3f} to "
    assert f"The threshold with recall 0.8 that keeps the fewest documents: {said}" in tuned.summary


def test_empty_lists_do_not_lower_a_precision():
    # Half of the queries keep nothing at zero; all that is kept is relevant.
    full = ScoredQuery([1.0, -3.0, -3.5], [True, False, False])
    empty = ScoredQuery([-2.0, -3.0, -3.5], [True, False, False])
    tuned = find_threshold([full, empty] * 10, Goal("precision", 1.0))
    assert tuned.value_before == 1.0
    assert tuned.value.mean == 1.0
    assert -3.0 <= tuned.threshold < -2.0
    assert tuned.summary.startswith(
        "The threshold with precision 1 that keeps the most documents: "
    )


def test_a_goal_that_cannot_be_reached_says_how_near_one_gets():
    good = ScoredQuery([1.0, -1.0], [True, False])
    bad = ScoredQuery([1.0, -1.0], [False, True])
    tuned = find_threshold([good, bad, good, bad, good], Goal("precision", 0.8))
    assert not tuned.reached
    assert "the highest precision is 0.600, at threshold" in tuned.problem
    assert "nearest to precision 0.8" in tuned.summary


def test_a_goal_that_is_missed_on_other_queries_is_a_problem():
    queries, _ = scorings(20)
    tuned = find_threshold(queries, Goal("recall", 0.9))
    missed = {"recall": Estimate(mean=0.8, low=0.7, high=0.85)}
    verdict = tuned.verdict.model_copy(update={"after": missed})
    tuned = replace(tuned, verdict=verdict)
    assert tuned.problem == (
        "on queries that did not choose the threshold, recall is 0.800 (0.700 to 0.850), below 0.9"
    )
    on_others = "On queries that did not choose the threshold it is"
    assert f"{on_others} 0.800 (0.700 to 0.850): the goal is missed beyond chance." in tuned.summary


def test_few_queries_must_reach_the_goal_by_themselves():
    # Too few queries keep a document for an interval.
    queries, _ = scorings(20)
    tuned = find_threshold(queries, Goal("precision", 0.8))
    for mean, problem in ((0.5, "precision is 0.500, below 0.8"), (0.8, None)):
        estimates = {"precision": Estimate(mean=mean, low=None, high=None)}
        verdict = tuned.verdict.model_copy(update={"after": estimates})
        said = replace(tuned, verdict=verdict)
        assert said.problem == (
            problem and f"on queries that did not choose the threshold, {problem}"
        )
        assert ("the goal is missed. There" in said.summary) is (problem is not None)
        assert ("stays open" in said.summary) is (problem is None)


@pytest.mark.parametrize(
    ("held_out", "chosen_on", "words"),
    [
        (0.91, 0.92, "the goal is reached beyond chance"),
        (0.85, 0.92, "whether recall 0.9 holds for new queries stays open"),
        # The thresholds of the left-out queries may keep more than the one that is written.
        (0.91, 0.85, "whether recall 0.9 holds for new queries stays open"),
    ],
)
def test_a_goal_is_reached_if_both_intervals_are_above_it(held_out, chosen_on, words):
    tuned = find_threshold(scorings(20)[0], Goal("recall", 0.9))
    recall = {"recall": Estimate(mean=0.95, low=held_out, high=0.99)}
    verdict = tuned.verdict.model_copy(update={"after": recall})
    value = Estimate(mean=0.96, low=chosen_on, high=0.99)
    assert words in replace(tuned, verdict=verdict, value=value).summary


def test_a_precision_has_an_estimate_where_nothing_was_kept_before():
    queries = [ScoredQuery([2.0, -1.0], [True, False])] * 12
    tuned = find_threshold(queries, Goal("precision", 0.9), before=5.0)
    assert tuned.value_before is None
    assert "at the threshold so far (5) it is undefined." in tuned.summary
    assert tuned.verdict.after["precision"].mean == 1.0
    assert "On queries that did not choose the threshold it is 1.000" in tuned.summary


def test_no_threshold_keeps_a_blank_document():
    # Half of the answers are blank: half is the highest recall, and the best F1 is two thirds.
    queries = [ScoredQuery([1.0, BLANK_SCORE, -1.0], [True, True, False])] * 12
    best = find_threshold(queries, Goal(), before=2.0)
    assert best.value.mean == pytest.approx(2 / 3)
    assert best.verdict.after["f1"].mean == pytest.approx(2 / 3)
    assert -1.0 <= best.threshold < 1.0
    complete = find_threshold(queries, Goal("recall", 1.0), before=2.0)
    assert (complete.reached, complete.value.mean) == (False, 0.5)
    assert complete.threshold >= -1.0


def test_scores_that_are_all_equal_have_a_threshold_at_some_distance():
    tuned = find_threshold([ScoredQuery([0.0, 0.0], [True, True])] * 4, Goal(), before=None)
    assert tuned.threshold == pytest.approx(-0.001)


def test_too_few_queries_or_none_to_answer_are_named():
    with pytest.raises(InputError, match="1 labelled queries cannot be"):
        find_threshold([ScoredQuery([1.0], [True])], Goal())
    for goal in (Goal(), Goal("precision", 0.5), Goal("recall", 0.5)):
        with pytest.raises(InputError, match="cannot be tuned: no query has a relevant"):
            find_threshold([ScoredQuery([1.0], [False])] * 4, goal)
    one = [ScoredQuery([1.0], [True]), *[ScoredQuery([1.0], [False])] * 4]
    with pytest.raises(InputError, match="too few queries have a relevant"):
        find_threshold(one, Goal("recall", 0.5))


# The command


def test_the_command_writes_what_it_says(fused, tmp_path):
    data = written(tmp_path / "own.jsonl", labelled(6))
    output = tmp_path / "tuned"
    arguments = ("tune", "--model", fused, "--data", data, "--output", output)
    said = run(*arguments, "--recall", 1.0, "--force")
    ranker = RSRank.from_pretrained(output, device="cpu", dtype="float32")
    before = RSRank.from_pretrained(fused, device="cpu", dtype="float32")
    threshold = hub.read_config(output).threshold
    assert f"written: threshold {threshold:.3f}, in" in said
    assert "The threshold with recall 1 that keeps the fewest documents: " in said
    assert "Measured on queries that were left out: 6" in said
    assert "Precision counts those that keep something" in said
    assert (
        "what changes on queries that were left out (the goal decides): no difference beyond "
        "chance; fewer than 10 queries cannot judge: nDCG@5 changes by" in said
    )
    assert "verdict: " not in said
    assert "base" not in said
    assert (ranker.threshold, before.threshold) == (threshold, 0.0)
    assert ranker.score(QUERIES[0], DOCUMENTS) == before.score(QUERIES[0], DOCUMENTS)
    assert ranker.rank(QUERIES[0], DOCUMENTS).threshold == threshold
    assert ranker.rank(QUERIES[0], DOCUMENTS, threshold=1.5).threshold == 1.5


def test_the_threshold_is_printed_before_it_is_written(fused, tmp_path, monkeypatch):
    def full(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tune_module, "write_trained", full)
    data = written(tmp_path / "own.jsonl", labelled(6))
    arguments = ("tune", "--model", fused, "--data", data, "--output", tmp_path / "tuned")
    said = run(*arguments, "--recall", 1.0, "--force", code=1)
    assert "The threshold with recall 1 that keeps the fewest documents: " in said
    assert "error: No space left on device." in said


def test_the_command_writes_nothing_where_the_goal_cannot_be_reached_unless_it_is_forced(
    fused, tmp_path
):
    queries = labelled(6)
    # The same texts are relevant in one query and irrelevant in the next.
    data = written(tmp_path / "own.jsonl", queries)
    arguments = ("tune", "--model", fused, "--data", data, "--output", tmp_path / "tuned")
    said = run(*arguments, "--precision", 1.0, code=1)
    assert "Nothing was written: no threshold reaches precision 1 on these 6 queries" in said
    assert "the highest precision is 0." in said
    assert not (tmp_path / "tuned").exists()
    assert "written: threshold" in run(*arguments, "--precision", 1.0, "--force")
    assert "It was forced: no threshold" in hub.read_config(tmp_path / "tuned").training.notes


# Other systems


@pytest.fixture(scope="module")
def tuned_bm25(tmp_path_factory):
    """The file with BM25's zero for recall 1 on `labelled`."""
    pytest.importorskip("bm25s")
    folder = tmp_path_factory.mktemp("tuned")
    data = written(folder / "own.jsonl", labelled(6))
    output = folder / "bm25.json"
    arguments = ("tune", "--model", "bm25", "--data", data, "--output", output, "--recall", 0.5)
    assert "written: threshold" in run(*arguments, "--force")
    return output


def test_a_file_stands_for_the_system_with_another_threshold(tuned_bm25):
    file = json.loads(tuned_bm25.read_text("utf-8"))
    assert (file["model"], file["data"]) == ("bm25", ["own"])
    assert "recall 0.5 on 6 labelled queries of own.jsonl" in file["notes"]
    plain = load(ModelSource("bm25"))
    tuned = load(ModelSource(str(tuned_bm25)))
    scores = plain.score(QUERIES[0], DOCUMENTS)
    assert tuned.score(QUERIES[0], DOCUMENTS) == scores
    assert (plain.threshold, tuned.threshold) == (None, file["threshold"])
    kept = {document.index for document in tuned.rank(QUERIES[0], DOCUMENTS).kept}
    assert kept == {place for place, score in enumerate(scores) if score > tuned.threshold}


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
    assert load(ModelSource(str(output))).threshold == file["threshold"]


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

    tuned = load(ModelSource(str(tuned_bm25)))
    compressor = langchain.RSRankCompressor(model=str(tuned_bm25))
    documents = [Document(page_content=text) for text in DOCUMENTS]
    kept = compressor.compress_documents(documents, QUERIES[0])
    assert [document.page_content for document in kept] == tuned.rank(QUERIES[0], DOCUMENTS).texts
    passages = tmp_path / "passages.txt"
    passages.write_text("\n".join(DOCUMENTS), encoding="utf-8")
    said = run("rank", "--model", tuned_bm25, "-q", QUERIES[0], "-d", passages, "--json")
    assert json.loads(said)["threshold"] == tuned.threshold


def test_labels_that_chose_the_threshold_before_are_named(tuned_bm25, tmp_path, caplog):
    caution = "own has the name of a labelled set that is recorded in"
    other = written(tmp_path / "other.jsonl", labelled(6))
    own = written(tmp_path / "own.jsonl", labelled(6))
    for command in (("evaluate",), ("tune", "--output", tmp_path / "again.json", "--force")):
        run(*command, "--model", tuned_bm25, "--data", other)
        assert caution not in caplog.text
        run(*command, "--model", tuned_bm25, "--data", own)
        assert caution in caplog.text
        caplog.clear()


def test_a_report_names_reused_labels_on_its_page_and_in_its_numbers(tuned_bm25, tmp_path):
    own = written(tmp_path / "own.jsonl", labelled(6))
    other = written(tmp_path / "other.jsonl", labelled(6))
    models = ("--model", "bm25", "--model", tuned_bm25)
    run("evaluate", *models, "--data", own, "--data", other, "--report", tmp_path / "report")
    numbers = json.loads((tmp_path / "report" / "report.json").read_text("utf-8"))
    assert [system["reused"] for system in numbers["systems"]] == [[], ["own"]]
    page = (tmp_path / "report" / "index.html").read_text("utf-8")
    assert page.count("records labelled sets with the names of these: own.") == 1


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
        load(ModelSource(str(file)))


def test_one_goal_at_a_time(fused, tmp_path):
    data = written(tmp_path / "own.jsonl", labelled(6))
    arguments = ("tune", "--model", fused, "--data", data, "--output", tmp_path / "x")
    assert "not both" in run(*arguments, "--recall", 1, "--precision", 1, code=2)


def test_the_threshold_is_zero_unless_the_config_gives_another(fused):
    config = hub.read_config(fused)
    assert config.threshold == 0.0
    moved = config.model_copy(update={"threshold": -0.5})
    assert RSRankConfig.parse(moved.model_dump_json(), source="x").threshold == -0.5


def test_figures_of_another_threshold_leave_the_artifact(ranker, tmp_path):
    training = ranker.config.training.model_copy(update={"metrics": {"held out": {"f1": 0.9}}})
    config = ranker.config.model_copy(update={"training": training})
    measured = RSRank(ranker.backbone, ranker.prompts, ranker.projection, config)
    measured.save_pretrained(tmp_path / "base")
    data = written(tmp_path / "own.jsonl", labelled(12))
    source = ModelSource(str(tmp_path / "base"))
    tune_module.tune(source, data, tmp_path / "tuned", Goal("recall", 0.5), force=True)
    assert hub.read_config(tmp_path / "base").training.metrics
    assert hub.read_config(tmp_path / "tuned").training.metrics == {}
