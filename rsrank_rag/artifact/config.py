"""The artifact's ``config.json``, validated: which backbone B belongs to and how it reads a prompt."""

import hashlib
import json
import reprlib
import textwrap
from operator import not_
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator
from typing_extensions import Self

from ..errors import ArtifactError
from ..method.template import Template

FORMAT_VERSION: Literal[1] = 1

LARGEST = 2**31

INSIDE = "./backbone"  # how an artifact names a language model that lies in its own folder

RETIRED: dict[str, tuple[object, ...]] = {
    "signal": ("values",),
    "null_prefix": ("empty",),
    "calibration": (None,),
}
"""Fields that artifacts of earlier releases have, and the values of them that this one still means."""


Value = TypeVar("Value")
Later = Annotated[Value, Field(exclude_if=not_)]
"""A field that earlier releases do not know: left out where it says what they mean."""


class BackboneSpec(BaseModel, extra="forbid", frozen=True, protected_namespaces=()):
    """The language model B was trained on, by name and by what can be checked after loading."""

    name: str = Field(description="Hub id or local path; './folder' lies inside the artifact.")
    revision: str | None = Field(default=None, description="Commit, tag or branch on the Hub.")
    model_type: str
    num_layers: int = Field(gt=1, le=LARGEST)
    num_heads: int = Field(gt=0, le=LARGEST, description="KV heads, H.")
    head_dim: int = Field(gt=0, le=LARGEST, description="D.")
    tokenizer: str = Field(description="Fingerprint of how the tokenizer splits a fixed text.")
    values: tuple[float, ...] = Field(
        description="Entries of the last read layer's value vectors on fixed tokens."
    )
    files: dict[str, str] = Field(
        default_factory=dict, description="sha256 of each file that decides a score."
    )


# JSON has no NaN or infinity: such a metric would be written as null and make the artifact unreadable.
class TrainingRecord(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Where B comes from. Shown in the model card."""

    data: tuple[str, ...] = ()
    seed: int | None = None
    metrics: dict[str, dict[str, float]] = Field(
        default_factory=dict, description="Dataset -> metric -> value."
    )
    settings: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="How B was trained."
    )
    notes: str = ""


class RSRankConfig(BaseModel, extra="forbid", frozen=True):
    """Everything about an artifact except the numbers in B."""

    format_version: Literal[1] = FORMAT_VERSION
    backbone: BackboneSpec
    layers: tuple[int, ...] = Field(
        min_length=1, description="Backbone layers B reads, from 0; layer 0 is left out."
    )
    projection_dim: int = Field(gt=0, le=LARGEST, description="P.")
    fusion_layer: Later[int] = Field(
        default=0, ge=0, description="The first layer in which queries see documents."
    )
    documents_stay: Later[bool] = Field(
        default=False, description="Whether layers from there on see documents as they enter it."
    )
    template: Template = Template()
    max_length: int | None = Field(
        default=None, gt=0, le=LARGEST, description="Positions to use, if fewer than the model has."
    )
    threshold: Later[float] = Field(
        default=0.0, allow_inf_nan=False, description="Keep what scores above; 0 as in the paper."
    )
    int8: Later[bool] = Field(
        default=False, description="Whether documents read in int8 were measured to be good enough."
    )
    license: str | None = None
    training: TrainingRecord = TrainingRecord()

    @model_validator(mode="after")
    def _layers_exist(self) -> Self:
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers must ascend without repeats, got {self.layers}")
        if self.layers[0] <= self.fusion_layer or self.layers[-1] >= self.backbone.num_layers:
            raise ValueError(
                f"layers must lie in {self.fusion_layer + 1}..{self.backbone.num_layers - 1} (up to layer "
                f"{self.fusion_layer}, no document has been seen), got {self.layers[0]}..{self.layers[-1]}"
            )
        return self

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
        """The backbone's layers in words, and how many of them are loaded if B needs fewer."""
        count, needed = self.backbone.num_layers, self.layers[-1] + 1
        return f"{count} layers" + (f", the first {needed} are loaded" if needed < count else "")

    @property
    def digest(self) -> str:
        """sha256 of the config's content, which `projection.safetensors` repeats."""
        return content_digest(self.model_dump_json())

    @classmethod
    def parse(cls, text: str, *, source: str) -> Self:
        """Read a ``config.json``; ArtifactError if it is no JSON, no RSRank config, or of an unknown version."""
        try:
            raw: Any = json.loads(text)
        except (
            ValueError,
            RecursionError,
        ) as error:  # also nested too deep, or a number of thousands of digits
            raise ArtifactError(
                f"{source} is not valid JSON ({error}). Download it again."
            ) from None
        if not isinstance(raw, dict) or "format_version" not in raw:
            raise ArtifactError(
                f"{source} is not an RSRank config: it has no format_version. Is this the folder of a language model? "
                "An RSRank artifact holds config.json and projection.safetensors, made by RSRank.save_pretrained."
            )
        if raw["format_version"] != FORMAT_VERSION:
            raise ArtifactError(
                f"{source} has format version {reprlib.repr(raw['format_version'])}; this rsrank_rag reads version "
                f"{FORMAT_VERSION}. Upgrade with: pip install -U rsrank-rag"
            )
        try:
            return cls.model_validate(_without_retired(raw, source))
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg']}" for e in error.errors()
            )
            problems = textwrap.shorten(
                problems, 1000, placeholder=" ..."
            )  # names in it may be of any length
            raise ArtifactError(f"{source} is not a valid RSRank config: {problems}.") from None


def _without_retired(raw: dict[str, Any], source: str) -> dict[str, Any]:
    """A config without what only earlier releases knew; ArtifactError if it asks for what only they could do."""
    for name, meant in RETIRED.items():
        if name in raw and raw[name] not in meant:
            raise ArtifactError(
                f"{source} was made with {name}={reprlib.repr(raw[name])}, which belongs to the paper's ablations and "
                "is no longer part of an artifact. Run it through `rsrank reproduce`, or train B on value vectors."
            )
    kept = {name: value for name, value in raw.items() if name not in RETIRED}
    for part, field in (
        ("backbone", "hidden_size"),
        ("template", "filler"),
        ("training", "histogram"),
    ):
        if isinstance(kept.get(part), dict):
            kept[part] = {name: value for name, value in kept[part].items() if name != field}
    return kept


def content_digest(text: str) -> str:
    """sha256 of a JSON text's content, whatever its layout and the order of its keys.

    Taken from the file as written, so that fields which later versions add do not change it.
    """
    try:
        content = json.dumps(json.loads(text), sort_keys=True, ensure_ascii=True)
    except RecursionError:
        raise ArtifactError("config.json is nested too deep. Download it again.") from None
    return hashlib.sha256(content.encode()).hexdigest()
