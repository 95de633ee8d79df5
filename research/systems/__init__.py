"""Systems that only the paper's experiments compare with.

Importing this module makes their names known to `rsrank_rag.adapters.kinds`.
"""

from rsrank_rag.adapters.kinds import KINDS, Kind

KINDS.update(
    {
        "jina-reranker-v2": Kind(
            "research.systems.jina.JinaReranker", "jinaai/jina-reranker-v2-base-multilingual"
        ),
        "qwen3-reranker": Kind("research.systems.prompted.Qwen3Reranker"),
        "monot5": Kind("research.systems.prompted.MonoT5"),
    }
)
