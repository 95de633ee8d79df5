r"""Make an artifact of what choose.py wrote: encoder, B, the other weights, and the rule.

    python research/mini/export.py --weights runs/mini/chosen --start rsrank_rag/models/mini \
        --output runs/mini/artifact --keep research/mini/reference.json

The artifact is loaded and has to give the scores of the recipe's own code (reference.json).
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, BertModel

from rsrank_rag import Fallback, RSRank, Template
from rsrank_rag.artifact.config import TrainingRecord
from rsrank_rag.backends.options import LoadOptions
from rsrank_rag.backends.torch.projection import Projection

TEMPLATE = Template(instruction="[CLS]", separator="[SEP]", query_start="[CLS]", suffix="[SEP]")
NEAR = 1e-4
"""Largest allowed difference from the recipe's own scores in float32. Rounding stays far below."""


def encoder(weights: dict[str, Tensor], start: Path) -> BertModel:
    """The encoder in fp16. Its last layer has a value projection only; the rest of it is 0."""
    config = AutoConfig.from_pretrained(start / "backbone")
    model = BertModel(config, add_pooling_layer=False).half()
    absent = model.load_state_dict(weights, strict=False).missing_keys
    for name in absent:
        if not name.startswith(f"encoder.layer.{config.num_hidden_layers - 1}."):
            raise SystemExit(f"{name} is missing.")
        model.get_parameter(name).data.zero_()
    return model


def convert(source: Path, folder: Path, start: Path) -> None:
    """Write the artifact."""
    description = json.loads((source / "model.json").read_text(encoding="utf-8"))
    rule = description["rule"]
    reach = description["reach"]
    weights = load_file(source / "model.safetensors")
    projection = weights.pop("projection")
    shift_weight = weights.pop("shift_weight")
    agreement = weights.pop("agreement")
    with tempfile.TemporaryDirectory() as temporary:
        encoder(weights, start).save_pretrained(temporary)
        AutoTokenizer.from_pretrained(start / "backbone").save_pretrained(temporary)
        ranker = RSRank.from_backbone(
            temporary,
            Projection(
                projection,
                description["read"],
                head_weight=shift_weight,
                agreement=agreement,
            ),
            template=TEMPLATE,
            fusion_layer=description["fuse"],
            similarity_window=description["window"],
            attention_window=None if reach is None else 2 * reach,
            options=LoadOptions(device="cpu", dtype="float16"),
            training=TrainingRecord(
                data=tuple(description.get("data", ())),
                seed=description.get("seed"),
                notes="all-MiniLM-L6-v2 (Apache-2.0) with fusion layers and B: research/mini.",
            ),
            license="apache-2.0",
        )
        # Measured to be as good: research/docs/speed.md, "int8 on a CPU".
        ranker.config = ranker.config.model_copy(update={"int8": True})
        ranker.max_gap = rule["max_gap"]
        ranker.fallback = rule["fallback"] and Fallback(**rule["fallback"])
        shutil.rmtree(folder, ignore_errors=True)
        ranker.save_pretrained(folder, include_backbone=True)


def check(folder: Path, reference: Path) -> float:
    """Largest difference between the artifact's scores and the recipe's own, in float32."""
    ranker = RSRank.from_pretrained(folder, device="cpu", dtype="float32", cache_size=0)
    largest = 0.0
    for case in json.loads(reference.read_text(encoding="utf-8")):
        scores = ranker.score(case["query"], case["documents"])
        for score, expected in zip(scores, case["scores"], strict=True):
            largest = max(largest, abs(score - expected))
    return largest


def main() -> None:
    """Convert and check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--weights", type=Path, required=True, help="folder that choose.py wrote")
    add("--start", type=Path, required=True, help="artifact with the encoder's shape and tokenizer")
    add("--output", type=Path, required=True, help="the artifact's folder; what is in it goes")
    add("--keep", type=Path, default=None, help="where to copy the scored pairs, for the tests")
    options = parser.parse_args()
    convert(options.weights, options.output, options.start)
    reference = options.weights / "reference.json"
    difference = check(options.output, reference)
    print(f"largest difference from the recipe's own scores: {difference:.1e}")
    if difference > NEAR:
        raise SystemExit("The artifact does not score as the recipe does.")
    if options.keep is not None:
        shutil.copy(reference, options.keep)
    print(options.output)


if __name__ == "__main__":
    main()
