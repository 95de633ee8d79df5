"""Figures of validation queries, which share no query and no answer with the training."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
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
FIGURES = (
    "ndcg", "ndcg similarity", "auroc", "f1", "f1 similarity", "lost", "kept", "answered anyway",
)  # fmt: skip


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
        self.lists["everyday.typo"] = with_typos(everyday, rng)
        for name, count in JOINED.items():
            self.lists[name] = joined(everyday, count)

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
        result["public"] = {}
        for key in public[0]:
            values = [figures[key] for figures in public if key in figures]
            if len(values) == len(public):
                result["public"][key] = round(float(np.mean(values)), 3)
        return result


def with_typos(examples: Sequence[Example], rng: random.Random) -> list[Example]:
    """The same examples with one typo in the longest word of each query."""
    changed = []
    for example in examples:
        query = typo(example.query, rng, longest=True)
        changed.append(Example(query, example.passages, example.source, example.group))
    return changed


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
    members = []
    texts = []
    for at in range(total):
        group = [answers[(at + 7 * k) % total][1] for k in range(count)]
        members.append(set(map(id, group)))
        texts.append("\n\n".join(map(Passage.content, group)))
    result = []
    for at, (example, own) in enumerate(answers):
        without = []
        for number, text in enumerate(texts):
            if id(own) not in members[number] and own.text not in text:
                without.append(number)
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
            labels: dict[int, bool] = {}
            for passage in example.passages:
                content = passage.content()
                text = Text(content, (content,), passage.relevant, {passage.group})
                place = batch.text(text)
                labels[place] = labels.get(place, False) or passage.relevant
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


def f1(selected: np.ndarray, relevant: np.ndarray) -> float:
    """F1 of the selected texts; 1 where nothing is relevant and nothing is selected."""
    total = int(selected.sum() + relevant.sum())
    if not total:
        return 1.0
    return 2 * int((selected & relevant).sum()) / total


def auroc(scores: np.ndarray, relevant: np.ndarray) -> float:
    """Probability that a relevant text scores above an irrelevant one, of any query."""
    below = np.searchsorted(np.sort(scores[~relevant]), scores[relevant])
    return float(below.mean() / max(1, (~relevant).sum()))


def together(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Scores and relevance of the texts of all queries."""
    scores = np.concatenate([row.scores() for row in rows])
    return scores, np.concatenate([row.relevant for row in rows])


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Ranking with the shift and without it, and selection at zero."""
    values: dict[str, list[float]] = {name: [] for name in FIGURES}
    values["auroc"] = [auroc(*together(rows))]
    for row in rows:
        selected = row.scores() > 0
        values["f1"].append(100 * f1(selected, row.relevant))
        values["f1 similarity"].append(100 * f1(row.base > 0, row.relevant))
        values["kept"].append(selected.sum())
        if row.relevant.any():
            values["ndcg"].append(100 * ndcg(row.scores(), row.relevant))
            values["ndcg similarity"].append(100 * ndcg(row.base, row.relevant))
            values["lost"].append(not selected[row.relevant].any())
        else:
            values["answered anyway"].append(selected.any())
    return means_of(values, 3)


def means_of(values: Mapping[str, Sequence[float]], digits: int) -> dict[str, float]:
    """The rounded mean of each figure that has values."""
    means = {}
    for name, numbers in values.items():
        if numbers:
            means[name] = round(float(np.mean(numbers)), digits)
    return means


def joined_figures(rows: Sequence[Row]) -> dict[str, float]:
    """How well scores tell answers from other texts, and how many answers are kept at zero."""
    scores, relevant = together(rows)
    return {
        "auroc": round(auroc(scores, relevant), 3),
        "kept": round(float((scores[relevant] > 0).mean()), 3),
        "wrong": round(float((scores[~relevant] > 0).mean()), 3),
    }
