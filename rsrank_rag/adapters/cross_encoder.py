"""LangChain's cross-encoder interface, for code that already has a ``CrossEncoderReranker``."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import MissingDependencyError
from ..reranker import RankResult, Reranker
from .settings import ModelAdapter

HOMES = (
    "langchain_core.cross_encoders",
    "langchain_classic.retrievers.document_compressors.cross_encoder",
    "langchain.retrievers.document_compressors.cross_encoder",
)
"""Where the base class stands, newest releases first."""


def _base_class() -> Any:
    for home in HOMES:
        try:
            return import_module(home).BaseCrossEncoder
        except ModuleNotFoundError:
            continue
    raise MissingDependencyError(
        "RSRankCrossEncoder needs LangChain's BaseCrossEncoder, which this langchain-core does not have. Install a "
        "newer one with: pip install -U langchain-core"
    )


if TYPE_CHECKING:
    from langchain_core.cross_encoders import BaseCrossEncoder
else:
    BaseCrossEncoder = _base_class()


class RSRankCrossEncoder(ModelAdapter, BaseCrossEncoder):
    """Scores pairs for LangChain's ``CrossEncoderReranker``, which keeps its own fixed ``top_n``.

    `RSRankCompressor` drops at zero instead, and traces, and does not block asynchronous callers.
    """

    def score(self, text_pairs: list[tuple[str, str]]) -> list[float]:
        """Score (query, document) pairs, in input order; above 0 means relevant.

        Raises:
            InputError: An empty or too long query.
            ScoringError: A document could not be scored. Its index counts the documents of its query.
            RemoteError: With ``base_url``, there was no usable answer in time.
        """
        scores = [0.0] * len(text_pairs)
        places: dict[str, list[int]] = {}
        for place, (query, _) in enumerate(text_pairs):
            places.setdefault(query, []).append(place)
        for query, wanted in places.items():
            documents = [text_pairs[place][1] for place in wanted]
            result = self._run(partial(_rank_only, query=query, documents=documents))
            for document in result.kept:
                scores[wanted[document.index]] = document.score
        return scores


def _rank_only(reranker: Reranker, query: str, documents: list[str]) -> RankResult:
    return reranker.rank(query, documents, threshold=None)
