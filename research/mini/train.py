r"""Train `mini`: all layers learn from what people type.

    python research/mini/train.py --data ../shared/data/train --start rsrank_rag/models/mini \
        --teacher runs/teacher --output runs/mini

The training starts from the weights of an artifact. A passage's similarity is that of its best
window (`scores.py`). The shift has a loss of its own: it has to rank and separate where similarity
alone does not. A checkpoint is written every 50 steps, and the same command goes on from it.
`config.toml` holds everything that was decided.

Axes: Q queries, D texts, R pairs of a query and a text of its list.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib
import torch
from batches import DOCUMENTS, EVERYDAY, Batch, Pool, Sampler, without_typos
from model import Mini, from_artifact
from scores import Output, run
from teacher import Teacher
from texts import Texts
from torch import Tensor
from torch.nn import functional
from validate import Validation

LAMBDA_CAL, LAMBDA_ORTHO, LAMBDA_FROB, MARGIN = 0.8, 0.05, 0.1, 0.5
"""Weights of the paper's calibration, orthogonality and Frobenius losses, and its margin."""
SELECTION = 0.5
"""Weight of the paper's calibration and margin losses beside the listwise one."""
SMOOTH = 2.0
"""Factor of the smooth maximum of a list's scores."""
LEAST_TEXTS = 20
"""Texts that the teacher must have read before their cosines are compared."""

Embedding = Callable[[str], Tensor | None]


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


def label_loss(scores: Tensor, relevant: Tensor) -> Tensor:
    """Both losses of one list."""
    return listwise_loss(scores, relevant) + SELECTION * selection_loss(scores, relevant)


@dataclass
class Anchor:
    """Output of the model that the training starts from, for some lists of a batch.

    Attributes:
        queries: Numbers of the lists in their batch.
        texts: Numbers of their texts.
        output: The output for these lists and texts.
    """

    queries: list[int]
    texts: list[int]
    output: Output


class Objective:
    """The whole loss of a batch.

    Two teachers keep what the encoder knows: all-mpnet-base-v2 for everyday questions, and for all
    other lists the model that the training starts from, which reads the queries without typos.

    Args:
        weights: The part ``loss`` of the configuration.
        teacher: all-mpnet-base-v2's embeddings.
    """

    def __init__(self, weights: dict[str, float], teacher: Embedding) -> None:
        self.weights, self.teacher = weights, teacher

    def __call__(
        self, model: Mini, batch: Batch, output: Output, anchor: Anchor
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss, and its parts."""
        device = output.base.device
        zero = torch.zeros((), device=device)
        names = ("labels", "shift", "teacher", "absent", "answered", "pooled", "strangers")
        parts = dict.fromkeys(names, zero)
        queries = []
        for query_text in batch.clean:
            queries.append(None if query_text is None else self.teacher(query_text))
        passages = [list(map(self.teacher, parts_of_text)) for parts_of_text in batch.parts]
        answered = []
        unanswered = []
        count = len(batch.queries)
        for query, labels in enumerate(batch.labels):
            if not labels:
                continue
            places = torch.tensor(list(labels), device=device)
            relevant = torch.tensor(list(labels.values()), device=device)
            base = output.base[query, places]
            whole = base.detach() + output.shift[query, places]
            parts["labels"] = parts["labels"] + label_loss(base, relevant) / count
            parts["shift"] = parts["shift"] + label_loss(whole, relevant) / count
            if relevant.any():
                answered.append(smooth_maximum(base[relevant]))
            if not relevant.all():
                unanswered.append(smooth_maximum(base[~relevant]))
            strange = self.strangers(batch, query, queries[query], passages)
            if strange:
                scores = torch.cat([base[relevant], output.base[query, strange]])
                first = torch.arange(len(scores), device=device) < relevant.sum()
                parts["strangers"] = parts["strangers"] + listwise_loss(scores, first) / count
            follow = self.order(batch, query, queries[query], passages, output)
            parts["teacher"] = parts["teacher"] + follow / count
        for row, query in enumerate(anchor.queries):
            follow = order_of_start(batch, query, row, anchor, output)
            parts["teacher"] = parts["teacher"] + follow / count
        yes, no = torch.stack(answered), torch.stack(unanswered)
        parts["absent"] = functional.softplus(no[None] - yes[:, None]).mean()
        parts["answered"] = functional.softplus(-yes).mean() + 0.5 * functional.softplus(no).mean()
        parts["pooled"] = self.everyday_cosines(batch, output, queries, passages)
        parts["start"] = cosines_divergence(
            output.queries[anchor.queries],
            output.texts[anchor.texts],
            anchor.output.queries,
            anchor.output.texts,
            self.weights["sharpness"],
        )
        parts["bounds"] = bounds(model.projection)
        total = zero
        for name, part in parts.items():
            total = total + self.weights[name] * part
        return total, {name: float(part.detach()) for name, part in parts.items()}

    def order(
        self,
        batch: Batch,
        query: int,
        target: Tensor | None,
        passages: list[list[Tensor | None]],
        output: Output,
    ) -> Tensor:
        """Divergence of an everyday list's similarity from the teacher's order."""
        labels = batch.labels[query]
        known = {}
        for place in labels:
            if len(passages[place]) == 1 and passages[place][0] is not None:
                known[place] = passages[place][0]
        if batch.sources[query] != EVERYDAY or target is None or len(known) < 4:
            return torch.zeros((), device=output.base.device)
        rows = torch.stack(list(known.values()))
        wanted = (rows @ target * self.weights["sharpness"]).softmax(0)
        return divergence(output.base[query, list(known)], wanted.to(output.base.device))

    def strangers(
        self, batch: Batch, query: int, target: Tensor | None, passages: list[list[Tensor | None]]
    ) -> list[int]:
        """Texts of other lists that certainly do not answer a query.

        A text is left out that shares its document or its set of typed queries with the query's
        list, unless the teacher says that the text is clearly further from the query than the
        query's own answer.
        """
        labels = batch.labels[query]
        groups: set[str] = set()
        for place in labels:
            groups |= batch.groups[place]
        nearest = -1.0
        if target is not None:
            nearest = greatest_cosine(labels, target, passages)
        strange = []
        for place in range(len(batch.texts)):
            if place in labels:
                continue
            if groups & batch.groups[place]:
                rows = passages[place]
                if target is None or nearest < 0 or any(row is None for row in rows):
                    continue
                if batch.sources[query] in DOCUMENTS:
                    continue
                limit = self.weights["doubtful"] * nearest
                if max(map(float, map(target.dot, rows))) > limit:
                    continue
            strange.append(place)
        return strange

    def everyday_cosines(
        self,
        batch: Batch,
        output: Output,
        queries: list[Tensor | None],
        passages: list[list[Tensor | None]],
    ) -> Tensor:
        """Divergence of the pooled cosines of everyday's queries and texts from the teacher's."""
        device = output.base.device
        texts = {}
        for place, rows in enumerate(passages):
            if EVERYDAY in batch.groups[place] and len(rows) == 1 and rows[0] is not None:
                texts[place] = rows[0]
        read = {}
        for number, row in enumerate(queries):
            if batch.sources[number] == EVERYDAY and row is not None:
                read[number] = row
        if len(texts) < LEAST_TEXTS or len(read) < 3:
            return torch.zeros((), device=device)
        return cosines_divergence(
            output.queries[list(read)],
            output.texts[list(texts)],
            torch.stack(list(read.values())).to(device),
            torch.stack(list(texts.values())).to(device),
            self.weights["sharpness"],
        )


def greatest_cosine(
    labels: dict[int, bool], target: Tensor, passages: list[list[Tensor | None]]
) -> float:
    """The teacher's greatest cosine of a query with its answers; with all texts without an answer.

    Args:
        labels: Text -> whether it is relevant, of the query's list.
        target: The teacher's embedding of the query.
        passages: The teacher's embeddings of each text's passages.

    Returns:
        The cosine; -1 if the teacher has read none of the texts.
    """
    greatest = -1.0
    has_answer = any(labels.values())
    for place, relevant in labels.items():
        if has_answer and not relevant:
            continue
        for row in passages[place]:
            if row is not None:
                greatest = max(greatest, float(target @ row))
    return greatest


def order_of_start(batch: Batch, query: int, row: int, anchor: Anchor, output: Output) -> Tensor:
    """Divergence of a list's similarity from the order of the model that the training starts from.

    Joined texts are left out: that model reads them badly.
    """
    known = [place for place in batch.labels[query] if len(batch.parts[place]) == 1]
    if len(known) < 4:
        return torch.zeros((), device=output.base.device)
    columns = list(map(anchor.texts.index, known))
    start = anchor.output
    wanted = (start.base[row, columns] + start.shift[row, columns]).softmax(0)
    return divergence(output.base[query, known], wanted)


def cosines_divergence(
    queries: Tensor, texts: Tensor, wanted_queries: Tensor, wanted_texts: Tensor, sharpness: float
) -> Tensor:
    """How far cosines of embeddings are from wanted ones: queries with texts, and among texts."""
    of_queries = rows_divergence(queries @ texts.T, wanted_queries @ wanted_texts.T, sharpness)
    itself = torch.eye(len(texts), dtype=torch.bool, device=texts.device)
    of_texts = rows_divergence(
        (texts @ texts.T).masked_fill(itself, -500.0),
        (wanted_texts @ wanted_texts.T).masked_fill(itself, -500.0),
        sharpness,
    )
    return of_queries + 0.5 * of_texts


def bounds(weight: Tensor) -> Tensor:
    """The paper's orthogonality and Frobenius terms for B, (L, H, P, D)."""
    gram = weight @ weight.mT - torch.eye(weight.shape[2], device=weight.device)
    orthogonality = gram.square().sum((-2, -1)).mean() / weight.shape[2] ** 2
    excess = (weight.norm() - 0.5 * weight.numel() ** 0.5).relu()
    return LAMBDA_ORTHO * orthogonality + LAMBDA_FROB * excess


def smooth_maximum(scores: Tensor) -> Tensor:
    """A maximum through which all scores get gradients."""
    return torch.logsumexp(scores * SMOOTH, 0) / SMOOTH


def divergence(scores: Tensor, wanted: Tensor) -> Tensor:
    """Of a list's scores from wanted shares."""
    return functional.kl_div(scores.log_softmax(0), wanted, reduction="sum")


def rows_divergence(cosines: Tensor, wanted: Tensor, sharpness: float) -> Tensor:
    """The mean divergence of rows of cosines from wanted ones."""
    log = (cosines * sharpness).log_softmax(1)
    return functional.kl_div(log, (wanted * sharpness).softmax(1), reduction="batchmean")


class Training:
    """Model, optimiser, running mean of the weights, and step: what a checkpoint holds.

    Args:
        config: What config.toml holds.
        options: The command line.
    """

    def __init__(self, config: dict[str, Any], options: argparse.Namespace) -> None:
        torch.manual_seed(config["seed"])
        self.config, self.device = config, options.device
        self.steps = options.steps or config["steps"]
        self.batches = options.batches
        self.teacher = Teacher(options.teacher)
        self.objective = Objective(config["loss"], self.teacher)
        self.texts = Texts(options.start / "backbone" / "tokenizer.json")
        self.pool = Pool.of(options.data, options.manuals)
        self.sampler = Sampler(
            self.pool, config["batch"], config["seed"], self.texts.count, self.near
        )
        form = (config["window"], config["reach"] or None)
        self.model = from_artifact(options.start, *form).to(self.device)
        self.first = from_artifact(options.start, *form).to(self.device).eval()
        self.first.requires_grad_(False)
        model, rates = self.model, config["rates"]
        model.embeddings.requires_grad_(False)
        for layer in model.layers[model.base :]:
            layer.drop = config["dropout"]
        self.lower = list(model.layers[: model.base].parameters())
        upper = list(model.layers[model.base :].parameters())
        scalars = [model.pooled_weight, model.token_weight, model.bias]
        groups = [
            {"params": self.lower, "lr": rates["lower"], "weight_decay": 0.01},
            {"params": upper, "lr": rates["upper"], "weight_decay": 0.01},
            {"params": [model.projection], "lr": rates["projection"]},
            {"params": [model.shift_weight], "lr": rates["shift_weight"]},
            {"params": scalars, "lr": rates["scalars"]},
        ]
        self.rates = [group["lr"] for group in groups]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
        self.mean = {name: weight.clone() for name, weight in self.trained().items()}
        self.step = 0

    def trained(self) -> dict[str, Tensor]:
        """The weights that are trained, by name, without gradients."""
        weights = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                weights[name] = parameter.detach()
        return weights

    def near(self, query: str, text: str) -> float | None:
        """The teacher's cosine of a query and a passage, if the teacher has read both."""
        rows = self.teacher(query), self.teacher(text)
        if rows[0] is None or rows[1] is None:
            return None
        return float(rows[0] @ rows[1])

    @torch.no_grad()
    def anchor(self, batch: Batch) -> Anchor:
        """Output of the model that the training starts from, for all lists but everyday's."""
        other = (EVERYDAY, "greetings")
        lists = [number for number, source in enumerate(batch.sources) if source not in other]
        clean, places = without_typos(batch, lists)
        return Anchor(lists, places, run(self.first, self.texts, clean))

    def update(self) -> dict[str, float]:
        """One step of the optimiser; the parts of the loss.

        Rates rise in the warm-up, stay, and fall in the last part of the run (``decay``).
        """
        share = self.step / self.steps
        factor = min(1.0, (self.step + 1) / self.config["warm_up"])
        factor *= min(1.0, 0.03 + max(0.0, 1 - share) / self.config["decay"])
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.model.train()
        self.optimizer.zero_grad()
        for number in range(self.batches):
            batch = self.sampler(self.step * self.batches + number)
            output = run(self.model, self.texts, batch)
            anchor = self.anchor(batch)
            loss, parts = self.objective(self.model, batch, output, anchor)
            (loss / self.batches).backward()
        torch.nn.utils.clip_grad_norm_(self.lower, 1.0)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        torch.nn.utils.clip_grad_norm_(trained, 2.0)
        self.optimizer.step()
        self.step += 1
        share_of_old = min(self.config["mean"], (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            for name, weight in self.trained().items():
                self.mean[name].lerp_(weight, 1 - share_of_old)
        return parts

    def save(self, path: Path) -> None:
        """Write a checkpoint; the old one stays until the new one is complete."""
        state = {
            "trained": self.trained(),
            "optimizer": self.optimizer.state_dict(),
            "mean": self.mean,
            "step": self.step,
            "random": torch.get_rng_state(),
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        state = torch.load(path, weights_only=True, map_location=self.device)
        self.model.load_state_dict(state["trained"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])
        self.mean, self.step = state["mean"], state["step"]
        torch.set_rng_state(state["random"].cpu())

    def validate(self, validation: Validation, folder: Path) -> None:
        """Measure the running mean, and write it to a file."""
        own = {name: weight.clone() for name, weight in self.trained().items()}
        self.model.load_state_dict(self.mean, strict=False)
        self.model.eval()
        figures = validation.figures(self.model, self.texts)
        line = json.dumps({"step": self.step, **figures})
        print(line, flush=True)
        with (folder / "validation.jsonl").open("a", encoding="utf-8") as log:
            log.write(line + "\n")
        torch.save(self.mean, folder / f"mean-{self.step}.pt")
        self.model.load_state_dict(own, strict=False)

    def run(self, folder: Path, minutes: float) -> None:
        """Go on from the folder's checkpoint, if there is one, until steps or minutes are over."""
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = folder / "checkpoint.pt"
        validation = Validation(self.pool) if self.pool.validation else None
        if checkpoint.exists():
            self.load(checkpoint)
            print(f"going on from step {self.step}", flush=True)
        started = time.monotonic()
        recent: list[dict[str, float]] = []
        while self.step < self.steps and time.monotonic() - started < 60 * minutes:
            recent.append(self.update())
            if self.step % 10 == 0 or self.steps <= 10:
                line = {"step": self.step, "minutes": round((time.monotonic() - started) / 60, 1)}
                for name in recent[0]:
                    line[name] = round(sum(parts[name] for parts in recent) / len(recent), 3)
                print(json.dumps(line), flush=True)
                with (folder / "log.jsonl").open("a", encoding="utf-8") as log:
                    log.write(json.dumps(line) + "\n")
                recent = []
            if self.step % self.config["save_every"] == 0:
                self.save(checkpoint)
                self.teacher.refresh()
            if self.step % self.config["validate_every"] == 0 and validation is not None:
                self.validate(validation, folder)
        self.save(checkpoint)
        torch.save(self.mean, folder / "mean.pt")


def main() -> None:
    """Train, or go on from a checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with the training sets")
    add("--start", type=Path, required=True, help="artifact to start from")
    add("--teacher", type=Path, required=True, help="folder that teacher.py wrote")
    add("--manuals", type=Path, default=None, help="what manuals.py wrote")
    add("--output", type=Path, required=True, help="folder for everything that is written")
    add("--config", type=Path, default=Path(__file__).with_name("config.toml"))
    add("--steps", type=int, default=None, help="default: the configuration's")
    add("--minutes", type=float, default=float("inf"), help="stop after so long")
    add("--batches", type=int, default=1, help="batches a step, for a GPU")
    add("--device", default="cpu")
    options = parser.parse_args()
    config = tomllib.loads(options.config.read_text(encoding="utf-8"))
    Training(config, options).run(options.output, options.minutes)


if __name__ == "__main__":
    main()
