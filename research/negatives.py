"""Irrelevant candidates for a query: random ones, as in the paper, or hard ones.

The paper's Limitations ask for hard candidates. A first stage, BM25 or a bi-encoder, ranks hard
candidates highest in the corpus, and nobody has labelled them relevant. Some may be relevant all
the same: labels of large corpora are never complete.
"""

import itertools
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal, get_args

import numpy as np
from pydantic import BaseModel, Field
from typing_extensions import Self

from rsrank_rag.backends.options import LoadOptions
from rsrank_rag.errors import InputError, required
from rsrank_rag.evaluation.datasets import LabelledDocument, LabelledQuery
from rsrank_rag.evaluation.statistics import Array
from rsrank_rag.evaluation.systems.sentence_transformers import BiEncoder

Kind = Literal["random", "bm25", "dense"]


class Negatives(BaseModel, extra="forbid", frozen=True):
    """How irrelevant documents are drawn: at random, or the best of BM25 or of a bi-encoder.

    Attributes:
        kind: The first stage, or "random".
        count: Documents for each query; all documents if the corpus is smaller.
        encoder: Hub id or folder of the bi-encoder, for "dense".
        corpus: Number of documents of the corpus, at random, that candidates are drawn from; None
            for all.
    """

    kind: Kind = "random"
    count: int = Field(default=15, ge=0)
    encoder: str = "sentence-transformers/all-MiniLM-L6-v2"
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
        fields = {"kind": kind}
        if encoder:
            fields["encoder"] = encoder
        return cls.model_validate(fields)


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
    ones follow. The negatives of a query depend on no other query.

    Args:
        negatives: How many, and of which kind.
        queries: Id, text and the rows of the relevant documents of each.
        size: Rows of the corpus.
        read: Texts of some rows, as a reranker reads them.
        seed: Seed of all random choices.
        options: How to load the bi-encoder.

    Raises:
        BackboneError: The bi-encoder cannot be loaded.
        MissingDependencyError: A library of the first stage is not installed.
    """
    rows: Sequence[int] = range(size)
    if negatives.corpus is not None and negatives.corpus < size:
        rows = sorted(random.Random(f"corpus:{seed}").sample(rows, negatives.corpus))
    # The first stage must rank so many documents that enough are left without the relevant ones.
    depth = negatives.count
    texts = []
    for _, text, relevant in queries:
        depth = max(depth, negatives.count + len(relevant))
        texts.append(text)
    ranked: Iterable[list[int]] = itertools.repeat([], len(texts))
    if negatives.kind == "bm25":
        ranked = _bm25(texts, read(rows), depth)
    elif negatives.kind == "dense":
        encoder = BiEncoder(negatives.encoder, options=options)
        ranked = _dense(encoder, texts, read(rows), depth)
    negatives_of = []
    for (key, _, relevant), best in zip(queries, ranked, strict=True):
        hard = without([rows[place] for place in best], relevant)[: negatives.count]
        excluded = {*relevant, *hard}
        count = negatives.count - len(hard)
        drawn = random.Random(f"{seed}:{key}").sample(rows, min(len(rows), count + len(excluded)))
        negatives_of.append([*hard, *without(drawn, excluded)[:count]])
    return negatives_of


def without(rows: Iterable[int], excluded: Collection[int]) -> list[int]:
    """The rows that are not excluded, in their order."""
    return [row for row in rows if row not in excluded]


def _bm25(queries: Sequence[str], corpus: Sequence[str], depth: int) -> Iterator[list[int]]:
    """Places of each query's best documents, all of which share a word with it."""
    for scores in bm25_scores(queries, corpus):
        best = np.argsort(-scores, kind="stable")[:depth]
        yield best[scores[best] > 0].tolist()


def bm25_scores(queries: Sequence[str], corpus: Sequence[str]) -> Iterator[Array]:
    """Scores of all documents for each query as `BM25` gives them, from one index."""
    bm25s = required("bm25s", "BM25 needs bm25s.", "eval")
    tokenize = partial(bm25s.tokenize, stopwords="en", return_ids=False, show_progress=False)
    words_of_corpus = tokenize(list(corpus))
    index = bm25s.BM25()
    if any(words_of_corpus):
        index.index(words_of_corpus, show_progress=False)
    for words in tokenize(list(queries)):
        if words and any(words_of_corpus):
            yield index.get_scores(words)
        else:
            yield np.zeros(len(corpus))


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
    """The queries with their relevant documents and irrelevant candidates of other queries.

    Args:
        queries: Labelled queries.
        negatives: How many irrelevant documents, and of which kind.
        titles: Whether the first stage reads a document's title in front of its text.
        seed: Seed of all random choices.
        options: How to load the bi-encoder.

    Raises:
        BackboneError: The bi-encoder cannot be loaded.
        MissingDependencyError: A library of the first stage is not installed.
    """
    corpus: dict[tuple[str | None, str], LabelledDocument] = {}
    for query in queries:
        for document in query.documents:
            corpus.setdefault((document.title, document.text), document)
    documents = list(corpus.values())
    place = dict(zip(corpus, range(len(corpus)), strict=True))
    keyed = []
    for query in queries:
        relevant = set()
        for document in query.documents:
            if document.relevant:
                relevant.add(place[document.title, document.text])
        keyed.append((query.id, query.query, relevant))

    def read(rows: Sequence[int]) -> list[str]:
        return [documents[row].content() if titles else documents[row].text for row in rows]

    negatives_of = choose(negatives, keyed, len(documents), read, seed=seed, options=options)
    changed = []
    for query, rows in zip(queries, negatives_of, strict=True):
        mixed = [document for document in query.documents if document.relevant]
        for row in rows:
            # An id may stand for another text at another query.
            update = {"id": f"negative-{row}", "relevant": False}
            mixed.append(documents[row].model_copy(update=update))
        random.Random(f"order:{seed}:{query.id}").shuffle(mixed)
        changed.append(query.model_copy(update={"documents": tuple(mixed)}))
    return changed
