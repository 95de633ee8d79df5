"""The command line, called as a user calls it."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from conftest import DOCUMENTS, QUERY

from rsrank_rag import __version__
from rsrank_rag.artifact import hub
from rsrank_rag.cli import app
from rsrank_rag.cli.arguments import catch_errors
from rsrank_rag.cli.evaluation import ROWS, print_file
from rsrank_rag.cli.ranking import explanation_text, read_documents
from rsrank_rag.errors import InputError
from rsrank_rag.evaluation.best_rule import Goal
from rsrank_rag.evaluation.datasets import LabelledDocument
from rsrank_rag.ranking.explanation import Explanation
from rsrank_rag.ranking.rule import Fallback, Rule, plain

runner = CliRunner()


@pytest.fixture(scope="module")
def artifact(ranker, tmp_path_factory):
    folder = tmp_path_factory.mktemp("artifact")
    ranker.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def passages(tmp_path):
    path = tmp_path / "passages.txt"
    path.write_text("\n".join(DOCUMENTS) + "\n\n", encoding="utf-8")
    return str(path)


def run(*arguments, code=0, **options):
    result = runner.invoke(app, list(arguments), env={"COLUMNS": "200"}, **options)
    assert result.exit_code == code, result.output
    return result


def rank_json(artifact, *arguments, **options):
    output = run(
        "rank", "-q", QUERY, "-m", artifact, "--dtype", "float32", "--json", *arguments, **options
    ).stdout
    return json.loads(output)


def test_rank_prints_every_document_once_as_the_library_ranks_them(ranker, artifact, passages):
    expected = ranker.rank(QUERY, DOCUMENTS)
    actual = rank_json(artifact, "-d", passages)
    assert [row["index"] for row in actual["kept"]] == [
        document.index for document in expected.kept
    ]
    assert [row["index"] for row in actual["dropped"]] == [
        document.index for document in expected.dropped
    ]
    assert [row["score"] for row in actual["kept"] + actual["dropped"]] == pytest.approx(
        [document.score for document in expected.kept + expected.dropped], abs=1e-4
    )


def test_the_table_shows_kept_and_dropped_documents(ranker, artifact, passages):
    output = run("rank", "-q", QUERY, "-m", artifact, "-d", passages, "--dtype", "float32").stdout
    result = ranker.rank(QUERY, DOCUMENTS)
    kept = [line for line in output.splitlines() if line.startswith("+ ")]
    dropped = [line for line in output.splitlines() if line.startswith("- ")]
    assert (len(kept), len(dropped)) == (len(result.kept), len(result.dropped))
    assert all(document.text[:40] in output for document in result.kept + result.dropped)


def test_documents_come_from_standard_input_as_json_lines_too(artifact):
    lines = "\n".join(json.dumps({"text": text, "id": i}) for i, text in enumerate(DOCUMENTS))
    actual = rank_json(artifact, "-d", "-", input=lines)
    read = {row["id"]: row["text"] for row in actual["kept"] + actual["dropped"]}
    assert read == dict(enumerate(DOCUMENTS))


def test_a_title_is_read_before_the_text_as_in_labelled_files(artifact):
    rows = [{"text": text, "title": "Notes"} for text in DOCUMENTS[:2]]
    rows.append({"text": DOCUMENTS[2], "title": None})
    read = [LabelledDocument(id="", relevant=True, **row).content() for row in rows]
    assert read[0].startswith("Notes\n")
    scores = []
    for lines in (rows, [{"text": text} for text in read]):
        actual = rank_json(artifact, "-d", "-", input="\n".join(map(json.dumps, lines)))
        scores.append({row["index"]: row["score"] for row in actual["kept"] + actual["dropped"]})
    assert scores[0] == scores[1]


def test_each_part_of_the_rule_is_passed_on(artifact, passages):
    assert rank_json(artifact, "-d", passages, "--threshold", "99")["kept"] == []
    weak = rank_json(artifact, "-d", passages, "--threshold", "99", "--fallback", "0,999")["kept"]
    assert [row["weak"] for row in weak] == [True]
    everything = rank_json(artifact, "-d", passages, "--threshold", "none")
    assert (everything["dropped"], everything["rule"]["threshold"]) == ([], None)
    best = rank_json(artifact, "-d", passages, "--threshold", "none", "--max-gap", "0")["kept"]
    assert [row["index"] for row in best] == [everything["kept"][0]["index"]]
    first = rank_json(artifact, "-d", passages, "--threshold", "none", "--top-n", "1")["kept"]
    assert first == best
    for wrong in (["--max-gap", "x"], ["--fallback", "1"], ["--fallback", "-1,2"]):
        run("rank", "-m", artifact, "-q", QUERY, "-d", passages, *wrong, code=2)


def test_json_that_is_nested_too_deeply_is_an_error_of_its_line(artifact, tmp_path):
    path = tmp_path / "deep.jsonl"
    path.write_text('{"text": ' + "[" * 200_000)
    message = run("rank", "-q", QUERY, "-m", artifact, "-d", str(path), code=2).stderr
    assert "document 1: expected JSON" in message


def test_no_documents_give_two_empty_lists(artifact):
    actual = rank_json(artifact, "-d", "-", input="\n")
    assert (actual["kept"], actual["dropped"]) == ([], [])


def test_rank_takes_other_systems_by_name_with_their_own_threshold(passages):
    pytest.importorskip("bm25s")
    actual = json.loads(run("rank", "-q", QUERY, "-m", "bm25", "-d", passages, "--json").stdout)
    assert (actual["rule"]["threshold"], actual["dropped"], actual["kept"][0]["index"]) == (
        None,
        [],
        0,
    )


def test_explain_shows_that_a_blank_document_has_no_parts(artifact):
    assert "-10000.00" in run("explain", "-q", QUERY, "--document", " ", "-m", artifact).stdout


def test_rank_finds_documents_that_were_read_ahead_of_time(artifact, passages, tmp_path):
    folder = str(tmp_path / "prefixes")
    run("index", "-d", passages, "-m", artifact, "--cache-folder", folder, "--dtype", "float32")
    kept = rank_json(artifact, "-d", passages, "--cache-folder", str(folder))
    plain = rank_json(artifact, "-d", passages)
    for name in ("kept", "dropped"):
        assert [row["index"] for row in kept[name]] == [row["index"] for row in plain[name]]


def test_index_counts_documents_and_the_different_parts_of_them(artifact, tmp_path):
    (tmp_path / "texts.txt").write_text("A bee dances.\nA bee dances.\nTrains run on rails.\n")
    arguments = (
        "index",
        "-d",
        str(tmp_path / "texts.txt"),
        "-m",
        artifact,
        "--cache-folder",
        str(tmp_path),
    )
    assert run(*arguments).stdout.startswith("3 documents: 2 different parts, 2 run for ")
    assert run(*arguments).stdout.startswith("3 documents: 2 different parts, 0 run for ")


def test_index_names_its_folder_by_its_full_path(artifact, passages, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = run("index", "-d", passages, "-m", artifact, "--cache-folder", "prefixes").stdout
    assert message.endswith(f" run for {tmp_path / 'prefixes'}\n")


def test_explain_says_kept_or_dropped_by_the_rule_of_the_model():
    explanation = Explanation("q", "d", 0.4, False, ("q",), (1,), ((0.4,),), (((0.4,),),))
    assert explanation_text(explanation, Rule(0.0)).endswith("\nkept")
    cut = replace(explanation, truncated=True)
    assert explanation_text(cut, Rule(0.0)).endswith(
        "\nkept (by its beginning alone; rank reads long documents in windows)"
    )
    below = explanation_text(explanation, Rule(0.5))
    assert below.endswith("\ndropped: the threshold is 0.5")
    weak = explanation_text(explanation, Rule(0.5, 2.0, Fallback(1.0, 2.0)))
    assert weak.endswith("list scores above the threshold: the threshold is 0.5")


def test_explain_prints_parts_that_add_up_to_the_score(artifact):
    output = run(
        "explain", "-q", QUERY, "--document", DOCUMENTS[0], "-m", artifact, "--json"
    ).stdout
    actual = json.loads(output)
    assert sum(sum(row) for row in actual["parts"]) == pytest.approx(actual["score"], abs=1e-6)
    table = run("explain", "-q", QUERY, "--document", DOCUMENTS[0], "-m", artifact).stdout
    assert "L1" in table
    assert f"{actual['score']:+.2f}" in table


def test_parts_agreement_and_matches_of_the_built_in_model_add_up_to_the_score():
    request = (
        "explain",
        "-q",
        "How do bees find flowers?",
        "--document",
        "Bees find flowers by their colour.",
    )
    actual = json.loads(run(*request, "-m", "mini", "--dtype", "float32", "--json").stdout)
    assert abs(actual["similarity"]) > 0.1
    assert sum(map(sum, actual["parts"])) + actual["similarity"] == pytest.approx(
        actual["score"], abs=1e-4
    )
    assert len(actual["matches"]) == len(actual["tokens"])


def test_info_describes_the_artifact_and_needs_no_language_model(artifact, ranker):
    output = run("info", artifact).stdout
    assert f"{ranker.projection.weight.numel():,} numbers" in output
    assert ranker.config.backbone.name in output
    assert f"{ranker.config.backbone.num_layers} layers)" in output
    assert json.loads(run("info", artifact, "--json").stdout) == json.loads(
        ranker.config.model_dump_json()
    )


@pytest.fixture
def labelled(tmp_path):
    rows = [
        {
            "id": str(number),
            "query": QUERY,
            "documents": [
                {"id": str(i), "text": text, "title": "Notes", "relevant": (i + number) % 3 == 0}
                for i, text in enumerate(DOCUMENTS)
            ],
        }
        for number in range(2)
    ]
    for name in ("first.set", "second"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return [str(tmp_path / "first.set.jsonl"), str(tmp_path / "second.jsonl")]


def test_evaluate_prints_one_record_a_file_and_shows_the_same_table(artifact, labelled):
    data = ["--data", labelled[0], "--data", labelled[1]]
    table = run("evaluate", "-m", artifact, *data).stdout
    records = json.loads(run("evaluate", "-m", artifact, *data, "--json").stdout)
    assert [(record["dataset"], record["queries"]) for record in records] == [
        ("first.set", 2),
        ("second", 2),
    ]
    for record in records:
        assert plain(record["ndcg@5"]) in table
        assert plain(record["rules"]["in_use"]["f1"]) in table
    assert "first 5 in the file's order" in table


def test_evaluate_shows_systems_side_by_side_with_every_number_whole(capsys):
    record = dict.fromkeys(ROWS, 0.125) | {"queries": 13145, "recall@5": -0.000451}
    record["lost_answers"] = ["q\x1b[31m1", "q2"]
    in_use = dict.fromkeys(ROWS, 0.5) | {"kept_unanswerable": None}
    names = ("queries", "ndcg@5", "recall@5")
    in_use = {key: value for key, value in in_use.items() if key not in names}
    records = [{"model": name, **record, "rules": {"in_use": in_use}} for name in ("a model", "x")]
    print_file("beir:scifact", records)
    *lines, first, second = capsys.readouterr().out.strip().splitlines()
    assert first == "a model loses the answers of: q\ufffd[31m1, q2"
    assert second == first.replace("a model", "x")
    assert lines[0] == "beir:scifact"
    assert len(set(map(len, lines[1:]))) == 1
    rows = {name: cells for name, *cells in (re.split("  +", line) for line in lines[1:])}
    assert rows[""] == ["a model", "x"]
    assert rows["queries"] == ["13145", "13145"]
    assert rows["nDCG@5 of all queries"] == ["0.125", "0.125"]
    assert rows["Recall@5 of all queries"] == ["-0.00045", "-0.00045"]
    assert rows["kept without an answer"] == ["-", "-"]
    assert rows["F1"] == ["0.5", "0.5"]


def test_a_system_without_a_threshold_gets_the_best_rule_over_all_files_and_that_is_said(labelled):
    arguments = ["evaluate", "-m", "bm25", "--data", labelled[0]]
    done = run(*arguments, "--json")
    (record,) = json.loads(done.stdout)
    assert record["rules"]["in_use"]["recall"] >= Goal.recall
    assert (
        "the best over all files, counted alike; this system has no native threshold" in done.stderr
    )
    (record,) = json.loads(run(*arguments, "--json", "--threshold", "1.5", "--max-gap", "2").stdout)
    assert record["rule"] == {"threshold": 1.5, "max_gap": 2.0, "fallback": None, "top_n": None}
    (record,) = json.loads(run(*arguments, "--json", "--threshold", "none").stdout)
    assert record["rule"] == {"threshold": None, "max_gap": None, "fallback": None, "top_n": None}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["rank", "-q", "", "-d", "-", "-m", "ARTIFACT"], 2, "has no tokens"),
        (["rank", "-q", "x", "-d", "nowhere.txt", "-m", "ARTIFACT"], 2, "could not be read"),
        (["rank", "-q", "x", "-d", "-", "-m", "ARTIFACT", "--top-n", "0"], 2, "top_n"),
        (["rank", "-q", "x", "-d", "-", "-m", "nowhere at all"], 2, "There is no system"),
        (["rank", "-q", "x", "-d", "-", "-m", "ARTIFACT", "--dtype", "int7"], 2, "is not a dtype"),
        (["info", "nowhere at all"], 1, "neither built in"),
        (["evaluate", "-m", "bm25", "--data", "nowhere.jsonl"], 2, "could not be read"),
        (
            ["evaluate", "-m", "bm25", "--data", "PAIRS", "--threshold", "nan"],
            2,
            "must be a number",
        ),
        (["evaluate", "-m", "bm25", "--data", "BLANK"], 2, "line 2: query: String should match"),
        (["rank", "--nonsense"], 2, "No such option"),
        (["rank", "-q", "x", "-d", "EMPTY", "-m", "ARTIFACT"], 2, "holds no documents"),
        (["rank", "-q", "x", "-d", "BINARY", "-m", "ARTIFACT"], 2, "Give a text file in UTF-8"),
        (
            ["rank", "-q", "x", "-d", "-", "-m", "bge-reranker-v3"],
            2,
            "Did you mean 'bge-reranker-v2-m3'",
        ),
        (["rank", "-q", "x", "-d", "-", "-m", "bm52"], 2, "Did you mean 'bm25'?"),
        (["evaluate", "-m", "mnii", "--data", "x"], 2, "Did you mean 'mini'?"),
        (["info", "mnii"], 1, "Did you mean 'mini'?"),
        (
            ["train", "--config", "encoder", "--set", "fit.epoch=1"],
            2,
            "fit.epoch: there is no such",
        ),
        (["score", "-i", "BINARY", "-o", "NEW"], 2, "is no file that ends in .jsonl"),
        (["score", "-i", "PAIRS", "-o", "EMPTY"], 2, "must be a file that ends in .jsonl"),
        (["score", "-i", "PAIRS", "-o", "EMPTY/out.jsonl"], 1, "File exists"),
        (["index", "-d", "BINARY"], 2, "Give --cache-folder"),
    ],
)
def test_a_mistake_gives_one_clear_line_and_an_exit_code(
    artifact, arguments, code, message, tmp_path
):
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00\xff")
    (tmp_path / "pairs.jsonl").write_text('{"query": "q", "document": "d"}\n')
    rows = [{"id": f"{query}.", "query": query, "documents": []} for query in ("q", " ")]
    (tmp_path / "blank.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {
        "BLANK": "blank.jsonl",
        "EMPTY": "empty.txt",
        "BINARY": "picture.png",
        "PAIRS": "pairs.jsonl",
        "NEW": "new",
    }
    names = {"ARTIFACT": artifact, **{name: str(tmp_path / file) for name, file in files.items()}}
    for name, path in names.items():
        arguments = [argument.replace(name, path) for argument in arguments]
    result = run(*arguments, code=code, input="text\n")
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    if "No such option" not in message:
        assert len(result.stderr.splitlines()) == 1
        assert result.stderr.startswith("error: ")
        assert result.stderr.endswith((".\n", "?\n"))


@pytest.mark.parametrize(
    ("resumes", "said"),
    [(True, "Stopped. Run the same command again to go on."), (False, "Stopped.")],
)
def test_ctrl_c_says_whether_the_same_command_goes_on(resumes, said, capfd):
    with pytest.raises(click.exceptions.Exit) as ended, catch_errors(resumes):
        raise KeyboardInterrupt
    assert ended.value.exit_code == 130
    assert capfd.readouterr().err.strip() == said


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (
            OSError(28, "No space left on device", "out/part"),
            " Make room. Run the same command again to go on.",
        ),
        (PermissionError(13, "Permission denied", "out"), ""),
        (FileExistsError(17, "File exists", "README.md"), ""),
    ],
)
def test_what_the_disk_refuses_is_one_line_and_only_a_full_disk_asks_to_go_on(error, advice, capfd):
    with pytest.raises(click.exceptions.Exit) as ended, catch_errors(resumes=True):
        raise error
    assert ended.value.exit_code == 1
    expected = f"error: {error.strerror}: {error.filename!r}.{advice}"
    assert " ".join(capfd.readouterr().err.split()) == expected


@pytest.mark.skipif(os.name == "nt", reason="pipes of a Unix shell")
def test_a_reader_that_ends_early_ends_a_command_without_a_word():
    command = f"'{sys.executable}' -m rsrank_rag info mini | true"
    assert subprocess.run(["sh", "-c", command], capture_output=True).stderr == b""


def test_a_disk_that_is_full_ends_scoring_in_one_line_and_leaves_no_half_file(
    tmp_path, monkeypatch
):
    source = tmp_path / "pairs.jsonl"
    source.write_text('{"query": "bees", "document": "Bees dance."}\n')

    def full(_path, _target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    out = tmp_path / "new" / "out.jsonl"
    result = run("score", "-i", str(source), "-o", str(out), "-m", "bm25", code=1)
    message = " ".join(result.stderr.split())
    assert re.fullmatch(r"error: No space left on device: '/.*'. Make room.", message)
    assert list(out.parent.iterdir()) == []


@pytest.fixture
def pairs_file(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"query": "bees", "document": "Bees dance."}\n')
    return str(path)


def test_what_a_killed_run_of_score_left_is_removed_after_a_day(pairs_file, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    old, new = (folder / f".{letter * 32}.partial" for letter in "ab")
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    run("score", "-i", pairs_file, "-o", str(folder / "out.jsonl"), "-m", "bm25")
    assert (old.exists(), new.exists()) == (False, True)


def test_control_characters_of_passages_and_artifacts_do_not_reach_the_terminal(artifact, tmp_path):
    evil = "bees \x1b]0;owned\x07 dance \x9b31m"
    documents = tmp_path / "passages.txt"
    documents.write_text(evil, encoding="utf-8")
    config = hub.read_config(Path(artifact))
    notes = config.training.model_copy(update={"notes": evil})
    folder = tmp_path / "evil"
    shutil.copytree(artifact, folder)
    text = config.model_copy(update={"training": notes}).model_dump_json()
    (folder / "config.json").write_text(text, encoding="utf-8")
    message = run("rank", "-q", "bees", "-d", str(documents), "-m", artifact).stdout
    message += run("explain", "-q", evil, "--document", evil, "-m", artifact).stdout
    message += run("info", str(folder)).stdout
    message += run("rank", "-q", "bees", "-d", evil, "-m", artifact, code=2).stderr
    assert message.count("bees \ufffd]0;owned\ufffd dance \ufffd31m") >= 5
    assert not set(message) & {"\x1b", "\x07", "\x9b"}


def test_a_json_line_without_text_is_an_error_that_names_the_document(tmp_path):
    path = tmp_path / "documents.jsonl"
    path.write_text('{"text": "a"}\n{"body": "b"}\n', encoding="utf-8")
    with pytest.raises(InputError, match="document 2"):
        read_documents(str(path))


def test_text_that_merely_starts_with_a_brace_is_text(tmp_path):
    path = tmp_path / "documents.txt"
    path.write_text("{curly} things\nplain\n", encoding="utf-8")
    assert read_documents(str(path)) == ["{curly} things", "plain"]


def test_the_help_shows_the_whole_first_sentence_of_each_command():
    message = " ".join(run("--help").stdout.split())
    for command in app.commands.values():
        assert command.help.partition("\n")[0] in message


def test_examples_in_the_help_stand_without_backticks():
    for command in app.commands:
        assert "`" not in run(command, "--help").stdout


def test_a_closed_standard_error_does_not_stop_a_command(artifact, passages):
    code = "import os, sys; os.close(2); sys.stderr = None; from rsrank_rag.cli import app; app()"
    words = ["rank", "-q", QUERY, "-d", passages, "-m", artifact, "--json"]
    done = subprocess.run([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, check=True)
    assert json.loads(done.stdout)["query"] == QUERY


def test_a_terminal_shows_what_takes_a_while_and_a_pipe_only_the_result(labelled):
    pytest.importorskip("bm25s")
    pytest.importorskip("ir_measures")
    fcntl = pytest.importorskip("fcntl")
    termios = pytest.importorskip("termios")
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    words = [sys.executable, "-m", "rsrank_rag", "evaluate", "-m", "bm25", "--data", labelled[0]]
    done = subprocess.run([*words, "--json"], stdout=subprocess.PIPE, stderr=theirs, check=True)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    os.close(theirs)
    assert "Loading bm25 ..." in shown
    assert "bm25, first.set: " in shown
    assert json.loads(done.stdout)[0]["model"] == "bm25"


@pytest.mark.parametrize("command", ["rank", "explain", "info", "evaluate"])
def test_every_command_teaches_by_an_example(command):
    examples = [
        line for line in run(command, "--help").stdout.splitlines() if f"rsrank {command} " in line
    ]
    assert any("[OPTIONS]" not in line for line in examples)


@pytest.mark.parametrize("command", ["rank", "index", "explain", "evaluate", "serve", "score"])
def test_every_command_that_loads_a_model_can_round_its_weights(command):
    text = run(command, "--help").stdout
    assert "nf4" in text


def test_version_is_the_package_version():
    assert run("--version").stdout.strip() == __version__


def test_a_byte_order_mark_does_not_turn_json_lines_into_text(tmp_path):
    path = tmp_path / "documents.jsonl"
    path.write_text('{"text": "a"}\n', encoding="utf-8-sig")
    assert read_documents(str(path)) == [{"text": "a"}]


def test_lone_surrogates_are_shown_as_the_replacement_character(artifact):
    actual = rank_json(artifact, "-d", "-", input='{"text": "bad \\ud83d end"}\n')
    assert [row["text"] for row in actual["kept"] + actual["dropped"]] == ["bad \ufffd end"]


def test_standard_input_that_is_not_utf8_is_refused_as_a_file_is(artifact):
    result = run("rank", "-q", QUERY, "-m", artifact, "-d", "-", input=b"Caf\xe9 au lait\n", code=2)
    assert "Give a text file in UTF-8" in " ".join(result.stderr.split())


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_is_utf8_whatever_the_terminal_was_set_to(artifact, encoding):
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    run = [
        sys.executable,
        "-m",
        "rsrank_rag",
        "rank",
        "-q",
        QUERY,
        "-m",
        artifact,
        "-d",
        "-",
        "--json",
    ]
    done = subprocess.run(
        run, input="Caf\u00e9 \u4e2d\n".encode(), env=environment, capture_output=True, timeout=300
    )
    assert done.returncode == 0
    actual = json.loads(done.stdout.decode())
    assert [row["text"] for row in actual["kept"] + actual["dropped"]] == ["Caf\u00e9 \u4e2d"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bi-encoder", "cross-encoder"])
def test_a_baseline_that_cannot_be_loaded_is_one_clear_error(kind, labelled, tmp_path):
    result = run("evaluate", "-m", f"{kind}:{tmp_path / 'nothing'}", "--data", labelled[0], code=1)
    assert "could not be loaded" in " ".join(result.stderr.split())
