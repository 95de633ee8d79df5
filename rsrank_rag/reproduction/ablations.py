"""Ablations (paper, Appendix B) as data: named changes of a recipe or of how its artifact is loaded, and their runs.

Every ablation changes one thing. B is trained on the recipe's data and measured on its evaluation sets, both from
features: those that read the same features share one store. A change of how the artifact is loaded trains nothing.

Axes: L layers, H heads, M rows (documents x query tokens), D head dimension.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import InputError, RSRankError
from ..evaluation import plots
from ..evaluation.calibration import select_top
from ..evaluation.evaluate import score_dataset
from ..evaluation.metrics import ScoredQuery, best_threshold, f1_at, ranking_by_query
from ..evaluation.statistics import estimate_mean
from ..method.projection import Projection
from ..prefixes.settings import PrefixCache
from ..rsrank import RSRank
from ..training.features import FeatureSource, FeatureStore, QueryFeatures
from ..training.fit import Subset, fit, scored, split
from ..training.recipe import DataPart, Recipe
from ..training.run import Kitchen
from .closed_form import closed_form

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Share = Literal["all", "first half", "second half", "every second", "first", "last"]
"""Which of the layers or heads that the recipe reads."""

BASE = "base"


@dataclass(frozen=True, slots=True)
class Load:
    """How an artifact is loaded.

    Attributes:
        eight_bit: The language model's weights in 8 bits.
        four_bit: In 4 bits.
        prefixes: Whether documents' prefixes are kept, in which places; False for none.
    """

    eight_bit: bool = False
    four_bit: bool = False
    prefixes: PrefixCache | Literal[False] = False


@dataclass(frozen=True, slots=True)
class Ablation:
    """One change.

    Attributes:
        name: Of it.
        group: The table it stands in.
        changes: Entries of the recipe, as after ``--set``.
        layers: B reads only these of the recipe's layers.
        heads: And only these heads.
        queries: B learns from so many queries, for the recipe's ``sample_epochs``; 0 is a random B.
        load: The recipe's artifact is loaded so and scores the texts, end to end; None: scores come from features.
    """

    name: str
    group: str
    changes: tuple[str, ...] = ()
    layers: Share = "all"
    heads: Share = "all"
    queries: int | None = None
    load: Load | None = None


_ASK = r'template.suffix="\nRelevant: "'
_SHARES: tuple[Share, ...] = ("first half", "second half", "every second", "first", "last")
_LOSSES = ("calibration", "margin", "orthogonality", "alignment", "frobenius")

ABLATIONS: Mapping[str, Ablation] = {
    ablation.name: ablation
    for ablation in (
        Ablation(BASE, BASE),
        Ablation("raw", "shift", ("features.null_prefix=none",)),
        Ablation("matched", "shift", ("features.null_prefix=matched",)),
        *(Ablation(f"closed-{name}", "shift", (f"method={name}",)) for name in ("oracle", "separation", "combined")),
        Ablation("keys", "signal", ("features.signal=keys", "features.null_prefix=matched")),
        Ablation("hidden", "signal", ("features.signal=hidden",)),
        *(Ablation(f"no-{name}", "loss", (f"fit.{name}_weight=0",)) for name in _LOSSES),
        *(Ablation(f"P={size}", "P", (f"fit.projection_dim={size}",)) for size in (1, 4, 16, 32, 64, 128)),
        *(Ablation(f"layers: {share}", "layers", layers=share) for share in _SHARES),
        *(Ablation(f"heads: {share}", "heads", heads=share) for share in _SHARES[:4]),
        Ablation("suffix, query scored", "positions", (_ASK,)),
        Ablation("suffix, suffix scored", "positions", (_ASK, "template.positions=suffix")),
        Ablation("suffix, both scored", "positions", (_ASK, "template.positions=query+suffix")),
        Ablation("8 query tokens in training", "positions", ("features.max_tokens=8",)),
        Ablation("short instruction", "template", ('template.instruction="Document: "',)),
        Ablation("bare separator", "template", (r'template.separator="\n"',)),
        Ablation("no titles", "template", ("features.titles=false",)),
        *(Ablation(f"{count} queries", "samples", queries=count) for count in (0, 50, 100, 200, 400, 800)),
        Ablation("end to end", "loading", load=Load()),
        Ablation("8-bit", "loading", load=Load(eight_bit=True)),
        Ablation("4-bit", "loading", load=Load(four_bit=True)),
        Ablation("prefixes as they are", "prefixes", load=Load(prefixes=PrefixCache(device=4 * 10**9))),
        Ablation("prefixes in 8 bits", "prefixes", load=Load(prefixes=PrefixCache(device=0, host=4 * 10**9))),
    )
}
"""All that are known, by name."""

_CURVES = {"recall@5": "Recall@5", "ndcg@5": "nDCG@5", "f1@0": "F1 at zero"}

GROUPS: tuple[str, ...] = tuple(dict.fromkeys(ablation.group for ablation in ABLATIONS.values()))


def chosen(names: Sequence[str]) -> list[Ablation]:
    """The ablations that names, groups or ``all`` stand for, the unchanged recipe first.

    Raises:
        InputError: There is no such one; all are listed.
    """
    found = {BASE: ABLATIONS[BASE]}
    for name in names:
        matching = {key: a for key, a in ABLATIONS.items() if name in ("all", key, a.group)}
        if not matching:
            raise InputError(
                f"There is no ablation {name!r}. Give 'all', a group ({', '.join(GROUPS)}) or a name: "
                f"{', '.join(ABLATIONS)}."
            )
        found |= matching
    return list(found.values())


class AblationRow(BaseModel):
    """What one ablation gave on one set; per query, so that intervals and differences can be taken.

    Attributes:
        name: Of the ablation.
        group: Its table.
        changes: In words: the settings, or what was left out.
        dataset: The set.
        parameters: Numbers in B.
        metrics: Metric -> one number a query: ``recall@5``, ``ndcg@5``, ``f1@0``, ``f1@5`` (of the best five) and
            ``f1@best`` (at the set's best threshold).
        tau_best: The set's best threshold.
        seconds: The run took, features included where they were not there yet.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    group: str
    changes: str
    dataset: str
    parameters: int
    metrics: dict[str, tuple[float, ...]]
    tau_best: float
    seconds: float

    def mean(self, metric: str) -> float:
        """Over queries."""
        values = self.metrics[metric]
        return sum(values) / max(len(values), 1)


class _Kept(BaseModel):
    """Rows of one ablation on disk, and what they are of."""

    key: str
    rows: tuple[AblationRow, ...]


@dataclass
class Ablations:
    """Runs ablations of a recipe one after another; what was done is kept and not done again.

    Attributes:
        config: The recipe: a shipped name or a TOML file.
        settings: Entries that are changed for all of them, as after ``--set``.
        train: What B learns from; empty for the recipe's data.
        evaluation: What it is measured on; empty for the recipe's evaluation sets.
        output: Folder for features, checkpoints and results.
        say: Told what is going on.
        progress: Show progress bars.
    """

    config: str
    output: Path
    settings: Sequence[str] = ()
    train: tuple[DataPart, ...] = ()
    evaluation: tuple[DataPart, ...] = ()
    say: Callable[[str], object] = str
    progress: bool = False
    _artifact: Path | None = field(default=None, init=False)
    _stores: dict[str, FeatureStore] = field(default_factory=dict, init=False)

    def recipe(self, ablation: Ablation) -> Recipe:
        """The changed recipe.

        Raises:
            InputError: There is no such recipe, it cannot be changed so, or it has nothing to measure on.
        """
        found = Recipe.load(self.config, [*self.settings, *ablation.changes])
        update = {"data": self.train or found.data, "evaluation": self.evaluation or found.evaluation}
        if not update["data"] or not update["evaluation"]:
            raise InputError(f"Ablations of {self.config!r} need data to train on and evaluation sets. Name both.")
        return found.model_copy(update=update)

    def run(self, ablations: Sequence[Ablation]) -> Iterator[tuple[Ablation, list[AblationRow] | RSRankError]]:
        """Each ablation with its rows, one a set; or with the error that it ended with. The others go on."""
        for ablation in ablations:
            try:
                yield ablation, self._rows(ablation)
            except RSRankError as error:
                yield ablation, error

    def _rows(self, ablation: Ablation) -> list[AblationRow]:
        recipe = self.recipe(ablation)
        key = _sha(repr(ablation), recipe.model_dump_json(), *map(_stamp, (*recipe.data, *recipe.evaluation)))
        path = self.output / "results" / f"{_sha(ablation.name)[:16]}.json"
        kept = _read(path)
        if kept is not None and kept.key == key:
            return list(kept.rows)
        self.say(f"ablation: {ablation.name}")
        started = time.perf_counter()
        if ablation.load is None:
            count, found = self._from_features(ablation, recipe)
        else:
            count, found = self._end_to_end(ablation.load, recipe)
        seconds = time.perf_counter() - started
        rows = [_row(ablation, label, queries, count, seconds) for label, queries in found.items()]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(_Kept(key=key, rows=tuple(rows)).model_dump_json(indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
        return rows

    def _from_features(self, ablation: Ablation, recipe: Recipe) -> tuple[int, dict[str, list[ScoredQuery]]]:
        """Parameters of B, and scores by set."""
        store = self._store(recipe)
        layers = pick(store.spec.layers, ablation.layers)
        features = _Part(store, ablation)
        train, held = split(len(store), recipe.validation_share, recipe.fit.seed)
        options = recipe.fit
        if ablation.queries is not None:
            options = options.model_copy(update={"epochs": recipe.sample_epochs, "keep": "last"})
            if ablation.queries > len(train):
                raise InputError(f"{ablation.queries} queries to learn from were asked for; there are {len(train)}.")
            train = train[: ablation.queries]
        heads, width = features[0].shifts.shape[1], features[0].shifts.shape[-1]
        if not train:
            projection = Projection.random(layers, heads, options.projection_dim, width, seed=options.seed)
        elif recipe.method != "gradient":
            projection = closed_form(
                Subset(features, train), layers, recipe.method, projection_dim=options.projection_dim
            )
        else:
            projection = fit(
                Subset(features, train),
                Subset(features, held),
                layers,
                options,
                output=self.output / "fit" / _sha(repr(ablation), recipe.model_dump_json())[:16],
                device=recipe.model.device,
                identity=_sha(store.spec.model_dump_json(), repr(ablation), str((train, held))),
            ).projection
        found = {}
        for part in recipe.evaluation:
            source = self._store(_evaluating(recipe, part))
            found[part.label] = scored(_Part(source, ablation), projection, device=recipe.model.device)
        return projection.weight.numel(), found

    def _store(self, recipe: Recipe) -> FeatureStore:
        """Features of the recipe's data, made if need be; shared by all that read the same."""
        same = recipe.model_dump_json(include={"model", "template", "features", "data"})
        key = _sha(same, str(recipe.fit.seed))[:16]
        if key not in self._stores:  # finding it again would load the language model
            kitchen = Kitchen(recipe, self.output / "stores" / key, say=self.say, progress=self.progress)
            self._stores[key] = kitchen.extract()
        return self._stores[key]

    def _end_to_end(self, load: Load, recipe: Recipe) -> tuple[int, dict[str, list[ScoredQuery]]]:
        if self._artifact is None:
            kitchen = Kitchen(recipe, self.output / BASE, say=self.say, progress=self.progress)
            self._artifact = kitchen.cook_from(self._store(recipe)).artifact
        ranker = RSRank.from_pretrained(
            self._artifact,
            device=recipe.model.device,
            dtype=recipe.model.dtype,
            load_in_8bit=load.eight_bit,
            load_in_4bit=load.four_bit,
            prefix_cache=load.prefixes,
            local_files_only=recipe.model.local_files_only,
        )
        found = {}
        for part in recipe.evaluation:
            queries = part.load(recipe.fit.seed)
            titles = recipe.features.titles
            if load.prefixes is not False:
                score_dataset(ranker, queries, titles=titles)  # the second time they come from where they are kept
            found[part.label] = score_dataset(ranker, queries, titles=titles)
        return ranker.projection.weight.numel(), found


def pick(items: Sequence[int], share: Share) -> tuple[int, ...]:
    """Some of the items; at least one.

    >>> pick(range(1, 6), "first half"), pick(range(1, 6), "second half"), pick(range(1, 6), "every second")
    ((1, 2, 3), (4, 5), (1, 3, 5))
    """
    middle = (len(items) + 1) // 2
    slices = {
        "all": slice(None),
        "first half": slice(middle),
        "second half": slice(min(middle, len(items) - 1), None),
        "every second": slice(None, None, 2),
        "first": slice(1),
        "last": slice(-1, None),
    }
    return tuple(items[slices[share]])


class _Part:
    """Features of some layers and heads."""

    def __init__(self, source: FeatureSource, ablation: Ablation) -> None:
        self.source, self.ablation = source, ablation

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int, /) -> QueryFeatures:
        found = self.source[number]
        count, heads = found.shifts.shape[:2]
        shifts = found.shifts
        if self.ablation.layers != "all":
            shifts = shifts[list(pick(range(count), self.ablation.layers))]
        if self.ablation.heads != "all":
            shifts = shifts[:, list(pick(range(heads), self.ablation.heads))]
        return QueryFeatures(shifts, found.relevant, found.tokens, found.oracle)


def _evaluating(recipe: Recipe, part: DataPart) -> Recipe:
    """The recipe with a set to measure on as its data: all documents, all tokens."""
    whole = recipe.features.model_copy(update={"max_documents": None, "max_tokens": None})
    return recipe.model_copy(update={"data": (part,), "features": whole, "minimum_queries": 1})


def _row(ablation: Ablation, label: str, found: list[ScoredQuery], count: int, seconds: float) -> AblationRow:
    tau, _ = best_threshold(found)
    return AblationRow(
        name=ablation.name,
        group=ablation.group,
        changes=describe_changes(ablation),
        dataset=label,
        parameters=count,
        metrics={
            **{name: tuple(values) for name, values in ranking_by_query(found).items()},
            "f1@0": tuple(f1_at(query, 0.0) for query in found),
            "f1@5": tuple(select_top(found, 5).f1),
            "f1@best": tuple(f1_at(query, tau) for query in found),
        },
        tau_best=tau,
        seconds=seconds,
    )


def describe_changes(ablation: Ablation) -> str:
    """What an ablation changes, in words."""
    parts = [*ablation.changes]
    parts += [f"{what}: {share}" for what in ("layers", "heads") if (share := getattr(ablation, what)) != "all"]
    if ablation.queries is not None:
        parts.append(f"{ablation.queries} training queries" if ablation.queries else "random B")
    if ablation.load is not None:
        bits = "8-bit weights" if ablation.load.eight_bit else "4-bit weights" if ablation.load.four_bit else ""
        parts += [part for part in ("scored by the artifact", bits) if part]
        if ablation.load.prefixes is not False:
            kept = "in 8 bits" if ablation.load.prefixes.host else "as they are"
            parts.append(f"second call, prefixes kept {kept}")
    return ", ".join(parts) or "nothing"


def sample_curves(rows: Sequence[AblationRow]) -> dict[str, Figure]:
    """Set -> quality by number of training queries (paper, Section 7.2), with bootstrap intervals over queries.

    Args:
        rows: Of any ablations; those of the group "samples" are drawn.
    """
    figures = {}
    measured = [row for row in rows if row.group == "samples"]
    for dataset in dict.fromkeys(row.dataset for row in measured):
        chosen = {ABLATIONS[row.name].queries or 0: row for row in measured if row.dataset == dataset}
        samples = sorted(chosen)
        points = {
            title: [estimate_mean(chosen[count].metrics[metric]) for count in samples]
            for metric, title in _CURVES.items()
        }
        figures[dataset] = plots.sample_efficiency(
            samples,
            {title: [point.mean for point in found] for title, found in points.items()},
            intervals={
                title: [(p.mean if p.low is None else p.low, p.mean if p.high is None else p.high) for p in found]
                for title, found in points.items()
            },
            label=f"on {dataset}, {len(chosen[samples[0]].metrics['f1@0'])} queries",
        )
    return figures


def _stamp(part: DataPart) -> str:
    """A file's state, so that a changed file is measured anew. A named set is pinned."""
    if part.file is None:
        return ""
    try:
        state = Path(part.file).stat()
    except OSError as error:
        raise InputError(f"There is no data file {part.file}: {error}") from None
    return f"{state.st_size} {state.st_mtime_ns}"


def _read(path: Path) -> _Kept | None:
    """None where there is nothing that could be read."""
    try:
        return _Kept.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError, UnicodeDecodeError):
        return None


def _sha(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()
