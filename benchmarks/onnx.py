"""`mini` on ONNX Runtime and on torch: time, memory and scores on this machine.

    python -m benchmarks.onnx --threads 1

Each runtime is a process of its own, and both take turns. Ratios are ONNX Runtime's by torch's, the
median over turns of one run. On a busy machine, the seconds of the processor say more than those of
the clock; with several threads, they add up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

CHILD = """
import json, random, resource, sys, time
from rsrank_rag import RSRank
from rsrank_rag.artifact.loading import open_artifact
from rsrank_rag.backends.options import ModelSource
source = ModelSource(device="cpu", dtype={dtype!r})
ranker = RSRank(*open_artifact(source, on_onnx={on_onnx}))
words = "bees dance flowers angle hive tower clock river train bread salt music sun moon".split()
query = "How do honeybees tell each other where the flowers are?"

def passages(seed):
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=draw.randint(*{words}))) for _ in range({documents})]

def measured(run):
    clock, processor = time.perf_counter(), time.process_time()
    scores = run()
    return dict(clock=time.perf_counter() - clock, processor=time.process_time() - processor,
                scores=scores)

ranker.score(query, ["a document"])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps(dict(processor=time.process_time(), megabytes=peak)), flush=True)
for line in sys.stdin:
    documents = passages(int(line))
    cold = measured(lambda: ranker.score(query, documents))
    warm = measured(lambda: ranker.score(query, documents))
    print(json.dumps(dict(cold=cold, warm=warm)), flush=True)
"""


class Child:
    """One runtime in a process of its own."""

    def __init__(self, runtime: str, options: argparse.Namespace) -> None:
        code = CHILD.format(
            on_onnx=runtime == "onnx",
            dtype=options.dtype,
            words=tuple(options.words),
            documents=options.documents,
        )
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.first = self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line that it prints."""
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def turn(self, seed: int) -> dict[str, Any]:
        """Score new passages, then the same again."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        return self.answer()


def main(arguments: Sequence[str] | None = None) -> None:
    """Take turns and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--words", type=int, nargs=2, default=(20, 160))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", help="Default: each runtime's own, int8 without AMX.")
    options = parser.parse_args(arguments)
    onnx = Child("onnx", options)
    torch = Child("torch", options)
    for name, child in (("onnx", onnx), ("torch", torch)):
        print(
            f"{name}: {child.first['processor']:.2f} s of the processor from the start to the "
            f"first result, {child.first['megabytes']:.0f} MB at most"
        )
    turns = []
    for seed in range(options.turns + 1):
        order = (onnx, torch) if seed % 2 else (torch, onnx)
        answers = {child: child.turn(seed) for child in order}
        # The first turn warms up.
        if seed:
            turns.append((answers[onnx], answers[torch]))
    for way in ("cold", "warm"):
        for unit in ("processor", "clock"):
            ratios = [ours[way][unit] / theirs[way][unit] for ours, theirs in turns]
            print(f"{way}, {unit}: {statistics.median(ratios):.2f} of torch's seconds")
    differences = [np.subtract(a["cold"]["scores"], b["cold"]["scores"]) for a, b in turns]
    print(f"scores differ by at most {np.abs(differences).max():.2g}")
    for child in (onnx, torch):
        child.process.communicate()


if __name__ == "__main__":
    main()
