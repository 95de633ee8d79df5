"""What the second stage exports: a strength, a share of the shift, and a threshold.

The strength says how far the weights move from those of the first stage.

All three are chosen by validation queries of three groups: typed queries over real documents of
sources that nothing was trained on, the sets that are trained on, and sets that nothing is trained
on. Weights on the line between two stages often rank both kinds of queries better than either end:
the first stage has not forgotten, the second has learned.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from choose import Row, Rows, f1, ndcg
from encode import minilm
from model import Mini, Shape, load_layers
from pairs import Entering, run
from safetensors.torch import load_file
from torch import Tensor
from typed import Batch, Pool

import data

STRENGTHS = (0.5, 0.75, 1.0)
"""Places on the line from the first stage's weights (0) to the second's (1)."""
SHARES = np.arange(0.1, 1.01, 0.1)
"""From a tenth on: without the shift there would be nothing that `explain` could show by layer."""
THRESHOLDS = np.arange(-2, 2.01, 0.05)
MANUALS = "manuals.passage"
MOST_LOST = 0.09
"""Largest share of answerable typed queries over real documents that may be left with nothing: a
tenth, less one point, because 150 queries measure the share only roughly."""
QUERIES_AT_ONCE = 12
QUERIES_OF_SET, TYPED_QUERIES = 12, 150
"""Validation queries of each set, and of the real documents."""


@dataclass(frozen=True)
class Choice:
    """Strength, share of the shift, and threshold."""

    strength: float
    share: float
    threshold: float


def load_stage(artifact: Path, start: str) -> Mini:
    """The recipe's model with the weights of an artifact that export.py wrote."""
    model = Mini(minilm(start), Shape(), seed=0)
    encoder = load_file(artifact / "backbone" / "model.safetensors")
    small = load_file(artifact / "projection.safetensors")
    with torch.no_grad():
        load_layers(model, encoder)
        model.projection.copy_(small["weight"])
        model.shift_weight.copy_(small["head_weight"])
        for parameter, value in zip(
            (model.pooled_weight, model.token_weight, model.bias), small["agreement"], strict=True
        ):
            parameter.copy_(value)
    return model


def interpolated(model: Mini, first: Mini, second: Mapping[str, Tensor], strength: float) -> Mini:
    """A copy of the model with weights on the line from the first stage's to the second's."""
    result = copy.deepcopy(model)
    state = first.state_dict()
    for name, tensor in second.items():
        state[name] = torch.lerp(state[name], tensor, strength)
    result.load_state_dict(state)
    return result.eval()


def validation_queries(
    folder: Path, pool: Pool, manuals: Sequence[dict] = ()
) -> dict[str, list[dict]]:
    """Set -> labelled queries that nothing was trained on, the typed ones first.

    Args:
        folder: Training sets.
        pool: Its `validation` holds the typed queries over real documents.
        manuals: Typed queries over the manuals of tools that nothing was trained on.
    """
    step = max(1, len(pool.validation) // TYPED_QUERIES)
    queries = {data.REAL: pool.validation[::step]}
    if manuals:
        queries[MANUALS] = list(manuals)
    for name in (*data.SETS, *data.UNSEEN):
        texts = data.Texts()
        _, examples = data.load(folder, [name], texts)
        queries[name] = [_labelled(example, texts) for example in examples[:QUERIES_OF_SET]]
    return queries


def _labelled(example: data.Example, texts: data.Texts) -> dict:
    documents = [{"text": texts.texts[p], "relevant": True} for p in example.relevant]
    documents += [{"text": texts.texts[p], "relevant": False} for p in example.others]
    return {"query": example.query, "documents": documents}


@torch.no_grad()
def measure_rows(
    model: Mini, encoder: Entering, queries: Mapping[str, Sequence[dict]]
) -> dict[str, list[Row]]:
    """Set -> what the scores of its queries are made of."""
    rows: dict[str, list[Row]] = {}
    for name, of_set in queries.items():
        rows[name] = []
        for start in range(0, len(of_set), QUERIES_AT_ONCE):
            rows[name] += _rows(model, encoder, of_set[start : start + QUERIES_AT_ONCE])
    return rows


def _rows(model: Mini, encoder: Entering, queries: Sequence[dict]) -> list[Row]:
    batch = Batch()
    for labelled in queries:
        query = batch.query(labelled["query"], hard=False)
        for passage in labelled["documents"]:
            content = data.content(passage)
            batch.pair(query, batch.text(content, content), passage["relevant"])
    output = run(model, encoder, batch)
    query_of, text_of = torch.tensor(batch.pairs).unbind(1)
    cosine = (output.queries[query_of] * output.texts[text_of]).sum(1)
    shift = output.scores - output.bases
    relevant = torch.tensor(batch.labels)
    return [
        Row(output.bases[at], shift[at], cosine[at], relevant[at])
        for at in (query_of == query for query in range(len(queries)))
    ]


def choose_typed(rows_of: Mapping[float, Rows]) -> tuple[Choice, dict[str, Any]]:
    """The strength and the share that rank best, then the threshold that selects best.

    A group counts as much as each other one. The threshold has the best mean F1 of those that leave
    at most `MOST_LOST` of the typed queries over real documents with nothing.
    """
    ranked = {
        (strength, float(share)): _mean_of_groups(
            rows, lambda row, s=share: ndcg(row.score(s, 0.0), row.relevant), answerable=True
        )
        for strength, rows in rows_of.items()
        for share in SHARES
    }
    strength, share = max(ranked, key=lambda each: ranked[each])
    rows = rows_of[strength]
    thresholds = [each for each in map(float, THRESHOLDS) if _lost(rows, share, each) <= MOST_LOST]
    threshold = max(
        thresholds or [float(THRESHOLDS[0])],
        key=lambda each: _mean_of_groups(
            rows, lambda row: f1(row.score(share, each) > 0, row.relevant)
        ),
    )
    figures: dict[str, Any] = {"strength": strength, "share": share, "threshold": threshold}
    figures["ranked"] = {f"{a:g}, {b:.1f}": round(100 * v, 2) for (a, b), v in ranked.items()}
    for name, of_set in rows.items():
        answerable = [row for row in of_set if row.relevant.any()]
        scores = [row.score(share, threshold) for row in answerable]
        pairs = list(zip(scores, (row.relevant for row in answerable), strict=True))
        figures[name] = {
            "ndcg@5": _points([ndcg(s, y) for s, y in pairs]),
            "f1": _points([f1(s > 0, y) for s, y in pairs]),
            "left with nothing": _points([not bool((y & (s > 0)).any()) for s, y in pairs]),
        }
    return Choice(strength, share, threshold), figures


def _lost(rows: Rows, share: float, threshold: float) -> float:
    """Share of answerable typed queries of which nothing relevant scores above the threshold."""
    answerable = [row for row in rows[data.REAL] if row.relevant.any()]
    lost = 0
    for row in answerable:
        lost += not bool((row.relevant & (row.score(share, threshold) > 0)).any())
    return lost / max(1, len(answerable))


def _mean_of_groups(rows: Rows, metric: Any, *, answerable: bool = False) -> float:
    groups: dict[str, list[float]] = {"typed": [], "seen": [], "unseen": []}
    for name, of_set in rows.items():
        group = (
            "typed" if name in (data.REAL, MANUALS) else "unseen" if name in data.UNSEEN else "seen"
        )
        values = [metric(row) for row in of_set if not answerable or row.relevant.any()]
        groups[group].append(float(np.mean(values)))
    return float(np.mean([np.mean(values) for values in groups.values() if values]))


def _points(values: Sequence[float]) -> float:
    return round(100 * float(np.mean(values)), 1)
