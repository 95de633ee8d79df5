"""``python -m research.reproduce``: the paper's tables and figures for any artifact.

System by system and set by set; scores are kept after each, so that a run that was interrupted goes
on. What cannot be loaded or scored is named with its error, and the others still run.
"""

import gc
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
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
    """What a run made."""

    measured: list[Measured] = field(
        default_factory=list
    )  # scores by set; a set that failed is not among them
    comparison: Comparison | None = (
        None  # of the systems that have all sets; None where there is none
    )
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

    `options`: how to load models. `say`: told what is going on, failures included. `watch`: wraps
    the queries that are being scored, as a progress bar does. Raises InputError if no set could be
    loaded.
    """
    output, options = Path(output), options or LoadOptions()
    output.mkdir(parents=True, exist_ok=True)
    run = _Run(config, output, options, say, watch)
    sets = run.sets()
    for part in config.systems:
        run.measure(part, sets)
        gc.collect()  # before the next system is loaded
        torch.cuda.empty_cache()  # does nothing where there is no GPU
    outcome = run.outcome
    complete = [found for found in outcome.measured if set(found.scored) == set(sets)]
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
        found = {}
        for part in self.config.sets:
            try:
                found[part.title] = part.load(
                    self.config.seed, options=self.options, titles=self.config.titles
                )
            except RSRankError as error:
                self.fail(part.title, error)
        if self.config.sets and not found:
            raise InputError(
                f"None of the sets could be loaded: {'; '.join(self.outcome.failures.values())}"
            )
        return found

    def measure(self, part: SystemPart, sets: dict[str, list[LabelledQuery]]) -> None:
        """Score the sets without scores; load the system only if there is one."""
        folder = self.output / "scores"
        files = {label: folder / f"{_digest(part.title, label)[:16]}.json" for label in sets}
        keys = {label: self._key(part, queries) for label, queries in sets.items()}
        done = {}
        for label in sets:
            stored = _StoredScores.read(files[label], keys[label])
            if stored is not None:
                done[label] = stored
        missing = [label for label in sets if label not in done]
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
            found = {label: done[label].scored(sets[label]) for label in sets if label in done}
            native = next(iter(done.values())).threshold
            threshold, origin = (
                (part.threshold, "given") if part.threshold is not None else (native, "native")
            )
            if threshold is None:
                threshold, origin = (
                    shared_threshold(list(found.values())),
                    "the best over all sets; no native one",
                )
            self.outcome.measured.append(Measured(part.title, Rule(threshold), origin, found))

    def _key(self, part: SystemPart, queries: Sequence[LabelledQuery]) -> str:
        """Of everything that scores depend on."""
        texts = [query.model_dump_json() for query in queries]
        options = part.options(self.options)
        how = [options.dtype, options.quantised, self.config.titles]
        folder = parse(part.name)[1]  # another artifact in a local folder is another system
        state = _state_of(Path(folder)) if hub.is_folder(folder) else ""
        return _digest(part.name, str(part.revision), str(how), state, *texts)


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
        labels = ([document.relevant for document in query.documents] for query in queries)
        return list(map(ScoredQuery, self.scores, labels))


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
