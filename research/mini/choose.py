"""The share of the shift and the threshold, chosen by validation queries; and the export.

The shift learns what the training sets have in common, which on other sets is noise. So of its
weights only the share is kept that ranks best on all validation queries while those of sets that
nothing is trained on are ranked no worse than by MiniLM's cosine.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from encode import DOCUMENT_TOKENS, Stored, padded
from model import BORDER, bert_weights, pooled
from safetensors.torch import save_file
from scorer import Scorer
from torch import Tensor

import data

PASSAGES = (
    (Path(__file__).parents[2] / "examples" / "passages.txt")
    .read_text(encoding="utf-8")
    .splitlines()
)
QUESTIONS = [
    "How do honeybees tell each other where the flowers are?",
    "night trains in winter",
    "honey",
]
SHARES = np.arange(0, 1.01, 0.05)
BORDERS = np.arange(-2, 2.01, 0.05)
UNSEEN_COUNT = 2
"""Weight, in the choice of the threshold, of a set that nothing is trained on."""


@dataclass(frozen=True)
class Row:
    """A validation query's documents: what the score is made of, each (documents,)."""

    base: Tensor
    shift: Tensor
    cosine: Tensor
    relevant: Tensor

    def score(self, share: float, border: float) -> Tensor:
        """With so much of the shift, and a border moved up by so much."""
        return self.base + share * self.shift - border


Rows = Mapping[str, Sequence[Row]]


@torch.no_grad()
def measured(
    scorer: Scorer, examples: Sequence[data.Example], stored: Stored
) -> dict[str, list[Row]]:
    """Set -> its validation queries."""
    found: dict[str, list[Row]] = {}
    for start in range(0, len(examples), 8):
        chunk = examples[start : start + 8]
        documents = [[*e.relevant, *e.others] for e in chunk]
        _, bases, terms = scorer([e.query for e in chunk], documents, stored)
        for e, base, term, of in zip(chunk, bases, terms, documents, strict=True):
            shift = (term * scorer.model.shift_weight).sum((1, 2))
            relevant = torch.arange(len(of)) < len(e.relevant)
            row = Row(base, shift, scorer.cosines(e.query, of, stored), relevant)
            found.setdefault(e.source, []).append(row)
    return found


def choose(rows: Rows) -> tuple[tuple[float, float], dict[str, Any]]:
    """Share of the shift and threshold, with nDCG@5 and F1 at zero by set, and MiniLM's cosine."""
    groups = [
        [name for name in rows if (name in data.UNSEEN) == unseen] for unseen in (False, True)
    ]

    def means(metric: Callable[[Row], float]) -> list[float]:
        return [
            float(np.mean([np.mean(list(map(metric, rows[name]))) for name in names]))
            for names in groups
        ]

    ranked = {
        float(share): means(lambda row, s=share: ndcg(row.score(s, 0.0), row.relevant))
        for share in SHARES
    }
    _, cosine = means(lambda row: ndcg(row.cosine, row.relevant))
    harmless = [share for share in ranked if ranked[share][1] >= cosine] or [0.0]
    share = max(harmless, key=lambda each: sum(ranked[each]))
    kept = {
        float(border): means(lambda row, b=border: f1(row.score(share, b) > 0, row.relevant))
        for border in BORDERS
    }
    weights = [len(groups[0]), UNSEEN_COUNT * len(groups[1])]
    border = max(kept, key=lambda each: np.dot(weights, kept[each]))
    figures: dict[str, Any] = {"share": share, "border": border}
    for name, of_set in rows.items():
        columns = {
            "ndcg@5": [ndcg(row.score(share, border), row.relevant) for row in of_set],
            "f1": [f1(row.score(share, border) > 0, row.relevant) for row in of_set],
            "ndcg@5 without the shift": [ndcg(row.base, row.relevant) for row in of_set],
            "cosine ndcg@5": [ndcg(row.cosine, row.relevant) for row in of_set],
            f"cosine f1 at {BORDER}": [f1(row.cosine > BORDER, row.relevant) for row in of_set],
        }
        figures[name] = {
            metric: round(100 * float(np.mean(values)), 1) for metric, values in columns.items()
        }
    return (share, border), figures


def export(
    scorer: Scorer, choice: tuple[float, float], folder: Path, about: Mapping[str, Any]
) -> None:
    """Write the weights (the encoder's in fp16) and their description for export.py."""
    model, (share, border) = scorer.model, choice
    folder.mkdir(parents=True, exist_ok=True)
    small = {
        "projection": model.projection,
        "shift_weight": model.shift_weight * share,
        "agreement": torch.stack([model.pooled_weight, model.token_weight, model.bias - border]),
    }
    encoder = {name: tensor.half().contiguous() for name, tensor in bert_weights(model).items()}
    save_file(
        encoder | {name: tensor.detach().contiguous() for name, tensor in small.items()},
        folder / "model.safetensors",
    )
    shape = (
        asdict(model.shape)
        | {"read": model.shape.read, "share": share, "border": border}
        | dict(about)
    )
    (folder / "model.json").write_text(json.dumps(shape, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class InMemory:
    """As `Stored`, of a few texts."""

    ids: list[list[int]]
    embedded: Tensor
    hidden: Tensor
    valid: Tensor

    def states(self, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """As `Stored.states`."""
        return self.hidden[list(places)], self.valid[list(places)]


@torch.no_grad()
def reference(scorer: Scorer, choice: tuple[float, float], folder: Path) -> None:
    """Write scores of a few pairs by this code in float32, with weights rounded to fp16."""
    model = copy.deepcopy(scorer.model).half().float()
    for name in (
        "projection",
        "shift_weight",
        "pooled_weight",
        "token_weight",
        "bias",
    ):  # kept in float32
        model.get_parameter(name).copy_(scorer.model.get_parameter(name))
    model.shift_weight *= choice[0]
    model.bias -= choice[1]
    plain = Scorer(model, scorer.ids)
    plain.fast = torch.float32
    ids, valid = padded(scorer.ids(PASSAGES, DOCUMENT_TOKENS))
    hidden = model.below(model.embed(ids), valid, 0, model.base)
    texts = InMemory(scorer.ids(PASSAGES, DOCUMENT_TOKENS), pooled(hidden, valid), hidden, valid)
    everything = [range(len(PASSAGES))] * len(QUESTIONS)
    scores, _, _ = plain(QUESTIONS, everything, texts)
    cases = [
        {"query": q, "documents": PASSAGES, "scores": s.tolist()}
        for q, s in zip(QUESTIONS, scores, strict=True)
    ]
    (folder / "reference.json").write_text(json.dumps(cases, indent=1) + "\n", encoding="utf-8")


def ndcg(scores: Tensor, relevant: Tensor, depth: int = 5) -> float:
    """Ranking quality, nDCG at a depth; there is a relevant document."""
    discounts = torch.arange(2, depth + 2).log2().reciprocal()
    gains = relevant[scores.argsort(descending=True, stable=True)[:depth]].float()
    best = discounts[: min(depth, int(relevant.sum()))].sum()
    return float((gains * discounts[: len(gains)]).sum() / best)


def f1(kept: Tensor, relevant: Tensor) -> float:
    """F1 of what is kept; 1 where nothing is relevant and nothing kept."""
    total = int(kept.sum() + relevant.sum())
    return 2 * int((kept & relevant).sum()) / total if total else 1.0
