"""Time and memory of training B at a language model's full size, with random weights.

    python benchmarks/train_full_size.py    # Qwen3-8B's shapes, on a CUDA GPU
    python benchmarks/train_full_size.py --layers 4 --hidden 256 --heads 4 --kv-heads 2 --width 32 --queries 4

(The second line is a try-out.) Weights, texts and labels are random, so it says nothing about quality. Printed as JSON
beside the floor: the arithmetic of the language model's pass and of B's training, and the features' bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import time

import torch
from transformers import AutoModel, Qwen3Config

from rsrank_rag.backbone import Backbone
from rsrank_rag.reading import NullRun, ShiftReader
from rsrank_rag.template import TokenisedQuery
from rsrank_rag.training.features import QueryFeatures
from rsrank_rag.training.fit import FitOptions, fit

DOCUMENT_TOKENS, QUERY_TOKENS = 204, 20


def options() -> argparse.Namespace:
    """Shapes of Qwen3-8B unless told otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=12288)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=128, help="of a head")
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--projection-dim", type=int, default=64)
    return parser.parse_args()


def main() -> None:
    """Extract features, train B, print figures."""
    chosen = options()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=chosen.vocabulary,
        hidden_size=chosen.hidden,
        intermediate_size=chosen.intermediate,
        num_hidden_layers=chosen.layers,
        num_attention_heads=chosen.heads,
        num_key_value_heads=chosen.kv_heads,
        head_dim=chosen.width,
        max_position_embeddings=4096,
    )
    with torch.device(device):
        model = AutoModel.from_config(config, dtype=torch.bfloat16)
    core = Backbone(model.requires_grad_(False))
    working = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    layers = tuple(range(1, chosen.layers))
    reader = ShiftReader(core, _Prompts(), layers)  # type: ignore[arg-type]

    features, seconds = extract(reader, chosen)
    tokens = chosen.queries * (chosen.documents + 1) * (DOCUMENT_TOKENS + QUERY_TOKENS)
    figures = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "queries": chosen.queries,
        "documents": chosen.documents,
        "feature_gb": sum(query.shifts.nbytes for query in features) / 1e9,
        "features_s": seconds,
        "features_tflop": 2e-12 * working * tokens,
        "features_tflop_per_s": 2e-12 * working * tokens / seconds,
    }
    del model, core, reader
    if device.type == "cuda":
        figures["peak_gb_features"] = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    held = max(1, len(features) // 10)
    settings = FitOptions(projection_dim=chosen.projection_dim, epochs=chosen.epochs, keep="last")
    started = time.perf_counter()
    fit(features[held:], features[:held], layers, settings, device=device)
    figures["fit_s_per_epoch"] = (time.perf_counter() - started) / chosen.epochs
    rows = sum(query.shifts.shape[2] for query in features[held:])
    numbers = len(layers) * chosen.kv_heads * chosen.projection_dim * chosen.width
    figures["fit_tflop_per_epoch"] = 6e-12 * rows * numbers
    if device.type == "cuda":
        figures["peak_gb_fit"] = torch.cuda.max_memory_allocated() / 1e9
    print(json.dumps({name: round(v, 3) if isinstance(v, float) else v for name, v in figures.items()}, indent=2))


def extract(reader: ShiftReader, chosen: argparse.Namespace) -> tuple[list[QueryFeatures], float]:
    """Features of random token sequences, and the seconds they took after a warm-up."""
    rng = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(chosen.vocabulary) for _ in range(count))

    features, started = [], 0.0
    for number in range(chosen.queries + 1):
        if number == 1:  # the first one warms up
            started = time.perf_counter()
        query = TokenisedQuery(ids(QUERY_TOKENS), slice(0, QUERY_TOKENS))
        documents = [ids(DOCUMENT_TOKENS) for _ in range(chosen.documents + 1)]  # one plays the oracle
        found: list[torch.Tensor] = []

        def keep(layer: int, shift: torch.Tensor, found: list[torch.Tensor] = found) -> None:
            n, heads, tokens, width = shift.shape
            found.append(shift.permute(1, 0, 2, 3).reshape(heads, n * tokens, width).to(torch.bfloat16).cpu())

        with torch.inference_mode():
            reader.read(NullRun(query), reader.prefill(documents), keep)
        labels = tuple(rng.random() < 0.2 for _ in range(chosen.documents))
        if number:
            features.append(QueryFeatures(torch.stack(found), labels, QUERY_TOKENS, oracle=True))
    return features, time.perf_counter() - started


class _Prompts:
    """Stands for a tokenizer: random models have none."""

    null_prefix = tuple(range(10, 30))


if __name__ == "__main__":
    main()
