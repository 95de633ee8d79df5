"""Train `base`: fusion layers and B on a frozen all-mpnet-base-v2.

    python research/mini/train_base.py --data ../shared/data/train \
        --start runs/all-mpnet-base-v2 --manuals runs/manuals.jsonl --output runs/base

The encoder never changes, so its token states are computed once for the texts of all batches and
read from disk. Only the fusion layers, B, and the weights of cosine, MaxSim and shift are trained.
A checkpoint is written every 50 steps; the same command goes on from the checkpoint.

Axes: R pairs of a query and a text, L layers read, H heads.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from choose import export
from choose_typed import choose_typed, interpolated, measure_rows, validation_queries
from encode import QUERY_TOKENS
from frozen import Frozen, Key, as_bert_model
from model import Mini, Shape, pooled
from pairs import DOCUMENT_TOKENS, run
from scorer import Scorer
from torch import Tensor
from train_all_layers import WEIGHTS, loss
from trainer import Training
from typed import Batch, Pool, TechnicalSampler

import data
from train import STAY, listwise_loss

STRENGTHS = (0.25, 0.5, 0.75, 1.0)
"""Places on the line from the weights before training (0) to those after it (1)."""
LOSS_WEIGHTS = {**WEIGHTS, "teacher": 0.25, "pooled": 0.0}
"""The encoder is its own teacher here: the score stays near the order of its cosine."""
FITTED_BATCHES = 24
"""Batches to which the weights of cosine and MaxSim are fitted before training."""


class FrozenTeacher:
    """The frozen encoder's own embeddings, as `train_all_layers.loss` takes a teacher's."""

    def __init__(self, frozen: Frozen) -> None:
        self.frozen = frozen

    def __call__(self, text: str) -> Tensor | None:
        """The unit embedding of a text whose states are stored, or None."""
        for most in (QUERY_TOKENS, DOCUMENT_TOKENS):
            if (most, text) in self.frozen.places:
                states, start, length = self.frozen.places[most, text]
                valid = torch.ones(1, length, dtype=torch.bool)
                return pooled(states[None, start : start + length], valid)[0]
        return None


def fit(model: Mini, frozen: Frozen, batches: Sequence[Batch]) -> None:
    """Set the weights of cosine and MaxSim and the bias to those that rank these batches best."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.no_grad():
        for batch in batches:
            output = run(model, frozen, batch)
            query_of, text_of = torch.tensor(batch.pairs).unbind(1)
            cosines = (output.queries[query_of] * output.texts[text_of]).sum(1)
            labels = torch.tensor(batch.labels)
            for query in sorted(set(range(len(batch.queries))) - batch.unlabelled):
                at = query_of == query
                parts.append((cosines[at], output.maxsims[at], labels[at]))
    scalars = [model.pooled_weight, model.token_weight, model.bias]
    optimizer = torch.optim.Adam(scalars, lr=0.05)
    for _ in range(400):
        losses = [
            listwise_loss(model.base_score(cosine, maxsim), relevant)
            for cosine, maxsim, relevant in parts
        ]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    model.zero_grad()
    print("g, w, bias:", [round(scalar.item(), 2) for scalar in scalars], flush=True)


class FrozenEncoder(Training):
    """Fusion layers on an encoder that does not change.

    Args:
        options: The command line.
        sampler: Of batches.
        frozen: States of their texts.
    """

    def __init__(
        self, options: argparse.Namespace, sampler: TechnicalSampler, frozen: Frozen
    ) -> None:
        torch.manual_seed(options.seed)
        self.sampler, self.frozen = sampler, frozen
        self.teacher = FrozenTeacher(frozen)
        encoder = as_bert_model(options.start)
        shape = Shape(fuse=encoder.config.num_hidden_layers, run=options.run)
        model = Mini(encoder, shape, shift=options.shift)
        fit(model, frozen, [sampler(step) for step in range(FITTED_BATCHES)])
        self.first = copy.deepcopy(model)
        for module in (model.embeddings, *model.layers[: model.base]):
            module.requires_grad_(False)
        for layer in model.layers[model.base :]:
            layer.drop = options.dropout
        upper = [p for layer in model.layers[model.base :] for p in layer.parameters()]
        groups = [
            {"params": upper, "lr": options.lr, "weight_decay": 0.01},
            {"params": [model.projection], "lr": options.projection_lr},
            {"params": [model.shift_weight], "lr": options.weight_lr},
            {"params": [model.pooled_weight, model.token_weight], "lr": options.scalar_lr},
            {"params": [model.bias], "lr": options.scalar_lr},
        ]
        super().__init__(model, groups, options)

    def objective(self) -> tuple[Tensor, dict[str, float]]:
        """See `Training`."""
        batch = self.sampler(self.step % self.options.batches)
        # The teacher has read the texts as they are, with their titles.
        batch.bare = batch.texts
        output = run(self.model, self.frozen, batch)
        total, parts = loss(self.model, batch, output, self.teacher, LOSS_WEIGHTS)
        fuse = self.model.shape.fuse
        value, start = (m.layers[fuse].value.weight for m in (self.model, self.first))
        moved = (value - start.detach()).square().sum() / start.detach().square().sum()
        return total + STAY * moved, {**parts, "moved": moved.item()}


def texts_of(batches: Sequence[Batch]) -> list[Key]:
    """Every query and text, in the order of the batches."""
    keys: list[Key] = [(QUERY_TOKENS, "")]
    for batch in batches:
        keys += [(QUERY_TOKENS, query) for query in batch.queries]
        keys += [(DOCUMENT_TOKENS, text) for text in batch.texts]
    return keys


def validation_texts(queries: dict[str, list[dict]]) -> list[Key]:
    """Every query and passage that validates."""
    keys: list[Key] = []
    for of_set in queries.values():
        for row in of_set:
            keys.append((QUERY_TOKENS, row["query"]))
            keys += [(DOCUMENT_TOKENS, data.content(passage)) for passage in row["documents"]]
    return keys


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with the training sets")
    add("--start", type=Path, required=True, help="folder of all-mpnet-base-v2")
    add("--manuals", type=Path, required=True, help="rows that manuals.py wrote")
    add("--output", type=Path, required=True, help="folder for everything that is written")
    add("--batches", type=int, default=250, help="different batches, whose texts are run once")
    add("--steps", type=int, default=600)
    add("--run", type=int, default=14, help="13 for one fusion layer, 14 for two")
    add("--shift", type=float, default=0.05, help="s at the start")
    add("--dropout", type=float, default=0.1, help="in the fusion layers")
    add("--lr", type=float, default=1e-4, help="of the fusion layers")
    add("--projection-lr", type=float, default=7e-4, help="of B")
    add("--weight-lr", type=float, default=4e-3, help="of the weights of shift terms")
    add("--scalar-lr", type=float, default=1e-2, help="of the weights of cosine and MaxSim, and b")
    add("--decay", type=float, default=0.5, help="last part of the run, in which rates fall")
    add("--mean", type=float, default=0.985, help="of the running mean of the weights")
    add("--seed", type=int, default=0)
    add("--save-every", type=int, default=50)
    add("--encode-only", action="store_true", help="stop when all states are on disk")
    return parser.parse_args()


def main() -> None:
    """Run the encoder; train or go on from a checkpoint; then choose and export."""
    options = arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    pool = Pool(options.data)
    sampler = TechnicalSampler(pool, options.seed, options.manuals, None, documents=2)
    queries = validation_queries(options.data, pool, sampler.validation)
    frozen = Frozen(options.start, options.output / "states")
    frozen.read(texts_of([sampler(step) for step in range(options.batches)]))
    frozen.read(validation_texts(queries))
    if options.encode_only:
        return
    trainer = FrozenEncoder(options, sampler, frozen)
    trainer.run(options.output)
    finish(trainer, queries)


def finish(trainer: FrozenEncoder, queries: dict[str, list[dict]]) -> None:
    """Choose by validation queries, and export what was chosen."""
    options, model = trainer.options, trainer.model
    rows_of = {
        strength: measure_rows(
            interpolated(model, trainer.first, trainer.mean, strength), trainer.frozen, queries
        )
        for strength in STRENGTHS
    }
    torch.save(rows_of, options.output / "rows.pt")
    choice, figures = choose_typed(rows_of)
    (options.output / "validation.json").write_text(
        json.dumps(figures, indent=1) + "\n", encoding="utf-8"
    )
    chosen = interpolated(model, trainer.first, trainer.mean, choice.strength)
    about = {
        "data": sorted({*data.SETS, "selqa.sentence", data.REAL, "manuals.passage"}),
        "seed": options.seed,
        "step": trainer.step,
        "strength": choice.strength,
    }
    scorer = Scorer(chosen, trainer.frozen.ids)
    export(scorer, (choice.share, choice.threshold), options.output / "model", about)


if __name__ == "__main__":
    main()
