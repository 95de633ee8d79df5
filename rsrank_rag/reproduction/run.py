"""``rsrank reproduce``: the paper's tables and figures for any artifact, from one TOML file.

System by system and set by set; scores are kept after each, so that a run that was interrupted goes on. What cannot be
loaded or scored is named with its error, and the others still run.
"""

from __future__ import annotations

import gc
import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ..adapters.systems import KINDS, load_system, parse
from ..artifact import hub
from ..errors import InputError, RSRankError
from ..evaluation import plots
from ..evaluation.comparison import Comparison, Measured
from ..evaluation.datasets import LabelledQuery, dataset_name, read_labelled
from ..evaluation.evaluate import System, score_dataset, shared_threshold
from ..evaluation.hub_datasets import Granularity, Split, load_named
from ..evaluation.metrics import ScoredQuery
from ..evaluation.negatives import Negatives, replace_negatives
from ..evaluation.report import Picture, check_report, write_report
from ..language_model.options import LoadOptions
from ..training.recipe import DataPart
from .ablation_figures import AblationFigures, FigureFile, ablation_tables, figures_of, sample_curves
from .ablation_runs import AblationRow, Ablations
from .ablations import chosen
from .paper_tables import TABLES, Table, page
from .shift_map import load_umap, shift_pictures

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the standard library has it from 3.11 on
    import tomli as tomllib

SHIPPED = Path(__file__).parent / "recipes"
ARTIFACT = "artifact"
"""Stands in a system's name for the artifact that is given on the command line."""

Figure = Literal["thresholds", "gaps", "selection", "scores", "latency", "shifts"]
FIGURES: tuple[Figure, ...] = ("thresholds", "gaps", "selection", "scores", "latency", "shifts")
_STRICT = ConfigDict(extra="forbid", frozen=True)


class SetPart(BaseModel):
    """A set to measure on: by name from the Hub, or a file of labelled queries."""

    model_config = _STRICT

    name: str | None = Field(default=None, description="One of the paper's sets, or beir:NAME.")
    file: str | None = None
    label: str | None = None
    split: Split = "test"
    queries: int | None = Field(default=None, gt=0, description="At most so many, at random.")
    granularity: Granularity | None = None
    negatives: Negatives | None = Field(
        default=None, description="None for the paper's: 15 at random for BEIR, the set's own for the others and files."
    )
    revision: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> SetPart:
        if (self.name is None) == (self.file is None):
            raise ValueError("give either name or file")
        return self

    @property
    def title(self) -> str:
        """What the tables call it."""
        return self.label or self.name or dataset_name(str(self.file))

    def load(self, seed: int, options: LoadOptions, *, titles: bool = True) -> list[LabelledQuery]:
        """Its queries.

        Raises:
            RSRankError: It cannot be loaded.
        """
        if self.name is not None:
            return load_named(
                self.name,
                split=self.split,
                queries=self.queries,
                granularity=self.granularity,
                negatives=self.negatives or Negatives(),
                seed=seed,
                revision=self.revision,
                options=options,
            )
        queries = read_labelled(str(self.file))
        changed = (
            queries
            if self.negatives is None
            else replace_negatives(queries, self.negatives, titles=titles, seed=seed, options=options)
        )
        if self.queries is None or self.queries >= len(changed):
            return changed
        return [changed[i] for i in sorted(random.Random(seed).sample(range(len(changed)), self.queries))]


class SystemPart(BaseModel):
    """A system by its name (`systems.KINDS`), and how to load it where that differs from the command line."""

    model_config = _STRICT

    name: str
    label: str | None = None
    revision: str | None = None
    threshold: float | None = Field(default=None, description="None for its native one, else the best over all sets.")
    dtype: str | None = None
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    load_in_fp8: bool = False
    trust_remote_code: bool = False

    @property
    def title(self) -> str:
        """What the tables call it."""
        return self.label or self.name

    def options(self, given: LoadOptions) -> LoadOptions:
        """How to load it."""
        own = LoadOptions(load_in_8bit=self.load_in_8bit, load_in_4bit=self.load_in_4bit, load_in_fp8=self.load_in_fp8)
        return replace(
            given,
            dtype=self.dtype or given.dtype,
            weights=own.weights or given.weights,
            trust_remote_code=self.trust_remote_code or given.trust_remote_code,
        )


def _several(value: Any) -> Any:
    """One table ``[ablations]`` is the only one of several ``[[ablations]]``."""
    return [value] if isinstance(value, dict) else value


class AblationPart(BaseModel):
    """Which ablations of which recipe (`reproduction.ablations`), and how often B is trained for each."""

    model_config = _STRICT

    recipe: str
    names: tuple[str, ...] = ("all",)
    setup: str = Field(default="", description="What B is trained on, for the tables' headings.")
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    settings: tuple[str, ...] = ()
    train: tuple[DataPart, ...] = ()
    evaluation: tuple[DataPart, ...] = ()


class Reproduction(BaseModel):
    """Everything that decides which tables and figures come out."""

    model_config = _STRICT

    name: str
    seed: int = 0
    titles: bool = True
    artifact: str | None = None
    sets: tuple[SetPart, ...] = ()
    systems: tuple[SystemPart, ...] = ()
    tables: tuple[Table, ...] = TABLES
    figures: tuple[Figure, ...] = FIGURES
    umap: bool = Field(default=False, description="Draw RSRank's shifts before and after B.")
    stages: str | None = Field(default=None, description="JSON of benchmarks.latency --paper: the inference stages.")
    ablations: Annotated[tuple[AblationPart, ...], BeforeValidator(_several)] = ()

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
    ) -> Reproduction:
        """Read a configuration.

        Args:
            source: Name of one that ships with the package, or a TOML file.
            data: Labelled files, or folders of them, instead of its sets.
            artifact: What its system "artifact" stands for.
            systems: More systems.
            negatives: For all sets but the multi-hop ones by name, which have their own (`Negatives.parse`).
            queries: At most so many a set.

        Raises:
            InputError: There is none, or it is not a valid one; or there are no such negatives.
        """
        path = SHIPPED / f"{source}.toml" if source in shipped() else Path(source)
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(
                f"There is no configuration {source!r}: neither {' nor '.join(shipped())} nor a TOML file ({error})."
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{source} is not valid TOML: {error}") from None
        if data:
            raw["sets"] = [{"file": str(file)} for file in files_in(data)]
        if artifact is not None:
            raw["artifact"] = artifact
        try:
            found = cls.model_validate(raw)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise InputError(f"{source} is not a valid configuration: {problems}.") from None
        return found._with(systems, negatives, queries)._checked(source)

    def _with(self, systems: Sequence[str], negatives: str | None, queries: int | None) -> Reproduction:
        sets = self.sets
        if negatives is not None:
            given = Negatives.parse(negatives)
            update = {name: getattr(given, name) for name in given.model_fields_set}
            sets = tuple(
                part.model_copy(update={"negatives": (part.negatives or Negatives()).model_copy(update=update)})
                for part in sets
            )
        if queries is not None:
            sets = tuple(part.model_copy(update={"queries": min(part.queries or queries, queries)}) for part in sets)
        more = tuple(SystemPart(name=name) for name in systems)
        return self.model_copy(update={"sets": sets, "systems": (*self.systems, *more)})

    def _checked(self, source: str) -> Reproduction:
        """With the artifact's name in place.

        Raises:
            InputError: No sets, no artifact, two systems or sets of one name, or an unknown system or ablation.
        """
        if not self.systems and not self.ablations:
            raise InputError(f"{source} names neither systems nor ablations. Add [[systems]] or [[ablations]].")
        if self.systems and not self.sets:
            raise InputError(f"{source} names no sets. Pass --data FILE with labelled queries.")
        systems = tuple(part.model_copy(update={"name": self._named(part.name, source)}) for part in self.systems)
        for system in systems:
            parse(system.name)
        for part in self.ablations:
            chosen(part.names)
        for kind, titles in (("systems", [p.title for p in systems]), ("sets", [p.title for p in self.sets])):
            twice = sorted({title for title in titles if titles.count(title) > 1})
            if twice:
                raise InputError(f"{source} has two {kind} called {twice[0]!r}. Give one of them a label.")
        return self.model_copy(update={"systems": systems})

    def _named(self, name: str, source: str) -> str:
        prefix, colon, last = name.rpartition(":")
        if last != ARTIFACT:
            return name
        if self.artifact is None:
            raise InputError(f"{source} measures an RSRank artifact and names none. Pass --model ARTIFACT.")
        return f"{prefix}{colon}{self.artifact}"


@dataclass
class Outcome:
    """What a run made.

    Attributes:
        measured: Systems with their scores by set; a set that failed is not among them.
        comparison: Of the systems that have all sets; None where there is none.
        failures: What could not be done, and the error.
        tables: The page of tables.
    """

    measured: list[Measured] = field(default_factory=list)
    comparison: Comparison | None = None
    failures: dict[str, str] = field(default_factory=dict)
    tables: Path | None = None


def shipped() -> list[str]:
    """Names of the configurations inside the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def files_in(places: Iterable[str | Path]) -> list[Path]:
    """Files, and for each folder its ``.jsonl`` and ``.jsonl.gz`` files by name.

    Raises:
        InputError: A folder without any.
    """
    files: list[Path] = []
    for place in map(Path, places):
        if not place.is_dir():
            files.append(place)
            continue
        inside = sorted(path for path in place.iterdir() if path.name.endswith((".jsonl", ".jsonl.gz")))
        if not inside:
            raise InputError(f"The folder {place} holds no .jsonl or .jsonl.gz files.")
        files += inside
    return files


def plan(config: Reproduction) -> str:
    """What a run would do, in words; nothing is loaded."""
    lines = [f"{config.name}: {len(config.systems)} systems on {len(config.sets)} sets, seed {config.seed}"]
    for part in config.sets:
        many = "all queries" if part.queries is None else f"{part.queries} queries"
        given = part.negatives or (Negatives() if part.name else None)
        kind = "" if given is None else f", {given.count} {given.kind} negatives where the set has none of its own"
        if part.file is not None and given is not None:
            kind = f", {given.count} {given.kind} negatives of the file's documents"
        lines.append(f"  set      {part.title}: {part.split if part.name else part.file}, {many}{kind}")
    lines += [f"  system   {part.title}: {part.name}" for part in config.systems]
    lines.append(f"  tables   {', '.join(config.tables)}")
    lines.append(f"  figures  {', '.join(figure for figure in config.figures if figure != 'shifts' or config.umap)}")
    for ablations in config.ablations:
        names = [ablation.name for ablation in chosen(ablations.names)]
        lines.append(f"  ablations of {ablations.recipe}, {len(ablations.seeds)} seeds: {'; '.join(names)}")
    return "\n".join(lines)


def reproduce(
    config: Reproduction,
    output: str | Path,
    *,
    options: LoadOptions | None = None,
    say: Callable[[str], object] = str,
    watch: Callable[[Sequence[LabelledQuery], str], Iterable[LabelledQuery]] = lambda queries, what: queries,
) -> Outcome:
    """Run a configuration, or what is left of it, and write ``tables.md`` and ``report/`` into a folder.

    Args:
        config: What to measure.
        output: Folder for scores, tables, figures and ablations.
        options: How to load models.
        say: Told what is going on, failures included.
        watch: Wraps the queries that are being scored, as a progress bar does.

    Raises:
        InputError: No set could be loaded, or the folder cannot be written.
        MissingDependencyError: What tables and figures need is not installed.
    """
    output, options = Path(output), options or LoadOptions()
    check_report(output)
    if config.umap:
        load_umap()
    run = _Run(config, output, options, say, watch)
    sets = run.sets()
    for part in config.systems:
        run.measure(part, sets)
        _free()
    outcome = run.outcome
    complete = [found for found in outcome.measured if set(found.scored) == set(sets)]
    if complete and sets:
        pictures = run.pictures
        outcome.comparison = write_report(
            output / "report", complete, sets, titles=config.titles, pictures=pictures, sections=config.figures
        )
    figures = run.ablations()
    tables = ablation_tables(figures)
    if figures:
        _write(output / "ablations.json", FigureFile(figures=tuple(figures)).model_dump_json(indent=1) + "\n")
    stages = None if config.stages is None else _stages(Path(config.stages))
    outcome.tables = output / "tables.md"
    text = page(config.name, config.tables, list(sets), outcome.measured, outcome.comparison, tables, stages)
    text += _sample_figures(figures, output)
    if outcome.failures:
        text += "\n## What failed\n\n" + "".join(f"- {what}: {why}\n" for what, why in outcome.failures.items())
    _write(outcome.tables, text)
    return outcome


class _Run:
    def __init__(
        self,
        config: Reproduction,
        output: Path,
        options: LoadOptions,
        say: Callable[[str], object],
        watch: Callable[[Sequence[LabelledQuery], str], Iterable[LabelledQuery]],
    ) -> None:
        self.config, self.output, self.options, self.say, self.watch = config, output, options, say, watch
        self.outcome = Outcome()
        self.pictures: list[Picture] = []

    def fail(self, what: str, error: Exception) -> None:
        self.outcome.failures[what] = str(error)
        self.say(f"failed: {what}: {error}")

    def sets(self) -> dict[str, list[LabelledQuery]]:
        found = {}
        for part in self.config.sets:
            try:
                found[part.title] = part.load(self.config.seed, self.options, titles=self.config.titles)
            except RSRankError as error:
                self.fail(part.title, error)
        if self.config.sets and not found:
            raise InputError(f"None of the sets could be loaded: {'; '.join(self.outcome.failures.values())}")
        return found

    def measure(self, part: SystemPart, sets: dict[str, list[LabelledQuery]]) -> None:
        """Score what has no scores yet; the system is loaded only if there is something to score or to draw."""
        files = {label: self.output / "scores" / f"{_sha(part.title, label)[:16]}.json" for label in sets}
        keys = {label: self._key(part, queries) for label, queries in sets.items()}
        kept = {label: _read(files[label], keys[label], sets[label]) for label in sets}
        system: System | None = None
        draw = self.config.umap and parse(part.name)[0] is KINDS["rsrank"]
        if draw or not all(kept.values()):
            try:
                system = load_system(part.name, revision=part.revision, options=part.options(self.options))
            except RSRankError as error:
                self.fail(part.title, error)
        if system is not None:
            for label in [label for label, found in kept.items() if found is None]:
                kept[label] = self._score(part, system, label, sets[label], keys[label], files[label])
            if draw:
                self.pictures += shift_pictures(part.title, system, sets, titles=self.config.titles)
        done = {label: found for label, found in kept.items() if found is not None}
        if done:
            scores = {label: found.scored(sets[label]) for label, found in done.items()}
            native = next(iter(done.values())).threshold
            threshold, origin = _threshold(part.threshold, native, list(scores.values()))
            self.outcome.measured.append(Measured(part.title, threshold, origin, scores))

    def _score(
        self, part: SystemPart, system: System, label: str, queries: Sequence[LabelledQuery], key: str, path: Path
    ) -> _Kept | None:
        """Score a set and keep the scores; None where that failed."""
        try:
            scored = score_dataset(system, self.watch(queries, f"{part.title}, {label}"), titles=self.config.titles)
        except RSRankError as error:
            self.fail(f"{part.title}, {label}", error)
            return None
        found = _Kept(
            key=key,
            system=part.name,
            set=label,
            threshold=system.threshold,
            scores=tuple(tuple(query.scores) for query in scored),
            seconds=tuple(query.seconds for query in scored),
        )
        _write(path, found.model_dump_json() + "\n")
        return found

    def _key(self, part: SystemPart, queries: Sequence[LabelledQuery]) -> str:
        """Of everything that scores depend on."""
        texts = [query.model_dump_json() for query in queries]
        options = part.options(self.options)
        how = [options.dtype, options.weights == "int8", options.weights == "nf4", self.config.titles]
        how += ["fp8"] if options.weights == "fp8" else []
        return _sha(part.name, str(part.revision), str(how), _state(part.name), *texts)

    def ablations(self) -> list[AblationFigures]:
        found: list[AblationFigures] = []
        for part in self.config.ablations:
            runner = Ablations(
                part.recipe,
                self.output / "ablations",
                settings=part.settings,
                train=part.train,
                evaluation=part.evaluation,
                seeds=part.seeds,
                say=self.say,
            )
            done: list[AblationRow] = []
            for ablation, rows in runner.run(chosen(part.names)):
                if isinstance(rows, RSRankError):
                    self.fail(f"ablation {ablation.name!r}", rows)
                else:
                    done += rows
            found += figures_of(done, part.setup)
        return found


class _Kept(BaseModel):
    """Scores of one system on one set, on disk; labels and texts stay in the data."""

    model_config = _STRICT

    key: str
    system: str
    set: str
    threshold: float | None
    scores: tuple[tuple[float, ...], ...]
    seconds: tuple[float | None, ...]

    def scored(self, queries: Sequence[LabelledQuery]) -> list[ScoredQuery]:
        return [
            ScoredQuery(scores, [document.relevant for document in query.documents], seconds)
            for query, scores, seconds in zip(queries, self.scores, self.seconds, strict=True)
        ]


def _read(path: Path, key: str, queries: Sequence[LabelledQuery]) -> _Kept | None:
    """None where there are none, or of something else."""
    try:
        found = _Kept.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError, UnicodeDecodeError):
        return None
    return found if found.key == key and len(found.scores) == len(queries) else None


def _threshold(given: float | None, native: float | None, scored: Sequence[Sequence[ScoredQuery]]) -> tuple[float, str]:
    if given is not None:
        return given, "given"
    if native is not None:
        return native, "native"
    return shared_threshold(scored), "the best over all sets; no native one"


def _state(name: str) -> str:
    """Of a local folder that a system is loaded from: another artifact there is another system."""
    chosen = parse(name)[1]
    if not hub.is_folder(chosen):
        return ""
    files = sorted(path for path in Path(chosen).iterdir() if path.is_file())
    return str([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])


def _stages(path: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return [row for row in rows if {"stage", "seconds"} <= set(row)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no output of benchmarks.latency --paper --json: {error}") from None


def _sample_figures(figures: Sequence[AblationFigures], output: Path) -> str:
    """Draw quality by number of training queries, a figure a set; the Markdown that shows them."""
    lines = []
    for number, (dataset, figure) in enumerate(sample_curves(figures).items()):
        path, _ = plots.save(figure, output / "report" / "figures" / f"samples-{number}")
        lines.append(f"\n![{dataset}: quality by number of training queries]({path.relative_to(output).as_posix()})\n")
    return "".join(lines)


def _free() -> None:
    """Give back what the last system took, before the next one is loaded."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _write(path: Path, text: str) -> None:
    """A file appears only when it is complete."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise InputError(f"{path} could not be written: {error}") from error


def _sha(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()
