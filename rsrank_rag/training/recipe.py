"""A recipe: everything that decides which artifact comes out, as validated settings in one TOML file."""

import json
import random
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from typing_extensions import Self

from ..artifact import hub
from ..artifact.config import INSIDE
from ..errors import BackboneError, InputError, nearest
from ..evaluation.datasets import LabelledQuery, dataset_name, read_labelled
from ..language_model.options import LoadOptions, LoadSettings
from ..method.template import Template
from .domain import DomainOptions
from .fit import FitOptions

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the standard library has it from 3.11 on
    import tomli as tomllib

Method = Literal["gradient", "oracle", "separation", "combined"]
"""How B is found: by gradient, or by one of the paper's closed forms (Appendix B.1)."""

Model = TypeVar("Model", bound=BaseModel)
SHIPPED = Path(__file__).parent / "recipes"


class LoadedPart(LoadSettings):
    """A model by its name, and how to load it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    revision: str | None = None

    def options(self, given: LoadOptions | None = None) -> LoadOptions:
        """How to load it: what is set here, and the rest as given."""
        own = self.load_options()
        return replace(
            given or LoadOptions(),
            **{part.name: value for part in fields(own) if (value := getattr(own, part.name))},
        )


class ModelPart(LoadedPart):
    """The language model, and how to load it."""

    max_length: int | None = Field(default=None, gt=0)
    fusion_layer: int = Field(
        default=0, ge=0, description="The first layer in which queries see documents."
    )
    documents_stay: bool = Field(
        default=False, description="Whether layers from there on see documents as they enter it."
    )

    @property
    def source(self) -> str:
        """Folder or Hub id; an artifact that holds its language model stands for that."""
        folder = hub.BUILTIN / self.name if self.name in hub.builtin_names() else Path(self.name)
        return str(folder / INSIDE) if (folder / hub.PROJECTION).is_file() else self.name


class DataPart(BaseModel, extra="forbid", frozen=True):
    """Labelled queries in a JSON-lines file."""

    file: str
    label: str | None = None
    queries: int | None = Field(default=None, gt=0, description="At most so many, at random.")

    @property
    def title(self) -> str:
        """What the set is called."""
        return self.label or dataset_name(self.file)

    def load(self, seed: int) -> list[LabelledQuery]:
        """Read it; the seed draws the queries."""
        return self.drawn(read_labelled(self.file), seed)

    def drawn(self, queries: list[LabelledQuery], seed: int) -> list[LabelledQuery]:
        """At most as many queries as are wanted."""
        if self.queries is None or self.queries >= len(queries):
            return queries
        return random.Random(f"{seed}-{self.title}").sample(queries, self.queries)


def parse_layers(value: Any) -> Any:
    """Numbers and ranges as a tuple of layers; anything but text and a number is left to the validation.

    >>> parse_layers("1-4,8")
    (1, 2, 3, 4, 8)
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if not isinstance(value, str):
        return value
    layers: list[int] = []
    for part in value.split(","):
        found = re.fullmatch(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", part)
        first, last = (0, -1) if found is None else (int(found[1]), int(found[2] or found[1]))
        if last < first:
            raise ValueError(
                f"{value!r} is no choice of layers. Write numbers and ranges, such as 1-24 or 1-8,12"
            )
        layers += range(first, last + 1)
    return tuple(layers)


class FeaturePart(BaseModel, extra="forbid", frozen=True):
    """What is read of the language model."""

    layers: Annotated[tuple[int, ...] | None, BeforeValidator(parse_layers)] = Field(
        default=None,
        description="Such as '1-24' or [1, 2, 3]; None for all but layer 0. Later ones are not loaded.",
    )
    dtype: Literal["float16", "bfloat16"] = "float16"
    max_tokens: int | None = Field(default=None, gt=0)
    max_documents: int | None = Field(default=None, gt=1)
    titles: bool = True
    token_budget: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if self.layers is not None and (
            not self.layers or sorted(set(self.layers)) != list(self.layers)
        ):
            raise ValueError("layers must ascend without repeats")
        if self.layers is not None and self.layers[0] < 1:
            raise ValueError("layers start at 1: layer 0 holds raw token embeddings")
        return self


class Recipe(BaseModel, extra="forbid", frozen=True):
    """Everything that decides which artifact comes out."""

    # Where recipes are that can be named.
    folder: ClassVar[Path] = SHIPPED

    name: str
    base: str | None = Field(
        default=None,
        description="An artifact to begin with and stay near. It gives model, template and layers.",
    )
    model: ModelPart
    template: Template = Template()
    data: tuple[DataPart, ...] = ()
    features: FeaturePart = FeaturePart()
    method: Method = "gradient"
    fit: FitOptions = FitOptions()
    domain: DomainOptions = Field(
        default=DomainOptions(), description="With a base, in place of `fit`."
    )
    validation_share: float = Field(
        default=0.1, gt=0, lt=1, description="Of the queries: they choose the epoch."
    )
    validation_queries: int | None = Field(
        default=None, gt=0, description="So many instead of a share."
    )
    evaluation: tuple[DataPart, ...] = ()
    sample_sizes: tuple[int, ...] = Field(
        default=(), description="Also train on so many queries, for a curve."
    )
    sample_epochs: int = Field(
        default=10, gt=0, description="Epochs for each of them (the paper's Table 4)."
    )
    minimum_queries: int = Field(default=2, ge=2)
    license: str | None = None

    @model_validator(mode="after")
    def _names_of_their_own(self) -> Self:
        titles = [part.title for part in self.evaluation]
        if twice := [title for title in titles if titles.count(title) > 1]:
            raise ValueError(
                f"two evaluation sets are called {twice[0]!r}: give one of them a label"
            )
        return self

    @classmethod
    def load(
        cls,
        source: str,
        overrides: Sequence[str] = (),
        data: Sequence[str | Path] = (),
        base: str | None = None,
    ) -> Self:
        """Read a recipe: the name of one that ships with the package, or a TOML file.

        `overrides`: ``key=value`` in TOML, such as ``fit.epochs=10``. `data`: labelled files to train on, and `base`:
        artifact to begin with, instead of the recipe's.

        Raises InputError: there is none, or it is not a valid one; ArtifactError: the base is none.
        """
        raw = read_toml(source, cls.folder, "recipe")
        for override in overrides:
            _merge(raw, _assignment(override))
        if data:
            raw["data"] = [{"file": str(file)} for file in data]
        if base is not None:
            raw |= {"base": base, "minimum_queries": 2, "sample_sizes": []}
        if raw.get("base"):
            _merge(raw, _from_base(raw["base"], raw))
        return validated(cls, raw, source, "recipe")

    def layers(self, count: int) -> tuple[int, ...]:
        """Layers that B reads of a language model with so many."""
        lowest = self.model.fusion_layer + 1
        chosen = self.features.layers or tuple(range(lowest, count)) or (lowest,)
        if wrong := [layer for layer in (chosen[0], chosen[-1]) if not lowest <= layer < count]:
            raise BackboneError(
                f"Layer {wrong[0]} was asked for; {self.model.name} has {lowest}..{count - 1}."
            )
        return chosen

    @property
    def passes(self) -> int:
        """How often features are read, at most."""
        if self.base is not None:
            return (self.domain.folds + 1) * len(self.domain.strengths) * self.domain.iterations
        return self.fit.epochs if self.method == "gradient" else 1

    @property
    def held(self) -> int | float:
        """Validation queries, as a number or a share."""
        return self.validation_queries or self.validation_share


def shipped(folder: Path = SHIPPED) -> list[str]:
    """Names of the recipes inside the package."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def read_toml(source: str, folder: Path, what: str) -> dict[str, Any]:
    """A TOML file, or one of those that ship in a folder, by its name.

    Raises InputError: there is none, or it is no TOML.
    """
    path = folder / f"{source}.toml" if source in shipped(folder) else Path(source)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        known, why = shipped(folder), "" if isinstance(error, FileNotFoundError) else f" ({error})"
        raise InputError(
            f"There is no {what} {source!r}: neither one of {', '.join(known)} nor a TOML file{why}."
            f"{nearest(source, known)}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{source} is not valid TOML: {error}") from None


def validated(kind: type[Model], raw: dict[str, Any], source: str, what: str) -> Model:
    """Settings that were read, as a model."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, e['loc']))}: {_said(kind, e)}" for e in error.errors()
        )
        raise InputError(f"{source} is not a valid {what}: {problems}") from None


def _said(kind: type[BaseModel], error: Any) -> str:
    """What is wrong with an entry; of one that does not exist, which are spelled like it."""
    if error["type"] != "extra_forbidden":
        return str(error["msg"])
    *path, name = map(str, error["loc"])
    for step in (step for step in path if step in kind.model_fields):  # not the numbers of a list
        annotation = kind.model_fields[step].annotation
        kind = next(
            part for part in (*get_args(annotation), annotation) if hasattr(part, "model_fields")
        )
    return f"there is no such entry.{nearest(name, kind.model_fields, '.'.join([*path, '']))}"


def _merge(target: dict[str, Any], extra: dict[str, Any]) -> None:
    for key, value in extra.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value


def _from_base(base: str, raw: dict[str, Any]) -> dict[str, Any]:
    """What an artifact decides for all that begins with it."""
    folder = hub.resolve(base)
    config = hub.read_config(folder)
    own = config.model_dump(
        mode="json", include={"template", "layers", "projection_dim", "max_length"}
    )
    ignored = [f"fit.{name}" for name in raw.get("fit", {}) if name != "seed"]
    ignored += ["features.layers"] * ("layers" in raw.get("features", {})) + ["method"] * (
        "method" in raw
    )
    if ignored:
        raise InputError(
            f"{', '.join(ignored)} cannot be set: training that begins with an artifact ({base}) keeps its "
            "layers and objective. See [domain] in docs/training.md, or take a recipe without a base, such as encoder."
        )
    inside = config.backbone.name == INSIDE
    model = {
        "name": str(folder) if inside else config.backbone.name,
        "revision": config.backbone.revision,
        "fusion_layer": config.fusion_layer,
        "documents_stay": config.documents_stay,
    }
    return {
        "model": {"max_length": own["max_length"], **raw.get("model", {}), **model},
        "template": own["template"],
        "features": {"layers": own["layers"]},
        "fit": {"projection_dim": own["projection_dim"]},
        "license": raw.get("license", config.license),
    }


def _assignment(override: str) -> dict[str, Any]:
    """``key=value`` in TOML; a value that is no TOML is taken as text."""
    key, found, value = override.partition("=")
    for text in (value, json.dumps(value)) if found else ():
        with suppress(tomllib.TOMLDecodeError):
            return tomllib.loads(f"{key} = {text}")
    raise InputError(f"{override!r} is no setting. Write key=value, such as fit.epochs=10.")
