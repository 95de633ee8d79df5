"""Jina-reranker-v2, whose own code was written for transformers 4."""

from transformers.models.xlm_roberta import modeling_xlm_roberta

from rsrank_rag.backends.options import LoadOptions
from rsrank_rag.evaluation.systems.sentence_transformers import CrossEncoder


class JinaReranker(CrossEncoder):
    """The cross-encoder; 0 is a probability of relevance of one half.

    It runs code from the model's repository: read the code first. Errors are those of
    `CrossEncoder`.
    """

    threshold = 0.0
    runs_own_code = True

    def __init__(
        self,
        name: str = "jinaai/jina-reranker-v2-base-multilingual",
        *,
        revision: str | None = None,
        options: LoadOptions | None = None,
    ) -> None:
        _restore_function_of_transformers_4()
        super().__init__(name, revision=revision, options=options)


def _restore_function_of_transformers_4() -> None:
    """Give transformers 5 a function back that the code of Jina-reranker-v2 imports."""
    name = "create_position_ids_from_input_ids"
    if not hasattr(modeling_xlm_roberta, name):
        function = getattr(modeling_xlm_roberta.XLMRobertaEmbeddings, name)
        setattr(modeling_xlm_roberta, name, function)
