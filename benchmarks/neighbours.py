"""How long a call takes beside busy processes, with torch's own threads and with ours.

    python -m benchmarks.neighbours --json docs/neighbours.json && python -m benchmarks.tables

A client asks one question after another, over passages whose prefixes are not kept, in a process of
its own; beside it none, one or four others multiply matrices without end. "torch's own": a thread a
core, idle ones wait busily for some milliseconds. "ours": what the commands choose
(`cli/process.py`), as many, and idle ones sleep. Both run batches side by side, one on each thread.
The three ways take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BUSY = "import torch; torch.set_num_threads(1); a = torch.randn(512, 512)\nwhile True: a @ a"
CLIENT = """
import json, sys, time
import torch
from benchmarks.workload import QUERY, on_torch, passages
if {threads}: torch.set_num_threads({threads})
ranker = on_torch()
documents = passages({documents}, {words})
ranker.score(QUERY, documents)
print("ready", flush=True)
for line in sys.stdin:
    taken = []
    for _ in range({calls}):
        started = time.perf_counter()
        ranker.score(QUERY, documents)
        taken.append(time.perf_counter() - started)
    print(json.dumps(taken), flush=True)
"""
WAYS: dict[str, tuple[dict[str, str], int]] = {
    "torch's own": ({}, 0),
    "ours": ({}, 0),
    "one thread": ({}, 1),
}


def start(way: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    """A client that waits for its turn."""
    variables, threads = WAYS[way]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")} | variables
    code = CLIENT.format(
        before="",
        threads=threads,
        **{k: getattr(options, k) for k in ("documents", "words", "calls")},
    )
    if way != "torch's own":  # before torch is there, as the command line does it
        code = "from rsrank_rag.cli.process import prepare; prepare()\n" + code
    client = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        stdin=-1,
        stdout=-1,
        stderr=-3,
        text=True,
    )
    assert client.stdout is not None
    assert client.stdout.readline().strip() == "ready"
    return client


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Times of a call, a row a number of neighbours and a way, in Markdown."""
    lines = [
        "| busy neighbours | threads | p50, ms | p99, ms | p50 of one thread's alone |",
        "|--:|---|--:|--:|--:|",
    ]
    lines += [
        f"| {row['neighbours']} | {row['threads']} | {row['p50_ms']:.0f} | {row['p99_ms']:.0f} "
        f"| {row['of_one_thread_alone']:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--words", type=int, default=100)
    parser.add_argument("--calls", type=int, default=10, help="of a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    clients = {way: start(way, options) for way in WAYS}
    rows: list[dict[str, Any]] = []
    for count in options.neighbours:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        busy = [
            subprocess.Popen([sys.executable, "-c", BUSY], env=environment, stderr=-3)
            for _ in range(count)
        ]
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        try:
            for _ in range(options.turns):
                for way, client in clients.items():
                    assert client.stdin is not None
                    assert client.stdout is not None
                    client.stdin.write("go\n")
                    client.stdin.flush()
                    taken[way] += json.loads(client.stdout.readline())
        finally:
            for process in busy:
                process.kill()
        for way, seconds in taken.items():
            half, most = statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]
            rows.append(
                {"neighbours": count, "threads": way, "p50_ms": 1e3 * half, "p99_ms": 1e3 * most}
            )
    alone = next(row["p50_ms"] for row in rows if row["threads"] == "one thread")
    for row in rows:
        row["of_one_thread_alone"] = row["p50_ms"] / alone
    print(table(rows))
    for client in clients.values():
        client.kill()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
