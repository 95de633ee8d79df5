"""Figures of validation queries, which share no query and no answer with the training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from batches import EVERYDAY, MANUALS, REAL, Batch, Example, Passage, Pool, Text, typo
from model import Mini
from scores import run
from texts import Texts

QUERIES = {EVERYDAY: 120, REAL: 60, MANUALS: 40}
OTHERS = 20
"""Queries of each public set."""
AT_ONCE = 6
ANSWERS = 60
"""Queries whose answer is scored alone and joined with others."""
JOINED = {"joined.1": 1, "joined.4": 4, "joined.8": 8}
"""Passages of a text."""


@dataclass
class Row:
    """One query: similarity, the shift, and relevance of its texts, each (N,)."""

    base: np.ndarray
    shift: np.ndarray
    relevant: np.ndarray

    def scores(self, share: float = 1.0) -> np.ndarray:
        """Scores with a share of the shift."""
        return self.base + share * self.shift


class Validation:
    """Validation queries of every set, with a typo, and with joined passages.

    Args:
        pool: Its validation queries are measured.
    """

    def __init__(self, pool: Pool) -> None:
        self.lists: dict[str, list[Example]] = {}
        for name, examples in pool.validation.items():
            most = QUERIES.get(name, OTHERS)
            self.lists[name] = random.Random(2).sample(examples, min(most, len(examples)))
        rng = random.Random(3)
        everyday = self.lists[EVERYDAY]
        self.lists["everyday.typo"] = [
            Example(typo(e.query, rng, longest=True), e.passages, e.source, e.group)
            for e in everyday
        ]
        self.lists |= {name: joined(everyday, count) for name, count in JOINED.items()}

    def rows(self, model: Mini, texts: Texts) -> dict[str, list[Row]]:
        """Set -> scores of its queries."""
        return {name: measure(model, texts, examples) for name, examples in self.lists.items()}

    def figures(self, model: Mini, texts: Texts) -> dict[str, dict[str, float]]:
        """Figures of the typed sets, joined passages, and the mean of the public sets."""
        rows = self.rows(model, texts)
        result: dict[str, dict[str, float]] = {}
        public = []
        for name, of_set in rows.items():
            if name in JOINED:
                result[name] = joined_figures(of_set)
            elif name in (EVERYDAY, REAL, MANUALS, "everyday.typo"):
                result[name] = summary(of_set)
            else:
                public.append(summary(of_set))
                if name.startswith(("2wiki", "hotpotqa.sentence")):
                    result[name] = public[-1]
        keys = [key for key in public[0] if all(key in each for each in public)]
        result["public"] = {
            key: round(float(np.mean([each[key] for each in public])), 3) for key in keys
        }
        return result


def joined(examples: Sequence[Example], count: int) -> list[Example]:
    """Each answer joined with others, against six texts that are joined without it."""
    answers = []
    for example in examples:
        for passage in example.passages:
            if passage.relevant:
                answers.append((example, passage))
    rng = random.Random(4)
    answers = rng.sample(answers, min(ANSWERS, len(answers)))
    total = len(answers)
    members = [[(at + 7 * k) % total for k in range(count)] for at in range(total)]
    texts = ["\n\n".join(answers[m][1].content() for m in each) for each in members]
    result = []
    for at, (example, own) in enumerate(answers):
        without = [i for i in range(total) if all(answers[m][1] is not own for m in members[i])]
        without = [i for i in without if own.text not in texts[i]]
        passages = [Passage(texts[at], "", True, "joined")]
        for other in rng.sample(without, 6):
            passages.append(Passage(texts[other], "", False, "joined"))
        result.append(Example(example.query, passages, "joined", example.group))
    return result


@torch.no_grad()
def measure(model: Mini, texts: Texts, examples: Sequence[Example]) -> list[Row]:
    """Scores of lists as they are."""
    model.eval()
    rows = []
    for start in range(0, len(examples), AT_ONCE):
        batch = Batch()
        for example in examples[start : start + AT_ONCE]:
            labels = {}
            for p in example.passages:
                place = batch.text(Text(p.content(), (p.content(),), p.relevant, {p.group}))
                labels[place] = labels.get(place, False) or p.relevant
            batch.queries.append(example.query)
            batch.labels.append(labels)
        output = run(model, texts, batch)
        for query, labels in enumerate(batch.labels):
            places = list(labels)
            rows.append(
                Row(
                    output.base[query, places].cpu().numpy(),
                    output.shift[query, places].cpu().numpy(),
                    np.array(list(labels.values())),
                )
            )
    return rows


def ndcg(scores: np.ndarray, relevant: np.ndarray) -> float:
    """nDCG@5 of a list with a relevant text."""
    discounts = 1 / np.log2(np.arange(2, 7))
    gains = relevant[np.argsort(-scores, kind="stable")][:5]
    ideal = discounts[: min(5, int(relevant.sum()))].sum()
    return float((gains * discounts[: len(gains)]).sum() / ideal)


def f1(kept: np.ndarray, relevant: np.ndarray) -> float:
    """F1 of what is kept; 1 where nothing is relevant and nothing kept."""
    total = int(kept.sum() + relevant.sum())
    return 2 * int((kept & relevant).sum()) / total if total else 1.0


def auroc(scores: np.ndarray, relevant: np.ndarray) -> float:
    """How often a relevant text scores above an irrelevant one, of any query."""
    below = np.searchsorted(np.sort(scores[~relevant]), scores[relevant])
    return float(below.mean() / max(1, (~relevant).sum()))


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Ranking with the shift and without it, and selection at zero."""
    answerable = [row for row in rows if row.relevant.any()]
    scores = np.concatenate([row.scores() for row in rows])
    relevant = np.concatenate([row.relevant for row in rows])
    figures = {
        "ndcg": np.mean([100 * ndcg(row.scores(), row.relevant) for row in answerable]),
        "ndcg similarity": np.mean([100 * ndcg(row.base, row.relevant) for row in answerable]),
        "auroc": auroc(scores, relevant),
        "f1": np.mean([100 * f1(row.scores() > 0, row.relevant) for row in rows]),
        "f1 similarity": np.mean([100 * f1(row.base > 0, row.relevant) for row in rows]),
        "lost": np.mean([not (row.scores()[row.relevant] > 0).any() for row in answerable]),
        "kept": np.mean([(row.scores() > 0).sum() for row in rows]),
    }
    unanswerable = [row for row in rows if not row.relevant.any()]
    if unanswerable:
        figures["answered anyway"] = np.mean([(row.scores() > 0).any() for row in unanswerable])
    return {name: round(float(value), 3) for name, value in figures.items()}


def joined_figures(rows: Sequence[Row]) -> dict[str, float]:
    """How well answers stand apart, and how many are kept at zero."""
    scores = np.concatenate([row.scores() for row in rows])
    relevant = np.concatenate([row.relevant for row in rows])
    return {
        "auroc": round(auroc(scores, relevant), 3),
        "kept": round(float((scores[relevant] > 0).mean()), 3),
        "wrong": round(float((scores[~relevant] > 0).mean()), 3),
    }
