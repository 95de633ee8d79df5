"""A recipe: everything that decides which artifact comes out, as validated settings in TOML."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, ValidationError, model_validator
from typing_extensions import Self

from ..backends.options import LoadSettings
from ..errors import InputError, nearest, problems_of
from ..evaluation.datasets import LabelledQuery, dataset_name, read_labelled
from ..method.template import Template
from .fine_tuning import FineTuningOptions
from .fit import FitOptions

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the standard library has it from 3.11 on
    import tomli as tomllib

Model = TypeVar("Model", bound=BaseModel)
SHIPPED = Path(__file__).parent / "recipes"


class ModelPart(LoadSettings, extra="forbid"):
    """The language model, and how to load it."""

    name: str = ""
    """Folder or Hub id of the language model. A recipe with a base ignores the name."""
    revision: str | None = None
    """Commit, tag or branch on the Hub: of the language model, or of the recipe's base."""
    max_length: PositiveInt | None = None


class DataPart(BaseModel, extra="forbid", frozen=True):
    """Labelled queries in a JSON-lines file."""

    file: str

    @property
    def title(self) -> str:
        """What the set is called."""
        return dataset_name(self.file)


class FeaturePart(BaseModel, extra="forbid", frozen=True):
    """What is read of the language model."""

    last_layer: PositiveInt | None = None
    """None for the model's last. No later layer is loaded."""
    dtype: Literal["float16", "bfloat16"] = "float16"


class Recipe(BaseModel, extra="forbid", frozen=True):
    """Everything that decides which artifact comes out."""

    # Where recipes are that can be named.
    folder: ClassVar[Path] = SHIPPED

    name: str
    base: str | None = None
    """An artifact to fine-tune. It gives model, template and layers."""
    model: ModelPart = ModelPart()
    template: Template = Template()
    data: tuple[DataPart, ...] = ()
    features: FeaturePart = FeaturePart()
    fit: FitOptions = FitOptions()
    fine_tuning: FineTuningOptions = FineTuningOptions()
    """With a base, in place of `fit`."""
    validation: PositiveFloat = 0.1
    """Validation queries, which choose the epoch: below 1 a share of all queries, else a number."""
    minimum_queries: int = Field(default=2, ge=2)
    """With fewer labelled queries, training raises InputError."""
    license: str | None = None

    @model_validator(mode="after")
    def _has_a_model(self) -> Self:
        if self.base is None and not self.model.name:
            raise ValueError("name a model, or an artifact as base")
        ignored = [f"fit.{name}" for name in sorted(self.fit.model_fields_set)]
        if self.features.last_layer is not None:
            ignored.append("features.last_layer")
        if self.template != Template():
            ignored.append("template")
        if self.base is not None and ignored:
            raise ValueError(
                f"{', '.join(ignored)} cannot be set: fine-tuning an artifact ({self.base}) keeps "
                "its layers and template, and has an objective of its own. See [fine_tuning] in "
                "docs/training.md, or take a recipe without a base, such as encoder"
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
        """Read a recipe.

        Args:
            source: Name of one that ships with the package, or a TOML file.
            overrides: ``key=value``, such as ``fit.epochs=10``. A value that is no TOML is text.
            data: Labelled files to train on instead of the recipe's.
            base: Artifact to fine-tune instead of the recipe's.

        Raises:
            InputError: There is no such recipe, or it is not valid.
        """
        raw = read_toml(source, cls.folder, "recipe")
        for override in overrides:
            _set(raw, override)
        if data:
            raw["data"] = [{"file": str(file)} for file in data]
        if base is not None:
            raw |= {"base": base, "minimum_queries": 2}
        return validated(cls, raw, source, "recipe")

    @property
    def titles(self) -> list[str]:
        """What the sets are called."""
        return [part.title for part in self.data]

    @property
    def passes(self) -> int:
        """How often training reads all features, at most."""
        if self.base is None:
            return self.fit.epochs
        return (self.fine_tuning.folds + 1) * self.fine_tuning.iterations

    def read_queries(self) -> list[LabelledQuery]:
        """The labelled queries of all files, without copies.

        Raises:
            InputError: A file cannot be read.
        """
        queries = (query for part in self.data for query in read_labelled(part.file))
        return list(dict.fromkeys(queries))


def shipped(folder: Path = SHIPPED) -> list[str]:
    """Names of the recipes inside the package."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def read_toml(source: str, folder: Path, what: str) -> dict[str, Any]:
    """A TOML file, or one of those that ship in a folder, by its name.

    Raises:
        InputError: There is none, or it is no TOML.
    """
    known = shipped(folder)
    path = Path(source)
    if source in known:
        path = folder / f"{source}.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"There is no {what} {source!r}: neither one of {', '.join(known)} nor a TOML file "
            f"({error.strerror}).{nearest(source, known)}"
        ) from None
    except ValueError as error:
        raise InputError(f"{source} is not valid TOML: {error}") from None


def validated(kind: type[Model], raw: dict[str, Any], source: str, what: str) -> Model:
    """Settings that were read, as a model; InputError names every entry that is wrong."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise InputError(f"{source} is not a valid {what}: {problems_of(error)}") from None


def _set(raw: dict[str, Any], override: str) -> None:
    """Set an entry by ``key=value``; a value that is no TOML is text."""
    key, equals, value = override.partition("=")
    *parents, name = key.split(".")
    part: Any = raw
    for parent in parents:
        part = part.setdefault(parent, {})
        if not isinstance(part, dict):
            raise InputError(f"{override!r} cannot be set, because {parent} has no entries.")
    if not equals:
        raise InputError(f"{override!r} is no setting. Write key=value, such as fit.epochs=10.")
    part[name] = value
    with suppress(tomllib.TOMLDecodeError):
        part[name] = tomllib.loads(f"value = {value}")["value"]
