"""Scores with rounded prefixes on real passages: bfloat16, 8 bits (as on disk) and 4 bits.

    python -m benchmarks.prefix_formats --model mini --data data/dev/hotpotqa.paragraph.jsonl.gz

Scores in float32 with prefixes as they are are compared with scores with each document's keys and
values rounded. 4 bits have a scale for every 32 numbers. The package does not offer them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rsrank_rag import RSRank
from rsrank_rag.backends.torch.backbone import Backbone
from rsrank_rag.evaluation.datasets import LabelledQuery, read_labelled
from rsrank_rag.method.batches import Row
from rsrank_rag.method.prefix import Prefix
from rsrank_rag.prefixes.cache import PackedPrefix

from .workload import on_torch

CPU = torch.device("cpu")


def four_bits(states: Tensor, group: int = 32) -> Tensor:
    """Round to 15 levels, one scale for each group of numbers."""
    parts = states.unflatten(-1, (-1, min(group, states.shape[-1])))
    scale = (parts.abs().amax(-1, keepdim=True) / 7).clamp_min(1e-7)
    return ((parts / scale).round().clamp(-7, 7) * scale).flatten(-2)


def eight_bits(states: Tensor) -> Tensor:
    """Round as the prefix cache does on disk."""
    packed = PackedPrefix.of(Prefix(states, torch.empty(0)))
    return packed.unpack(CPU, torch.float32).states


def sixteen_bits(states: Tensor) -> Tensor:
    """Round to bfloat16."""
    return states.bfloat16().float()


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": sixteen_bits,
    "8 bits": eight_bits,
    "4 bits": four_bits,
}


class Rounding:
    """Takes the place of the prefix cache: runs documents, then rounds their prefixes.

    Args:
        change: Applied to each document's keys and values, (2, L, H, S, D).
    """

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        self.change = change

    def prefill(self, backbone: Backbone, rows: Sequence[Row]) -> list[Prefix]:
        """As `CachedPrefixes.prefill`."""
        prefixes = []
        for prefix in backbone.prefill([row.document for row in rows]):
            prefixes.append(replace(prefix, states=self.change(prefix.states)))
        return prefixes


def all_scores(ranker: RSRank, queries: Sequence[LabelledQuery]) -> Tensor:
    """Scores of all documents of all queries, in one row."""
    scores: list[float] = []
    for query in queries:
        texts = [document.content() for document in query.documents]
        scores += ranker.score(query.query, texts)
    return torch.tensor(scores)


def main() -> None:
    """Score everything in every format, and print how much scores and decisions changed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mini")
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=20, help="queries of each file")
    options = parser.parse_args()
    ranker = on_torch(options.model, device="cpu", dtype="float32")
    queries: list[LabelledQuery] = []
    for path in options.data:
        queries += read_labelled(path)[: options.limit]
    exact = all_scores(ranker, queries)
    print(
        f"{options.model}: {len(exact):,} documents, standard deviation of the scores "
        f"{exact.std():.2f}"
    )
    print(f"{'':10}{'largest':>10}{'mean':>10}{'decisions changed':>20}")
    for name, change in FORMATS.items():
        ranker.reader.cache = Rounding(change)
        scores = all_scores(ranker, queries)
        error = (scores - exact).abs()
        changed = ((scores > 0) != (exact > 0)).sum()
        print(f"{name:10}{error.max():10.4f}{error.mean():10.4f}{changed:20}")


if __name__ == "__main__":
    main()
