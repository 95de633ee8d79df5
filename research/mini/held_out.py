r"""Compare artifacts on sets that took no part in training: by their rule, and by zero alone.

    python research/mini/held_out.py --data ../shared/data/dev --output runs/held-out.json \
        --models mini runs/mini/artifact

The sets are measured as they are, and everyday in three other forms: its queries with one typo in
their longest word, its answers alone, and its answers joined with seven others.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from batches import EVERYDAY, REAL, Example, Passage, example_of
from tqdm import tqdm
from validate import auroc, f1, joined, means_of, ndcg, with_typos

import data
from rsrank_rag import RSRank, Rule

TYPO = "everyday.typo"
ALONE = "joined.1"
JOINED = "joined.8"
TYPED = (EVERYDAY, TYPO, REAL)
Lists = list[tuple[np.ndarray, np.ndarray]]
"""Scores and labels of each query."""


def read_sets(folder: Path, limit: int | None) -> dict[str, list[Example]]:
    """Every set by name, then the other forms of everyday."""
    sets = {}
    for path in sorted(folder.glob("*.jsonl.gz")):
        name = path.name.removesuffix(".jsonl.gz")
        sets[name] = [example_of(row, name, "") for row in data.read(path)[:limit]]
    everyday = sets[EVERYDAY]
    sets[TYPO] = with_typos(everyday, random.Random(7))
    sets[ALONE] = joined(everyday, 1)
    sets[JOINED] = joined(everyday, 8)
    return sets


def score(ranker: RSRank, examples: Sequence[Example], name: str) -> Lists:
    """Scores of a set."""
    lists = []
    for example in tqdm(examples, desc=name):
        texts = list(map(Passage.content, example.passages))
        relevant = [passage.relevant for passage in example.passages]
        lists.append((np.array(ranker.score(example.query, texts)), np.array(relevant)))
    return lists


def selection(lists: Lists, rule: Rule) -> dict[str, float]:
    """What a rule loses and keeps.

    Returns:
        ``lost``, the share of answerable queries without any relevant document; ``kept``,
        documents a query; ``f1``; ``recall``; ``called relevant``, the share of unanswerable
        queries with a score above the threshold.
    """
    figures: dict[str, list[float]] = {
        "lost": [],
        "kept": [],
        "f1": [],
        "recall": [],
        "called relevant": [],
    }
    for scores, relevant in lists:
        selected = np.zeros(len(scores), dtype=bool)
        selected[list(rule.select(scores.tolist()))] = True
        figures["kept"].append(selected.sum())
        figures["f1"].append(f1(selected, relevant))
        if relevant.any():
            figures["lost"].append(not (selected & relevant).any())
            figures["recall"].append((selected & relevant).sum() / relevant.sum())
        else:
            figures["called relevant"].append((scores > rule.threshold).any())
    return means_of(figures, 4)


def figures_of(scored: Mapping[str, Lists], native: Rule) -> dict[str, dict]:
    """Figures of every set, and their means over typed and public sets."""
    figures = {}
    rules = {"rule": native, "zero": Rule(threshold=0.0)}
    for name, lists in scored.items():
        ndcgs = [ndcg(scores, relevant) for scores, relevant in lists if relevant.any()]
        scores, labels = map(np.concatenate, zip(*lists, strict=True))
        figures[name] = {
            "queries": len(lists),
            "ndcg@5": round(float(np.mean(ndcgs)), 4),
            "auroc": round(auroc(scores, labels), 4),
        }
        for label, rule in rules.items():
            figures[name][label] = selection(lists, rule)
    alone = figures[ALONE]["rule"]["recall"]
    together = figures[JOINED]["rule"]["recall"]
    figures[JOINED]["kept as often as alone"] = round(together / alone, 4)
    typed = [figures[name] for name in TYPED]
    public = [figures[name] for name in scored if name not in (*TYPED, ALONE, JOINED)]
    figures["typed, mean"] = mean_of(typed)
    figures["public, mean"] = mean_of(public)
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
