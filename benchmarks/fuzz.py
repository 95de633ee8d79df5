"""Damaged files: they give the same score, one clear error, or a new read.

    python -m benchmarks.fuzz artifacts --cases 3000
    python -m benchmarks.fuzz prefixes --cases 3000

A case damages one file at random: bits flipped, bytes cut out or put in, the file
cut short, emptied, filled with noise, or replaced by another one. Ends with 1 if a case has any
other outcome, and prints the seed that repeats it.
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

from tqdm import tqdm

from rsrank_rag import RSRank
from rsrank_rag.artifact import hub
from rsrank_rag.errors import ArtifactError

QUERY = "Which animal gives milk?"
TEXTS = [
    "The cow is an animal that gives milk.",
    "The train leaves at noon.",
    "Goats give milk, too, and sheep.",
    "Rain fell all day, and the river rose.",
]
TOLERANCE = 0.05
"""Scores may move so much between a document's own prefix and one kept in 8 bits."""


def damage(content: bytes, rng: random.Random, other: bytes) -> bytes:
    """The content, damaged in one of several ways; never as it was."""
    place, length = rng.randrange(len(content)), rng.randint(1, 64)
    ways: list[Callable[[], bytes]] = [
        lambda: _flipped(content, rng),
        lambda: content[:place],
        lambda: content[:place] + content[place + length :],
        lambda: content[:place] + rng.randbytes(length) + content[place:],
        lambda: (
            content[:place]
            + rng.randbytes(min(length, len(content) - place))
            + content[place + length :]
        ),
        lambda: rng.randbytes(length),
        lambda: b"",
        lambda: other,
        lambda: content + rng.randbytes(length),
    ]
    changed = rng.choice(ways)()
    return damage(content, rng, other) if changed == content else changed


def _flipped(content: bytes, rng: random.Random) -> bytes:
    # Headers are small beside the numbers, and more interesting: half of the time, look there.
    place = rng.randrange(min(len(content), 600) if rng.random() < 0.5 else len(content))
    return (
        content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :]
    )


def artifacts(cases: int, seed: int) -> Counter[str]:
    """Damage to config.json and projection.safetensors of an artifact."""
    found: Counter[str] = Counter()
    source = hub.resolve("mini")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("config.json", "projection.safetensors"):
            shutil.copy(source / name, folder)
        files = {path: path.read_bytes() for path in Path(folder).iterdir()}
        config = hub.read_config(Path(folder))
        weights = hub.read_projection(Path(folder), config).state_dict()
        for case in tqdm(range(cases), desc="artifacts"):
            rng = random.Random(seed + case)
            path, other = rng.sample(sorted(files), 2)
            path.write_bytes(damage(files[path], rng, files[other]))
            try:
                read = hub.read_config(Path(folder))
                numbers = hub.read_projection(Path(folder), read).state_dict()
                same = read == config and all(
                    numbers[name].equal(weight) for name, weight in weights.items()
                )
                found[
                    "read as it was"
                    if same
                    else f"WRONG: read as something else (seed {seed + case})"
                ] += 1
            except ArtifactError:
                found["refused with ArtifactError"] += 1
            except Exception as error:  # what must not happen is what is looked for
                found[f"WRONG: {type(error).__name__} (seed {seed + case}): {error}"] += 1
            path.write_bytes(files[path])
    return found


def prefixes(cases: int, seed: int) -> Counter[str]:
    """Damage to files of kept prefixes."""
    found: Counter[str] = Counter()
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
            try:
                scores = ranker.score(QUERY, TEXTS)
            except Exception as error:  # what must not happen is what is looked for
                found[f"WRONG: {type(error).__name__} (seed {seed + case}): {error}"] += 1
                scores = expected
            apart = max(abs(a - b) for a, b in zip(scores, expected, strict=True))
            noticed = ranker.stats()["corrupt"] > before["corrupt"]
            if apart > TOLERANCE:
                found[f"WRONG: scores moved by {apart:.3f} (seed {seed + case})"] += 1
            else:
                found["computed again" if noticed else "read as it was"] += 1
            path.write_bytes(files[path])
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {part.__name__: part for part in (artifacts, prefixes)}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = parts[options.part](options.cases, options.seed)
    for outcome, count in found.most_common():
        print(f"{count:>7,}  {outcome}")
    sys.exit(any(outcome.startswith("WRONG") for outcome in found))


if __name__ == "__main__":
    main()
