r"""Time and memory of training B at a language model's full size, with random weights.

    python benchmarks/train_full_size.py    # Qwen3-8B's shapes, on a CUDA GPU
    python benchmarks/train_full_size.py --layers 4 --hidden 256 --heads 4 --kv-heads 4 \
        --width 32 --queries 4

The second command is a small trial. Weights, texts and labels are random, so it says nothing about
quality. Printed as JSON beside the floor: the arithmetic of the language model's pass and of B's
training, and the features' bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModel, Qwen3Config

from rsrank_rag.backends.torch.check import open_backbone
from rsrank_rag.evaluation.datasets import LabelledDocument, LabelledQuery
from rsrank_rag.method.scoring import ShiftReader
from rsrank_rag.method.template import Template, TokenisedDocument, TokenisedQuery
from rsrank_rag.training.features import FeatureExtractor
from rsrank_rag.training.fit import FitOptions, fit
from rsrank_rag.training.recipe import FeaturePart
from rsrank_rag.training.store import read_features, write_features

DOCUMENT_TOKENS, QUERY_TOKENS = 184, 20


def options() -> argparse.Namespace:
    """Shapes of Qwen3-8B unless told otherwise."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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


class RandomWords:
    """Replaces the tokenizer: every text becomes random ids of a fixed length."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary, self.template, self.max_length, self.fingerprint = (
            vocabulary,
            Template(),
            4096,
            "random",
        )
        self.null_prefix, self.after_document = self.ids("template", 20), 4
        self.instruction, self.separator = self.null_prefix[:-4], self.null_prefix[-4:]

    def ids(self, text: str, count: int) -> tuple[int, ...]:
        """A text as so many ids."""
        rng = random.Random(text)
        return tuple(rng.randrange(self.vocabulary) for _ in range(count))

    def query(self, text: str) -> TokenisedQuery:
        """A query."""
        return TokenisedQuery(self.ids(text, QUERY_TOKENS), 0, QUERY_TOKENS)

    def documents(self, texts: Sequence[str], query_length: int) -> list[TokenisedDocument]:
        """Documents behind the template."""
        return [
            TokenisedDocument(self.null_prefix + self.ids(t, DOCUMENT_TOKENS), False, False)
            for t in texts
        ]

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Documents by themselves, and the line breaks between them."""
        return [self.ids(text, DOCUMENT_TOKENS if text.strip() else 1) for text in texts]

    def room(self, query_length: int) -> int:
        """Tokens that a document may have."""
        return self.max_length - len(self.null_prefix) - query_length


def main() -> None:
    """Extract features into a store on disk, train B from it, print figures."""
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
    core, words = open_backbone(model.requires_grad_(False)), RandomWords(chosen.vocabulary)
    working = (
        sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    )
    layers = tuple(range(1, chosen.layers))
    reader = ShiftReader(core, words, layers)  # type: ignore[arg-type]
    extractor = FeatureExtractor(reader, FeaturePart(dtype="bfloat16"))
    queries = [
        LabelledQuery(
            id=str(number),
            query=f"query {number}",
            documents=[
                LabelledDocument(id=str(i), text=f"document {number}-{i}", relevant=i % 5 == 0)
                for i in range(chosen.documents)
            ],
        )
        for number in range(chosen.queries)
    ]
    numbers = len(layers) * core.num_heads * core.head_dim
    # One shift a token for each document, and for the relevant ones together.
    rows = chosen.queries * (chosen.documents + 1) * QUERY_TOKENS
    size = 2 * rows * numbers
    prompt = len(words.null_prefix) + DOCUMENT_TOKENS + QUERY_TOKENS
    prompt_tokens = rows // QUERY_TOKENS * prompt
    extractor.extract(queries[0])  # warms up
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number:05d}.pt" for number in range(chosen.queries)]
        started = time.perf_counter()
        for path, query in zip(paths, queries, strict=True):
            write_features(path, extractor.extract(query))
        seconds = time.perf_counter() - started
        figures: dict[str, object] = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "queries": chosen.queries,
            "documents": chosen.documents,
            "feature_gb": size / 1e9,
            "features_s": seconds,
            "features_tflop": 2e-12 * working * prompt_tokens,
            "features_tflop_per_s": 2e-12 * working * prompt_tokens / seconds,
        }
        if device.type == "cuda":
            figures["peak_gb_features"] = torch.cuda.max_memory_allocated() / 1e9
        del model, core, reader, extractor
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        held = max(1, chosen.queries // 10)
        settings = FitOptions(projection_dim=chosen.projection_dim, epochs=chosen.epochs)
        numbers = len(layers) * chosen.kv_heads * chosen.projection_dim * chosen.width
        store = list(map(read_features, paths))
        learning_rows = sum(query.shifts.shape[2] for query in store[held:])
        figures["fit_tflop_per_epoch"] = 6e-12 * numbers * learning_rows
        started = time.perf_counter()
        fit(store[held:], store[:held], layers, settings, device=device)
        figures["fit_s_per_epoch"] = (time.perf_counter() - started) / chosen.epochs
        if device.type == "cuda":
            figures["peak_gb_fit"] = torch.cuda.max_memory_allocated() / 1e9
    print(
        json.dumps(
            {name: round(v, 4) if isinstance(v, float) else v for name, v in figures.items()},
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
