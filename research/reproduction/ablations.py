"""Ablations (paper, Appendix B): the changes of a recipe that ``ablations.toml`` lists.

Every ablation changes one thing. B is trained on the recipe's data and measured on its evaluation
sets, both from features: ablations that read the same features share one store. What was done is
kept and not done again.
"""

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, Field, ValidationError
from typing_extensions import Self

from rsrank_rag.adapters.kinds import load
from rsrank_rag.backends.torch.projection import Projection
from rsrank_rag.errors import InputError, RSRankError
from rsrank_rag.evaluation.evaluate import score_dataset
from rsrank_rag.evaluation.metrics import (
    ScoredQuery,
    ranking_measures,
    selection_measures,
)
from rsrank_rag.evaluation.statistics import Record
from rsrank_rag.partial_files import write_text
from rsrank_rag.ranking.rule import Rule
from rsrank_rag.training.feature_scores import device_for, scored, split
from rsrank_rag.training.fit import FitOptions, fit
from rsrank_rag.training.recipe import SHIPPED, read_toml
from rsrank_rag.training.store import QueryFeatures

from ..best_threshold import best_threshold
from ..features import ResearchRun
from ..recipe import ResearchRecipe, SetPart
from .closed_forms import closed_form
from .oracle import oracle_scores
from .signals import Null, Signal, reader_of

Share = Literal["all", "first half", "second half", "every second", "first", "last"]
"""Which of the layers or heads that the recipe reads."""

Scorer = Literal["B", "oracle similarity", "cosine"]
"""B, or a score to compare it with.

"oracle similarity" is the similarity to the shift of all relevant documents, taken from the labels
(Section 4.2). "cosine" uses the recipe's model as a bi-encoder.
"""

BASE = "base"

# Epochs of a B that learns from few queries (the paper's Table 4).
SAMPLE_EPOCHS = 10


@dataclass(frozen=True)
class Ablation:
    """One change."""

    name: str
    group: str  # the table it stands in
    changes: tuple[str, ...] = ()  # entries of the recipe, as after ``--set``
    signal: Signal = "values"
    null: Null = "empty"
    layers: Share = "all"
    heads: Share = "all"
    # B learns from so many, drawn at random, for `SAMPLE_EPOCHS`; 0 is a random B.
    queries: int | None = None
    scorer: Scorer = "B"

    def __str__(self) -> str:
        """The change in words."""
        parts = [change.split(".", 1)[-1] for change in self.changes]
        read = {name: getattr(self, name) for name in ("signal", "null", "layers", "heads")}
        parts += [
            f"{name}: {value}" for name, value in read.items() if value != getattr(Ablation, name)
        ]
        if self.queries is not None:
            parts.append(f"{self.queries} training queries" if self.queries else "random B")
        if self.scorer != "B":
            parts.append(
                "knows the labels"
                if self.scorer == "oracle similarity"
                else "the model as a bi-encoder"
            )
        return ", ".join(parts) or "nothing"


class AblationPart(BaseModel, extra="forbid", frozen=True):
    """Which ablations of which recipe, and how often B is trained for each."""

    recipe: str
    names: tuple[str, ...] = ("all",)
    setup: str = Field(default="", description="What B is trained on, for the tables' headings.")
    seeds: tuple[int, ...] = Field(
        default=(0,), min_length=1, description="Of all that is random in training."
    )
    settings: tuple[str, ...] = Field(
        default=(), description="Entries changed for all of them, as after --set."
    )
    train: tuple[SetPart, ...] = Field(
        default=(), description="What B learns from; empty for the recipe's data."
    )
    evaluation: tuple[SetPart, ...] = Field(
        default=(), description="Empty for the recipe's evaluation sets."
    )


ABLATIONS: Mapping[str, Ablation] = {
    entry["name"]: Ablation(**{**entry, "changes": tuple(entry.get("changes", ()))})
    for entry in read_toml(str(Path(__file__).with_suffix(".toml")), SHIPPED, "list of ablations")[
        "ablations"
    ]
}
"""All that are known, by name."""

GROUPS: tuple[str, ...] = tuple(dict.fromkeys(ablation.group for ablation in ABLATIONS.values()))


def chosen(names: Sequence[str]) -> list[Ablation]:
    """The unchanged recipe, then the ablations of these names or groups; InputError for others."""
    found = {BASE: ABLATIONS[BASE]}
    for name in names:
        matching = {key: a for key, a in ABLATIONS.items() if name in ("all", key, a.group)}
        if not matching:
            raise InputError(
                f"There is no ablation {name!r}. Give 'all', a group ({', '.join(GROUPS)}) or a "
                f"name: {', '.join(ABLATIONS)}."
            )
        found |= matching
    return list(found.values())


def pick(items: Sequence[int], share: Share) -> tuple[int, ...]:
    """Some of the items; at least one.

    >>> [pick(range(1, 6), share) for share in ("first half", "second half", "every second")]
    [(1, 2, 3), (4, 5), (1, 3, 5)]
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


class AblationOnSet(Record):
    """One ablation on one set."""

    name: str
    group: str
    changes: str
    dataset: str
    train: int = 0  # queries that B was given
    parameters: int  # numbers in B


class AblationRow(AblationOnSet):
    """One with one seed; metrics per query, so that intervals and differences can be taken."""

    seed: int = 0
    metrics: dict[
        str, tuple[float, ...]
    ]  # metric -> one number a query; f1@5 is of the best five, f1@best at tau_best
    tau_best: float  # the set's best threshold
    seconds: float  # the run took, features included where they were not there yet


class Kept(Record):
    """What was computed, on disk, under a key of everything that it depends on."""

    key: str

    @classmethod
    def read(cls, path: Path, key: str) -> Self | None:
        """What was kept under this key; None where there is nothing, or something else."""
        try:
            found = cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError, UnicodeDecodeError):
            return None
        return found if found.key == key else None


class _KeptRows(Kept):
    """Rows of one ablation."""

    rows: tuple[AblationRow, ...]


@dataclass
class Ablations:
    """Runs ablations of a recipe one after another."""

    part: AblationPart
    output: Path
    say: Callable[[str], object]  # told what is going on
    fail: Callable[[str, Exception], object]  # told what ended with an error
    _features: dict[str, list[QueryFeatures]] = field(default_factory=dict, init=False)
    _layers: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False)

    def recipe(self, ablation: Ablation) -> ResearchRecipe:
        """The changed recipe; InputError if it is missing, or lacks training or evaluation data."""
        part = self.part
        found = ResearchRecipe.load(part.recipe, [*part.settings, *ablation.changes])
        update = {
            "data": part.train or found.data,
            "evaluation": part.evaluation or found.evaluation,
        }
        if not update["data"] or not update["evaluation"]:
            raise InputError(
                f"Ablations of {part.recipe!r} need data to train on and evaluation sets. Name "
                "both."
            )
        return found.model_copy(update=update)

    def run(self, ablations: Sequence[Ablation]) -> list[AblationRow]:
        """Rows of each ablation and seed, one a set; an error is reported, and the others go on."""
        rows: list[AblationRow] = []
        for ablation in ablations:
            for seed in (
                self.part.seeds if ablation.scorer == "B" else self.part.seeds[:1]
            ):  # yardsticks draw nothing
                try:
                    rows += self._rows(ablation, seed)
                except RSRankError as error:
                    self.fail(f"ablation {ablation.name!r}", error)
        return rows

    def _rows(self, ablation: Ablation, seed: int) -> list[AblationRow]:
        recipe = self.recipe(ablation)
        files = [
            Path(part.file) for part in (*recipe.data, *recipe.evaluation) if part.file
        ]  # named sets are pinned
        key = sha(repr(ablation), str(seed), recipe.model_dump_json(), state_of(files))
        path = self.output / "results" / f"{key[:16]}.json"
        if kept := _KeptRows.read(path, key):
            return list(kept.rows)
        self.say(f"ablation: {ablation.name}, seed {seed}")
        started = time.perf_counter()
        train, parameters, found = self._scores(ablation, recipe, seed)
        about: dict[str, Any] = {
            "name": ablation.name,
            "group": ablation.group,
            "changes": str(ablation),
            "seed": seed,
        }
        about |= {
            "train": train,
            "parameters": parameters,
            "seconds": time.perf_counter() - started,
        }
        rows = [
            AblationRow(**about, dataset=label, **_measured(queries))
            for label, queries in found.items()
        ]
        write_text(path, _KeptRows(key=key, rows=tuple(rows)).model_dump_json(indent=1) + "\n")
        return rows

    def _scores(
        self, ablation: Ablation, recipe: ResearchRecipe, seed: int
    ) -> tuple[int, int, dict[str, list[ScoredQuery]]]:
        """Queries to learn from, numbers in B, and scores by set."""
        sets = recipe.evaluation
        if ablation.scorer == "cosine":
            options = recipe.model.load_options()
            system = load(options.source(f"bi-encoder:{recipe.model.name}"))
            found: dict[str, list[ScoredQuery]] = {}
            for part in sets:
                labelled = part.load(recipe.fit.seed, titles=recipe.features.titles)
                found[part.title] = score_dataset(system, labelled)
            return 0, 0, found
        features = {}
        for part in sets:
            features[part.title] = self._read(_evaluating(recipe, part), ablation)
        found = {}
        if ablation.scorer == "oracle similarity":
            for label, queries in features.items():
                found[label] = [ScoredQuery(oracle_scores(q), q.relevant) for q in queries]
            return 0, 0, found
        train, projection = self._projection(ablation, recipe, seed)
        weights = dict(projection.named_parameters())
        for label, queries in features.items():
            rows = [_part(query, ablation) for query in queries]
            found[label] = scored(rows, weights, device=device_for(recipe.model.device))
        return train, projection.weight.numel(), found

    def _projection(
        self, ablation: Ablation, recipe: ResearchRecipe, seed: int
    ) -> tuple[int, Projection]:
        """B, and how many queries it was given."""
        features = [_part(query, ablation) for query in self._read(recipe, ablation)]
        train, held = split(len(features), recipe.validation, seed)
        options = recipe.fit.model_copy(update={"seed": seed})
        if ablation.queries is not None:
            if ablation.queries > len(train):
                raise InputError(
                    f"{ablation.queries} queries to learn from were asked for; there are "
                    f"{len(train)}."
                )
            train = random.Random(f"samples-{seed}").sample(train, ablation.queries)
            options = options.model_copy(update={"epochs": SAMPLE_EPOCHS, "keep": "last"})
        layers = pick(self._layers[self._key(recipe, ablation)], ablation.layers)
        learning = [features[number] for number in train]
        validation = [features[number] for number in held]
        return len(train), learn(recipe, learning, validation, layers, options)

    def _key(self, recipe: ResearchRecipe, ablation: Ablation) -> str:
        """Of features; all ablations that read the same share them."""
        same = recipe.model_dump_json(include={"model", "template", "features", "data"})
        return sha(same, str(recipe.fit.seed), ablation.signal, ablation.null)[:16]

    def _read(self, recipe: ResearchRecipe, ablation: Ablation) -> list[QueryFeatures]:
        """Features of the recipe's data, made if need be."""
        key = self._key(recipe, ablation)
        if key not in self._features:
            folder = self.output / "stores" / key
            reader = reader_of(ablation.signal, ablation.null)
            run = ResearchRun(recipe, folder)
            run.reader = reader  # type: ignore[assignment]
            self._features[key] = run.extract()
            self._layers[key] = run.layers
        return self._features[key]


def learn(
    recipe: ResearchRecipe,
    train: Sequence[QueryFeatures],
    validation: Sequence[QueryFeatures],
    layers: Sequence[int],
    options: FitOptions,
) -> Projection:
    """B from queries, by the recipe's method; a random one from none."""
    if not train:
        _, heads, _, width = validation[0].shifts.shape
        return Projection.random(layers, heads, options.projection_dim, width, seed=options.seed)
    if recipe.method != "gradient":
        return closed_form(train, layers, recipe.method, projection_dim=options.projection_dim)
    device = device_for(recipe.model.device)
    return fit(train, validation, layers, options, device=device).projection


def _part(query: QueryFeatures, ablation: Ablation) -> QueryFeatures:
    """Features of some layers and heads."""
    shifts = query.shifts
    count, heads = shifts.shape[:2]
    if ablation.layers != "all":
        shifts = shifts[list(pick(range(count), ablation.layers))]
    if ablation.heads != "all":
        shifts = shifts[:, list(pick(range(heads), ablation.heads))]
    return QueryFeatures(shifts, query.relevant, query.tokens, query.oracle)


def _evaluating(recipe: ResearchRecipe, part: SetPart) -> ResearchRecipe:
    """The recipe with a set to measure on as its data: all documents, all tokens."""
    whole = recipe.features.model_copy(update={"max_documents": None, "max_tokens": None})
    return recipe.model_copy(update={"data": (part,), "features": whole, "minimum_queries": 1})


def _measured(found: list[ScoredQuery]) -> dict[str, Any]:
    """All metrics, one number a query each, and the set's best threshold."""
    tau, _ = best_threshold(found)
    top5 = selection_measures(found, Rule(top_n=5))
    metrics = {
        **ranking_measures(found),
        "p@5": np.nan_to_num(top5["precision"]),
        "f1@5": top5["f1"],
        "f1@0": selection_measures(found, Rule(0.0))["f1"],
        "f1@best": selection_measures(found, Rule(tau))["f1"],
    }
    return {
        "metrics": {name: tuple(row.tolist()) for name, row in metrics.items()},
        "tau_best": tau,
    }


def state_of(files: Iterable[Path]) -> str:
    """Of the files that are there, so that what was made of one that has changed is made anew."""
    found = [(file, file.stat()) for file in sorted(files) if file.is_file()]
    return str([(file.name, state.st_size, state.st_mtime_ns) for file, state in found])


def sha(*texts: str) -> str:
    """sha256 of several texts."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()
