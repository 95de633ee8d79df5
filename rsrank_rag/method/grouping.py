"""Which documents and queries share a batch, when several queries are scored at once.

A batch is one of two kinds. In the first, documents that several queries want are read once, and each of these queries
runs over all of them. In the second, each row has a query of its own. The first is for many documents that the same
queries want; the second for everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .batching import Ids
from .template import TokenisedDocument, TokenisedQuery

FEW = 8
"""So few documents that the same queries want would make small batches of the first kind."""

Places = dict[Ids, list[tuple[int, int]]]
"""Where each distinct document stands: its prefix -> (query, document) positions."""


@dataclass(frozen=True, slots=True)
class Row:
    """A document in a batch.

    Attributes:
        ids: Its prefix.
        queries: Those that run over it in this batch.
    """

    ids: Ids
    queries: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Group:
    """Rows that may share batches: all with the same queries, or each with one.

    Attributes:
        queries: All that run in the group.
        rows: Its rows.
    """

    queries: tuple[int, ...]
    rows: list[Row]


def places_of(documents: Sequence[Sequence[TokenisedDocument]]) -> Places:
    """Where each document stands.

    One without tokens is left out: without a document there is no shift, and its score is exactly 0.
    """
    places: Places = {}
    for row, texts in enumerate(documents):
        for column, prompt in enumerate(texts):
            if not prompt.empty:
                places.setdefault(prompt.ids, []).append((row, column))
    return places


def groups_of(places: Places, queries: Sequence[TokenisedQuery], *, joined: bool, keeps: bool) -> list[Group]:
    """Groups, in the order in which they are to be run.

    Args:
        places: Documents and the queries that want them.
        queries: To tell long from short ones: a batch's rows are as wide as its longest query.
        joined: Whether rows with queries of their own can share a batch.
        keeps: Whether a document that was read is kept, so that it may stand in further rows at little cost.
    """
    wanted: dict[tuple[int, ...], list[Ids]] = {}
    for ids, positions in places.items():
        wanted.setdefault(tuple(dict.fromkeys(row for row, _ in positions)), []).append(ids)
    together, first, again = [], [], []
    for rows, documents in wanted.items():
        if joined and (len(rows) == 1 or (keeps and len(documents) < FEW)):
            first += [Row(ids, rows[:1]) for ids in documents]
            again += [Row(ids, (row,)) for ids in documents for row in rows[1:]]
        else:
            together.append(Group(rows, [Row(ids, rows) for ids in documents]))
    return [*together, *_by_length(first, queries), *_by_length(again, queries)]


def _by_length(rows: Iterable[Row], queries: Sequence[TokenisedQuery]) -> list[Group]:
    """Groups of rows with queries of like length."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(len(queries[row.queries[0]].ids).bit_length(), []).append(row)
    return [Group(tuple(dict.fromkeys(row.queries[0] for row in group)), group) for group in found.values()]
