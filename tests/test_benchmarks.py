"""Benchmarks run at a small size, and tables in the docs match their figures."""

import json
from pathlib import Path

import pytest

from benchmarks import latency, peers, tables

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("size", ["qwen3-8b", "qwen3-0.6b"])
@pytest.mark.parametrize("table", [[], ["--paper"]])
def test_latency_of_the_large_sizes_runs_end_to_end(size, table, tmp_path, monkeypatch):
    monkeypatch.setattr(latency, "matmul_ceiling", lambda device, dtype: 1e12)
    file = tmp_path / "found.json"
    options = [
        "--documents",
        "4",
        "--words",
        "8",
        "--turns",
        "1",
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    latency.main(["--size", size, "--toy", *options, *table, "--json", str(file)])
    figures = json.loads(file.read_text())
    assert size in figures["machine"]
    assert all(row["seconds"] > 0 for row in figures["rows"])
    systems = {row["stage" if table else "system"] for row in figures["rows"]}
    assert len(systems) == (4 if table else 7)


def row(system, times):
    return {"system": system, "milliseconds": 1e3 * times, "of_onnx_int8": times}


def test_peers_write_one_column_a_process_and_replace_it_whole(tmp_path):
    rows = [row("mini, 0% cached", 1.25), row(peers.BASE, 1.0)]
    both = [
        {
            "processor": "as it is",
            "threads": 1,
            "machine": "A machine",
            "floor_milliseconds": 400.0,
            "rows": rows,
        },
        {
            "processor": "AVX2",
            "threads": 2,
            "machine": "A machine",
            "floor_milliseconds": 300.4,
            "rows": [*rows, row("other", 2)],
        },
    ]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/peers.json").write_text(json.dumps(both))
    for page in {table.page for table in tables.TABLES.values()}:
        blocks = [name for name, table in tables.TABLES.items() if table.page == page]
        lines = "".join(
            f"<!-- figures: {name} -->\nold {name}\n<!-- end of figures -->\n" for name in blocks
        )
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text(f"before\n{lines}after\n")
    for _ in range(2):
        tables.main(tmp_path)
    text = (tmp_path / "docs/benchmarks.md").read_text()
    assert text.startswith("before\n<!-- figures: peers -->\n`mini` runs on ONNX Runtime")
    assert "- 1 thread, 2 threads: A machine\n" in text
    assert "| mini, 0% cached | 1.25 | 1.25 |" in text
    assert "| other |  | 2.00 |" in text
    assert "| floor of mini, 0% cached, in ms | 400 | 300 |" in text
    assert "old peers" not in text
    assert "old sentences" in text  # nobody has measured them there


@pytest.mark.parametrize("name", tables.TABLES)
def test_a_page_has_a_place_for_each_table_and_shows_what_was_measured(name):
    page = tables.TABLES[name].page
    text = (ROOT / page).read_text(encoding="utf-8")
    assert name in [match[2] for match in tables.BLOCK.finditer(text)]
    assert tables.rewritten(page) == text
