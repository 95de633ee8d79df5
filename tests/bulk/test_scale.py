"""Many pairs: files in, files out, whatever is in them, whoever does the work, and however often it is killed."""

import ast
import csv
import gzip
import json
import os
import pickle
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest
from ray_models import Fatal, Lengths, refuse, worker_of_nothing
from typer.testing import CliRunner

from rsrank_rag import Reranker, RSRank
from rsrank_rag.artifact import hub
from rsrank_rag.bulk.files import begun, missing
from rsrank_rag.bulk.on_ray import Actors, each
from rsrank_rag.bulk.pairs import PairScorer
from rsrank_rag.bulk.run import model_identity, score_files, settled_dtype
from rsrank_rag.cli import app
from rsrank_rag.errors import ArtifactError, InputError, RSRankError
from rsrank_rag.evaluation.datasets import read_labelled
from rsrank_rag.evaluation.evaluate import score_dataset
from rsrank_rag.evaluation.systems.bm25 import BM25
from rsrank_rag.language_model import options
from rsrank_rag.language_model.options import LoadOptions
from rsrank_rag.partial_files import is_running, partial_of
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


def table_of(folder):
    return pyarrow.dataset.dataset(folder).to_table()


def read(folder):
    return table_of(folder).to_pylist()


class Counting(Lengths):
    """Remembers what it scored, and ends the run at a text."""

    def __init__(self, stop_at=None):
        super().__init__()
        self.seen, self.stop_at = [], stop_at

    def score_pairs(self, pairs):
        if any(pair.document == self.stop_at for pair in pairs):
            raise KeyboardInterrupt
        self.seen += [pair.document for pair in pairs]
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
    return score_files(str(source), output, make, **{"model": "lengths", **options})


# Rows


def test_scores_are_those_of_the_model(ranker, tmp_path):
    rows = rows_of(40)
    source = write_lines(tmp_path / "rows.jsonl", rows)
    found = score(source, tmp_path / "out", lambda: ranker, rows_per_part=7)
    assert (found.rows, found.pairs, found.errors, found.parts, found.found) == (40, 40, 0, 6, 0)
    out = read(tmp_path / "out")
    assert [{name: row[name] for name in ("id", "query", "document")} for row in out] == rows
    expected = [ranker.score(row["query"], [row["document"]])[0] for row in rows]
    assert [row["score"] for row in out] == pytest.approx(
        expected, abs=1e-4
    )  # other batches: fp32 rounding
    assert [row["kept"] for row in out] == [score > 0 for score in expected]
    assert {row["error"] for row in out} == {None}


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.parquet", "folder", "pattern"])
def test_every_form_of_input_gives_the_same_rows(name, tmp_path):
    rows = rows_of(50)
    expected = score(
        write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "expected", rows_per_part=8
    )
    source = tmp_path / name
    if name == "rows.parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), source, row_group_size=11)
    elif name == "rows.jsonl.gz":
        write_lines(source, rows)
    else:
        (tmp_path / "in" / "deep").mkdir(parents=True)
        write_lines(tmp_path / "in" / "a.jsonl", rows[:20])
        write_lines(tmp_path / "in" / "b.jsonl.gz", rows[20:30])
        pyarrow.parquet.write_table(
            pa.Table.from_pylist(rows[30:]), tmp_path / "in" / "deep" / "c.parquet"
        )
        (tmp_path / "in" / "_notes.jsonl").write_text("not read")
        (tmp_path / "in" / ".hidden").mkdir()
        (tmp_path / "in" / ".hidden" / "a-checkpoint.jsonl").write_text("not read")
        source = tmp_path / "in" if name == "folder" else f"{tmp_path}/in/**/[a-c].*"
    found = score(source, tmp_path / "out", rows_per_part=8)
    assert read(tmp_path / "out") == read(tmp_path / "expected")
    assert found.rows == expected.rows == 50


def test_rows_with_lists_get_lists(tmp_path):
    rows = [
        {"query": "q", "documents": ["a", "no score", "", None]},
        {"query": "q", "documents": []},
        {"query": None, "documents": ["a", "b"]},
        {"query": "q"},
    ]
    found = score(
        write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "out", partial(Threshold, -1000)
    )
    out = read(tmp_path / "out")
    assert [row["score"] for row in out] == [
        [-999.0, None, BLANK_SCORE, None],
        [],
        [None, None],
        [None],
    ]
    assert [row["kept"] for row in out] == [[True, None, False, None], [], [None, None], [None]]
    assert out[0]["error"] == [None, "has no score.", None, "The document is no text but null."]
    assert out[2]["error"] == ["The query is no text but null."] * 2
    assert out[3]["error"] == ["The row's documents are no list but null."]
    assert (found.pairs, found.errors) == (7, 5)


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
    assert [row["error"] for row in out][3:] == [
        "The document is no text but null.",
        "has no score.",
        "The query is no text but null.",
    ]
    assert [row["kept"] for row in out][3:] == [None] * 3


def test_whatever_else_a_row_has_is_carried_along(tmp_path):
    rows = [
        {
            "query": "q",
            "document": "d",
            "n": 1,
            "when": "2020-01-01",
            "deep": {"a": [1, 2]},
            "late": None,
        },
        {
            "query": "q",
            "document": "\ud83d\ude00 \ud83d",
            "n": 2.5,
            "when": None,
            "deep": None,
            "late": "here",
        },
        {"query": "q", "document": "e", "extra": True},
    ]
    score(write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "out", rows_per_part=1)
    out = read(tmp_path / "out")
    assert [row["n"] for row in out] == [1.0, 2.5, None]
    assert [row["when"] for row in out] == ["2020-01-01", None, None]
    assert [row["deep"] for row in out] == [{"a": [1, 2]}, None, None]
    assert [row["late"] for row in out] == [None, "here", None]
    assert [row["extra"] for row in out] == [None, None, True]
    assert out[1]["document"] == "😀 \ufffd"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"query": "q", "document": "d"}\n{"query": ',
            r"rows\.jsonl, row 1 \(from 0\) is no JSON object",
        ),
        ('["q", "d"]\n', "it is no object but list"),
        ('{"question": "q", "document": "d"}\n', 'need a "query".*found question, document'),
        (
            '{"query": "q", "document": "d", "documents": []}\n',
            'either a "document" or "documents"',
        ),
        ('{"query": "q", "document": "d", "score": 1}\n', "have score already"),
        ('{"query": "q", "document": 7}\n', 'Column "document" must hold texts, got int64'),
        (
            '{"query": "q", "documents": "d"}\n',
            'Column "documents" must hold lists of texts, got string',
        ),
        (
            '{"query": "q", "document": "d"}\n{"query": 1, "document": "d"}\n',
            'column "query" holds values of several',
        ),
        ("\n\n", "there are no rows"),
    ],
)
def test_input_that_cannot_be_used_is_refused_before_anything_is_scored(content, message, tmp_path):
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(InputError, match=message):
        score(tmp_path / "rows.jsonl", tmp_path / "out", refuse)
    assert not (tmp_path / "out").exists()


def test_columns_that_do_not_fit_between_files_are_named(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"query": "q", "document": "d", "n": "one"}])
    write_lines(tmp_path / "b.jsonl", [{"query": "q", "document": "d", "n": 1}])
    with pytest.raises(InputError, match=r"b\.jsonl, rows 0 to 0: the columns do not fit"):
        score(tmp_path, tmp_path / "out")


def test_a_source_that_is_not_there_is_said(tmp_path):
    with pytest.raises(InputError, match=r"there is no \.jsonl"):
        score(tmp_path / "none*.jsonl", tmp_path / "out")
    (tmp_path / "rows.tsv").write_text("a")
    with pytest.raises(InputError, match=r"rows\.tsv is none of \.jsonl"):
        score(tmp_path / "rows.tsv", tmp_path / "out")


def test_a_run_whose_output_lies_in_the_folder_of_its_input_can_be_gone_on_with(tmp_path):
    write_lines(tmp_path / "rows.jsonl", rows_of(4))
    done = score(tmp_path, tmp_path / "scored", rows_per_part=2)
    next((tmp_path / "scored").glob("part-*1.parquet")).unlink()
    assert score(tmp_path, tmp_path / "scored", rows_per_part=2).found == 1
    assert done.rows == 4


def test_what_was_scored_before_is_refused_with_the_columns_that_it_has_already(tmp_path):
    score(write_lines(tmp_path / "rows.jsonl", rows_of(2)), tmp_path / "out")
    with pytest.raises(InputError, match="Rows have score, kept"):
        score(tmp_path / "out", tmp_path / "again", refuse)


def test_an_object_without_fields_is_carried_along_as_null(tmp_path):
    rows = [
        {"query": "q", "document": "a", "metadata": {}},
        {"query": "q", "document": "b", "metadata": {"x": {}}},
    ]
    score(write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "out")
    assert [row["score"] for row in read(tmp_path / "out")] == PairScorer(Lengths)(
        {"query": ["q", "q"], "document": ["a", "b"]}
    )["score"]
    score(write_lines(tmp_path / "bare.jsonl", rows[:1]), tmp_path / "bare")
    assert read(tmp_path / "bare")[0]["error"] is None


def test_a_cell_of_a_table_may_be_as_long_as_a_document(tmp_path):
    (tmp_path / "rows.csv").write_text(f"query,document\nq,{'a' * 200_000}\n")
    score(tmp_path / "rows.csv", tmp_path / "out")
    assert len(read(tmp_path / "out")[0]["document"]) == 200_000


def test_a_table_with_commas_and_line_breaks_in_its_cells_is_read_as_json_lines_are(tmp_path):
    rows = [{**row, "document": f'{row["document"]}, "quoted"\nand broken'} for row in rows_of(11)]
    with (tmp_path / "rows.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    score(write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "expected", rows_per_part=4)
    score(tmp_path / "rows.csv", tmp_path / "out", rows_per_part=4)
    assert read(tmp_path / "out") == read(tmp_path / "expected")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"query,document\nq,d,more\n",
            r"rows\.csv, row 0 \(from 0\) has more cells than the header",
        ),
        (b"query;document\nq;d\n", 'need a "query"'),
        (b"\x89PNG\r\n\x1a\n\x00\xff", "cannot be read after row 0"),
        (b'query,document\nq,"d\n', "cannot be read after row 0"),
        (b"query,document,query\nq,d,other\n", "has two columns called 'query'"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(content, message, tmp_path):
    (tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(InputError, match=message):
        score(tmp_path / "rows.csv", tmp_path / "out", refuse)


def test_labelled_queries_are_scored_as_they_are_measured(ranker, tmp_path):
    documents = [
        {"id": "a", "text": "Trains run on rails.", "title": "Trains", "relevant": True},
        {"id": "b", "text": "Honey keeps.", "title": "Food", "relevant": False},
        {"id": "c", "text": "", "title": None, "relevant": False},
    ]
    row = {"id": "1", "query": "What runs on rails?", "documents": documents}
    score(write_lines(tmp_path / "rows.jsonl", [row]), tmp_path / "out", lambda: ranker)
    (found,) = read(tmp_path / "out")
    assert found["documents"] == documents
    (query,) = read_labelled(tmp_path / "rows.jsonl")
    (expected,) = score_dataset(ranker, [query])
    assert found["score"] == pytest.approx(list(expected.scores), abs=1e-5)


def test_json_lines_hold_what_parquet_holds_also_of_a_run_that_is_done(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", [*rows_of(9), {"query": "q", "document": None}])
    command = [
        "score",
        "-i",
        str(source),
        "-o",
        str(tmp_path / "out"),
        "-m",
        "bm25",
        "--rows-per-part",
        "4",
    ]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert [path.suffix for path in sorted((tmp_path / "out").glob("part-*"))] == [".parquet"] * 3
    assert CliRunner().invoke(app, [*command, "--jsonl"]).exit_code == 0
    parts = sorted((tmp_path / "out").glob("part-*.jsonl"))
    lines = [json.loads(line) for path in parts for line in path.read_text("utf-8").splitlines()]
    assert (len(parts), len(lines)) == (3, 10)
    tables = [pyarrow.parquet.read_table(path.with_suffix(".parquet")) for path in parts]
    assert lines == [row for table in tables for row in table.to_pylist()]


# Interruptions


def test_an_interrupted_run_goes_on_and_does_nothing_twice(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", rows_of(30))
    stops = Counting(stop_at=rows_of(30)[17]["document"])
    with pytest.raises(KeyboardInterrupt):
        score(source, tmp_path / "out", lambda: stops, rows_per_part=4)
    assert len(list((tmp_path / "out").glob("part-*"))) == 4
    goes_on = Counting()
    found = score(source, tmp_path / "out", lambda: goes_on, rows_per_part=4)
    assert (found.found, found.parts, found.rows) == (4, 8, 30)
    assert goes_on.seen == [row["document"] for row in rows_of(30)[16:]]
    score(source, tmp_path / "once", rows_per_part=4)
    assert table_of(tmp_path / "out").equals(table_of(tmp_path / "once"))
    assert (
        score(source, tmp_path / "out", refuse, rows_per_part=4).found == 8
    )  # nothing to do, nothing loaded


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "another"}, "model: 'lengths' there, 'another' asked for"),
        ({"settings": {"dtype": "bfloat16"}}, "dtype: None there, 'bfloat16' asked for"),
        ({"rows_per_part": 5}, "rows_per_part: 4 there, 5 asked for"),
        ({"edit": True}, r"the content of .*rows\.jsonl"),
        ({"more": True}, "input files: 1 there, 2 asked for"),
    ],
)
def test_a_folder_of_something_else_is_not_continued_and_the_difference_is_named(
    change, message, tmp_path
):
    (tmp_path / "in").mkdir()
    source = write_lines(tmp_path / "in" / "rows.jsonl", rows_of(9))
    score(tmp_path / "in", tmp_path / "out", rows_per_part=4)
    if change.pop("edit", False):
        source.write_text(source.read_text().replace("row 3", "row X"))
    if change.pop("more", False):
        write_lines(tmp_path / "in" / "more.jsonl", rows_of(1))
    with pytest.raises(InputError, match=message):
        score(tmp_path / "in", tmp_path / "out", **{"rows_per_part": 4, **change})


def test_the_same_content_elsewhere_is_the_same_input(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", rows_of(9))
    score(source, tmp_path / "out", rows_per_part=4)
    (tmp_path / "out" / "part-000001.parquet").unlink()
    moved = source.rename(tmp_path / "moved.jsonl")
    assert score(moved, tmp_path / "out", rows_per_part=4).found == 2
    assert len(read(tmp_path / "out")) == 9


def test_a_folder_that_holds_other_files_is_left_alone(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", rows_of(2))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("dear")
    with pytest.raises(InputError, match="is no empty folder"):
        score(source, tmp_path / "out")


def test_what_a_killed_run_left_half_written_is_removed_and_what_another_writes_is_not(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", rows_of(2))
    (tmp_path / "out").mkdir()
    dead = tmp_path / "out" / "_part-000000.999999999-1.partial"
    mine = partial_of(tmp_path / "out" / "_part-000000.parquet")
    elsewhere = tmp_path / "out" / "_part-000000.999999999-1-otherhost.partial"
    for file in (dead, mine, elsewhere):
        file.write_text("half")
    score(source, tmp_path / "out")
    assert not dead.exists()
    assert not mine.exists()  # it has become the part
    assert elsewhere.exists()
    os.utime(elsewhere, (0, 0))
    assert not is_running(elsewhere)


DAMAGES = {
    "gone": lambda parts, other: parts[1].unlink(),
    "cut": lambda parts, other: parts[1].write_bytes(parts[1].read_bytes()[:-9]),
    "empty": lambda parts, other: parts[1].write_bytes(b""),
    "no Parquet": lambda parts, other: parts[1].write_bytes(b"PAR1"),
    "another part": lambda parts, other: parts[1].write_bytes(parts[0].read_bytes()),
    "another run's": lambda parts, other: parts[1].write_bytes(
        (other / parts[1].name).read_bytes()
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_part_that_is_not_this_plans_as_it_was_written_is_done_again(damage, tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", rows_of(6))
    score(source, tmp_path / "other", rows_per_part=2, model="another")
    score(source, tmp_path / "out", rows_per_part=2)
    parts = sorted((tmp_path / "out").glob("part-*"))
    expected = parts[1].read_bytes()
    DAMAGES[damage](parts, tmp_path / "other")
    assert score(source, tmp_path / "out", rows_per_part=2).found == 2
    assert parts[1].read_bytes() == expected


def test_a_part_says_what_it_is_of(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", rows_of(3))
    score(source, tmp_path / "out", settings={"dtype": "float32"})
    said = json.loads(
        pyarrow.parquet.read_metadata(tmp_path / "out" / "part-000000.parquet").metadata[b"rsrank"]
    )
    assert (said["model"], said["dtype"], said["part"], said["pairs"]) == (
        "lengths",
        "float32",
        0,
        3,
    )


def test_no_byte_of_a_part_or_a_plan_can_change_unseen(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", rows_of(3))
    score(source, tmp_path / "out")
    made, path = begun(tmp_path / "out"), tmp_path / "out" / "part-000000.parquet"
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert missing(tmp_path / "out", made) == list(made.parts)
    path.write_bytes(content)
    assert missing(tmp_path / "out", made) == []
    plan = tmp_path / "out" / "_plan.json"
    text = plan.read_bytes()
    for place in range(0, len(text), 7):
        plan.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
        with pytest.raises(InputError, match="Use another folder"):
            begun(tmp_path / "out")


KILLED = """
import os, sys
from functools import partial
from pathlib import Path
from ray_models import Assassin
from rsrank_rag.bulk.on_ray import Actors
from rsrank_rag.bulk.run import model_identity, score_files, settled_dtype

source, output, address = sys.argv[1:]
actors = Actors(2, cpus=0.5, address=address) if address else None
score_files(source, output, partial(Assassin, os.getpid()), model="lengths", rows_per_part=3, actors=actors)
"""


def check_kill_9(tmp_path, address=""):
    """A process is killed at its sixth part or so, by its model; another goes on."""
    rows = rows_of(30)
    rows[16]["document"] = "kill the driver"
    source, output = write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "out"
    here = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), str(here)])}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, source, output, address],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    there = {path.name for path in output.glob("part-*")}
    found = score(source, output, rows_per_part=3)
    assert (found.rows, found.parts) == (30, 10)
    score(source, tmp_path / "once", rows_per_part=3)
    assert table_of(output).equals(table_of(tmp_path / "once"))
    return there


def test_a_run_goes_on_after_kill_9(tmp_path):
    assert check_kill_9(tmp_path) == {f"part-{number:06d}.parquet" for number in range(5)}
    assert not list((tmp_path / "out").glob("_*.partial"))


@pytest.mark.ray
def test_a_run_on_a_cluster_goes_on_after_kill_9_of_who_asked_for_it(ray_cluster, tmp_path):
    check_kill_9(tmp_path, ray_cluster.get_runtime_context().gcs_address)


def test_a_model_that_fails_on_everything_fills_no_file_with_errors(tmp_path):
    rows = [{"query": "q", "document": text} for text in ("a", "b", "break", "d")]
    source = write_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(RSRankError, match="lengths fails on every pair"):
        score(source, tmp_path / "out", Broken, rows_per_part=2)
    assert [file.name for file in (tmp_path / "out").glob("part-*")] == ["part-000000.parquet"]


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
    assert PairScorer(Lengths)(missing)["error"] == [None, "The document is no text but null."]
    keyed = PairScorer(Lengths)({"query": ["q"], "documents": [{"text": "a", "title": "b"}]})
    assert keyed["error"] == [["The row's documents are no list but dict."]]
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


# On Ray

TWO = Actors(2, cpus=0.5)


@pytest.mark.ray
def test_actors_write_what_one_process_writes(ray_cluster, tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", rows_of(60))
    score(source, tmp_path / "local", rows_per_part=7)
    seen = []

    def watch(plan, done):
        for rows in done:
            seen.append(rows)
            yield rows

    found = score(source, tmp_path / "ray", rows_per_part=7, actors=TWO, progress=watch)
    assert found.rows == sum(seen) == 60
    assert table_of(tmp_path / "ray").equals(table_of(tmp_path / "local"))


@pytest.mark.ray
def test_an_actor_that_dies_is_replaced_and_one_that_dies_each_time_ends_the_run(
    ray_cluster, tmp_path
):
    rows = rows_of(12)
    rows[7]["document"] = "kill this process"
    source = write_lines(tmp_path / "rows.jsonl", rows)
    (tmp_path / "flag").touch()
    with pytest.raises(RSRankError, match="process died 3 times on one item"):
        score(
            source,
            tmp_path / "out",
            partial(Fatal, tmp_path / "flag", False),
            rows_per_part=2,
            actors=TWO,
        )
    found = score(
        source,
        tmp_path / "out",
        partial(Fatal, tmp_path / "flag", True),
        rows_per_part=2,
        actors=TWO,
    )
    assert found.rows == 12
    assert [row["score"] for row in read(tmp_path / "out")] == [
        Lengths().score(row["query"], [row["document"]])[0] for row in rows
    ]


@pytest.mark.ray
def test_what_an_actor_says_reaches_the_user_as_one_line(ray_cluster, tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", rows_of(4))
    with pytest.raises(RSRankError, match=r"^There is no such artifact\.$"):
        score(source, tmp_path / "out", refuse, actors=TWO)


@pytest.mark.ray
def test_every_item_is_done_once(ray_cluster):
    items = [{"number": number, "text": "ä\n"} for number in range(40)]
    found = list(each(worker_of_nothing, items, TWO))
    assert sorted(found, key=lambda item: item["number"]) == items
    assert list(each(worker_of_nothing, [], TWO)) == []


@pytest.mark.ray
def test_the_dtype_is_that_of_the_machines_that_do_the_work(ray_cluster):
    assert settled_dtype(LoadOptions("cpu"), TWO) == settled_dtype(LoadOptions("cpu"), None)


@pytest.mark.ray
def test_actors_choose_int8_where_this_machine_would_without_bfloat16(tmp_path):
    """In a process of its own: its actors' processes inherit the setting."""
    told = {
        **os.environ,
        "ATEN_CPU_CAPABILITY": "avx2",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    text = (
        "from rsrank_rag.bulk.on_ray import Actors\nfrom rsrank_rag.bulk.run import settled_dtype\n"
        "from rsrank_rag.language_model.options import LoadOptions\n"
        "print([settled_dtype(LoadOptions('cpu'), actors) for actors in (None, Actors(1, cpus=0.5))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], env=told, capture_output=True, text=True, cwd=tmp_path
    )
    here, there = ast.literal_eval(done.stdout)
    assert here == there


@pytest.mark.ray
def test_a_machine_without_room_for_an_actor_says_so(ray_cluster):
    with pytest.raises(
        RSRankError,
        match=r"1 actors of 1 CPUs and 4 GPUs were asked for, and the cluster has 8 CPUs",
    ):
        list(each(worker_of_nothing, [1], Actors(gpus=4)))
    with pytest.raises(InputError, match="--actors must be at least 1"):
        Actors(0)


# The commands


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_scores_and_goes_on(tmp_path):
    pytest.importorskip("bm25s")
    source, output = write_lines(tmp_path / "rows.jsonl", rows_of(10)), tmp_path / "out"
    arguments = ["score", "-i", source, "-o", output, "--rows-per-part", 3, "--model", "bm25"]
    done = run(*arguments)
    assert done.exit_code == 0, done.stderr
    assert "10 rows, 10 pairs, in 4 files of" in done.stdout
    (output / "part-000002.parquet").unlink()
    assert "in 4 files (3 were there)" in run(*arguments).stdout
    assert [row["score"] for row in read(output)] == [
        BM25().score(row["query"], [row["document"]])[0] for row in rows_of(10)
    ]
    other = run(*arguments[:-1], "mini")
    assert other.exit_code == 2
    said = " ".join(other.stderr.split())
    assert (
        "was begun otherwise (" in said
    )  # the dtype may be named first: what `mini` chooses depends on the processor
    assert "model: 'bm25' there, 'mini" in said


def test_a_plan_names_the_dtype_that_was_chosen_and_another_machines_is_refused(
    tmp_path, monkeypatch
):
    pytest.importorskip("bm25s")
    source, output = write_lines(tmp_path / "rows.jsonl", rows_of(4)), tmp_path / "out"
    arguments = ["score", "-i", source, "-o", output, "--model", "bm25"]
    monkeypatch.setattr(options, "has_fast_bfloat16", lambda device, **_: True)
    assert run(*arguments).exit_code == 0
    assert begun(output).settings["dtype"] == "bfloat16"
    monkeypatch.setattr(
        options, "has_fast_bfloat16", lambda device, **_: False
    )  # as on another machine
    refused = run(*arguments)
    assert "dtype: 'bfloat16' there, 'float32' asked for" in " ".join(refused.stderr.split())
    assert run(*arguments, "--dtype", "bfloat16").exit_code == 0


@pytest.mark.parametrize("recorded", [True, False])
def test_another_language_model_is_another_model(recorded, ranker, tmp_path):
    ranker.save_pretrained(tmp_path, include_backbone=True)
    if not recorded:  # as in earlier releases
        config = hub.read_config(tmp_path)
        plain = config.model_copy(
            update={"backbone": config.backbone.model_copy(update={"files": {}})}
        )
        hub.write_artifact(tmp_path, plain, hub.read_projection(tmp_path, config), "")
    before = model_identity(str(tmp_path))
    assert model_identity(str(tmp_path)) == before
    weights = tmp_path / "backbone" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-64] + bytes(64))
    if recorded:
        with pytest.raises(ArtifactError, match=r"model\.safetensors not as when"):
            RSRank.from_pretrained(tmp_path, device="cpu")
    else:
        assert model_identity(str(tmp_path)) != before


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


@pytest.mark.ray
def test_the_command_names_what_is_wrong_on_a_cluster(ray_cluster, tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", rows_of(4))
    failed = run(
        "score",
        "-i",
        source,
        "-o",
        tmp_path / "out",
        "--dtype",
        "float99",
        "--engine",
        "ray",
        "--actors",
        1,
    )
    assert failed.exit_code == 1
    assert "float99" in failed.stderr
    assert "Traceback" not in failed.stderr
