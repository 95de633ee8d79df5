"""Scores with rounded prefixes on real passages: bfloat16, 8 bits (as on disk) and 4 bits.

    python -m benchmarks.prefix_formats --model mini --data data/dev/hotpotqa.paragraph.jsonl.gz

Scores in float32 with prefixes as they are, against scores with each document's keys and values
rounded. 4 bits have a scale for every 32 numbers; the package does not offer them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rsrank_rag.backends.torch.backbone import Backbone
from rsrank_rag.evaluation.datasets import read_labelled
from rsrank_rag.method.prefix import Prefix, Prefixes
from rsrank_rag.method.scoring import Row
from rsrank_rag.prefixes.cache import PackedPrefix

from .workload import on_torch

CPU = torch.device("cpu")


def four_bits(states: Tensor, group: int = 32) -> Tensor:
    """Round to 15 levels, one scale for each group of numbers."""
    parts = states.unflatten(-1, (-1, min(group, states.shape[-1])))
    scale = (parts.abs().amax(-1, keepdim=True) / 7).clamp_min(1e-7)
    return ((parts / scale).round().clamp(-7, 7) * scale).flatten(-2)


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": lambda states: states.bfloat16().float(),
    "8 bits": lambda states: (
        PackedPrefix.of(Prefix(states, torch.empty(0))).unpack(CPU, torch.float32).states
    ),
    "4 bits": four_bits,
}


class Rounding:
    """Takes the place of the prefix cache: documents are run, then rounded.

    Args:
        change: Applied to each document's keys and values, (2, L, H, S, D).
    """

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        self.change = change

    def prefill(
        self,
        backbone: Backbone,
        rows: Sequence[Row],
        query_slots: int,
        extra_rows: Sequence[Prefix],
    ) -> Prefixes:
        """As `CachedPrefixes.prefill`."""
        run = backbone.prefill([row.document for row in rows])
        prefixes = []
        for prefix in run.rows():
            prefixes.append(replace(prefix, states=self.change(prefix.states)))
        return Prefixes.join([*prefixes, *extra_rows], query_slots)


def main() -> None:
    """Score everything in every format and print what moved."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mini")
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=20, help="queries of each file")
    options = parser.parse_args()
    ranker = on_torch(options.model, device="cpu", dtype="float32")
    queries = [query for path in options.data for query in read_labelled(path)[: options.limit]]

    def scores() -> Tensor:
        return torch.tensor(
            [
                s
                for q in queries
                for s in ranker.score(q.query, [document.content() for document in q.documents])
            ]
        )

    exact = scores()
    print(
        f"{options.model}: {len(exact):,} documents, standard deviation of the scores "
        f"{exact.std():.2f}"
    )
    print(f"{'':10}{'largest':>10}{'mean':>10}{'decisions changed':>20}")
    for name, change in FORMATS.items():
        ranker.reader.cache = Rounding(change)
        moved = scores()
        error, changed = (moved - exact).abs(), ((moved > 0) != (exact > 0)).sum()
        print(f"{name:10}{error.max():10.4f}{error.mean():10.4f}{changed:20}")


if __name__ == "__main__":
    main()
