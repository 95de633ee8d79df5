"""The artifact's ``config.json``: the language model of B, and how it reads a prompt."""

import hashlib
import json
from typing import Literal

from pydantic import BaseModel, Field, ValidationError, model_validator
from typing_extensions import Self

from ..errors import ArtifactError, problems_of
from ..method.template import Template
from ..ranking.rule import Fallback, Rule

# The name of a language model that lies in the artifact's own folder.
INSIDE = "./backbone"


class BackboneSpec(BaseModel, extra="forbid", frozen=True, protected_namespaces=()):
    """The language model that B was trained on: its name, and properties to check it by."""

    name: str
    """Hub id or local path; './folder' lies inside the artifact."""
    revision: str | None = None
    """Commit, tag or branch on the Hub."""
    model_type: str
    num_layers: int = Field(gt=1)
    num_heads: int = Field(gt=0)
    """KV heads, H."""
    head_dim: int = Field(gt=0)
    """D."""
    tokenizer: str
    """Fingerprint of how the tokenizer splits a fixed text."""
    values: tuple[float, ...]
    """Entries of value vectors of the last layer in `layers`, on fixed tokens."""
    bits: Literal[4, 8, 16] = 16
    """Bits to which the weights that gave `values` were rounded; 16 also for 32."""
    files: dict[str, str] = Field(default_factory=dict)
    """sha256 of each file that can change a score, by name. If empty, no files are compared: then
    only the tokenizer and `values` identify the model."""


# JSON has no NaN and no infinity: such a metric would be written as null, which cannot be read.
class TrainingRecord(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """The data and settings that B was trained with. The model card shows them."""

    data: tuple[str, ...] = ()
    """Names of the labelled sets that trained B or chose the threshold."""
    seed: int | None = None
    metrics: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Dataset -> metric -> value."""
    settings: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """How B was trained."""
    notes: str = ""


# A fallback may be of infinite depth.
class RSRankConfig(BaseModel, extra="forbid", frozen=True, ser_json_inf_nan="constants"):
    """Everything about an artifact except the weights of B."""

    format_version: Literal[1] = 1
    backbone: BackboneSpec
    layers: tuple[int, ...] = Field(min_length=1)
    """Backbone layers that B reads, counted from 0, without 0."""
    projection_dim: int = Field(gt=0)
    """P."""
    fusion_layer: int = Field(default=0, ge=0)
    """The first layer in which queries see documents. This layer and all above it get keys and
    values from the states of a document that enter this layer."""
    similarity_window: int | None = Field(default=None, gt=0, multiple_of=2)
    """Positions of a similarity window. The similarity terms are those of the window with the
    greatest sum of these terms; the whole document is one of the windows, and the only one if None.
    """
    attention_window: int | None = Field(default=None, gt=0, multiple_of=2)
    """Below the fusion layer, a token of a document attends to the document's first token and to
    the tokens at most half of so many positions away (as in Longformer); None: to all tokens."""
    template: Template = Template()
    max_length: int | None = Field(default=None, gt=0)
    """Positions to use, if fewer than the model has."""
    threshold: float = Field(default=0.0, allow_inf_nan=False)
    """Documents that score above it are kept."""
    max_gap: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Of these, documents further below the best one are dropped; None for no gap."""
    fallback: Fallback | None = None
    """What is kept of a list in which no document scores above the threshold; None: nothing."""
    graphs: dict[str, str] = Field(default_factory=dict)
    """sha256 of each graph of an encoder for ONNX Runtime, by its file's name in ``graphs``."""
    int8: bool = False
    """Whether int8 is precise enough for this artifact's documents."""
    license: str | None = None
    training: TrainingRecord = TrainingRecord()

    @model_validator(mode="after")
    def _layers_exist(self) -> Self:
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers must ascend without repeats, got {self.layers}")
        if self.layers[0] <= self.fusion_layer or self.layers[-1] >= self.backbone.num_layers:
            raise ValueError(
                f"layers must lie in {self.fusion_layer + 1}..{self.backbone.num_layers - 1} "
                f"(up to layer {self.fusion_layer}, queries do not see the document), "
                f"got {self.layers[0]}..{self.layers[-1]}"
            )
        for name in ("similarity_window", "attention_window"):
            if getattr(self, name) is not None and not self.fusion_layer:
                raise ValueError(f"{name} needs a fusion_layer")
        return self

    @property
    def rule(self) -> Rule:
        """The rule that decides which documents are kept."""
        return Rule(self.threshold, self.max_gap, self.fallback)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of B, (L, H, P, D)."""
        return (
            len(self.layers),
            self.backbone.num_heads,
            self.projection_dim,
            self.backbone.head_dim,
        )

    @property
    def depth(self) -> str:
        """The number of the backbone's layers in words, and how many of them B needs."""
        needed = self.layers[-1] + 1
        text = f"{self.backbone.num_layers} layers"
        if needed < self.backbone.num_layers:
            text += f", the first {needed} are loaded"
        return text

    @property
    def digest(self) -> str:
        """sha256 of the config's content, which ``projection.safetensors`` repeats."""
        return content_digest(self.model_dump_json())

    @classmethod
    def parse(cls, text: str, *, source: str) -> Self:
        """Validate the text of a ``config.json``; ``source`` is its path, for errors.

        Raises:
            ArtifactError: The text is no RSRank config.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ArtifactError(
                f"{source} is not a valid RSRank config: {problems_of(error)}. Is this the folder "
                "of a language model, damaged, or of a later release? An RSRank artifact holds "
                "config.json and projection.safetensors, made by RSRank.save_pretrained. Download "
                "it again, or upgrade this package."
            ) from None


def content_digest(text: str) -> str:
    """sha256 of a JSON text's content, whatever its layout and the order of its keys.

    The digest is taken from the file as written, so that a field with a default that a later
    version adds does not change it.
    """
    content = json.dumps(json.loads(text), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
