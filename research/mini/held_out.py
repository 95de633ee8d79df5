r"""Compare artifacts on sets kept apart: by the rule of their config, and by zero alone.

    python research/mini/held_out.py --data ../shared/data/dev --output runs/held-out.json \
        --models mini runs/mini/artifact

Besides the sets as they are: everyday's queries with one typo in their longest word, and its
answers joined with none and with seven others.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from batches import EVERYDAY, REAL, Example, example_of, typo
from tqdm import tqdm
from validate import auroc, f1, joined, ndcg

import data
from rsrank_rag import RSRank, Rule

TYPO, ALONE, JOINED = "everyday.typo", "joined.1", "joined.8"
TYPED = (EVERYDAY, TYPO, REAL)
Lists = list[tuple[np.ndarray, np.ndarray]]
"""Scores and labels of each query."""


def read_sets(folder: Path, limit: int | None) -> dict[str, list[Example]]:
    """Every set by name, then what is made of everyday."""
    sets = {}
    for path in sorted(folder.glob("*.jsonl.gz")):
        name = path.name.removesuffix(".jsonl.gz")
        sets[name] = [example_of(row, name, "") for row in data.read(path)[:limit]]
    rng = random.Random(7)
    everyday = sets[EVERYDAY]
    sets[TYPO] = [
        Example(typo(each.query, rng, longest=True), each.passages, each.source, each.group)
        for each in everyday
    ]
    sets[ALONE], sets[JOINED] = joined(everyday, 1), joined(everyday, 8)
    return sets


def score(ranker: RSRank, examples: Sequence[Example], name: str) -> Lists:
    """Scores of a set."""
    lists = []
    for example in tqdm(examples, desc=name):
        scores = ranker.score(example.query, [passage.content() for passage in example.passages])
        relevant = np.array([passage.relevant for passage in example.passages])
        lists.append((np.array(scores), relevant))
    return lists


def selection(lists: Lists, rule: Rule) -> dict[str, float]:
    """What a rule loses and keeps.

    Returns:
        ``lost``, the share of answerable queries without any relevant document; ``kept``,
        documents a query; ``f1``; ``recall``; ``called relevant``, the share of unanswerable
        queries with a score above the threshold.
    """
    lost, kept, f1s, recalls, called = [], [], [], [], []
    for scores, relevant in lists:
        chosen = np.zeros(len(scores), dtype=bool)
        chosen[list(rule.select(scores.tolist()))] = True
        kept.append(chosen.sum())
        f1s.append(f1(chosen, relevant))
        if relevant.any():
            lost.append(not (chosen & relevant).any())
            recalls.append((chosen & relevant).sum() / relevant.sum())
        else:
            called.append((scores > rule.threshold).any())
    figures = {"lost": lost, "kept": kept, "f1": f1s, "recall": recalls, "called relevant": called}
    return {name: round(float(np.mean(values)), 4) for name, values in figures.items() if values}


def figures_of(scored: Mapping[str, Lists], native: Rule) -> dict[str, dict]:
    """Figures of every set, and their means over typed and public sets."""
    figures = {}
    rules = {"rule": native, "zero": Rule(threshold=0.0)}
    for name, lists in scored.items():
        answerable = [each for each in lists if each[1].any()]
        figures[name] = {
            "queries": len(lists),
            "ndcg@5": round(float(np.mean([ndcg(*each) for each in answerable])), 4),
            "auroc": round(auroc(*map(np.concatenate, zip(*lists, strict=True))), 4),
            **{label: selection(lists, rule) for label, rule in rules.items()},
        }
    alone, together = (figures[name]["rule"]["recall"] for name in (ALONE, JOINED))
    figures[JOINED]["kept as often as alone"] = round(together / alone, 4)
    public = [name for name in scored if name not in (*TYPED, ALONE, JOINED)]
    for label, names in (("typed, mean", TYPED), ("public, mean", public)):
        figures[label] = mean_of([figures[name] for name in names])
    return figures


def mean_of(rows: Sequence[Mapping]) -> dict:
    """The mean of each figure that all rows have."""
    mean = {}
    for name, value in rows[0].items():
        others = [row.get(name) for row in rows]
        if isinstance(value, dict):
            mean[name] = mean_of(others)
        elif None not in others and name != "queries":
            mean[name] = round(float(np.mean(others)), 4)
    return mean


def main() -> None:
    """Score, and write the figures of all models to one file; those in the file stay."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with labelled sets")
    add("--models", nargs="+", default=["mini"], help="built-in names or artifact folders")
    add("--limit", type=int, default=None, help="first queries of each set only")
    add("--output", type=Path, required=True, help="JSON file for the figures")
    options = parser.parse_args()
    sets = read_sets(options.data, options.limit)
    figures = {}
    if options.output.exists():
        figures = json.loads(options.output.read_text(encoding="utf-8"))
    for model in options.models:
        if model in figures:
            continue
        ranker = RSRank.from_pretrained(model, device="cpu")
        scored = {name: score(ranker, examples, name) for name, examples in sets.items()}
        figures[model] = figures_of(scored, ranker.native_rule)
        options.output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(figures[model], indent=1))


if __name__ == "__main__":
    main()
