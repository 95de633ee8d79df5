"""Many pairs: a file in, a file out, whatever is in it and whatever happens meanwhile."""

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from ray_models import Lengths, refuse

from rsrank_rag import Reranker
from rsrank_rag.bulk import COLUMNS, score_file
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


def read(path):
    content = path.read_bytes()
    text = gzip.decompress(content) if path.suffix == ".gz" else content
    return [json.loads(line) for line in text.decode().splitlines()]


class Counting(Lengths):
    """Remembers how many pairs each call had."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def score_pairs(self, pairs):
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


def score(source, output, load=Lengths):
    return score_file(source, output, load)


def score_rows(rows, folder, load=Lengths):
    """The rows with their scores, by way of files."""
    score(write_lines(folder / "rows.jsonl", rows), folder / "out.jsonl", load)
    return read(folder / "out.jsonl")


def is_empty(folder):
    return not folder.exists() or not list(folder.iterdir())


# Rows


def test_scores_are_those_of_the_model(ranker, tmp_path):
    rows = rows_of(40)
    source = write_lines(tmp_path / "rows.jsonl", rows)
    assert score(source, tmp_path / "out.jsonl", lambda: ranker) == Counter(rows=40)
    out = read(tmp_path / "out.jsonl")
    assert [{name: row[name] for name in ("id", "query", "document")} for row in out] == rows
    expected = [ranker.score(row["query"], [row["document"]])[0] for row in rows]
    # Other batches: float32 rounds otherwise.
    assert [row["score"] for row in out] == pytest.approx(expected, abs=1e-4)
    assert [row["above_threshold"] for row in out] == [score > 0 for score in expected]
    assert {row["error"] for row in out} == {None}


def test_compressed_files_are_read_and_written(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl.gz", rows_of(50))
    assert score(source, tmp_path / "new" / "out.jsonl.gz")["rows"] == 50
    assert read(tmp_path / "new" / "out.jsonl.gz") == score_rows(rows_of(50), tmp_path)


@pytest.mark.parametrize(("limit", "calls"), [("CHUNK", [7, 7, 6]), ("CHUNK_BYTES", [1] * 20)])
def test_chunks_are_bounded_by_rows_and_by_bytes(limit, calls, tmp_path, monkeypatch):
    monkeypatch.setattr(f"rsrank_rag.bulk.{limit}", 7)
    counting = Counting()
    out = score_rows(rows_of(20), tmp_path, lambda: counting)
    assert counting.calls == calls
    assert [row["id"] for row in out] == [row["id"] for row in rows_of(20)]


class Threshold(Lengths):
    """With another native threshold."""

    def __init__(self, threshold):
        super().__init__()
        self.threshold = threshold


def test_a_blank_document_is_not_kept_and_without_a_threshold_nothing_is(tmp_path):
    rows = [{"query": "q", "document": text} for text in ("aa", "  ")]
    below = score_rows(rows, tmp_path, partial(Threshold, 2 * BLANK_SCORE))
    assert [row["above_threshold"] for row in below] == [True, False]
    without = score_rows(rows, tmp_path, partial(Threshold, None))
    assert [row["above_threshold"] for row in without] == [None, None]
    assert [row["score"] for row in without] == [-998.0, BLANK_SCORE]


class ShortQueries(Lengths):
    """Reads four characters of a query."""

    def fit_query(self, query):
        return query[:4]


def test_a_row_says_that_its_query_was_cut(tmp_path):
    rows = [{"query": query, "document": "d"} for query in ("long query", "q")]
    assert [row["truncated"] for row in score_rows(rows, tmp_path, ShortQueries)] == [True, False]


def test_pairs_without_a_score_are_named_and_the_others_scored(tmp_path):
    rows = [
        *rows_of(3),
        {"query": "q", "document": None},
        {"query": "q", "document": "no score"},
        {"query": 1, "document": "d"},
    ]
    out = score_rows(rows, tmp_path)
    assert [row["score"] is None for row in out] == [False] * 3 + [True] * 3
    no_text = "The query or the document is no text."
    assert [row["error"] for row in out][3:] == [no_text, "has no score.", no_text]
    assert [row["above_threshold"] for row in out][3:] == [None] * 3


def test_whatever_else_a_row_has_is_carried_along(tmp_path):
    rows = [
        {"query": "q", "document": "d", "n": 1, "when": "2020-01-01", "deep": {"a": [1, {}]}},
        {"query": "q", "document": "\ud83d\ude00 \ud83d", "n": "two", "deep": None, "late": "here"},
    ]
    out = score_rows(rows, tmp_path)
    assert [list(row) for row in out] == [[*row, *COLUMNS] for row in rows]
    assert [row["n"] for row in out] == [1, "two"]
    assert out[0]["deep"] == {"a": [1, {}]}
    assert out[1]["document"] == "\U0001f600 ?"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"query": "q", "document": "d"}\n{"query": ', r"rows\.jsonl, line 2 is no JSON"),
        ('["q", "d"]\n', "line 1 is no JSON object with"),
        ('{"query": "q", "document": "d", "n": NaN}\n', "line 1 is no JSON: NaN is no finite"),
        ('{"query": "q", "document": "d", "n": 1e400}\n', "line 1 is no JSON: 1e400 is no finite"),
        ('{"question": "q", "document": "d"}\n', 'line 1 is .* with a "query"'),
        ('{"query": "q", "document": "d", "error": 1}\n', "line 1 has error already"),
    ],
)
def test_input_that_cannot_be_used_is_refused_before_a_model_is_loaded(content, message, tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_text(content)
    with pytest.raises(InputError, match=message):
        score(source, tmp_path / "new" / "out.jsonl", refuse)
    assert is_empty(tmp_path / "new")


def test_a_line_that_is_wrong_far_down_is_named_and_leaves_no_half_file(tmp_path, monkeypatch):
    monkeypatch.setattr("rsrank_rag.bulk.CHUNK", 2)
    source = write_lines(tmp_path / "rows.jsonl", rows_of(5))
    source.write_text(source.read_text() + "{")
    with pytest.raises(InputError, match=r"rows\.jsonl, line 6 is no JSON"):
        score(source, tmp_path / "new" / "out.jsonl")
    assert is_empty(tmp_path / "new")


def test_an_empty_file_gives_an_empty_file(tmp_path):
    assert score_rows([], tmp_path) == []


@pytest.mark.parametrize("name", ["none.jsonl", "rows.csv", "pipe.jsonl", "folder.jsonl"])
def test_a_source_that_is_no_file_of_rows_is_refused(name, tmp_path):
    (tmp_path / "rows.csv").write_text("query,document")
    (tmp_path / "folder.jsonl").mkdir()
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(InputError, match=rf"--input .*{name} is no file that ends in \.jsonl"):
        score(tmp_path / name, tmp_path / "out.jsonl", refuse)


def test_an_output_that_is_the_input_or_has_another_ending_is_refused(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", rows_of(2))
    (tmp_path / "folder.jsonl").mkdir()
    for output, message in (
        (source, "is the file of --input"),
        (tmp_path / "README.md", r"must be a file that ends in \.jsonl"),
        (tmp_path / "folder.jsonl", r"must be a file that ends in \.jsonl"),
    ):
        with pytest.raises(InputError, match=message):
            score(source, output, refuse)
    assert read(source) == rows_of(2)


def test_a_name_may_be_as_long_as_the_disk_allows_and_a_longer_one_fails_at_once(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", rows_of(2))
    longest = tmp_path / f"{'n' * 249}.jsonl"
    assert score(source, longest)["rows"] == 2
    with pytest.raises(OSError, match="name too long"):
        score(source, longest.with_stem("n" * 250), refuse)


def test_a_file_that_changes_while_it_is_read_gives_no_output(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", rows_of(5))
    output = tmp_path / "out.jsonl"
    score(source, output)
    before = output.read_bytes()

    class Replacing(Lengths):
        def score(self, query, documents):
            write_lines(source, rows_of(4))
            return super().score(query, documents)

    with pytest.raises(InputError, match="changed while it was read"):
        score(source, output, Replacing)
    assert output.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "rows.jsonl"]


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
        [sys.executable, "-c", text, source, tmp_path / "out.jsonl"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    (row,) = read(tmp_path / "out.jsonl")
    assert row["error"] is None
    # MB; what the process holds without the row is about 600.
    assert int(done.stdout.splitlines()[-1]) < 1000


def test_a_model_that_fails_on_everything_fills_no_file_with_errors(tmp_path):
    rows = [{"query": "q", "document": text} for text in ("a", "break", "d")]
    with pytest.raises(RSRankError, match="fails on every pair, even on a simple one"):
        score_rows(rows, tmp_path, Broken)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


# The command


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_scores_a_file(tmp_path):
    pytest.importorskip("bm25s")
    source = write_lines(tmp_path / "rows.jsonl", rows_of(10))
    output = tmp_path / "out.jsonl"
    done = run("score", "-i", source, "-o", output, "--model", "bm25")
    assert done.exit_code == 0, done.stderr
    message = " ".join(done.stdout.split())
    assert message == f"{output}: 10 rows, 0 without a score (column error)"
    assert [row["score"] for row in read(output)] == [
        BM25().score(row["query"], [row["document"]])[0] for row in rows_of(10)
    ]


def test_the_command_names_what_is_wrong(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", rows_of(4))
    paths = ("-i", source, "-o", tmp_path / "out.jsonl")
    refused = run("score", *paths, "--model", "nobody/nothing", "--local-files-only")
    assert refused.exit_code == 1
    assert "nobody/nothing" in refused.stderr
