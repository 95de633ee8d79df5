"""The benchmarks that nobody here can run at full size do run, and tables in the docs are those of their figures."""

import json
from pathlib import Path

import pytest

from benchmarks import latency, peers

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("size", ["qwen3-8b", "qwen3-0.6b"])
@pytest.mark.parametrize("table", [[], ["--paper"]])
def test_latency_of_the_large_sizes_runs_end_to_end(size, table, tmp_path, monkeypatch):
    monkeypatch.setattr(latency, "matmul_ceiling", lambda device, dtype: 1e12)
    file = tmp_path / "found.json"
    options = ["--documents", "4", "--words", "8", "--turns", "1", "--device", "cpu", "--dtype", "float32"]
    latency.main(["--size", size, "--toy", *options, *table, "--json", str(file)])
    found = json.loads(file.read_text())
    assert size in found["machine"]
    assert all(row["seconds"] > 0 for row in found["rows"])
    systems = {row["stage"] for row in found["rows"]} if table else {row["system"] for row in found["rows"]}
    assert len(systems) == (4 if table else 7)


def row(system, times, floor=None):
    return {"system": system, "milliseconds": 1e3 * times, "of_onnx_int8": times, "floor_milliseconds": floor}


def test_peers_write_one_column_a_process_and_replace_it_whole(tmp_path):
    rows = [row("mini, 0% kept", 1.25, 400.0), row(peers.BASE, 1.0)]
    both = [
        {"processor": "as it is", "threads": 1, "machine": "A machine", "dtype": "bfloat16", "rows": rows},
        {"processor": "AVX2", "threads": 2, "machine": "A machine", "dtype": "int8", "rows": [*rows, row("other", 2)]},
    ]
    (tmp_path / "docs").mkdir()
    for page in peers.PAGES:
        (tmp_path / page).write_text("before\n<!-- peers -->\nold\n<!-- end of peers -->\nafter\n")
    for _ in range(2):
        peers.write(both, tmp_path)
    text = (tmp_path / "docs/benchmarks.md").read_text()
    assert text.startswith("before\n<!-- peers -->\nA machine; ")
    assert "| mini, 0% kept | 1.25 | 1.25 |" in text
    assert "| other |  | 2.00 |" in text
    assert "old" not in text


def test_the_pages_have_a_place_for_it_and_show_what_was_measured():
    for page in peers.PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert peers.BLOCK.search(text)
        if (figures := ROOT / "docs/peers.json").exists():
            assert peers.rewritten(text, json.loads(figures.read_text(encoding="utf-8"))) == text
