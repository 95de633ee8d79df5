"""What a recipe will take on this machine, without loading the language model's weights."""

import timeit
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from ..artifact import hub
from ..artifact.config import INSIDE
from ..backends.torch.loading import LOAD_ERRORS, shortened
from ..errors import BackboneError
from ..evaluation.datasets import LabelledQuery
from ..method.template import PromptTokenizer
from .features import document_ids
from .recipe import Recipe

# A model reaches about this share of the speed of a large matrix product.
EFFICIENCY = 0.5

# Bytes of a stored number of the features.
FEATURE_BYTES = 2

# Operations for each weight: of a run forwards, and of one forwards and backwards.
FORWARD = 2
TRAINING = 6


@dataclass(frozen=True)
class Estimate:
    """What a recipe will take.

    Attributes:
        queries: Labelled queries.
        pairs: Their documents.
        tokens: Tokens that the language model runs.
        disk: Bytes of the features.
        memory: Bytes of the language model's weights.
        hours: Of reading features and training, if this machine does nothing else.
    """

    queries: int
    pairs: int
    tokens: int
    disk: int
    memory: int
    hours: float

    def __str__(self) -> str:
        return (
            f"queries  {self.queries:,}\n"
            f"pairs    {self.pairs:,}, with {self.tokens:,} tokens\n"
            f"disk     {self.disk / 1e9:,.2f} GB for features\n"
            f"memory   {self.memory / 1e9:,.2f} GB for the language model's weights, and batches\n"
            f"time     about {self.hours:,.2f} hours on this machine"
        )


def estimate(
    recipe: Recipe,
    queries: Sequence[LabelledQuery],
    model: tuple[Any, Any] | None = None,
    most_tokens: int | None = None,
) -> Estimate:
    """Disk, memory and time of a recipe, from files on this machine.

    Args:
        recipe: What to do.
        queries: Its queries.
        model: The language model's config and tokenizer, of transformers; None to read them.
        most_tokens: Features are stored of at most so many tokens of a query.

    Raises:
        ArtifactError: The recipe's base cannot be read.
        BackboneError: The language model's config and tokenizer are not on this machine.
        InputError: A query is empty or too long.
    """
    part = recipe.model
    name = part.name
    template = recipe.template
    dimension = recipe.fit.projection_dim
    passes = recipe.fit.epochs
    last_layer = recipe.features.last_layer
    layers = 0
    if recipe.base is not None:
        folder = hub.resolve(recipe.base, part.revision)
        base = hub.read_config(folder)
        name = str(folder / INSIDE) if base.backbone.name == INSIDE else base.backbone.name
        template = base.template
        dimension = base.projection_dim
        tuning = recipe.fine_tuning
        passes = (tuning.folds + 1) * tuning.iterations
        last_layer = base.layers[-1]
        layers = len(base.layers)
    config, tokenizer = model or _read_model(name)
    text = config.get_text_config()
    last_layer = last_layer or text.num_hidden_layers - 1
    with torch.device("meta"):
        shape = transformers.AutoModel.from_config(shortened(text, last_layer + 1))
    weights = sum(parameter.numel() for parameter in shape.parameters())
    run_weights = weights - shape.get_input_embeddings().weight.numel()
    value_size = _value_size(text)
    most = min(part.max_length or text.max_position_embeddings, text.max_position_embeddings)
    prompts = PromptTokenizer(
        tokenizer, template, max_length=most, shared_positions=text.model_type != "bert"
    )
    tokens = 0
    rows = 0
    for query in queries:
        tokenised = prompts.query(query.query)
        documents = document_ids(prompts, query, len(tokenised.ids))
        runs = set(documents)
        tokens += sum(map(len, runs)) + len(runs) * len(tokenised.ids)
        rows += len(documents) * min(tokenised.length, most_tokens or tokenised.length)
    stored = rows * (layers or last_layer) * value_size
    options = part.load_options()
    bits = {"int8": 8, "nf4": 4}.get(options.quantised or "", 8 * options.resolved_dtype().itemsize)
    operations = FORWARD * run_weights * tokens + TRAINING * stored * dimension * passes
    return Estimate(
        queries=len(queries),
        pairs=sum(len(query.documents) for query in queries),
        tokens=tokens,
        disk=FEATURE_BYTES * stored,
        memory=weights * bits // 8,
        hours=operations / _operations_a_second(options.resolved_device()) / EFFICIENCY / 3600,
    )


def _read_model(name: str) -> tuple[Any, Any]:
    try:
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
        return config, transformers.AutoTokenizer.from_pretrained(name, local_files_only=True)
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
