"""Does this language model belong to this artifact? B means nothing to any other model."""

from __future__ import annotations

import math

from .backbone import Backbone
from .config import BackboneSpec, RSRankConfig
from .errors import ArtifactError
from .template import PromptTokenizer


def describe(core: Backbone, prompts: PromptTokenizer, name: str, revision: str | None) -> BackboneSpec:
    """What an artifact records of its language model."""
    return BackboneSpec(
        name=name,
        revision=revision,
        model_type=core.config.model_type,
        num_layers=core.num_layers,
        num_heads=core.num_heads,
        head_dim=core.head_dim,
        tokenizer=prompts.fingerprint,
        weights=core.weight_sample,
    )


def check_model_config(found: object, config: RSRankConfig, source: str) -> None:
    """Compare what can be compared before the model runs, so that a foreign one gives this error and no other.

    Raises:
        ArtifactError: Another architecture or another depth.
    """
    layers, kind = getattr(found, "num_hidden_layers", None), getattr(found, "model_type", None)
    if (layers, kind) != (config.backbone.num_layers, config.backbone.model_type):
        raise ArtifactError(
            f"This artifact belongs to {config.backbone.name} ({config.backbone.model_type}, "
            f"{config.backbone.num_layers} layers), but {source} is a {kind} with {layers} layers. "
            "Load the backbone the artifact names, or train B for this one."
        )


def check_identity(core: Backbone, prompts: PromptTokenizer, spec: BackboneSpec, source: str) -> None:
    """Compare a loaded model and its tokenizer with the ones the artifact was made with.

    Raises:
        ArtifactError: Other heads, another tokenizer or other weights.
    """
    advice = "Load the backbone the artifact names (and its revision), or train B for this one."
    if (core.num_heads, core.head_dim) != (spec.num_heads, spec.head_dim):
        raise ArtifactError(
            f"This artifact belongs to {spec.name} with {spec.num_heads} KV heads of {spec.head_dim}, but {source} "
            f"has {core.num_heads} of {core.head_dim}. {advice}"
        )
    if prompts.fingerprint != spec.tokenizer:
        raise ArtifactError(
            f"The tokenizer of {source} splits text differently from the one this artifact was made with "
            f"(fingerprint {prompts.fingerprint}, expected {spec.tokenizer}). {advice}"
        )
    found = core.weight_sample
    near = len(found) == len(spec.weights) and all(
        math.isclose(a, b, rel_tol=2**-7, abs_tol=1e-4) for a, b in zip(found, spec.weights, strict=True)
    )
    if not near:
        raise ArtifactError(
            f"The weights of {source} are not those of {spec.name} (revision {spec.revision or 'not pinned'}) that "
            f"this artifact was made with. {advice}"
        )
