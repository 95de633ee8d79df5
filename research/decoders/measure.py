"""Measure B on stored features: `python -m research.decoders.measure --help`."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import click

from rsrank_rag.adapters.kinds import load
from rsrank_rag.artifact import hub
from rsrank_rag.backends.options import ModelSource
from rsrank_rag.backends.torch.projection import Projection
from rsrank_rag.cli.arguments import PATH, command
from rsrank_rag.errors import InputError
from rsrank_rag.evaluation.datasets import LabelledQuery
from rsrank_rag.evaluation.evaluate import score_dataset
from rsrank_rag.evaluation.metrics import ScoredQuery
from rsrank_rag.evaluation.statistics import Record
from rsrank_rag.partial_files import write_text
from rsrank_rag.ranking.rule import Fallback, Rule
from rsrank_rag.training.feature_scores import scored
from rsrank_rag.training.store import QueryFeatures

from ..best_threshold import shared_threshold
from .ablations import AblationRow, first_layers, read_ablations
from .plan import Plan
from .store import Store


class SystemScores(Record):
    """A system's rule, and its scores of each set, in the order of the labels."""

    threshold: float
    max_gap: float | None = None
    fallback: Fallback | None = None
    own_threshold: bool = True
    """Whether the threshold is the system's own, or the best one over these sets."""
    scores: dict[str, tuple[tuple[float, ...], ...]]

    @property
    def rule(self) -> Rule:
        """The rule that the system's artifact sets."""
        return Rule(self.threshold, max_gap=self.max_gap, fallback=self.fallback)


class Scores(Record):
    """Labels and scores, from which all tables are made."""

    labels: dict[str, tuple[tuple[bool, ...], ...]]
    systems: dict[str, SystemScores]

    def scored(self, system: str, name: str) -> list[ScoredQuery]:
        """One system's scores of one set."""
        rows = self.systems[system].scores[name]
        return list(map(ScoredQuery, rows, self.labels[name]))

    def present(self, titles: Mapping[str, str]) -> dict[str, str]:
        """Those of some sets that were scored: name -> title."""
        return {name: title for name, title in titles.items() if name in self.labels}


class Figures(Record):
    """The file from which all tables are made."""

    scores: Scores
    ablations: tuple[AblationRow, ...] = ()


def rounded(queries: Iterable[ScoredQuery]) -> tuple[tuple[float, ...], ...]:
    """Scores with three decimals."""
    rows = []
    for query in queries:
        rows.append(tuple(round(score, 3) for score in query.scores))
    return tuple(rows)


ReadSets = dict[str, tuple[list[LabelledQuery], list[QueryFeatures]]]
"""Set -> its queries, and their features."""


def sets_read(plan: Plan, store: Store, least: int = 1) -> ReadSets:
    """Queries of the plan's dev sets of which all documents have been read, and their features.

    Args:
        plan: The plan.
        store: Its features.
        least: Sets with fewer queries are left out.
    """
    sets = {}
    for name, part in plan.files("dev").items():
        drawn = part.drawn()
        features = store.read(name, drawn)
        queries = [query for query in drawn if query.id in features]
        if len(queries) >= least:
            sets[name] = queries, list(features.values())
    return sets


def features_of(store: Store, sets: ReadSets) -> ReadSets:
    """The same queries with the features of another store, such as those of another decoder.

    Raises:
        InputError: The store lacks a query.
    """
    others = {}
    for name, (queries, _) in sets.items():
        features = store.read(name, queries)
        if len(features) < len(queries):
            raise InputError(
                f"{store.folder} has features of {len(features)} of {len(queries)} queries of "
                f"{name}. Read the others first (research.decoders.extract)."
            )
        others[name] = queries, list(features.values())
    return others


def score_stored(artifact: Path, sets: ReadSets) -> SystemScores:
    """Scores of an artifact's B on stored features."""
    config = hub.read_config(artifact)
    weights = dict(Projection.of(hub.read_weights(artifact, config)).named_parameters())
    scores = {}
    for name, (_, rows) in sets.items():
        read = first_layers(rows, len(config.layers))
        scores[name] = rounded(scored(read, weights))
    return SystemScores(
        threshold=config.threshold,
        max_gap=config.max_gap,
        fallback=config.fallback,
        scores=scores,
    )


def score_texts(name: str, sets: ReadSets) -> SystemScores:
    """Scores of another system, which reads the same queries' texts."""
    system = load(ModelSource(name=name))
    results = {name: score_dataset(system, queries) for name, (queries, _) in sets.items()}
    scores = {name: rounded(rows) for name, rows in results.items()}
    threshold = system.threshold
    if threshold is None:
        best = shared_threshold(list(results.values()))
        return SystemScores(threshold=best, own_threshold=False, scores=scores)
    return SystemScores(
        threshold=threshold, max_gap=system.max_gap, fallback=system.fallback, scores=scores
    )


def named(text: str) -> tuple[str, str, str]:
    """The parts of ``NAME=VALUE=FEATURES``, of which the last ones may be missing."""
    name, _, rest = text.partition("=")
    value, _, features = rest.partition("=")
    return name, value or name, features


@command(resumes=False)
@click.argument("plan")
@click.argument("features", type=PATH)
@click.argument("output", type=PATH)
@click.option(
    "--model",
    "models",
    multiple=True,
    help="NAME=ARTIFACT, measured on FEATURES, or NAME=ARTIFACT=FOLDER with features of its own.",
)
@click.option("--system", "systems", multiple=True, help="NAME=SYSTEM, measured on the texts.")
@click.option("--least", type=click.IntRange(1), default=10, help="Leave out smaller sets.")
@click.option("--ablations", type=PATH, help="A file of research.decoders.ablations to copy.")
def main(
    plan: str,
    features: Path,
    output: Path,
    models: tuple[str, ...],
    systems: tuple[str, ...],
    least: int,
    ablations: Path | None,
) -> None:
    """Score the dev queries of PLAN that FEATURES holds, and write OUTPUT (JSON)."""
    sets = sets_read(Plan.load(plan), Store(features), least)
    labels = {}
    for name, (_, rows) in sets.items():
        labels[name] = tuple(features.relevant for features in rows)
    results = {}
    for text in models:
        name, artifact, own = named(text)
        read = features_of(Store(Path(own)), sets) if own else sets
        results[name] = score_stored(Path(artifact), read)
    for text in systems:
        name, system, _ = named(text)
        results[name] = score_texts(system, sets)
    figures = Figures(scores=Scores(labels=labels, systems=results))
    if ablations is not None:
        figures = figures.model_copy(update={"ablations": read_ablations(ablations).rows})
    write_text(output, figures.model_dump_json() + "\n")


if __name__ == "__main__":
    main()
