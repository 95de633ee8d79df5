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
ARTIFACT = (
    "artifact"  # stands in a system's name for the artifact that is given on the command line
)


class SetPart(NamedSetPart, extra="forbid", frozen=True):
    """A set to measure on."""

    split: Split = "test"


class SystemPart(LoadSettings):
    """A system by its name (`systems.KINDS`); its loading options override the command line."""

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
        """How to load it: what is set here, and the rest from the defaults."""
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

        `source`: name of one that ships with the package, or a TOML file. `data`: labelled files,
        or folders of them, instead of its sets. `artifact`: what its system "artifact" stands for.
        `systems`: more of them. `negatives`: as of `Negatives.parse`, for all sets but the
        multi-hop ones by name, which have their own. `queries`: at most so many a set. InputError:
        there is no such configuration, or it is not valid.
        """
        raw = read_toml(source, SHIPPED, "configuration")
        if data:
            raw["sets"] = [{"file": str(file)} for file in files_in(data)]
        if artifact is not None:
            raw["artifact"] = artifact
        validated(cls, raw, source, "configuration")  # before it is changed
        given = (
            {} if negatives is None else Negatives.parse(negatives).model_dump(exclude_unset=True)
        )
        for part in raw.get("sets", ()):
            if given:
                part["negatives"] = part.get("negatives", {}) | given
            if queries is not None:
                part["queries"] = min(part.get("queries", queries), queries)
        raw["systems"] = [*raw.get("systems", ()), *({"name": name} for name in systems)]
        return validated(cls, raw, source, "configuration")._checked(source)

    def _checked(self, source: str) -> Self:
        """With the artifact's name in place; InputError for what no run could use."""
        if not self.systems:
            raise InputError(f"{source} names no systems. Add [[systems]].")
        if not self.sets:
            raise InputError(f"{source} names no sets. Pass --data FILE with labelled queries.")
        systems = tuple(
            part.model_copy(update={"name": self._named(part.name, source)})
            for part in self.systems
        )
        for system in systems:
            parse(system.name)
        for kind, titles in (
            ("systems", [p.title for p in systems]),
            ("sets", [p.title for p in self.sets]),
        ):
            twice = sorted({title for title in titles if titles.count(title) > 1})
            if twice:
                raise InputError(
                    f"{source} has two {kind} called {twice[0]!r}. Give one of them a label."
                )
        return self.model_copy(update={"systems": systems})

    def _named(self, name: str, source: str) -> str:
        prefix, colon, last = name.rpartition(":")
        if last != ARTIFACT:
            return name
        if self.artifact is None:
            raise InputError(
                f"{source} measures an RSRank artifact and names none. Pass --model ARTIFACT."
            )
        return f"{prefix}{colon}{self.artifact}"


def files_in(places: Iterable[str | Path]) -> list[Path]:
    """The files, and all ``.jsonl`` and ``.jsonl.gz`` files of folders; InputError without any."""
    files: list[Path] = []
    for place in map(Path, places):
        inside = (
            [place]
            if not place.is_dir()
            else sorted([*place.glob("*.jsonl"), *place.glob("*.jsonl.gz")])
        )
        if not inside:
            raise InputError(f"The folder {place} holds no .jsonl or .jsonl.gz files.")
        files += inside
    return files


def plan(config: Reproduction) -> str:
    """What a run would do, in words; nothing is loaded."""
    lines = [
        f"{config.name}: {len(config.systems)} systems on {len(config.sets)} sets, seed "
        f"{config.seed}"
    ]
    for part in config.sets:
        many = "all queries" if part.queries is None else f"{part.queries} queries"
        given = part.negatives or Negatives(count=0 if part.file else 15)
        where = "of the file's documents" if part.file else "where the set has none of its own"
        kind = f", {given.count} {given.kind} negatives {where}" if given.count else ""
        lines.append(f"  set      {part.title}: {part.file or part.split}, {many}{kind}")
    lines += [f"  system   {part.title}: {part.name}" for part in config.systems]
    return "\n".join(lines)
