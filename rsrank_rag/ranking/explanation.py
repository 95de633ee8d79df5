"""Why a document got its score: the exact terms of the score per query token, layer and head."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .notebook import explanation_html

# Widest table in a terminal: neighbouring layers share a column where there are more.
TERMINAL_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class Explanation:
    """The exact terms of one score; over all axes they add up to it.

    Attributes:
        query: The query.
        document: The document.
        score: The score.
        truncated: Whether the document's end was cut off.
        tokens: The T scored query tokens.
        layers: The L backbone layers read.
        parts: Shift terms, (T, L) nested tuples, each summed over heads and divided by T.
        head_parts: Shift terms, (T, L, H) nested tuples, the same per KV head.
        similarity: The sum of the similarity terms, with the bias; 0 without a fusion layer.
        matches: The MaxSim term of each query token, (T,), which is part of ``similarity``; empty
            without a fusion layer.
        similarity_window: Start and end, in characters of the document, of the similarity window
            that the similarity terms are of; None for the whole document.
    """

    query: str
    document: str
    score: float
    truncated: bool
    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    parts: tuple[tuple[float, ...], ...]
    head_parts: tuple[tuple[tuple[float, ...], ...], ...]
    similarity: float = 0.0
    matches: tuple[float, ...] = ()
    similarity_window: tuple[int, int] | None = None

    def columns(self) -> tuple[list[str], Any]:
        """Labels such as ``L1``, ``L1-5`` or ``match``, and the terms of each token, (T, columns).

        Neighbouring layers are joined if there are more than `TERMINAL_COLUMNS`.
        """
        size = -(-len(self.layers) // TERMINAL_COLUMNS)
        starts = range(0, len(self.layers), size)
        labels = []
        for start in starts:
            group = self.layers[start : start + size]
            label = f"L{group[0]}"
            if len(group) > 1:
                label += f"-{group[-1]}"
            labels.append(label)
        terms = np.add.reduceat(self.parts, starts, axis=1)
        if self.matches:
            labels.append("match")
            terms = np.column_stack([terms, self.matches])
        return labels, terms

    def _repr_html_(self) -> str:
        """The explanation in a notebook."""
        return explanation_html(self)

    def __str__(self) -> str:
        labels, terms = self.columns()
        totals = terms.sum(0).tolist()
        if self.similarity:
            # The similarity terms of the whole query.
            labels.append("whole")
            totals.append(self.similarity - math.fsum(self.matches))
        # A token may be a line break.
        names = [*(repr(token)[1:-1] for token in self.tokens), "score"]
        width = max(map(len, names))
        head = " ".join(f"{label:>6}" for label in labels)
        lines = [f"{'token':<{width}}  {'total':>7}  {head}"]
        rows = zip(names, [*terms.sum(1), self.score], [*terms, totals], strict=True)
        for name, total, row in rows:
            cells = " ".join(f"{term:>+6.2f}" for term in row)
            lines.append(f"{name:<{width}}  {total:>+7.3f}  {cells}")
        if self.similarity_window is not None:
            start, end = self.similarity_window
            text = " ".join(self.document[start:end].split())
            lines.append(f"match and whole are of characters {start} to {end}: {text}")
        return "\n".join(lines)
