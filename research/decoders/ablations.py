"""What each part of the method adds, on stored features (paper, Appendix B).

`python -m research.decoders.ablations PLAN FEATURES OUTPUT`. Each row changes one thing. Rows that
OUTPUT (JSON) has for the same queries are not computed again.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import click

from rsrank_rag.backends.torch.projection import Projection
from rsrank_rag.cli.arguments import PATH, command
from rsrank_rag.errors import InputError
from rsrank_rag.evaluation.metrics import ScoredQuery, ranking_measures, selection_measures
from rsrank_rag.evaluation.statistics import Estimate, Record, bootstrap, estimate
from rsrank_rag.partial_files import write_text
from rsrank_rag.ranking.rule import Rule
from rsrank_rag.training.feature_scores import scored, split
from rsrank_rag.training.fit import TERMS, FitOptions, fit
from rsrank_rag.training.store import QueryFeatures

from ..best_threshold import best_threshold
from ..reproduction.closed_forms import closed_form
from ..reproduction.oracle import oracle_scores
from .plan import Plan
from .store import Signal, Store

SET = "2wiki.sentence"

QUERY_COUNTS = (0, 50, 100, 200, 400, 800)
"""Training queries of the paper's Table 4."""

SAMPLE_EPOCHS = 10
"""Epochs of B with few queries (paper, Table 4)."""

SHARES_OF_LAYERS = (0.25, 0.5, 0.625, 0.75, 0.875)
"""Shares of the layers of a B over the first ones."""

VALIDATION = 0.1


@dataclass(frozen=True)
class Ablation:
    """One change.

    Attributes:
        group: The table of the row.
        name: The change in words.
        signal: What the features are of.
        method: How B is made: ``gradient``, a closed form, ``random`` or ``oracle``, which is no B
            but the similarity to the shift of all relevant documents.
        queries: Number of training queries; None for all.
        layers: Number of layers that B reads, the first ones; None for all.
        fit: Settings of the training that differ.
    """

    group: str
    name: str
    signal: Signal = "values"
    method: str = "gradient"
    queries: int | None = None
    layers: int | None = None
    fit: dict[str, float] = field(default_factory=dict)


class AblationRow(Record):
    """The figures of one change; metrics are means over the queries with their intervals."""

    group: str
    name: str
    training_queries: int
    queries: int
    layers: int
    parameters: int
    metrics: dict[str, Estimate]


class AblationFile(Record):
    """All rows."""

    rows: tuple[AblationRow, ...] = ()


def read_ablations(file: Path) -> AblationFile:
    """Read a file of rows."""
    return AblationFile.model_validate_json(file.read_text(encoding="utf-8"))


def ablations(layers: int) -> Iterator[Ablation]:
    """All changes, for a model whose features have so many layers."""
    yield Ablation("method", "RSRank")
    yield Ablation("method", "similarity to the oracle shift", method="oracle")
    yield Ablation("method", "random B", method="random")
    yield Ablation("signal", "keys", signal="keys")
    yield Ablation("signal", "hidden states", signal="hidden")
    yield Ablation("signal", "value vectors, not their shift", signal="raw")
    for method in ("oracle", "separation", "combined"):
        yield Ablation("closed form", method, method=f"closed form: {method}")
    for term in TERMS:
        yield Ablation("loss", f"without {term}", fit={f"{term}_weight": 0.0})
    for count in QUERY_COUNTS:
        method = "gradient" if count else "random"
        fit_options: dict[str, float] = {"epochs": SAMPLE_EPOCHS}
        yield Ablation("queries", str(count), method=method, queries=count, fit=fit_options)
    for share in SHARES_OF_LAYERS:
        count = round(share * layers)
        yield Ablation("layers", f"the first {count}", layers=count)


@dataclass
class Features:
    """Features of one signal: training, validation and test queries."""

    training: list[QueryFeatures]
    validation: list[QueryFeatures]
    test: list[QueryFeatures]


def read(plan: Plan, store: Store, signal: Signal, *, whole: bool) -> Features:
    """Features of 2Wiki's sentences; test queries have all documents.

    Raises:
        InputError: Too few queries have been read.
    """
    drawn = plan.files("train")[SET].drawn()
    features = list(store.read(SET, drawn, whole=whole, signal=signal).values())
    test = list(store.read(SET, plan.files("dev")[SET].drawn(), signal=signal).values())
    if len(features) < 2 or not test:
        raise InputError(
            f"{store.folder} has {signal} of {len(features)} training and {len(test)} test queries."
        )
    training, validation = split(len(features), VALIDATION)
    return Features(
        training=[features[number] for number in training],
        validation=[features[number] for number in validation],
        test=test,
    )


def run(ablation: Ablation, features: Features, options: FitOptions) -> AblationRow | None:
    """The figures of one change; None if there are too few training queries."""
    training = features.training
    if ablation.queries is not None:
        if ablation.queries > len(training):
            return None
        training = random.Random("samples").sample(training, ablation.queries)
    training = first_layers(training, ablation.layers)
    validation = first_layers(features.validation, ablation.layers)
    test = first_layers(features.test, ablation.layers)
    layers = range(1, 1 + len(test[0].shifts))
    parameters = 0
    if ablation.method == "oracle":
        results = [ScoredQuery(oracle_scores(query), query.relevant) for query in test]
    else:
        changed = options.model_copy(update=ablation.fit)
        projection = _projection(ablation.method, training, validation, layers, changed)
        parameters = projection.weight.numel()
        results = scored(test, dict(projection.named_parameters()))
    return AblationRow(
        group=ablation.group,
        name=ablation.name,
        training_queries=len(training) if ablation.method not in ("oracle", "random") else 0,
        queries=len(test),
        layers=len(layers),
        parameters=parameters,
        metrics=metrics_of(results),
    )


def _projection(
    method: str,
    training: Sequence[QueryFeatures],
    validation: Sequence[QueryFeatures],
    layers: Sequence[int],
    options: FitOptions,
) -> Projection:
    _, heads, _, width = validation[0].shifts.shape
    if method == "random":
        return Projection.random(layers, heads, options.projection_dim, width, seed=options.seed)
    if method == "gradient":
        return fit(training, validation, layers, options).projection
    form = method.removeprefix("closed form: ")
    return closed_form(training, layers, form, projection_dim=options.projection_dim)


def first_layers(queries: Sequence[QueryFeatures], count: int | None) -> list[QueryFeatures]:
    """Features of the first layers that B can read, which are layers 1 to ``count``."""
    return [replace(query, shifts=query.shifts[:count]) for query in queries]


def metrics_of(results: Sequence[ScoredQuery]) -> dict[str, Estimate]:
    """nDCG@5, R@5, and F1 at zero and at the set's best threshold."""
    best, _ = best_threshold(results)
    values = {
        **ranking_measures(results),
        "f1@0": selection_measures(results, Rule(0.0))["f1"],
        "f1@best": selection_measures(results, Rule(best))["f1"],
    }
    return {name: estimate(bootstrap(row)) for name, row in values.items()}


@command(resumes=True)
@click.argument("plan")
@click.argument("features", type=PATH)
@click.argument("output", type=PATH)
@click.option("--epochs", type=click.IntRange(1), help="Most epochs, if fewer than the paper's.")
@click.option("--whole", is_flag=True, help="Train on queries with all their documents only.")
def main(plan: str, features: Path, output: Path, epochs: int | None, whole: bool) -> None:
    """Compute the rows that OUTPUT lacks."""
    read_plan, store = Plan.load(plan), Store(features)
    options = FitOptions()
    if epochs is not None:
        options = FitOptions(epochs=epochs)
    rows: list[AblationRow] = []
    if output.exists():
        rows += read_ablations(output).rows
    done = {(row.group, row.name) for row in rows}
    by_signal: dict[Signal, Features] = {}
    values = read(read_plan, store, "values", whole=whole)
    for ablation in ablations(len(values.test[0].shifts)):
        if (ablation.group, ablation.name) in done:
            continue
        if ablation.signal not in by_signal:
            # One signal in memory at a time: hidden states are large.
            by_signal = {ablation.signal: read(read_plan, store, ablation.signal, whole=whole)}
        row = run(ablation, by_signal[ablation.signal], options)
        if row is None:
            click.echo(f"{ablation.group}, {ablation.name}: too few training queries")
            continue
        rows.append(row)
        write_text(output, AblationFile(rows=tuple(rows)).model_dump_json(indent=1) + "\n")
        click.echo(f"{row.group}, {row.name}: nDCG@5 {100 * row.metrics['ndcg@5'].mean:.1f}")


if __name__ == "__main__":
    main()
