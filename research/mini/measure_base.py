"""Measure an artifact of train_base.py, its encoder's cosine, and `mini`.

    python research/mini/measure_base.py --data ../shared/data/dev --model runs/base/artifact \
        --sets realdocs.passage fiqa clapnq.sentence nfcorpus:15 --output research/docs/base.json

The two models are measured at zero, and the cosine at the threshold with the best F1 over all sets,
found on these very labels.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from measure import summary, unanswered
from rsrank_rag import Reranker, RSRank
from rsrank_rag.evaluation.datasets import read_labelled
from rsrank_rag.evaluation.evaluate import score_dataset, shared_threshold


def cosine_of(ranker: RSRank) -> RSRank:
    """A reranker whose scores are the cosines of the pooled states, with the same prefixes."""
    weights: Any = ranker.projection
    only = {
        "head_weight": np.zeros_like(weights.head_weight),
        "agreement": np.array([1.0, 0.0, 0.0], np.float32),
    }
    return RSRank(
        ranker.backbone,
        ranker.prompts,
        replace(weights, **only),
        ranker.config,
        prefix_cache=ranker.cache,
    )


def main() -> None:
    """Score all sets with all systems, and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with labelled sets")
    add("--model", type=Path, required=True, help="the artifact")
    add("--sets", nargs="+", required=True, help="names; NAME:COUNT for the first queries only")
    add("--output", type=Path, required=True, help="JSON file for the figures")
    options = parser.parse_args()
    base = RSRank.from_pretrained(options.model, device="cpu", runtime="onnx", prefix_cache="4GB")
    systems: dict[str, Reranker] = {
        "base": base,
        "all-mpnet-base-v2 cosine": cosine_of(base),
        "mini": RSRank.from_pretrained("mini", device="cpu"),
    }
    scored: dict[str, dict[str, Any]] = {name: {} for name in systems}
    for entry in options.sets:
        name, _, count = entry.partition(":")
        queries = read_labelled(options.data / f"{name}.jsonl.gz")[: int(count) if count else None]
        for system, reranker in systems.items():
            scored[system][name] = score_dataset(reranker, queries)
        figures = {system: of_system(system, of_sets) for system, of_sets in scored.items()}
        options.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        print(name, flush=True)
        for system, found in figures.items():
            row = found["sets"][-1]
            shown = {key: row[key] for key in row if isinstance(row[key], float)}
            print(f"  {system}", {key: round(value, 3) for key, value in shown.items()}, flush=True)


def of_system(system: str, of_sets: dict[str, Any]) -> dict[str, Any]:
    """A system's figures on the sets that are scored so far."""
    tau = 0.0
    if system.endswith("cosine"):
        tau = shared_threshold(
            [[query for query in queries if any(query.relevant)] for queries in of_sets.values()]
        )
    return {
        "tau": tau,
        "sets": [summary(name, queries, tau) for name, queries in of_sets.items()],
        "unanswered": unanswered(of_sets, tau),
    }


if __name__ == "__main__":
    main()
