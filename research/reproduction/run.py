"""``python -m research.reproduce``: the paper's tables and figures for any artifact.

The run goes system by system and set by set. It writes scores after each set, so that a run that
was interrupted goes on. The tables name systems and sets that could not be loaded or scored, with
their errors, and the others still run.
"""

import gc
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import ValidationError
from typing_extensions import Self

from rsrank_rag.adapters.kinds import load, parse
from rsrank_rag.artifact import hub
from rsrank_rag.backends.options import LoadOptions
from rsrank_rag.errors import InputError, RSRankError
from rsrank_rag.evaluation.datasets import LabelledQuery
from rsrank_rag.evaluation.evaluate import score_dataset
from rsrank_rag.evaluation.metrics import ScoredQuery
from rsrank_rag.evaluation.statistics import Record
from rsrank_rag.partial_files import write_text
from rsrank_rag.ranking.rule import Rule

from ..best_threshold import shared_threshold
from ..comparison import Comparison, Measured, compare
from .config import Reproduction, SystemPart
from .tables import page
from .thresholds import write_figures


@dataclass
class Outcome:
    """What a run made.

    Attributes:
        measured: Scores of each system by set, without sets that failed.
        comparison: Compares the systems that have all sets; None without such a system.
        failures: Name of a set or system -> its error.
        tables: The file with the tables.
    """

    measured: list[Measured] = field(default_factory=list)
    comparison: Comparison | None = None
    failures: dict[str, str] = field(default_factory=dict)
    tables: Path | None = None


def reproduce(
    config: Reproduction,
    output: str | Path,
    *,
    options: LoadOptions | None = None,
    say: Callable[[str], object] = str,
    watch: Callable[
        [Sequence[LabelledQuery], str], Iterable[LabelledQuery]
    ] = lambda queries, what: queries,
) -> Outcome:
    """Run what is left of a configuration.

    Writes ``tables.md``, ``comparison.json`` and ``figures/`` into ``output``.

    Args:
        config: The configuration.
        output: Folder for scores, tables and figures.
        options: How to load models.
        say: Called with a line of text for each failure.
        watch: Wraps the queries that are being scored, as a progress bar does.

    Raises:
        InputError: No set could be loaded.
    """
    output = Path(output)
    options = options or LoadOptions()
    output.mkdir(parents=True, exist_ok=True)
    run = _Run(config, output, options, say, watch)
    sets = run.sets()
    for part in config.systems:
        run.measure(part, sets)
        # Free the memory before the next system is loaded.
        gc.collect()
        torch.cuda.empty_cache()
    outcome = run.outcome
    complete = [system for system in outcome.measured if set(system.scored) == set(sets)]
    if complete and sets:
        outcome.comparison = compare(complete, sets)
        text = outcome.comparison.model_dump_json(indent=1)
        write_text(output / "comparison.json", text + "\n")
        write_figures(output / "figures", complete, outcome.comparison)
    outcome.tables = output / "tables.md"
    text = page(config.name, list(sets), outcome.measured, outcome.comparison, outcome.failures)
    write_text(outcome.tables, text)
    return outcome


@dataclass
class _Run:
    config: Reproduction
    output: Path
    options: LoadOptions
    say: Callable[[str], object]
    watch: Callable[[Sequence[LabelledQuery], str], Iterable[LabelledQuery]]
    outcome: Outcome = field(default_factory=Outcome)

    def fail(self, what: str, error: Exception) -> None:
        self.outcome.failures[what] = str(error)
        self.say(f"failed: {what}: {error}")

    def sets(self) -> dict[str, list[LabelledQuery]]:
        sets = {}
        for part in self.config.sets:
            try:
                sets[part.title] = part.load(
                    self.config.seed, options=self.options, titles=self.config.titles
                )
            except RSRankError as error:
                self.fail(part.title, error)
        if self.config.sets and not sets:
            errors = "; ".join(self.outcome.failures.values())
            raise InputError(f"None of the sets could be loaded: {errors}")
        return sets

    def measure(self, part: SystemPart, sets: dict[str, list[LabelledQuery]]) -> None:
        """Score the sets without scores; load the system only if there is one."""
        files = {}
        keys = {}
        done = {}
        missing = []
        for label, queries in sets.items():
            name = _digest(part.title, label)[:16]
            files[label] = self.output / "scores" / f"{name}.json"
            keys[label] = self._key(part, queries)
            stored = _StoredScores.read(files[label], keys[label])
            if stored is None:
                missing.append(label)
            else:
                done[label] = stored
        try:
            options = part.options(self.options)
            if missing:
                system = load(options.source(part.name, part.revision))
        except RSRankError as error:
            self.fail(part.title, error)
            missing = []
        for label in missing:
            try:
                watched = self.watch(sets[label], f"{part.title}, {label}")
                scored = score_dataset(system, watched)
            except RSRankError as error:
                self.fail(f"{part.title}, {label}", error)
                continue
            scores = tuple(tuple(query.scores) for query in scored)
            done[label] = _StoredScores(key=keys[label], threshold=system.threshold, scores=scores)
            write_text(files[label], done[label].model_dump_json() + "\n")
        if done:
            self.outcome.measured.append(_measured(part, done, sets))

    def _key(self, part: SystemPart, queries: Sequence[LabelledQuery]) -> str:
        """Hash of everything that scores depend on."""
        texts = [query.model_dump_json() for query in queries]
        options = part.options(self.options)
        settings = [options.dtype, options.quantised, self.config.titles]
        # Another artifact in a local folder is another system.
        folder = parse(part.name)[1]
        state = _state_of(Path(folder)) if hub.is_folder(folder) else ""
        return _digest(part.name, str(part.revision), str(settings), state, *texts)


class _StoredScores(Record):
    """Scores of one system on one set; labels and texts stay in the data."""

    key: str
    """Hash of everything that the scores depend on."""
    threshold: float | None
    scores: tuple[tuple[float, ...], ...]

    @classmethod
    def read(cls, path: Path, key: str) -> Self | None:
        """The scores of this key; None if the file is missing or has another key."""
        try:
            stored = cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError, UnicodeDecodeError):
            return None
        return stored if stored.key == key else None

    def scored(self, queries: Sequence[LabelledQuery]) -> list[ScoredQuery]:
        """The scores with the queries' labels."""
        scored = []
        for query, scores in zip(queries, self.scores, strict=True):
            labels = [document.relevant for document in query.documents]
            scored.append(ScoredQuery(scores, labels))
        return scored


def _measured(
    part: SystemPart,
    stored: Mapping[str, _StoredScores],
    sets: Mapping[str, Sequence[LabelledQuery]],
) -> Measured:
    """A system with its threshold and its scores of sets, in the order of the sets."""
    scored = {}
    for label, queries in sets.items():
        if label in stored:
            scored[label] = stored[label].scored(queries)
    threshold = next(iter(stored.values())).threshold
    origin = "native"
    if part.threshold is not None:
        threshold = part.threshold
        origin = "given"
    elif threshold is None:
        threshold = shared_threshold(list(scored.values()))
        origin = "the best over all sets; no native one"
    return Measured(part.title, Rule(threshold), origin, scored)


def _digest(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _state_of(folder: Path) -> str:
    """Names, sizes and times of a folder's files."""
    states = []
    for file in sorted(folder.iterdir()):
        if file.is_file():
            state = file.stat()
            states.append((file.name, state.st_size, state.st_mtime_ns))
    return str(states)
