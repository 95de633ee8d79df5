"""Damaged files: they give the same score, one clear error, or a new read.

    python -m benchmarks.fuzz artifacts --cases 3000
    python -m benchmarks.fuzz prefixes --cases 3000

A case damages one file at random: bits flipped, bytes cut out or put in, the file cut short,
emptied, filled with noise, or replaced by another one. The command ends with 1 if a case has any
other outcome, and prints the seed that repeats the case.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tqdm import tqdm

from rsrank_rag import RSRank
from rsrank_rag.artifact import hub
from rsrank_rag.artifact.config import RSRankConfig
from rsrank_rag.errors import ArtifactError
from rsrank_rag.method.formula import Numbers

CHANGED = "WRONG: read as something else"
"""Outcome of a damaged artifact that was read with another config or other weights."""
QUERY = "Which animal gives milk?"
TEXTS = [
    "The cow is an animal that gives milk.",
    "The train leaves at noon.",
    "Goats give milk, too, and sheep.",
    "Rain fell all day, and the river rose.",
]
TOLERANCE = 0.05
"""Scores may move so much between a document's own prefix and one that is cached in 8 bits."""


def damage(content: bytes, rng: random.Random, other: bytes) -> bytes:
    """The content, damaged in one of several ways; never as it was."""
    place = rng.randrange(len(content))
    length = rng.randint(1, 64)
    start = content[:place]
    end = content[place + length :]
    ways: list[Callable[[], bytes]] = [
        lambda: _flipped(content, rng),
        lambda: start,
        lambda: start + end,
        lambda: start + rng.randbytes(length) + content[place:],
        lambda: start + rng.randbytes(min(length, len(content) - place)) + end,
        lambda: rng.randbytes(length),
        lambda: b"",
        lambda: other,
        lambda: content + rng.randbytes(length),
    ]
    changed = rng.choice(ways)()
    if changed == content:
        return damage(content, rng, other)
    return changed


def _flipped(content: bytes, rng: random.Random) -> bytes:
    # Headers are much shorter than the numbers, and more interesting: half of the flips are there.
    length = len(content)
    if rng.random() < 0.5:
        length = min(length, 600)
    place = rng.randrange(length)
    byte = content[place] ^ (1 << rng.randrange(8))
    return content[:place] + bytes([byte]) + content[place + 1 :]


def artifacts(cases: int, seed: int) -> Counter[str]:
    """Damage to config.json and projection.safetensors of an artifact."""
    outcomes: Counter[str] = Counter()
    source = hub.resolve("mini")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("config.json", "projection.safetensors"):
            shutil.copy(source / name, folder)
        files = {path: path.read_bytes() for path in Path(folder).iterdir()}
        config = hub.read_config(Path(folder))
        weights = hub.read_weights(Path(folder), config).state_dict()
        for case in tqdm(range(cases), desc="artifacts"):
            rng = random.Random(seed + case)
            path, other = rng.sample(sorted(files), 2)
            path.write_bytes(damage(files[path], rng, files[other]))
            # This script looks for the exceptions that must not be raised.
            try:
                outcome = _artifact_outcome(Path(folder), config, weights)
            except ArtifactError:
                outcome = "refused with ArtifactError"
            except Exception as error:
                outcome = f"WRONG: {type(error).__name__} (seed {seed + case}): {error}"
            if outcome == CHANGED:
                outcome = f"{CHANGED} (seed {seed + case})"
            outcomes[outcome] += 1
            path.write_bytes(files[path])
    return outcomes


def _artifact_outcome(folder: Path, config: RSRankConfig, weights: dict[str, Numbers]) -> str:
    """Whether a folder holds this config and these weights; ArtifactError if it cannot be read."""
    read = hub.read_config(folder)
    numbers = hub.read_weights(folder, read).state_dict()
    if read != config:
        return CHANGED
    for name, weight in weights.items():
        if not np.array_equal(numbers[name], weight):
            return CHANGED
    return "read as it was"


def prefixes(cases: int, seed: int) -> Counter[str]:
    """Damage to files of cached prefixes."""
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        ranker = RSRank.from_pretrained("mini", cache_folder=folder, dtype="float32")
        ranker.score(QUERY, TEXTS)
        expected = ranker.score(QUERY, TEXTS)
        files = {path: path.read_bytes() for path in Path(folder).rglob("*.prefix")}
        for case in tqdm(range(cases), desc="prefixes"):
            rng = random.Random(seed + case)
            path, other = rng.sample(sorted(files), 2)
            path.write_bytes(damage(files[path], rng, files[other]))
            before = ranker.stats()
            ranker.cache.tiers.clear()
            # This script looks for the exceptions that must not be raised.
            try:
                scores = ranker.score(QUERY, TEXTS)
            except Exception as error:
                outcomes[f"WRONG: {type(error).__name__} (seed {seed + case}): {error}"] += 1
                scores = expected
            difference = max(abs(a - b) for a, b in zip(scores, expected, strict=True))
            if difference > TOLERANCE:
                outcomes[f"WRONG: scores moved by {difference:.3f} (seed {seed + case})"] += 1
            elif ranker.stats()["corrupt"] > before["corrupt"]:
                outcomes["computed again"] += 1
            else:
                outcomes["read as it was"] += 1
            path.write_bytes(files[path])
    return outcomes


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"artifacts": artifacts, "prefixes": prefixes}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    outcomes = parts[options.part](options.cases, options.seed)
    for outcome, count in outcomes.most_common():
        print(f"{count:>7,}  {outcome}")
    sys.exit(any(outcome.startswith("WRONG") for outcome in outcomes))


if __name__ == "__main__":
    main()
