"""What a recipe will take on this machine, in both of its parts: the language model's one pass, then B's epochs."""

import timeit
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from ..artifact import hub
from ..artifact.config import INSIDE
from ..errors import BackboneError
from ..evaluation.datasets import LabelledQuery
from ..language_model.loading import LOAD_ERRORS, shortened
from ..method.template import PromptTokenizer
from .features import Plan, plan_features
from .recipe import SHIPPED, Recipe, read_toml

_KNOWN = read_toml(str(Path(__file__).with_name("sizes.toml")), SHIPPED, "list of sizes")
# Of language models whose config nobody has to be asked for.
SHAPES = _KNOWN["models"]


@dataclass(frozen=True)
class Estimate:
    """What a recipe will take."""

    plan: Plan
    evaluation_tokens: int
    weight_bytes: int  # of the language model in memory
    flops: float  # of the language model's pass
    flops_per_second: float  # half of what a large matrix product reached here just now
    parameters: int  # of B
    epochs: int

    def __str__(self) -> str:
        plan = self.plan
        lines = {
            "queries": f"{plan.queries:,} with {plan.documents:,} documents",
            "reading": f"{plan.prompt_tokens:,} tokens and {self.evaluation_tokens:,} for the evaluation, "
            f"{self.flops / 1e12:,.1f} TFLOP: about {timedelta(seconds=round(self.flops / self.flops_per_second))} "
            "(hours:minutes:seconds) here, at half of what a large matrix product reaches",
            "memory": f"{self.weight_bytes / 1e9:,.2f} GB for the language model's weights",
            "disk": f"{plan.bytes / 1e9:,.2f} GB for the features (less with features.max_tokens or "
            "features.max_documents)",
            "training B": "not with so few queries: what heads and agreement count is found in seconds"
            if not self.parameters
            else f"{self.parameters:,} numbers, at most {self.epochs} epochs over {plan.rows:,} rows of features",
        }
        return "\n".join(f"{name:<13}{text}" for name, text in lines.items())


def estimate(
    recipe: Recipe, queries: list[LabelledQuery], evaluation: list[LabelledQuery]
) -> Estimate:
    """Disk, memory and time, without loading the language model's weights."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer, Qwen3Config

    part, options = recipe.model, recipe.model.options()
    known = {"revision": part.revision, "local_files_only": part.local_files_only}
    try:
        if part.source in SHAPES:
            config = Qwen3Config(**SHAPES[part.source])
            tokenizer = AutoTokenizer.from_pretrained(
                hub.BUILTIN / "mini" / INSIDE
            )  # it splits texts about alike
        else:
            config = AutoConfig.from_pretrained(part.source, **known).get_text_config()
            tokenizer = AutoTokenizer.from_pretrained(part.source, **known)
    except LOAD_ERRORS as error:
        raise BackboneError(
            f"The language model {part.name!r} could not be found: {error}"
        ) from error
    layers = recipe.layers(config.num_hidden_layers)
    with torch.device("meta"):
        model = AutoModel.from_config(shortened(config, layers[-1] + 1))
    weights = sum(parameter.numel() for parameter in model.parameters())
    working = weights - model.get_input_embeddings().weight.numel()
    dtype, device = options.resolved_dtype(), options.resolved_device()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    limit = min(config.max_position_embeddings, part.max_length or config.max_position_embeddings)
    prompts = PromptTokenizer(tokenizer, recipe.template, max_length=limit, shared_positions=True)
    plan = plan_features(queries, prompts, recipe.features, len(layers) * heads * width)
    tokens = plan_features(evaluation, prompts, recipe.features, 1).prompt_tokens
    bits = {"int8": 8, "nf4": 4}.get(options.weights or "", dtype.itemsize * 8)
    few = bool(recipe.base) and len(queries) < recipe.domain.projection_from
    return Estimate(
        plan=plan,
        evaluation_tokens=tokens,
        weight_bytes=weights * bits // 8,
        flops=2.0 * working * (plan.prompt_tokens + tokens),
        flops_per_second=_matmul_rate(device, dtype) / 2,
        parameters=0 if few else len(layers) * heads * recipe.fit.projection_dim * width,
        epochs=recipe.passes,
    )


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product here and now: the best of a few."""
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device).to(dtype)
    wait = torch.cuda.synchronize if device.type == "cuda" else str
    return 2.0 * size**3 / min(timeit.repeat(lambda: (a @ a, wait()), number=1, repeat=4))
