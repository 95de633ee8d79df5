"""Pairs a second of `rsrank score`: in one process, and by actors on a Ray cluster of this machine.

Loading is left out: the time runs from the first part that is written to the last one. The engines take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WORDS = "the bees dance a map of every flower near hive and keep honey for winter while trains run late".split()  # noqa: SIM905


def write_pairs(path: Path, pairs: int, words: int) -> None:
    """Made-up documents that differ."""
    generator = random.Random(0)
    rows = (
        {
            "query": f"Where is number {i % 50}?",
            "document": " ".join(generator.choices(WORDS, k=words)),
        }
        for i in range(pairs)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def engines(actors: int) -> dict[str, list[str]]:
    """What is compared: each process has one thread, which other work on the machine disturbs least."""
    ray = ["--engine", "ray", "--actors"]
    return {"local": [], "ray, 1 actor": [*ray, "1"], f"ray, {actors} actors": [*ray, str(actors)]}


def rate(source: Path, output: Path, rows: int, arguments: list[str]) -> float:
    """Pairs a second of one run."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rsrank_rag", "score", "-i", str(source), "-o", str(output)]
    subprocess.run(
        [*command, "--rows-per-part", str(rows), *arguments], env=environment, check=True, stdout=2
    )
    times = sorted(part.stat().st_mtime for part in output.glob("part-*.parquet"))
    return (len(times) - 1) * rows / (times[-1] - times[0])


def main() -> None:
    """Run all engines in turn and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--words", type=int, default=100)
    parser.add_argument("--rows", type=int, default=50, help="rows of a part")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--actors", type=int, default=2)
    options = parser.parse_args()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "pairs.jsonl"
        write_pairs(source, options.pairs, options.words)
        for turn in range(options.turns):
            for number, (name, arguments) in enumerate(engines(options.actors).items()):
                output = Path(folder) / f"{turn}-{number}"
                found.setdefault(name, []).append(rate(source, output, options.rows, arguments))
                print(f"{name}: {found[name][-1]:.1f}", file=sys.stderr, flush=True)
    first = next(iter(found.values()))
    for name, rates in found.items():
        ratios = [rate / other for rate, other in zip(rates, first, strict=True)]
        print(
            f"{name:16} {statistics.median(rates):8.1f} pairs/s   {statistics.median(ratios):.2f} x local"
        )


if __name__ == "__main__":
    main()
