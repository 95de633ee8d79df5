"""RSRank: rerank by how a document shifts a language model's view of the query, and drop what scores below zero."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import needs_the_whole_package

if TYPE_CHECKING:
    from .artifact.config import TrainingRecord
    from .errors import RSRankError
    from .langchain import RSRankCompressor as RSRankCompressor
    from .language_model.options import LoadOptions
    from .llama_index import RSRankPostprocessor as RSRankPostprocessor
    from .method.explanation import Explanation
    from .method.projection import Projection
    from .method.template import Template
    from .reranker import RankedDocument, RankResult, Reranker
    from .rsrank import RSRank

__version__ = "0.1.0"

_HOME = {
    "Explanation": "method.explanation",
    "LoadOptions": "language_model.options",
    "Projection": "method.projection",
    "RSRank": "rsrank",
    "RSRankCompressor": "langchain",
    "RSRankError": "errors",
    "RSRankPostprocessor": "llama_index",
    "RankResult": "reranker",
    "RankedDocument": "reranker",
    "Reranker": "reranker",
    "Template": "method.template",
    "TrainingRecord": "artifact.config",
}

# Without the adapters: `from rsrank_rag import *` has to work where their frameworks are not installed.
__all__ = [
    "Explanation",
    "LoadOptions",
    "Projection",
    "RSRank",
    "RSRankError",
    "RankResult",
    "RankedDocument",
    "Reranker",
    "Template",
    "TrainingRecord",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch takes seconds."""
    if name in _HOME:
        with needs_the_whole_package():
            import_module(".language_model.threads", __name__).use_threads()
            return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
