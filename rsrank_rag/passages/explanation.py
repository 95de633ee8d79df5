"""Why a document got its score: the score's exact parts per query token, layer and head."""

import html
import math
from collections.abc import Iterable
from dataclasses import dataclass


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
        parts: (T, L) nested tuples, each summed over heads and divided by T.
        head_parts: (T, L, H) nested tuples, the same per KV head.
        agreement: What the document's agreement with the query adds, less the border; 0 for models without.
        matches: (T,), what of it each query token adds by its match in the document; empty for models without.
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

    @property
    def by_token(self) -> dict[int, float]:
        """Contribution of each query token's shifts, by its position."""
        return {i: math.fsum(row) for i, row in enumerate(self.parts)}

    @property
    def by_layer(self) -> dict[int, float]:
        """Contribution of each layer."""
        return {
            layer: math.fsum(row[i] for row in self.parts) for i, layer in enumerate(self.layers)
        }

    def columns(self, most: int = 8) -> tuple[list[str], list[list[float]]]:
        """Parts with neighbouring layers joined, to fit a terminal, and matches.

        Gives labels such as ``L1``, ``L1-5`` or ``match``, and a row of parts for each token. `most`: largest number
        of columns for layers.
        """
        size = -(-len(self.layers) // most)
        groups = [slice(start, start + size) for start in range(0, len(self.layers), size)]
        ends = [(self.layers[group][0], self.layers[group][-1]) for group in groups]
        labels = [f"L{first}" if first == last else f"L{first}-{last}" for first, last in ends]
        rows = [[math.fsum(row[group]) for group in groups] for row in self.parts]
        if self.matches:
            return [*labels, "match"], [
                [*row, match] for row, match in zip(rows, self.matches, strict=True)
            ]
        return labels, rows

    @property
    def _whole(self) -> list[float]:
        """What is of the whole query and of no token, if anything is."""
        return [self.agreement - math.fsum(self.matches)] * bool(self.agreement)

    def __str__(self) -> str:
        labels, rows = self.columns()
        width = max([len(token) for token in self.tokens] + [5])

        def line(name: str, total: float, parts: Iterable[float]) -> str:
            return f"{name:<{width}}  {total:>+7.3f}  " + " ".join(
                f"{part:>+6.2f}" for part in parts
            )

        names = [*labels, *["whole"] * len(self._whole)]
        head = f"{'token':<{width}}  {'total':>7}  " + " ".join(f"{name:>6}" for name in names)
        body = [
            line(token, math.fsum(row), row) for token, row in zip(self.tokens, rows, strict=True)
        ]
        total = [*map(math.fsum, zip(*rows, strict=True)), *self._whole]
        return "\n".join([head, *body, line("score", self.score, total)])

    def _repr_html_(self) -> str:
        """A table in a notebook: green cells raise the score, red ones lower it."""
        labels, rows = self.columns(len(self.layers) or 1)
        largest = max((abs(part) for row in rows for part in row), default=0.0) or 1.0

        def cell(value: float, scale: float) -> str:
            colour = "34,139,34" if value > 0 else "200,40,40"
            shade = min(abs(value) / scale, 1.0)
            return f'<td style="text-align:right;background:rgba({colour},{shade:.2f})">{value:+.2f}</td>'

        verdict = "kept" if self.score > 0 else "dropped"
        own = self._whole
        head = "".join(f"<th>{label}</th>" for label in labels) + "<th>whole</th>" * len(own)
        body = "".join(
            f"<tr><th>{html.escape(token)}</th>{cell(math.fsum(row), largest * len(row))}"
            + "".join(cell(part, largest) for part in row)
            + "<td></td>" * len(own)
            + "</tr>"
            for token, row in zip(self.tokens, rows, strict=True)
        )
        foot = "".join(
            f"<td>{part:+.2f}</td>" for part in (*map(math.fsum, zip(*rows, strict=True)), *own)
        )
        cut = " (truncated)" if self.truncated else ""
        return (
            f"<p><b>{html.escape(self.query)}</b><br>{html.escape(self.document[:300])}{cut}</p>"
            f"<table><tr><th>token</th><th>total</th>{head}</tr>{body}"
            f"<tr><th>{verdict}</th><th>{self.score:+.2f}</th>{foot}</tr></table>"
        )
