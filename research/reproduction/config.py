"""Configuration of ``python -m research.reproduce`` in TOML: sets and systems."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import Self

from rsrank_rag.adapters.kinds import parse
from rsrank_rag.backends.options import LoadOptions, LoadSettings
from rsrank_rag.errors import InputError
from rsrank_rag.training.recipe import read_toml, validated

from ..hub_datasets import Split
from ..negatives import Negatives
from ..recipe import SetPart as NamedSetPart

SHIPPED = Path(__file__).parent / "recipes"
ARTIFACT = "artifact"
"""Stands in a system's name for the artifact of the command line."""


class SetPart(NamedSetPart, extra="forbid", frozen=True):
    """A set to measure on."""

    split: Split = "test"


class SystemPart(LoadSettings):
    """A system by its name (`systems.KINDS`). Its loading options override the command line."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    revision: str | None = None
    label: str | None = None
    threshold: float | None = Field(
        default=None, description="None for its native one, else the best over all sets."
    )

    @property
    def title(self) -> str:
        """What the tables call it."""
        return self.label or self.name

    def options(self, defaults: LoadOptions) -> LoadOptions:
        """How to load the system: options that are set here, and the rest from the defaults."""
        settings = self.load_options().model_dump(exclude_defaults=True)
        return defaults.model_copy(update=settings)


class Reproduction(BaseModel, extra="forbid", frozen=True):
    """Everything that decides which tables and figures come out."""

    name: str
    seed: int = 0
    titles: bool = True
    artifact: str | None = None
    sets: tuple[SetPart, ...] = ()
    systems: tuple[SystemPart, ...] = ()

    @classmethod
    def load(
        cls,
        source: str,
        *,
        data: Sequence[str | Path] = (),
        artifact: str | None = None,
        systems: Sequence[str] = (),
        negatives: str | None = None,
        queries: int | None = None,
    ) -> Self:
        """Read a configuration.

        Args:
            source: Name of a configuration of this package, or a TOML file.
            data: Labelled files or folders of them, instead of the configuration's sets.
            artifact: What the system "artifact" stands for.
            systems: Names of more systems.
            negatives: A text for `Negatives.parse`, for all sets but the multi-hop ones by name,
                which have their own negatives.
            queries: The largest number of queries of a set.

        Raises:
            InputError: There is no such configuration, or the configuration is not valid.
        """
        raw = read_toml(source, SHIPPED, "configuration")
        if data:
            raw["sets"] = [{"file": str(file)} for file in files_in(data)]
        if artifact is not None:
            raw["artifact"] = artifact
        # Errors must name the entries of the file, so validate the file before it is changed.
        validated(cls, raw, source, "configuration")
        override = {}
        if negatives is not None:
            override = Negatives.parse(negatives).model_dump(exclude_unset=True)
        for part in raw.get("sets", ()):
            if override:
                part["negatives"] = part.get("negatives", {}) | override
            if queries is not None:
                part["queries"] = min(part.get("queries", queries), queries)
        raw["systems"] = [*raw.get("systems", ())]
        raw["systems"] += [{"name": name} for name in systems]
        return validated(cls, raw, source, "configuration")._checked(source)

    def _checked(self, source: str) -> Self:
        """The configuration with the artifact's name; InputError for what no run could use."""
        if not self.systems:
            raise InputError(f"{source} names no systems. Add [[systems]].")
        if not self.sets:
            raise InputError(f"{source} names no sets. Pass --data FILE with labelled queries.")
        systems = []
        for part in self.systems:
            name = self._named(part.name, source)
            parse(name)
            systems.append(part.model_copy(update={"name": name}))
        _check_titles("systems", [part.title for part in systems], source)
        _check_titles("sets", [part.title for part in self.sets], source)
        return self.model_copy(update={"systems": tuple(systems)})

    def _named(self, name: str, source: str) -> str:
        prefix, colon, last = name.rpartition(":")
        if last != ARTIFACT:
            return name
        if self.artifact is None:
            raise InputError(
                f"{source} measures an RSRank artifact and names none. Pass --model ARTIFACT."
            )
        return f"{prefix}{colon}{self.artifact}"


def _check_titles(kind: str, titles: list[str], source: str) -> None:
    """Raise InputError if two systems or sets have the same title."""
    for title in sorted(titles):
        if titles.count(title) > 1:
            raise InputError(f"{source} has two {kind} called {title!r}. Give one of them a label.")


def files_in(places: Iterable[str | Path]) -> list[Path]:
    """The files, and all ``.jsonl`` and ``.jsonl.gz`` files of folders.

    Raises:
        InputError: A folder holds no such file.
    """
    files: list[Path] = []
    for place in map(Path, places):
        if not place.is_dir():
            files.append(place)
            continue
        in_folder = sorted([*place.glob("*.jsonl"), *place.glob("*.jsonl.gz")])
        if not in_folder:
            raise InputError(f"The folder {place} holds no .jsonl or .jsonl.gz files.")
        files += in_folder
    return files


def plan(config: Reproduction) -> str:
    """What a run would do, in words; nothing is loaded."""
    lines = [
        f"{config.name}: {len(config.systems)} systems on {len(config.sets)} sets, seed "
        f"{config.seed}"
    ]
    for part in config.sets:
        queries = "all queries" if part.queries is None else f"{part.queries} queries"
        line = f"  set      {part.title}: {part.file or part.split}, {queries}"
        negatives = part.negatives or Negatives(count=0 if part.file else 15)
        where = "of the file's documents" if part.file else "where the set has none of its own"
        if negatives.count:
            line += f", {negatives.count} {negatives.kind} negatives {where}"
        lines.append(line)
    for system in config.systems:
        lines.append(f"  system   {system.title}: {system.name}")
    return "\n".join(lines)
