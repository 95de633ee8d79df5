"""LangChain's cross-encoder interface, for code that already has a ``CrossEncoderReranker``."""

from operator import methodcaller

from ..errors import MissingDependencyError
from ..reranker import Pair
from .settings import ModelAdapter

try:
    from langchain_core.cross_encoders import BaseCrossEncoder
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        "RSRankCrossEncoder needs LangChain's BaseCrossEncoder, which this langchain-core does not "
        "have. Install a newer one with: pip install -U langchain-core"
    ) from error


class RSRankCrossEncoder(ModelAdapter, BaseCrossEncoder):
    """Scores pairs for LangChain's ``CrossEncoderReranker``, which keeps a fixed ``top_n``.

    `RSRankCompressor` drops below zero instead, traces its runs and has asynchronous methods.
    """

    def score(self, text_pairs: list[tuple[str, str]]) -> list[float]:
        """Score (query, document) pairs, in input order; a score above 0 means relevant.

        Raises:
            InputError: A query is empty or too long.
            ScoringError: A pair could not be scored; its position is given.
        """
        pairs = [Pair(query, document) for query, document in text_pairs]
        scores = self._call(methodcaller("score_pairs", pairs))
        return [pair.score for pair in scores]
