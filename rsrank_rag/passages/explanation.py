"""Why a document got its score: the exact terms of the score per query token, layer and head."""

import math
from dataclasses import dataclass

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
        agreement: The sum of the similarity terms, with the bias; 0 without a fusion layer.
        matches: The MaxSim term of each query token, (T,), which is part of ``agreement``; empty
            without a fusion layer.
    """

    query: str
    document: str
    score: float
    truncated: bool
    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    parts: tuple[tuple[float, ...], ...]
    head_parts: tuple[tuple[tuple[float, ...], ...], ...]
    agreement: float = 0.0
    matches: tuple[float, ...] = ()

    def columns(self, most: int = TERMINAL_COLUMNS) -> tuple[list[str], list[list[float]]]:
        """Labels such as ``L1``, ``L1-5`` or ``match``, and a row of terms for each token.

        ``most``: the largest number of columns for layers; more layers are joined.
        """
        size = -(-len(self.layers) // most)
        labels: list[str] = []
        rows: list[list[float]] = [[] for _ in self.parts]
        for start in range(0, len(self.layers), size):
            group = self.layers[start : start + size]
            label = f"L{group[0]}"
            if len(group) > 1:
                label += f"-{group[-1]}"
            labels.append(label)
            for row, part in zip(rows, self.parts, strict=True):
                row.append(math.fsum(part[start : start + size]))
        if self.matches:
            labels.append("match")
            for row, match in zip(rows, self.matches, strict=True):
                row.append(match)
        return labels, rows

    def _totals(self, rows: list[list[float]]) -> list[float]:
        """The sum of each column, and the terms of the whole query, if there are any."""
        totals = [math.fsum(column) for column in zip(*rows, strict=True)]
        if self.agreement:
            totals.append(self.agreement - math.fsum(self.matches))
        return totals

    def __str__(self) -> str:
        labels, rows = self.columns()
        if self.agreement:
            labels.append("whole")
        width = max([len(token) for token in self.tokens] + [5])
        head = " ".join(f"{label:>6}" for label in labels)
        lines = [f"{'token':<{width}}  {'total':>7}  {head}"]
        table = [(token, math.fsum(row), row) for token, row in zip(self.tokens, rows, strict=True)]
        table.append(("score", self.score, self._totals(rows)))
        for name, total, terms in table:
            cells = " ".join(f"{term:>+6.2f}" for term in terms)
            lines.append(f"{name:<{width}}  {total:>+7.3f}  {cells}")
        return "\n".join(lines)
