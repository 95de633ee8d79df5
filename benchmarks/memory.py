"""Memory of `mini` over many batches of random lengths, with and without cached prefixes.

    python -m benchmarks.memory --batches 300

Each of the two is a process of its own. A batch has 1 to 40 passages of 1 to 500 words, and a query
of 1 to 30 words. The memory after the thirtieth batch stands beside that after the last one, and
beside what is left when glibc has given freed memory back to the system. The cache of prefixes
holds 64 MB here, so that it is full before the thirtieth batch.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

EARLY = 30
CACHE_BYTES = 64 * 10**6


def resident_megabytes() -> float:
    """Memory of this process."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmRSS"))


def run(batches: int, cache_bytes: int) -> list[float]:
    """Megabytes after each batch, and at last after glibc has given back what is free."""
    from rsrank_rag import RSRank

    ranker = RSRank.from_pretrained("mini", device="cpu", cache_size=cache_bytes)
    # `workload` has words, too, but imports torch.
    words = Path(__file__).read_text("utf-8").split()
    draw = random.Random(0)

    def text(longest: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, longest)))

    megabytes = []
    for _ in range(batches):
        ranker.score(text(30), [text(500) for _ in range(draw.randint(1, 40))])
        gc.collect()
        megabytes.append(resident_megabytes())
    ctypes.CDLL(None).malloc_trim(0)
    return [*megabytes, resident_megabytes()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the memory of both processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--cache-bytes", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.cache_bytes is not None:
        print(json.dumps(run(options.batches, options.cache_bytes)))
        return
    for cache_bytes in (0, CACHE_BYTES):
        command = [sys.executable, "-m", "benchmarks.memory", f"--cache-bytes={cache_bytes}"]
        command.append(f"--batches={options.batches}")
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        *megabytes, trimmed = json.loads(done.stdout.splitlines()[-1])
        early = megabytes[min(EARLY, len(megabytes)) - 1]
        print(
            f"cached prefixes of at most {cache_bytes / 1e6:.0f} MB: {early:.0f} MB after batch "
            f"{EARLY}, {megabytes[-1]:.0f} MB after batch {len(megabytes)} "
            f"({megabytes[-1] - early:+.0f}), {max(megabytes):.0f} MB at most, "
            f"{trimmed:.0f} MB trimmed"
        )


if __name__ == "__main__":
    main()
