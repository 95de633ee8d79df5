"""What the recipes of this folder will take, without the Hub."""

from transformers import AutoTokenizer, Qwen3Config

from rsrank_rag.artifact import hub
from rsrank_rag.artifact.config import INSIDE
from rsrank_rag.errors import InputError
from rsrank_rag.evaluation.datasets import LabelledDocument, LabelledQuery
from rsrank_rag.training.estimate import Estimate, estimate

from .recipe import ResearchRecipe, SetPart, subsample

# Documents of a query, tokens of a query and tokens of a document in the paper's sets: means of
# samples, with the tokenizer of `mini`.
SIZES = {
    "2wiki": (33, 17, 31),
    "hotpotqa": (43, 20, 34),
    "musique": (20, 21, 113),
    "fiqa": (18, 14, 241),
    "nfcorpus": (59, 5, 355),
    "fever": (17, 11, 34),
}

# What differs from the defaults of `Qwen3Config`, which are those of Qwen3-8B up to the layers.
SHAPES = {
    "Qwen/Qwen3-8B": {"num_hidden_layers": 36, "intermediate_size": 12_288},
    "Qwen/Qwen3-0.6B": {
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
    },
}


def estimate_recipe(recipe: ResearchRecipe) -> Estimate:
    """What a recipe will take; sets of the Hub have queries of mean length.

    Raises:
        InputError: The sizes of a set are not known.
        BackboneError: The language model is neither known nor on this machine.
    """
    queries: list[LabelledQuery] = []
    for part in recipe.data:
        if part.dataset is None:
            queries += part.load(recipe.fit.seed, titles=recipe.features.titles)
        else:
            queries += mean_queries(part)
    queries = subsample(queries, recipe.features.max_documents, recipe.fit.seed)
    model = None
    if recipe.base is None and recipe.model.name in SHAPES:
        shape = {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            **SHAPES[recipe.model.name],
        }
        # The tokenizer of `mini` splits texts into about as many tokens.
        tokenizer = AutoTokenizer.from_pretrained(hub.BUILTIN / "mini" / INSIDE)
        model = (Qwen3Config(**shape), tokenizer)
    return estimate(recipe, queries, model, recipe.features.max_tokens)


def mean_queries(part: SetPart) -> list[LabelledQuery]:
    """As many queries as a set has, all of its mean length."""
    if part.dataset not in SIZES or part.queries is None:
        raise InputError(
            f"The sizes of {part.title} are not known without the Hub. Known are "
            f"{', '.join(SIZES)}, with a number of queries."
        )
    documents, query_tokens, document_tokens = SIZES[part.dataset]
    texts = []
    for number in range(documents):
        text = "a " * document_tokens + str(number)
        texts.append(LabelledDocument(id=str(number), text=text, relevant=number < 2))
    queries = []
    for number in range(part.queries):
        name = f"{part.title} {number}"
        queries.append(LabelledQuery(id=name, query="a " * query_tokens, documents=tuple(texts)))
    return queries
