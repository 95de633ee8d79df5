"""What B over the first layers only costs in quality and saves in arithmetic: the frozen encoder of `mini`.

    python benchmarks/layers.py --train ../shared/data/train/2wiki.sentence.jsonl.gz \
        --dev ../shared/data/dev/2wiki.sentence.jsonl.gz --output runs/layers

The shifts of all layers are read once. A layer's value vectors do not depend on later layers, so the first k of them
are what a model loaded up to layer k gives; B is trained on them for each k, and measured on the other file's queries.
FLOPs are counted while such a model reads the documents of five of those, document first, and divided by those of one
whole pass over each document and query together.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.utils import logging

from rsrank_rag.evaluation.datasets import LabelledQuery
from rsrank_rag.evaluation.evaluate import summarise
from rsrank_rag.language_model.check import open_backbone
from rsrank_rag.language_model.loading import load_model
from rsrank_rag.method.template import PromptTokenizer
from rsrank_rag.training.batches import scored, split
from rsrank_rag.training.fit import fit
from rsrank_rag.training.recipe import Recipe
from rsrank_rag.training.run import TrainingRun
from rsrank_rag.training.store import FeatureSource, QueryFeatures, Subset, resident


class FirstLayers:
    """Features of the first layers of a source."""

    def __init__(self, source: FeatureSource, count: int) -> None:
        self.source, self.count = source, count

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int, /) -> QueryFeatures:
        query = self.source[number]
        return replace(query, shifts=query.shifts[: self.count])


@torch.inference_mode()
def flops(recipe: Recipe, queries: Sequence[LabelledQuery], last_layer: int | None) -> tuple[int, int]:
    """FLOPs of reading queries' documents up to a layer (None: a whole pass), and the loaded model's parameters."""
    model, tokenizer, _ = load_model(
        recipe.model.source, revision=None, options=recipe.model.options(), last_layer=last_layer
    )
    core = open_backbone(model, last_layer)
    prompts = PromptTokenizer(tokenizer, recipe.template, max_length=core.max_length, shared_positions=core.causal)
    with FlopCounterMode(display=False) as counter:
        for query in queries:
            asked = prompts.query(query.query).ids
            for document in prompts.documents([d.content() for d in query.documents], len(asked)):
                if last_layer is None:
                    model(input_ids=torch.tensor([[*document.ids, *asked]]))
                else:
                    prefixes = core.prefill([document.ids], room=len(asked))
                    core.query_values([asked], prefixes, lambda layer, value: None)
    return counter.get_total_flops(), sum(parameter.numel() for parameter in model.parameters())


def measure(train: FeatureSource, dev: FeatureSource, recipe: Recipe, count: int, seed: int) -> dict[str, float]:
    """B of layers 1..count, trained and measured."""
    layers = range(1, count + 1)
    numbers, held = split(len(train), recipe.held, recipe.fit.seed)
    features = FirstLayers(train, count)
    options = recipe.fit.model_copy(update={"seed": seed})
    fitted = fit(Subset(features, numbers), Subset(features, held), layers, options, device="cpu")
    return summarise(scored(FirstLayers(dev, count), fitted.projection, device="cpu"))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True)
    parser.add_argument("--dev", required=True)
    parser.add_argument("--output", type=Path, default=Path("runs/layers"))
    parser.add_argument("--max-documents", type=int, default=16, help="of a training query")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, help="at most so many queries of each file, for a try-out")
    chosen = parser.parse_args()
    logging.disable_progress_bar()
    few = [] if chosen.limit is None else [f"queries={chosen.limit}"]

    def run(file: str, name: str, *settings: str) -> TrainingRun:
        data = ", ".join([f'file="{file}"', *few])
        recipe = Recipe.load(
            "encoder", ["model.device=cpu", f"fit.epochs={chosen.epochs}", f"data=[{{{data}}}]", *settings]
        )
        return TrainingRun(recipe, chosen.output / name, say=print)

    training, held = (
        run(chosen.train, "train", f"features.max_documents={chosen.max_documents}"),
        run(chosen.dev, "dev"),
    )
    store = training.extract()
    train, dev, layers = resident(store, "cpu"), resident(held.extract(), "cpu"), store.spec.layers
    heads, width = store.spec.backbone.num_heads, store.spec.backbone.head_dim
    recipe, sample = training.recipe, held.queries[:5]
    whole, parameters = flops(recipe, sample, None)
    print(f"{len(train)} training queries, {len(dev)} held out, {parameters:,} parameters, torch {torch.__version__}")
    print("| layers of B | FLOPs | parameters loaded | numbers in B | nDCG@5 | Recall@5 | F1 at zero | F1 at best |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for count in range(1, len(layers) + 1):
        found = [measure(train, dev, recipe, count, seed) for seed in range(chosen.seeds)]
        cost, loaded = flops(recipe, sample, count)
        numbers = count * heads * recipe.fit.projection_dim * width
        columns = []
        for metric in ("ndcg@5", "recall@5", "f1@tau", "f1@best"):
            values = [100 * row[metric] for row in found]
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            columns.append(f"{statistics.mean(values):.1f}{spread}")
        print(f"| 1-{count} | {cost / whole:.0%} | {loaded:,} | {numbers:,} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
