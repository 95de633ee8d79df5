"""What a recipe will take on this machine, in both of its parts: the language model's one pass, then B's epochs."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import BackboneError
from ..evaluation.datasets import LabelledQuery
from ..language_model.loading import LOAD_ERRORS, shortened
from ..method.projection import Projection
from ..method.template import PromptTokenizer
from .features import Plan, plan_features
from .fit import Batch, batch_scores
from .losses import calibration_loss
from .recipe import Recipe
from .store import QueryFeatures, free_memory

DISK = 1e9
"""Bytes a second of a middling disk, for features that do not fit into memory."""

_TOKENS, _DOCUMENTS = 16, 32  # of the made-up query whose training is timed


@dataclass(frozen=True)
class Estimate:
    """What a recipe will take.

    Attributes:
        evaluation_tokens: Tokens that the language model reads for the evaluation.
        weight_bytes: Of the language model in memory.
        flops: Of the language model's pass.
        flops_per_second: Half of what a large matrix product reached here just now.
        rows_per_second: Rows of features that B was trained on here just now.
        memory: Bytes that features may take to be kept in memory.
    """

    plan: Plan
    evaluation_tokens: int
    weight_bytes: int
    flops: float
    flops_per_second: float
    parameters: int
    epochs: int
    rows_per_second: float
    memory: int

    @property
    def hours(self) -> float:
        """Of the language model's pass."""
        return self.flops / self.flops_per_second / 3600

    @property
    def training_hours(self) -> float:
        """Of all epochs' arithmetic."""
        return self.epochs * self.plan.rows / self.rows_per_second / 3600

    @property
    def bytes_read(self) -> int:
        """By all epochs: once where the features fit into memory, else again in each."""
        return self.plan.bytes * (1 if self.plan.bytes <= self.memory else self.epochs)

    def __str__(self) -> str:
        plan = self.plan
        again = "once, they fit into memory" if self.bytes_read == plan.bytes else "in each epoch: they fit no memory"
        lines = {
            "queries": f"{plan.queries:,} with {plan.documents:,} documents",
            "reading": f"{plan.prompt_tokens:,} tokens and {self.evaluation_tokens:,} for the evaluation, "
            f"{self.flops / 1e12:,.1f} TFLOP: about {_hours(self.hours)} here (at {self.flops_per_second / 1e12:,.2f} "
            "TFLOP/s, half of what a large matrix product reaches)",
            "memory": f"{self.weight_bytes / 1e9:,.2f} GB for the language model's weights",
            "disk": f"{plan.bytes / 1e9:,.2f} GB for the features (less with features.max_tokens or "
            "features.max_documents)",
            "training B": f"{self.parameters:,} numbers, at most {self.epochs} epochs over {plan.rows:,} rows: about "
            f"{_hours(self.training_hours)} here; features are read {again}: {self.bytes_read / 1e9:,.1f} GB in all, "
            f"{_hours(self.bytes_read / DISK / 3600)} from a disk of 1 GB/s",
        }
        return "\n".join(f"{name:<13}{text}" for name, text in lines.items())


def estimate(recipe: Recipe, queries: list[LabelledQuery], evaluation: list[LabelledQuery]) -> Estimate:
    """Disk, memory and time, without loading the language model's weights.

    Raises:
        BackboneError: There is no such language model.
    """
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    part, options = recipe.model, recipe.model.options()
    known = {"revision": part.revision, "local_files_only": part.local_files_only}
    try:
        config = AutoConfig.from_pretrained(part.source, **known).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(part.source, **known)
    except LOAD_ERRORS as error:
        raise BackboneError(f"The language model {part.name!r} could not be found: {error}") from error
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
    bits = {"int8": 8, "fp8": 8, "nf4": 4}.get(options.weights or "", dtype.itemsize * 8)
    first = Projection.random(layers, heads, recipe.fit.projection_dim, width).weight.detach().to(device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    return Estimate(
        plan=plan,
        evaluation_tokens=tokens,
        weight_bytes=weights * bits // 8,
        flops=2.0 * working * (plan.prompt_tokens + tokens),
        flops_per_second=_matmul_rate(device, dtype) / 2,
        parameters=first.numel(),
        epochs=recipe.fit.epochs if recipe.method == "gradient" else 1,
        rows_per_second=_training_rate(first.requires_grad_()),
        memory=max(free, free_memory()) // 2,
    )


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product here and now."""
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device).to(dtype)
    return 2.0 * size**3 / _seconds(lambda: a @ a, device)


def _training_rate(weight: torch.Tensor) -> float:
    """Rows a second of B's loss and its gradient, for one made-up query."""
    layers, heads, _, width = weight.shape
    rows = _DOCUMENTS * _TOKENS
    labels = tuple(i == 0 for i in range(_DOCUMENTS))
    shifts = torch.randn(layers, heads, rows, width).half()
    batch = Batch.of([QueryFeatures(shifts, labels, _TOKENS, oracle=False)]).to(weight.device)

    def step() -> None:
        scores, _ = batch_scores(weight, batch, torch.bfloat16 if weight.device.type == "cuda" else torch.float32)
        calibration_loss(scores, batch.relevant, batch.valid).backward()  # type: ignore[no-untyped-call]

    return rows / _seconds(step, weight.device)


def _seconds(step: Callable[[], object], device: torch.device) -> float:
    """The shortest of a few runs."""

    def finished() -> None:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return min(timeit.repeat(finished, number=1, repeat=4))


def _hours(hours: float) -> str:
    if hours < 1 / 60:
        return f"{hours * 3600:.0f} s"
    return f"{hours * 60:.0f} min" if hours < 2 else f"{hours:.1f} h"
