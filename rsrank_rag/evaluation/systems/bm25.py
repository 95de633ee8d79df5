"""BM25 behind the same contract."""

from collections.abc import Sequence
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
        (words,) = self._words([query])
        corpus = self._words(documents)
        if not words or not any(corpus):
            return [0.0] * len(documents)
        index = self._bm25s.BM25()
        index.index(corpus, show_progress=False)
        return [float(score) for score in index.get_scores(words)]

    def _words(self, texts: Sequence[str]) -> Any:
        return self._bm25s.tokenize(
            list(texts), stopwords="en", return_ids=False, show_progress=False
        )
