"""The paper's figures for decoders: `python -m research.decoders.figures --help`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np
import torch
from torch.nn.functional import normalize

from rsrank_rag.artifact import hub
from rsrank_rag.backends.torch.projection import Projection
from rsrank_rag.cli.arguments import PATH, command
from rsrank_rag.errors import InputError
from rsrank_rag.method.formula import EPSILON, Numbers
from rsrank_rag.training.store import QueryFeatures

from .. import plots
from ..reproduction.thresholds import f1_gap_curves, f1_gaps, score_ranges, threshold_stability
from .ablations import first_layers
from .measure import Figures, Scores
from .plan import Plan
from .store import Store
from .tables import PAPERS_SETS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMAGES = Path(__file__).parents[1] / "docs" / "images"

SET = "2wiki.sentence"
"""The set of the paper's Figure 4."""


def gap_curves(scores: Scores) -> Figure:
    """Share of queries that lose more F1 than x by a shared threshold (paper, Fig. 2)."""
    panels: dict[str, dict[str, list[float]]] = {}
    for name, title in scores.present(PAPERS_SETS).items():
        panels[title] = {}
        for system in scores.systems:
            panels[title][system] = f1_gaps(scores.scored(system, name))
    return f1_gap_curves(panels)


def ranges(scores: Scores, system: str) -> Figure:
    """The range of a system's scores in each set, with the best thresholds (paper, Fig. 1)."""
    sets = {}
    for name, title in scores.present(PAPERS_SETS).items():
        sets[title] = scores.scored(system, name)
    stability = threshold_stability(sets, scores.systems[system].threshold)
    title = f"{system}: bias {stability.bias:.3f}, variance {stability.variance:.4f}"
    return score_ranges(stability.ranges, stability.best, stability.natural, title=title)


def directions(query: QueryFeatures, weight: torch.Tensor | None) -> Numbers:
    """A vector for each document, (N, F): its shift's direction, averaged over the query's tokens.

    Args:
        query: Features of the query.
        weight: B, (L, H, P, D); None for the shift before B.
    """
    layers, heads, _, width = query.shifts.shape
    rows = query.shifts.float()
    if weight is not None:
        rows = rows @ weight.mT
        width = weight.shape[2]
    by_token = normalize(rows, dim=-1, eps=EPSILON).reshape(layers, heads, -1, query.tokens, width)
    by_document = by_token.mean(3)[:, :, : len(query.relevant)]
    vectors: Numbers = by_document.permute(2, 0, 1, 3).flatten(1).numpy()
    return vectors


def shift_map(queries: Sequence[QueryFeatures], weight: torch.Tensor) -> Figure:
    """Documents on a plane by their shifts, before and after B (paper, Fig. 4).

    Raises:
        InputError: umap-learn is not installed.
    """
    try:
        from umap import UMAP
    except ImportError:
        raise InputError("The map needs umap-learn: pip install umap-learn.") from None
    relevant = np.concatenate([query.relevant for query in queries])
    with plots.style():
        figure, grid = plots.panel_grid(("before B", "after B"), 3.2)
        for axes, title, matrix in zip(grid, ("before B", "after B"), (None, weight), strict=True):
            vectors = np.concatenate(list(map(partial(directions, weight=matrix), queries)))
            plane = UMAP(metric="cosine", random_state=0).fit_transform(vectors)
            others, wanted = plane[~relevant], plane[relevant]
            axes.plot(*others.T, "o", color=plots.SKY, markersize=2, label="irrelevant")
            axes.plot(*wanted.T, "^", color=plots.VERMILION, markersize=4, label="relevant")
            axes.set(title=title, xticks=[], yticks=[])
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
        return figure


@command(resumes=False)
@click.argument("figures", type=PATH)
@click.option("--plan", help="The plan of the features.")
@click.option("--features", type=PATH, help="Stored features, for the map of shifts.")
@click.option("--artifact", type=PATH, help="The artifact of B, for the map of shifts.")
@click.option("--output", type=PATH, default=IMAGES, help="Folder of the images.")
def main(
    figures: Path, plan: str | None, features: Path | None, artifact: Path | None, output: Path
) -> None:
    """Draw the figures of FIGURES (research/docs/decoders.json), and a map of shifts."""
    scores = Figures.model_validate_json(figures.read_text(encoding="utf-8")).scores
    drawn = {"decoders-f1-gap": gap_curves(scores)}
    first = next(iter(scores.systems))
    drawn["decoders-score-range"] = ranges(scores, first)
    if plan and features and artifact:
        part = Plan.load(plan).files("dev")[SET]
        config = hub.read_config(artifact)
        read = Store(features).read(SET, part.drawn()).values()
        queries = first_layers(list(read), len(config.layers))
        weights = dict(Projection.of(hub.read_weights(artifact, config)).named_parameters())
        drawn["decoders-shifts"] = shift_map(queries, weights["weight"].detach())
    for name, figure in drawn.items():
        (output / f"{name}.png").write_bytes(plots.png(figure))
        click.echo(output / f"{name}.png")


if __name__ == "__main__":
    main()
