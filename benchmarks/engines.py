"""Pairs a second of `rsrank score`: in one process, and by actors on a Ray cluster of this machine.

Loading is left out: the time runs from the first file that is written to the last one. The engines
take turns.
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

SENTENCE = (
    "the bees dance a map of every flower near hive and keep honey for winter while trains run late"
)
WORDS = SENTENCE.split()


def write_pairs(folder: Path, pairs: int, words: int, rows: int) -> None:
    """Write made-up documents that differ, in files of so many rows."""
    generator = random.Random(0)
    folder.mkdir()
    for start in range(0, pairs, rows):
        lines = []
        for number in range(start, min(start + rows, pairs)):
            document = " ".join(generator.choices(WORDS, k=words))
            lines.append(json.dumps({"query": f"Where is {number % 50}?", "document": document}))
        path = folder / f"{start:06}.jsonl"
        path.write_text("\n".join(lines), encoding="utf-8")


def engines(actors: int) -> dict[str, list[str]]:
    """Options of each engine. A process has one thread, which other work disturbs least."""
    ray = ["--engine", "ray", "--actors"]
    return {"local": [], "ray, 1 actor": [*ray, "1"], f"ray, {actors} actors": [*ray, str(actors)]}


def rate(source: Path, output: Path, rows: int, arguments: list[str]) -> float:
    """Pairs a second of one run."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rsrank_rag", "score", "-i", str(source), "-o", str(output)]
    subprocess.run([*command, *arguments], env=environment, check=True, stdout=2)
    times = sorted(path.stat().st_mtime for path in output.glob("*.jsonl"))
    return (len(times) - 1) * rows / (times[-1] - times[0])


def main() -> None:
    """Run all engines in turn and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--words", type=int, default=100)
    parser.add_argument("--rows", type=int, default=50, help="rows of a file")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--actors", type=int, default=2)
    options = parser.parse_args()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "pairs"
        write_pairs(source, options.pairs, options.words, options.rows)
        for turn in range(options.turns):
            for number, (name, arguments) in enumerate(engines(options.actors).items()):
                output = Path(folder) / f"{turn}-{number}"
                found.setdefault(name, []).append(rate(source, output, options.rows, arguments))
                print(f"{name}: {found[name][-1]:.1f}", file=sys.stderr, flush=True)
    first = next(iter(found.values()))
    for name, rates in found.items():
        ratios = [rate / other for rate, other in zip(rates, first, strict=True)]
        rate_text = f"{statistics.median(rates):8.1f} pairs/s"
        print(f"{name:16} {rate_text}   {statistics.median(ratios):.2f} x local")


if __name__ == "__main__":
    main()
