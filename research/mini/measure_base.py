r"""Measure what train_base.py wrote, its encoder's cosine, and `mini`.

    python research/mini/measure_base.py --data ../shared/data/dev --weights runs/base/model \
        --start runs/all-mpnet-base-v2 --sets realdocs.passage fiqa clapnq.sentence nfcorpus:15 \
        --output research/docs/base.json

Long documents are cut. The two models are measured at zero, and the cosine at the threshold with
the best F1 over all sets, found on these very labels. Scores are computed in plain torch, in
float32: the package loads no fusion layers above another encoder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from frozen import Frozen, trained
from model import Mini
from pairs import run
from torch import Tensor
from typed import Batch

from measure import summary, unanswered
from research.best_threshold import shared_threshold
from rsrank_rag import Reranker, RSRank
from rsrank_rag.evaluation.datasets import read_labelled
from rsrank_rag.evaluation.evaluate import score_dataset, shared_rule
from rsrank_rag.passages.rule import Rule

MOST_TOKENS = 510
"""Tokens of a text that the encoder reads."""
MOST_TEXTS = 5000
"""Texts whose states stay in memory: 2.3 GB where a text has 150 tokens."""


class WholeTexts:
    """The frozen encoder as `pairs.run` takes it, for texts of any length that it can read."""

    def __init__(self, start: Path) -> None:
        self.frozen = Frozen(start, None, torch.float32)

    def ids(self, texts: Iterable[str], most: int) -> list[list[int]]:
        """See `pairs.Entering`."""
        return self.frozen.ids(texts, MOST_TOKENS)

    def entering(self, model: Mini, texts: Sequence[str], most: int) -> tuple[Tensor, Tensor]:
        """See `pairs.Entering`."""
        if len(self.frozen.places) > MOST_TEXTS:
            self.frozen.places.clear()
        return self.frozen.entering(model, texts, MOST_TOKENS)


class TrainedModel(Reranker):
    """The trained model on its frozen encoder; with ``cosine``, the encoder's cosine alone."""

    def __init__(self, model: Mini, encoder: WholeTexts, *, cosine: bool = False) -> None:
        self.model = model
        self.encoder = encoder
        self.cosine = cosine

    @torch.no_grad()
    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """See `Reranker.score`."""
        if not documents:
            return []
        batch = Batch()
        number = batch.query(query, hard=False)
        for document in documents:
            batch.pair(number, batch.text(document, document), relevant=False)
        output = run(self.model, self.encoder, batch)
        scores = output.scores
        if self.cosine:
            texts = [text for _, text in batch.pairs]
            scores = output.texts[texts] @ output.queries[number]
        return scores.tolist()


def main() -> None:
    """Score all sets with all systems, and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with labelled sets")
    add("--weights", type=Path, required=True, help="folder that train_base.py wrote")
    add("--start", type=Path, required=True, help="folder of all-mpnet-base-v2")
    add("--sets", nargs="+", required=True, help="names; NAME:COUNT for the first queries only")
    add("--output", type=Path, required=True, help="JSON file for the figures")
    options = parser.parse_args()
    model, encoder = trained(options.weights, options.start), WholeTexts(options.start)
    systems: dict[str, Reranker] = {
        "base": TrainedModel(model, encoder),
        "all-mpnet-base-v2 cosine": TrainedModel(model, encoder, cosine=True),
        "mini": RSRank.from_pretrained("mini", device="cpu"),
    }
    systems["mini"].long_documents = "cut"
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
    rule = Rule(tau)
    if system.endswith("cosine"):
        answerable = [
            [query for query in queries if any(query.relevant)] for queries in of_sets.values()
        ]
        tau = shared_threshold(answerable)
        rule = shared_rule(answerable)
    return {
        "tau": tau,
        "sets": [summary(name, queries, rule, tau) for name, queries in of_sets.items()],
        "unanswered": unanswered(of_sets, tau),
    }


if __name__ == "__main__":
    main()
