r"""Take the training to a machine with a GPU and nothing else, and bring the weights back.

Here, everything that the other machine lacks goes into a folder of some megabytes:

    python research/mini/gpu.py pack --data ../shared/data/train --manuals runs/manuals.jsonl \
        --teacher runs/teacher --output .gpu

There, in the root of the same checkout:

    PYTHONPATH=$PWD python research/mini/train.py --data .gpu/pool.json.xz --teacher .gpu/teacher \
        --start rsrank_rag/models/mini --output /tmp/run --device cuda --batches 4 --minutes 8 &&
    python research/mini/gpu.py split --weights /tmp/run/mean.pt --output $OUT

And here again:

    python research/mini/gpu.py join --parts FOLDER --output runs/mini/mean.pt
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from batches import Pool, pack
from teacher import Teacher, key_of

QUERIES, PASSAGES = 80, 8
"""Most queries of a public set, and most passages of each of its queries."""
PART = 15_000_000
"""Bytes of a part of the weights."""


def pack_all(data: Path, manuals: Path | None, teacher: Path, output: Path) -> None:
    """Write the pool, and the teacher's rows of its texts."""
    (output / "teacher").mkdir(parents=True, exist_ok=True)
    pack(Pool.of(data, manuals), output / "pool.json.xz", QUERIES, PASSAGES)
    rows = Teacher(teacher).rows
    keys = []
    rows_of_pool = []
    for key in map(key_of, Pool.of(output / "pool.json.xz").teacher_texts()):
        if key in rows:
            keys.append(np.frombuffer(key, dtype=np.uint8))
            rows_of_pool.append(rows[key])
    file = output / "teacher" / "0000.npz"
    np.savez(file, keys=np.stack(keys), rows=np.stack(rows_of_pool))


def split(weights: Path, output: Path) -> None:
    """Write weights in fp16, in parts."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in torch.load(weights, weights_only=True, map_location="cpu").items():
        half = tensor.half()
        if size + half.nbytes > PART:
            parts.append({})
            size = 0
        parts[-1][name] = half
        size += half.nbytes
    for number, part in enumerate(parts):
        torch.save(part, output / f"part-{number}.pt")


def join(parts: Path, output: Path) -> None:
    """Weights of all parts in fp32."""
    weights = {}
    for path in sorted(parts.glob("part-*.pt")):
        for name, tensor in torch.load(path, weights_only=True).items():
            weights[name] = tensor.float()
    torch.save(weights, output)


def main() -> None:
    """Pack, split or join."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("pack", "split", "join"))
    for name in ("data", "manuals", "teacher", "weights", "parts"):
        parser.add_argument(f"--{name}", type=Path, default=None)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if options.what == "pack":
        pack_all(options.data, options.manuals, options.teacher, options.output)
    elif options.what == "split":
        split(options.weights, options.output)
    else:
        join(options.parts, options.output)


if __name__ == "__main__":
    main()
