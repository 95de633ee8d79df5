"""Scores with rounded weights of the language model on real passages: bfloat16, int8 and nf4.

    python -m benchmarks.weight_formats --model mini --data data/dev/hotpotqa.paragraph.jsonl.gz

On the CPU in float32, but for "all in bfloat16" and "documents in int8" (``dtype="int8"``). int8
and nf4 are bitsandbytes' (whose int8 rounds activations, too).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from rsrank_rag import RSRank
from rsrank_rag.artifact.opening import open_artifact
from rsrank_rag.backends.options import ModelSource
from rsrank_rag.evaluation.datasets import read_labelled
from rsrank_rag.evaluation.evaluate import score_dataset, summarise
from rsrank_rag.ranking.rule import Rule


def nf4_weights(ranker: RSRank) -> None:
    """Round the weights as bitsandbytes does; its own product on a CPU is coarser than float32."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for module in ranker.backbone.model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = dequantize_4bit(
                *quantize_4bit(module.weight.data, blocksize=64, quant_type="nf4")
            )


def bfloat16_weights(ranker: RSRank) -> None:
    """Round the weights, and compute as before."""
    for weight in ranker.backbone.model.parameters():
        weight.data = weight.data.bfloat16().float()


FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "bfloat16": ({}, bfloat16_weights),
    "all in bfloat16": ({"dtype": "bfloat16"}, None),
    "documents in int8": ({"dtype": "int8"}, None),
    "int8": ({"dtype": "int8", "device": "cpu:0"}, None),
    "nf4": ({}, nf4_weights),
}
"""How the model is loaded, and what is done to it then."""


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

    def measure(how: dict[str, Any], change: Any) -> tuple[Tensor, float, float]:
        """Scores, and nDCG@5 and F1 at zero as means over the files."""
        loading = {"device": "cpu", "dtype": "float32", "cache_size": 0, **how}
        loading["backbone"] = options.backbone
        source = ModelSource(name=options.model, **loading)
        # Weights are changed in torch's model.
        on_onnx = False if source.dtype == "float32" else None
        ranker = RSRank(*open_artifact(source, on_onnx), cache_size=0)
        if change is not None:
            change(ranker)
        found = {name: score_dataset(ranker, queries) for name, queries in sets.items()}
        records = [summarise(scored, Rule(0.0)) for scored in found.values()]
        scores = torch.tensor(
            [score for scored in found.values() for query in scored for score in query.scores]
        )
        return (
            scores,
            100 * fmean(r["ndcg@5"] for r in records),
            100 * fmean(r["rules"]["in_use"]["f1"] for r in records),
        )

    exact, *quality = measure({}, None)
    print(
        f"{options.model}: {len(exact):,} documents, standard deviation of the scores "
        f"{exact.std():.2f}"
    )
    print(f"{'':22}{'largest':>9}{'mean':>9}{'decisions changed':>20}{'nDCG@5':>9}{'F1 at 0':>9}")
    print(f"{'float32':22}{'':9}{'':9}{'':20}{quality[0]:9.1f}{quality[1]:9.1f}")
    for name in options.forms:
        moved, *quality = measure(*FORMS[name])
        error, changed = (moved - exact).abs(), ((moved > 0) != (exact > 0)).sum()
        text = (
            f"{name:22}{error.max():9.4f}{error.mean():9.4f}{changed:20}{quality[0]:9.1f}"
            f"{quality[1]:9.1f}"
        )
        print(text, flush=True)


if __name__ == "__main__":
    main()
