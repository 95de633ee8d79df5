"""What the recipes of this folder will take, without the Hub and the language model's weights."""

import timeit
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, Qwen3Config

from rsrank_rag.artifact import hub
from rsrank_rag.artifact.config import INSIDE
from rsrank_rag.backends.torch.loading import LOAD_ERRORS, shortened
from rsrank_rag.errors import BackboneError, InputError
from rsrank_rag.evaluation.datasets import LabelledDocument, LabelledQuery
from rsrank_rag.method.template import PromptTokenizer
from rsrank_rag.training.estimate import Estimate
from rsrank_rag.training.features import document_ids

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

# A model reaches about this share of the speed of a large matrix product.
EFFICIENCY = 0.5

# Bytes of a stored number of the features.
FEATURE_BYTES = 2

# Operations for each weight: of a run forwards, and of one forwards and backwards.
FORWARD = 2
TRAINING = 6


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
    if recipe.model.name not in SHAPES:
        return estimate(recipe, queries, *_read_model(recipe.model.name))
    shape = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        **SHAPES[recipe.model.name],
    }
    # The tokenizer of `mini` splits texts into about as many tokens.
    tokenizer = AutoTokenizer.from_pretrained(hub.BUILTIN / "mini" / INSIDE)
    return estimate(recipe, queries, Qwen3Config(**shape), tokenizer)


def estimate(
    recipe: ResearchRecipe, queries: Sequence[LabelledQuery], config: Any, tokenizer: Any
) -> Estimate:
    """Disk, memory and time of a recipe.

    Args:
        recipe: What to do.
        queries: Its queries.
        config: The language model's config.
        tokenizer: Its tokenizer.

    Raises:
        InputError: A query is empty or too long, or the recipe fine-tunes an artifact.
    """
    if recipe.base is not None:
        raise InputError(f"For a recipe with a base ({recipe.base}), call rsrank train --dry-run.")
    part = recipe.model
    text = config.get_text_config()
    layers = recipe.features.last_layer or text.num_hidden_layers - 1
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(shortened(text, layers + 1))
    most = min(part.max_length or text.max_position_embeddings, text.max_position_embeddings)
    prompts = PromptTokenizer(
        tokenizer, recipe.template, max_length=most, shared_positions=text.model_type != "bert"
    )
    most_tokens = recipe.features.max_tokens
    tokens = 0
    rows = 0
    for query in queries:
        tokenised = prompts.query(query.query)
        documents = document_ids(prompts, query, len(tokenised.ids))
        runs = set(documents)
        tokens += sum(map(len, runs)) + len(runs) * len(tokenised.ids)
        rows += len(documents) * min(tokenised.length, most_tokens or tokenised.length)
    stored = rows * layers * _value_size(text)
    options = part.load_options()
    bits = {"int8": 8, "nf4": 4}.get(options.quantised or "", 8 * options.resolved_dtype().itemsize)
    weights = sum(parameter.numel() for parameter in model.parameters())
    reading = FORWARD * tokens * (weights - model.get_input_embeddings().weight.numel())
    training = TRAINING * stored * recipe.fit.projection_dim * recipe.fit.epochs
    speed = EFFICIENCY * _operations_a_second(options.resolved_device())
    return Estimate(
        queries=len(queries),
        pairs=sum(len(query.documents) for query in queries),
        disk=FEATURE_BYTES * stored,
        memory=weights * bits // 8,
        hours=(reading + training) / speed / 3600,
    )


def _read_model(name: str) -> tuple[Any, Any]:
    try:
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
        return config, AutoTokenizer.from_pretrained(name, local_files_only=True)
    except LOAD_ERRORS as error:
        raise BackboneError(
            f"The config and the tokenizer of {name} are not on this machine: {error}. Download "
            f"them first: hf download {name} --include '*.json'"
        ) from error


def _value_size(config: Any) -> int:
    """Numbers of a token's value vectors in a layer, H * D."""
    attributes = config.to_dict()
    heads = attributes["num_attention_heads"]
    head_dim = attributes.get("head_dim") or attributes["hidden_size"] // heads
    return int(attributes.get("num_key_value_heads") or heads) * int(head_dim)


def _operations_a_second(device: torch.device) -> float:
    """Floating-point operations of a large matrix product a second, here and now."""
    size = 8192 if device.type == "cuda" else 1024
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    # `item` waits for the device.
    seconds = min(timeit.repeat(lambda: (matrix @ matrix)[0, 0].item(), number=1, repeat=4))
    return 2.0 * size**3 / seconds


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
