"""Scores with rounded weights of the language model on real passages: bfloat16, int8 and nf4.

    python -m benchmarks.weight_formats --model mini --data data/dev/hotpotqa.paragraph.jsonl.gz

Scores are computed on the CPU in float32, but for "all in bfloat16" and "documents in int8"
(``dtype="int8"``). int8 and nf4 are bitsandbytes', whose int8 rounds activations, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from rsrank_rag import RSRank
from rsrank_rag.artifact.opening import open_artifact
from rsrank_rag.backends.options import ModelSource
from rsrank_rag.evaluation.datasets import LabelledQuery, read_labelled
from rsrank_rag.evaluation.evaluate import score_dataset, summarise
from rsrank_rag.ranking.rule import Rule


def nf4_weights(ranker: RSRank) -> None:
    """Round the weights as bitsandbytes does. Its matrix product is coarser than float32's."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for module in ranker.backbone.model.modules():
        if isinstance(module, nn.Linear):
            rounded = quantize_4bit(module.weight.data, blocksize=64, quant_type="nf4")
            module.weight.data = dequantize_4bit(*rounded)


def bfloat16_weights(ranker: RSRank) -> None:
    """Round the weights, and compute as before."""
    for weight in ranker.backbone.model.parameters():
        weight.data = weight.data.bfloat16().float()


Change = Callable[[RSRank], None]
"""Changes the weights of a loaded model."""

FORMS: dict[str, tuple[dict[str, Any], Change | None]] = {
    "bfloat16": ({}, bfloat16_weights),
    "all in bfloat16": ({"dtype": "bfloat16"}, None),
    "documents in int8": ({"dtype": "int8"}, None),
    "int8": ({"dtype": "int8", "device": "cpu:0"}, None),
    "nf4": ({}, nf4_weights),
}
"""How the model is loaded, and how its weights are changed after that."""


def measure(
    options: argparse.Namespace,
    sets: dict[str, list[LabelledQuery]],
    loading: dict[str, Any],
    change: Change | None,
) -> tuple[Tensor, float, float]:
    """Scores (documents of all files,), and nDCG@5 and F1 at zero as means over the files."""
    defaults = {"device": "cpu", "dtype": "float32", "cache_size": 0, "backbone": options.backbone}
    source = ModelSource(name=options.model, **{**defaults, **loading})
    # Weights are changed in torch's model.
    on_onnx = False if source.dtype == "float32" else None
    ranker = RSRank(*open_artifact(source, on_onnx), ModelSource(cache_size=0))
    if change is not None:
        change(ranker)
    scores: list[float] = []
    records = []
    for queries in sets.values():
        scored = score_dataset(ranker, queries)
        records.append(summarise(scored, Rule(0.0)))
        for query in scored:
            scores += query.scores
    ndcg = 100 * fmean(record["ndcg@5"] for record in records)
    f1 = 100 * fmean(record["rules"]["in_use"]["f1"] for record in records)
    return torch.tensor(scores), ndcg, f1


def main() -> None:
    """Score everything in every form and print what moved."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mini")
    parser.add_argument("--backbone", help="folder of the language model")
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=20, help="queries of each file")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    options = parser.parse_args()
    sets = {path.name: read_labelled(path)[: options.limit] for path in options.data}
    exact, ndcg, f1 = measure(options, sets, {}, None)
    print(
        f"{options.model}: {len(exact):,} documents, standard deviation of the scores "
        f"{exact.std():.2f}"
    )
    print(f"{'':22}{'largest':>9}{'mean':>9}{'decisions changed':>20}{'nDCG@5':>9}{'F1 at 0':>9}")
    print(f"{'float32':22}{'':9}{'':9}{'':20}{ndcg:9.1f}{f1:9.1f}")
    for name in options.forms:
        scores, ndcg, f1 = measure(options, sets, *FORMS[name])
        error = (scores - exact).abs()
        changed = ((scores > 0) != (exact > 0)).sum()
        text = f"{name:22}{error.max():9.4f}{error.mean():9.4f}{changed:20}{ndcg:9.1f}{f1:9.1f}"
        print(text, flush=True)


if __name__ == "__main__":
    main()
