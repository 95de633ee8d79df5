"""Other systems behind the same contract: BM25 and sentence-transformers models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import BackboneError, MissingDependencyError
from ..reranker import Reranker


class BM25(Reranker):
    """Okapi BM25 with the candidates themselves as the corpus (bm25s, English stop words). No natural threshold.

    Raises:
        MissingDependencyError: bm25s is not installed.
    """

    def __init__(self) -> None:
        try:
            import bm25s
        except ImportError:
            raise MissingDependencyError("BM25 needs bm25s. Install with: pip install 'rsrank-rag[eval]'") from None
        self._bm25s: Any = bm25s

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """BM25 scores; 0 where no word is shared."""

        def tokenize(texts: list[str]) -> list[list[str]]:
            found: list[list[str]] = self._bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)
            return found

        words, corpus = tokenize([query])[0], tokenize(list(documents))
        if not words or not any(corpus):
            return [0.0] * len(documents)
        index = self._bm25s.BM25()
        index.index(corpus, show_progress=False)
        return [float(score) for score in index.get_scores(words)]


class BiEncoder(Reranker):
    """Cosine of sentence embeddings (sentence-transformers). No natural threshold.

    Args:
        name: Hub id or local folder.
        device: Torch device; None for the best one present.

    Raises:
        BackboneError: The model cannot be loaded.
        MissingDependencyError: sentence-transformers is not installed.
    """

    def __init__(self, name: str, *, device: str | None = None) -> None:
        self._model = _load("SentenceTransformer", name, device)

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """Cosine of query and document."""
        if not documents:
            return []
        texts = [query, *documents]
        vectors = self._model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
        return [float(score) for score in vectors[1:] @ vectors[0]]


class CrossEncoder(Reranker):
    """A sentence-transformers cross-encoder, by its raw output.

    Args:
        name: Hub id or local folder.
        device: Torch device; None for the best one present.

    Raises:
        BackboneError: The model cannot be loaded.
        MissingDependencyError: sentence-transformers is not installed.
    """

    def __init__(self, name: str, *, device: str | None = None) -> None:
        from torch.nn import Identity

        self._model = _load("CrossEncoder", name, device)
        self._raw = Identity()

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """The model's logit."""
        if not documents:
            return []
        pairs = [(query, document) for document in documents]
        scores = self._model.predict(pairs, activation_fn=self._raw, show_progress_bar=False)
        return [float(score) for score in scores]


def _load(kind: str, name: str, device: str | None) -> Any:
    try:
        import sentence_transformers
    except ImportError:
        raise MissingDependencyError(
            "Bi-encoders and cross-encoders need sentence-transformers. Install with: pip install 'rsrank-rag[eval]'"
        ) from None
    try:
        return getattr(sentence_transformers, kind)(name, device=device)
    except (OSError, ValueError, RuntimeError) as error:
        raise BackboneError(f"{name!r} could not be loaded as a {kind}: {error}") from error
