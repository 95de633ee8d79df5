"""BM25 behind the same contract."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ...errors import required
from ...reranker import Reranker


class BM25(Reranker):
    """Okapi BM25 by bm25s, with English stop words. It has no native threshold.

    The corpus of a call, from which term frequencies are counted, is the documents of that call.
    """

    threshold: float | None = None

    def __init__(self) -> None:
        self._bm25s = required("bm25s", "BM25 needs bm25s.", "eval")

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """BM25 scores; 0 where no word is shared."""
        return [float(score) for score in next(self.scores([query], documents))]

    def scores(self, queries: Sequence[str], documents: Sequence[str]) -> Iterator[Any]:
        """Scores of all documents for each query, from one index: a list or a NumPy array each."""
        tokenize = partial(
            self._bm25s.tokenize, stopwords="en", return_ids=False, show_progress=False
        )
        corpus = tokenize(list(documents))
        index = self._bm25s.BM25()
        if any(corpus):
            index.index(corpus, show_progress=False)
        for words in tokenize(list(queries)):
            if words and any(corpus):
                yield index.get_scores(words)
            else:
                yield [0.0] * len(documents)
