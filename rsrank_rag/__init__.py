"""RSRank: a reranker that drops irrelevant documents."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .artifact.config import TrainingRecord
    from .backends.options import LoadOptions
    from .errors import RSRankError
    from .langchain import RSRankCompressor, RSRankRetriever
    from .llama_index import RSRankPostprocessor
    from .method.template import Template
    from .ranking.explanation import Explanation
    from .remote.client import RemoteReranker
    from .reranker import Fallback, Pair, RankedDocument, RankResult, Reranker, Rule, Scored
    from .rsrank import RSRank

__version__ = "0.1.0"

_HOME = {
    "Explanation": "ranking.explanation",
    "Fallback": "reranker",
    "LoadOptions": "backends.options",
    "Pair": "reranker",
    "RSRank": "rsrank",
    "RSRankCompressor": "langchain",
    "RSRankError": "errors",
    "RSRankPostprocessor": "llama_index",
    "RSRankRetriever": "langchain",
    "RankResult": "reranker",
    "RankedDocument": "reranker",
    "RemoteReranker": "remote.client",
    "Reranker": "reranker",
    "Rule": "reranker",
    "Scored": "reranker",
    "Template": "method.template",
    "TrainingRecord": "artifact.config",
}

# Adapters are listed only where their frameworks are installed, because `from rsrank_rag import *`
# and `inspect.getmembers` have to work without them.
__all__ = [
    "Explanation",
    "Fallback",
    "LoadOptions",
    "Pair",
    "RSRank",
    "RSRankError",
    "RankResult",
    "RankedDocument",
    "RemoteReranker",
    "Reranker",
    "Rule",
    "Scored",
    "Template",
    "TrainingRecord",
    "__version__",
]
if find_spec("langchain_core"):
    __all__ += ["RSRankCompressor", "RSRankRetriever"]
if find_spec("llama_index"):
    __all__ += ["RSRankPostprocessor"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
