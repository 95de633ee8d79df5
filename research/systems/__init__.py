"""Systems that only the paper's experiments compare with.

Importing this module makes their names known to `rsrank_rag.adapters.systems`.
"""

from rsrank_rag.adapters.systems import KINDS, Kind

QWEN_SIZES = ("0.6B", "4B", "8B")
MONOT5_SIZES = ("base", "3b")

KINDS.update(
    {
        "oracle": Kind("research.reproduction.oracle.OracleSimilarity", wraps_ranker=True),
        "qwen3-reranker": Kind(
            "research.systems.prompted.Qwen3Reranker",
            short={size.lower(): f"Qwen/Qwen3-Reranker-{size}" for size in QWEN_SIZES},
        ),
        "monot5": Kind(
            "research.systems.prompted.MonoT5",
            short={size: f"castorini/monot5-{size}-msmarco" for size in MONOT5_SIZES},
        ),
        "llm2vec-gen": Kind(
            "research.systems.llm2vec_gen.LLM2VecGen",
            default="McGill-NLP/LLM2Vec-Gen-Qwen3-8B",
        ),
    }
)
