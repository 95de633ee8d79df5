"""Irrelevant candidates for a query: random ones, as in the paper, or hard ones.

The paper's Limitations ask for hard ones. A first stage, BM25 or a bi-encoder, ranks them highest
in the corpus, and nobody has labelled them relevant. Some may be relevant all the same: labels of
large corpora are never complete.
"""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal, get_args

import numpy as np
from pydantic import BaseModel, Field
from typing_extensions import Self

from rsrank_rag.backends.options import LoadOptions
from rsrank_rag.errors import InputError
from rsrank_rag.evaluation.datasets import LabelledDocument, LabelledQuery
from rsrank_rag.evaluation.systems.bm25 import BM25
from rsrank_rag.evaluation.systems.sentence_transformers import BiEncoder

Kind = Literal["random", "bm25", "dense"]


class Negatives(BaseModel, extra="forbid", frozen=True):
    """How irrelevant documents are drawn: at random, or the best of BM25 or of a bi-encoder."""

    kind: Kind = "random"
    # Documents for each query; all documents if the corpus is smaller.
    count: int = Field(default=15, ge=0)
    # For "dense", by Hub id or folder.
    encoder: str = "sentence-transformers/all-MiniLM-L6-v2"
    # Draw from so many documents of the corpus, at random; None for all.
    corpus: int | None = Field(default=None, gt=0)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``random``, ``bm25``, ``dense`` or ``dense:ENCODER``; InputError for all else.

        >>> Negatives.parse("dense:BAAI/bge-m3").encoder
        'BAAI/bge-m3'
        """
        kind, colon, encoder = text.partition(":")
        if kind not in get_args(Kind) or (colon and not (kind == "dense" and encoder)):
            raise InputError(
                f"Negatives are random, bm25, dense or dense:ENCODER (a bi-encoder), not {text!r}."
            )
        return cls.model_validate({"kind": kind, "encoder": encoder} if encoder else {"kind": kind})


def choose(
    negatives: Negatives,
    queries: Sequence[tuple[str, str, Collection[int]]],
    size: int,
    read: Callable[[Sequence[int]], Sequence[str]],
    *,
    seed: int = 0,
    options: LoadOptions | None = None,
) -> list[list[int]]:
    """Rows of each query's irrelevant documents; hard ones best first, random ones in random order.

    Documents that share no word with the query are no hard negatives: if BM25 gives too few, random
    ones follow. What a query gets depends on no other query.

    Args:
        negatives: How many, and of which kind.
        queries: Id, text and the rows of the relevant documents of each.
        size: Rows of the corpus.
        read: Texts of some rows, as a reranker reads them.
        seed: Of everything random.
        options: How to load the bi-encoder.

    Raises:
        BackboneError: The bi-encoder cannot be loaded.
        MissingDependencyError: A library of the first stage is not installed.
    """
    rows: Sequence[int] = range(size)
    if negatives.corpus is not None and negatives.corpus < size:
        rows = sorted(random.Random(f"corpus:{seed}").sample(rows, negatives.corpus))
    ranked: Iterable[list[int]] = ([] for _ in queries)
    if negatives.kind != "random":
        depth = negatives.count + max(
            (len(gold) for _, _, gold in queries), default=0
        )  # enough beside the relevant
        by = (
            _bm25
            if negatives.kind == "bm25"
            else partial(_dense, BiEncoder(negatives.encoder, options=options))
        )
        ranked = by([text for _, text, _ in queries], read(rows), depth)
    negatives_of = []
    for (key, _, gold), best in zip(queries, ranked, strict=True):
        hard = [rows[place] for place in best if rows[place] not in gold][: negatives.count]
        taken, count = (
            {*gold, *hard},
            negatives.count - len(hard),
        )  # so many others, or all there are
        drawn = random.Random(f"{seed}:{key}").sample(rows, min(len(rows), count + len(taken)))
        negatives_of.append([*hard, *[row for row in drawn if row not in taken][:count]])
    return negatives_of


def _bm25(queries: Sequence[str], corpus: Sequence[str], depth: int) -> Iterator[list[int]]:
    """Places of each query's best documents, all of which share a word with it."""
    for scores in map(np.asarray, BM25().scores(queries, corpus)):
        yield [int(row) for row in np.argsort(-scores, kind="stable")[:depth] if scores[row] > 0]


def _dense(
    encoder: BiEncoder, queries: Sequence[str], corpus: Sequence[str], depth: int
) -> Iterator[list[int]]:
    from sentence_transformers.util import semantic_search

    for hits in semantic_search(
        encoder.encode_queries(queries), encoder.encode_documents(corpus), top_k=depth
    ):
        yield [int(hit["corpus_id"]) for hit in hits]


def replace_negatives(
    queries: Sequence[LabelledQuery],
    negatives: Negatives,
    *,
    titles: bool = True,
    seed: int = 0,
    options: LoadOptions | None = None,
) -> list[LabelledQuery]:
    """The queries with their relevant documents and others that are candidates of other queries.

    ``titles``: the first stage reads a document's title in front of its text. Raises as `choose`.
    """
    corpus: dict[tuple[str | None, str], LabelledDocument] = {}
    for query in queries:
        for document in query.documents:
            corpus.setdefault((document.title, document.text), document)
    documents = list(corpus.values())
    place = {key: number for number, key in enumerate(corpus)}
    wanted = [
        (query.id, query.query, {place[d.title, d.text] for d in query.documents if d.relevant})
        for query in queries
    ]

    def read(rows: Sequence[int]) -> list[str]:
        return [documents[row].content() if titles else documents[row].text for row in rows]

    rows_of = choose(negatives, wanted, len(documents), read, seed=seed, options=options)
    changed = []
    for query, rows in zip(queries, rows_of, strict=True):
        # An id may stand for another text at another query.
        others = [
            documents[row].model_copy(update={"id": f"negative-{row}", "relevant": False})
            for row in rows
        ]
        mixed = [document for document in query.documents if document.relevant] + others
        random.Random(f"order:{seed}:{query.id}").shuffle(mixed)
        changed.append(query.model_copy(update={"documents": tuple(mixed)}))
    return changed
