"""LangChain's cross-encoder interface, for code that already has a ``CrossEncoderReranker``."""

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import MissingDependencyError
from ..reranker import Pair
from .settings import ModelAdapter

HOMES = (
    "langchain_core.cross_encoders",
    "langchain_classic.retrievers.document_compressors.cross_encoder",
    "langchain.retrievers.document_compressors.cross_encoder",
)
"""Where the base class stands, newest releases first."""


def _base_class() -> Any:
    for home in HOMES:
        with suppress(ModuleNotFoundError):
            return import_module(home).BaseCrossEncoder
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
        """Score (query, document) pairs, in input order; above 0 means relevant; see `Reranker.score_pairs`."""
        pairs = [Pair(query, document) for query, document in text_pairs]
        return [scored.score for scored in self._run(lambda reranker: reranker.score_pairs(pairs))]
