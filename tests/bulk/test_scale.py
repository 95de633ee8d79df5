"""Many pairs: files in, files out, whatever is in them and however often a run is killed."""

import gzip
import json
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from ray_models import Lengths, refuse

from rsrank_rag import Reranker
from rsrank_rag.bulk.pairs import COLUMNS, PairScorer
from rsrank_rag.bulk.run import score_files
from rsrank_rag.cli import app
from rsrank_rag.errors import InputError, RSRankError
from rsrank_rag.evaluation.systems.bm25 import BM25
from rsrank_rag.reranker import BLANK_SCORE

TEXTS = [
    "A cow gives milk.",
    "Trains run on rails.",
    "Honey keeps.",
    "Bees dance. " * 20,
    "Salt",
    "",
]


def rows_of(count):
    return [
        {"id": f"row {i}", "query": f"query {i % 7}", "document": f"{TEXTS[i % 6]}{i}"}
        for i in range(count)
    ]


def write_lines(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def read(folder):
    """All rows below a folder, file by file."""
    rows = []
    for path in sorted(Path(folder).rglob("*")):
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            content = path.read_bytes()
            text = gzip.decompress(content) if path.suffix == ".gz" else content
            rows += [json.loads(line) for line in text.decode().splitlines()]
    return rows


def split_lines(folder, rows, size):
    """A folder of shards of so many rows."""
    folder.mkdir()
    for number, start in enumerate(range(0, len(rows), size)):
        write_lines(folder / f"shard-{number:02}.jsonl", rows[start : start + size])
    return folder


class Counting(Lengths):
    """Remembers what it scored, and ends the run at a text."""

    def __init__(self, stop_at=None):
        super().__init__()
        self.seen = []
        self.calls = []
        self.stop_at = stop_at

    def score_pairs(self, pairs):
        if any(pair.document == self.stop_at for pair in pairs):
            raise KeyboardInterrupt
        self.seen += [pair.document for pair in pairs]
        self.calls.append(len(pairs))
        return super().score_pairs(pairs)


class Broken(Reranker):
    """Fails on everything once something has broken it."""

    broken = False

    def score(self, query, documents):
        self.broken = self.broken or "break" in documents
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return [1.0] * len(documents)


def score(source, output, make=Lengths, **options):
    return score_files(str(source), output, make, **{"settings": {"model": "lengths"}, **options})


# Rows


def test_scores_are_those_of_the_model(ranker, tmp_path):
    rows = rows_of(40)
    source = write_lines(tmp_path / "rows.jsonl", rows)
    numbers = score(source, tmp_path / "out", lambda: ranker)
    assert numbers == Counter(rows=40, files=1)
    out = read(tmp_path / "out")
    assert [{name: row[name] for name in ("id", "query", "document")} for row in out] == rows
    expected = [ranker.score(row["query"], [row["document"]])[0] for row in rows]
    # Other batches: float32 rounds otherwise.
    assert [row["score"] for row in out] == pytest.approx(expected, abs=1e-4)
    assert [row["kept"] for row in out] == [score > 0 for score in expected]
    assert {row["error"] for row in out} == {None}


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "folder"])
def test_every_form_of_input_gives_the_same_rows_in_its_own_format(name, tmp_path):
    rows = rows_of(50)
    expected = score(write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "expected")
    source = tmp_path / name
    files = {name}
    if name == "rows.jsonl.gz":
        write_lines(source, rows)
    else:
        (tmp_path / "in" / "deep").mkdir(parents=True)
        write_lines(tmp_path / "in" / "a.jsonl", rows[:20])
        write_lines(tmp_path / "in" / "b.jsonl.gz", rows[20:30])
        write_lines(tmp_path / "in" / "deep" / "c.jsonl", rows[30:])
        (tmp_path / "in" / "_notes.jsonl").write_text("not read")
        (tmp_path / "in" / ".hidden").mkdir()
        (tmp_path / "in" / ".hidden" / "a-checkpoint.jsonl").write_text("not read")
        source = tmp_path / "in"
        files = {"a.jsonl", "b.jsonl.gz", "c.jsonl"}
    numbers = score(source, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").rglob("*.*")} == {*files, "_settings.json"}
    assert read(tmp_path / "out") == read(tmp_path / "expected")
    assert numbers["rows"] == expected["rows"] == 50


def test_a_file_is_scored_a_chunk_of_rows_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("rsrank_rag.bulk.run.CHUNK", 7)
    rows = rows_of(30)
    counting = Counting()
    source = write_lines(tmp_path / "rows.jsonl", rows)
    assert score(source, tmp_path / "out", lambda: counting)["rows"] == 30
    assert counting.calls == [7, 7, 7, 7, 2]
    assert [row["id"] for row in read(tmp_path / "out")] == [row["id"] for row in rows]


class Threshold(Lengths):
    """With another native threshold."""

    def __init__(self, threshold):
        super().__init__()
        self.threshold = threshold


def test_a_blank_document_is_not_kept_and_without_a_threshold_nothing_is():
    batch = {"query": ["q", "q"], "document": ["aa", "  "]}
    assert PairScorer(partial(Threshold, 2 * BLANK_SCORE))(batch)["kept"] == [True, False]
    found = PairScorer(partial(Threshold, None))(batch)
    assert found["kept"] == [None, None]
    assert found["score"] == [-998.0, BLANK_SCORE]


class ShortQueries(Lengths):
    """Reads four characters of a query."""

    def fit_query(self, query):
        return query[:4]


def test_a_row_says_that_its_query_was_cut():
    found = PairScorer(ShortQueries)({"query": ["long query", "q"], "document": ["d", "d"]})
    assert found["truncated"] == [True, False]


def test_pairs_without_a_score_are_named_and_the_others_scored(tmp_path):
    rows = [
        *rows_of(3),
        {"query": "q", "document": None},
        {"query": "q", "document": "no score"},
        {"document": "d"},
    ]
    score(write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "out")
    out = read(tmp_path / "out")
    assert [row["score"] is None for row in out] == [False] * 3 + [True] * 3
    no_text = "The query or the document is no text."
    assert [row["error"] for row in out][3:] == [no_text, "has no score.", no_text]
    assert [row["kept"] for row in out][3:] == [None] * 3


def test_whatever_else_a_row_has_is_carried_along(tmp_path):
    rows = [
        {"query": "q", "document": "d", "n": 1, "when": "2020-01-01", "deep": {"a": [1, {}]}},
        {"query": "q", "document": "\ud83d\ude00 \ud83d", "n": "two", "deep": None, "late": "here"},
    ]
    score(write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "out")
    out = read(tmp_path / "out")
    assert [list(row) for row in out] == [[*row, *COLUMNS] for row in rows]
    assert [row["n"] for row in out] == [1, "two"]
    assert out[0]["deep"] == {"a": [1, {}]}
    assert out[1]["document"] == "\U0001f600 ?"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"query": "q", "document": "d"}\n{"query": ', r"rows\.jsonl, line 2 is no JSON"),
        ('["q", "d"]\n', "line 1 is no JSON object"),
        ('{"question": "q", "document": "d"}\n', 'need a "query".*found document, question'),
        ('{"query": "q", "document": "d", "score": 1}\n', "have score already"),
    ],
)
def test_input_that_cannot_be_used_is_refused_before_a_model_is_loaded(content, message, tmp_path):
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(InputError, match=message):
        score(tmp_path / "rows.jsonl", tmp_path / "out", refuse)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["_settings.json"]


def test_a_line_that_is_wrong_far_down_is_named_and_leaves_no_half_file(tmp_path, monkeypatch):
    monkeypatch.setattr("rsrank_rag.bulk.run.CHUNK", 2)
    source = write_lines(tmp_path / "rows.jsonl", rows_of(5))
    source.write_text(source.read_text() + "{")
    with pytest.raises(InputError, match=r"rows\.jsonl, line 6 is no JSON"):
        score(source, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["_settings.json"]


def test_values_of_other_types_are_errors_of_their_rows(tmp_path):
    rows = [{"query": "q", "document": 7}, {"query": 1, "document": "d"}, rows_of(1)[0]]
    score(write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "out")
    assert [row["error"] for row in read(tmp_path / "out")] == [
        "The query or the document is no text.",
        "The query or the document is no text.",
        None,
    ]


def test_files_of_one_folder_may_have_other_columns(tmp_path):
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in" / "a.jsonl", [{"query": "q", "document": "d", "n": "one"}])
    write_lines(tmp_path / "in" / "b.jsonl", [{"query": "q", "document": "e", "m": 1}])
    assert score(tmp_path / "in", tmp_path / "out")["rows"] == 2


def test_an_empty_file_gives_an_empty_file(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n\n")
    assert score(tmp_path / "rows.jsonl", tmp_path / "out")["rows"] == 0
    assert (tmp_path / "out" / "rows.jsonl").read_text() == ""


def test_a_source_that_is_not_there_is_said(tmp_path):
    with pytest.raises(InputError, match=r"there is no \.jsonl"):
        score(tmp_path / "none.jsonl", tmp_path / "out")
    (tmp_path / "rows.csv").write_text("query,document")
    with pytest.raises(InputError, match=r"rows\.csv: there is no \.jsonl"):
        score(tmp_path / "rows.csv", tmp_path / "out")


def test_an_output_in_the_folder_of_its_input_is_not_read_again(tmp_path):
    write_lines(tmp_path / "rows.jsonl", rows_of(4))
    assert score(tmp_path, tmp_path / "scored")["files"] == 1
    again = score(tmp_path, tmp_path / "scored", refuse)
    assert (again["files"], again["skipped"]) == (0, 1)


def test_what_was_scored_before_is_refused_with_the_columns_that_it_has_already(tmp_path):
    score(write_lines(tmp_path / "rows.jsonl", rows_of(2)), tmp_path / "out")
    with pytest.raises(InputError, match=r"Rows of .*rows\.jsonl have score, kept"):
        score(tmp_path / "out" / "rows.jsonl", tmp_path / "again", refuse)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_a_cell_of_ten_megabytes_is_cut_before_it_is_tokenised(tmp_path):
    """In a process of its own, whose peak of memory is measured."""
    rows = [{"query": "Which animal gives milk?", "document": "The cow gives milk. " * 500_000}]
    source = write_lines(tmp_path / "rows.jsonl", rows)
    text = (
        "import re, sys\nfrom pathlib import Path\nfrom rsrank_rag.cli import app\n"
        "app(['score', '-i', sys.argv[1], '-o', sys.argv[2]], standalone_mode=False)\n"
        # The peak of this program's own memory. `ru_maxrss` begins with the peak of the process
        # that started the program.
        "status = Path('/proc/self/status').read_text()\n"
        "print(int(re.search(r'VmHWM:\\s+(\\d+) kB', status)[1]) // 1024)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", text, source, tmp_path / "out"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    (row,) = read(tmp_path / "out")
    assert row["error"] is None
    # MB; what the process holds without the row is about 600.
    assert int(done.stdout.splitlines()[-1]) < 1000


# Interruptions


def test_an_interrupted_run_goes_on_and_does_nothing_twice(tmp_path):
    source = split_lines(tmp_path / "in", rows_of(30), 4)
    stops = Counting(stop_at=rows_of(30)[17]["document"])
    with pytest.raises(KeyboardInterrupt):
        score(source, tmp_path / "out", lambda: stops)
    assert len(list((tmp_path / "out").glob("shard-*"))) == 4
    goes_on = Counting()
    numbers = score(source, tmp_path / "out", lambda: goes_on)
    assert numbers == Counter(skipped=4, files=4, rows=14)
    # Within a file, the longest document comes first.
    assert sorted(goes_on.seen) == sorted(row["document"] for row in rows_of(30)[16:])
    score(source, tmp_path / "once")
    assert read(tmp_path / "out") == read(tmp_path / "once")
    # Nothing is left to do, so no model is loaded.
    assert score(source, tmp_path / "out", refuse)["skipped"] == 8


def test_a_file_that_has_changed_since_is_scored_again(tmp_path):
    source = split_lines(tmp_path / "in", rows_of(6), 2)
    score(source, tmp_path / "out")
    changed = write_lines(source / "shard-01.jsonl", rows_of(1))
    later = (tmp_path / "out" / "shard-01.jsonl").stat().st_mtime + 1
    os.utime(changed, (later, later))
    numbers = score(source, tmp_path / "out")
    assert (numbers["files"], numbers["skipped"], numbers["rows"]) == (1, 2, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "another"}, "model: 'lengths' there, 'another' wanted"),
        ({"model": "lengths", "dtype": "bfloat16"}, "dtype: None there, 'bfloat16' wanted"),
    ],
)
def test_a_folder_of_other_settings_is_not_continued_and_the_difference_is_named(
    settings, message, tmp_path
):
    source = write_lines(tmp_path / "rows.jsonl", rows_of(2))
    score(source, tmp_path / "out")
    with pytest.raises(InputError, match=message):
        score(source, tmp_path / "out", settings=settings)


def test_the_scores_of_a_file_of_the_same_name_in_another_folder_are_not_taken_for_its_own(
    tmp_path,
):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "rows.jsonl", rows_of(2))
    score(tmp_path / "first" / "rows.jsonl", tmp_path / "out")
    for source in (tmp_path / "second", tmp_path / "second" / "rows.jsonl"):
        with pytest.raises(InputError, match=r"input: '.*first' there, '.*second' wanted"):
            score(source, tmp_path / "out")
    assert score(tmp_path / "first", tmp_path / "out")["skipped"] == 1


def test_a_folder_that_holds_other_files_of_these_names_is_left_alone(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", rows_of(2))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rows.jsonl").write_text("dear")
    with pytest.raises(InputError, match="holds files of these names"):
        score(source, tmp_path / "out")
    assert (tmp_path / "out" / "rows.jsonl").read_text() == "dear"


KILLED = """
import os, sys
from functools import partial
from pathlib import Path
from ray_models import Assassin
from rsrank_rag.bulk.run import score_files

source, output = sys.argv[1:]
settings = {"model": "lengths"}
score_files(source, output, partial(Assassin, os.getpid()), settings=settings)
"""


def test_a_run_goes_on_after_kill_9(tmp_path):
    """A process is killed by its model at its sixth file; another goes on."""
    rows = rows_of(30)
    rows[16]["document"] = "kill the driver"
    source = split_lines(tmp_path / "in", rows, 3)
    output = tmp_path / "out"
    here = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), str(here)])}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, source, output],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    there = {path.name for path in output.glob("shard-*.jsonl")}
    assert there == {f"shard-{number:02}.jsonl" for number in range(5)}
    numbers = score(source, output)
    assert numbers["files"] + numbers["skipped"] == 10
    score(source, tmp_path / "once")
    assert read(output) == read(tmp_path / "once")


def test_a_model_that_fails_on_everything_fills_no_file_with_errors(tmp_path):
    rows = [{"query": "q", "document": text} for text in ("a", "b", "break", "d")]
    source = split_lines(tmp_path / "in", rows, 2)
    with pytest.raises(RSRankError, match="lengths fails on every pair"):
        score(source, tmp_path / "out", Broken)
    assert [file.name for file in (tmp_path / "out").glob("shard-*")] == ["shard-00.jsonl"]


# Other frameworks


def test_one_callable_serves_arrays_frames_and_datasets():
    rows = rows_of(10)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    expected = PairScorer(Lengths)(columns)["score"]
    arrays = {name: np.array(values, dtype=object) for name, values in columns.items()}
    assert PairScorer(Lengths)(arrays)["score"] == expected
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    frame = pandas.DataFrame(
        PairScorer(Lengths)(pandas.DataFrame(columns))
    )  # what mapInPandas of Spark is given
    assert frame["score"].tolist() == expected
    missing = pandas.DataFrame(
        {"query": ["q", "q"], "document": pandas.array(["a", pandas.NA], dtype="string")}
    )
    assert PairScorer(Lengths)(missing)["error"] == [
        None,
        "The query or the document is no text.",
    ]
    mapped = datasets.Dataset.from_dict(columns).map(
        PairScorer(Lengths), batched=True, batch_size=4
    )
    assert mapped["score"] == expected
    assert mapped["id"] == columns["id"]
    scorer = PairScorer(Lengths)
    scorer(columns)
    assert pickle.loads(pickle.dumps(scorer))(columns)["score"] == expected


@pytest.mark.ray
def test_one_callable_serves_ray_data(ray_cluster):
    from ray import data

    done = data.from_items(rows_of(20)).map_batches(
        PairScorer,
        fn_constructor_args=(Lengths,),
        batch_size=8,
        compute=data.ActorPoolStrategy(size=1),
        num_cpus=0.5,
    )
    found = {row["id"]: row["score"] for row in done.take_all()}
    assert found == {
        row["id"]: Lengths().score(row["query"], [row["document"]])[0] for row in rows_of(20)
    }


# The command


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_scores_and_goes_on(tmp_path):
    pytest.importorskip("bm25s")
    source = split_lines(tmp_path / "in", rows_of(10), 3)
    output = tmp_path / "out"
    arguments = ["score", "-i", source, "-o", output, "--model", "bm25"]
    done = run(*arguments)
    assert done.exit_code == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert said.startswith("10 new rows, 0 without a score (column error); files in ")
    assert said.endswith(": 4 written, 0 skipped")
    (output / "shard-02.jsonl").unlink()
    assert " ".join(run(*arguments).stdout.split()).endswith(": 1 written, 3 skipped")
    assert [row["score"] for row in read(output)] == [
        BM25().score(row["query"], [row["document"]])[0] for row in rows_of(10)
    ]
    other = run(*arguments[:-1], "mini")
    assert other.exit_code == 2
    assert "model: 'bm25' there, 'mini' wanted" in " ".join(other.stderr.split())


def test_another_projection_in_the_same_folder_is_another_model(ranker, tmp_path):
    ranker.save_pretrained(tmp_path / "model", include_backbone=True)
    source = write_lines(tmp_path / "rows.jsonl", rows_of(2))
    arguments = ["score", "-i", source, "-o", tmp_path / "out", "--model", tmp_path / "model"]
    assert run(*arguments).exit_code == 0
    weights = tmp_path / "model" / "projection.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-4] + b"\0\0\0\0")
    refused = run(*arguments)
    assert refused.exit_code == 2
    assert "sha256: " in refused.stderr


def test_the_command_names_what_is_wrong(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", rows_of(4))
    refused = run(
        "score",
        "-i",
        source,
        "-o",
        tmp_path / "out",
        "--model",
        "nobody/nothing",
        "--local-files-only",
    )
    assert refused.exit_code == 1
    assert "nobody/nothing" in refused.stderr
