"""B from features by any method: gradient, a closed form, or none at all (random); and its curve over sample sizes.

Axes: L layers, H heads, M rows (query tokens of documents), P projection dimension, D head dimension.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import TrainingError
from ..evaluation.metrics import ScoredQuery, f1_at, mean, ranking_metrics
from ..method.projection import Projection
from .batches import scored
from .fit import Epoch, FitOptions, fit
from .recipe import Recipe
from .store import FeatureSource, subset


@dataclass
class Learner:
    """Trains B on some queries of a source; those numbered in `held` choose the epoch. The rest is as in `fit`."""

    recipe: Recipe
    features: FeatureSource
    held: Sequence[int]
    layers: Sequence[int]
    output: Path
    identity: str

    def learn(
        self,
        train: Sequence[int],
        options: FitOptions | None = None,
        folder: str = "fit",
        on_epoch: Callable[[Epoch], object] = lambda epoch: None,
    ) -> tuple[Projection, tuple[Epoch, ...]]:
        """B from the queries of these numbers, a random one from none; and the epochs, if there were any."""
        options, source, held = options or self.recipe.fit, *(subset(self.features, x) for x in (train, self.held))
        if not train:
            _, heads, _, width = self.features[0].shifts.shape
            return Projection.random(self.layers, heads, options.projection_dim, width, seed=options.seed), ()
        if self.recipe.method != "gradient":
            return closed_form(source, self.layers, self.recipe.method, projection_dim=options.projection_dim), ()
        where: dict[str, Any] = {"output": self.output / folder, "device": self.recipe.model.device}
        fitted = fit(source, held, self.layers, options, **where, identity=self.identity, on_epoch=on_epoch)
        return fitted.projection, fitted.history

    def scored(self, projection: Projection) -> list[ScoredQuery]:
        """The validation queries' scores."""
        return scored(subset(self.features, self.held), projection, device=self.recipe.model.device)

    def sample(self, train: Sequence[int], size: int, seed: int) -> tuple[list[int], FitOptions]:
        """Some training queries, drawn at random, and how B learns from them: so many epochs, nothing is chosen."""
        changes: dict[str, Any] = {"epochs": self.recipe.sample_epochs, "keep": "last", "seed": seed}
        drawn = random.Random(f"samples-{seed}").sample(list(train), size)
        return drawn, self.recipe.fit.model_copy(update=changes)

    def sample_curve(self, train: Sequence[int], say: Callable[[str], object]) -> list[dict[str, float]]:
        """Recall@5 and F1 at zero on the validation queries by number of training queries; 0 is a random B."""
        rows: list[dict[str, float]] = []
        sizes = [size for size in self.recipe.sample_sizes if size < len(train)]
        for size in [*sizes, len(train)] if self.recipe.sample_sizes else []:
            drawn, options = self.sample(train, size, self.recipe.fit.seed)
            found = self.scored(self.learn(drawn, options, f"fit-samples/{size}")[0])
            recall, f1 = ranking_metrics(found)["recall@5"], mean([f1_at(query, 0.0) for query in found])
            rows.append({"samples": size, "recall@5": recall, "f1@0": f1})
            say(f"{size:5} samples: Recall@5 {recall:.3f}, F1 at zero {f1:.3f}")
        return rows


def closed_form(
    features: FeatureSource, layers: Sequence[int], method: str, *, projection_dim: int = 64, ridge: float = 1e-3
) -> Projection:
    """Solve for B (paper, Appendix B.1).

    Its rows are all alike, so a cosine to the ones vector is 1 or -1 for each layer, head and token, whatever the
    length of the shift: it ranks, but its zero means little. Matrices are accumulated in fp64, query by query.

    - ``oracle``: B mu = 1, with mu the mean oracle shift.
    - ``separation``: ridge regression of relevant shifts to 1 and irrelevant ones to 0.
    - ``combined``: the least response to irrelevant shifts among those with B mu = 1.

    `ridge`: added to the diagonal, as a share of its mean. TrainingError: no query has a relevant document.
    """
    gram, target, count = _moments(features, separation=method == "separation")
    if not count:
        raise TrainingError("No query has a relevant document, so there is no oracle shift to align with.")
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype)
    if method == "oracle":
        gram = eye
    diagonal = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(1e-12)
    direction = torch.linalg.solve(gram + ridge * diagonal * eye, target[..., None])[..., 0]  # (L, H, D)
    if method != "separation":  # B mu = 1
        direction = direction / (direction * target / count).sum(-1, keepdim=True).clamp_min(1e-12)
    weight = direction[:, :, None].expand(-1, -1, projection_dim, -1)  # (L, H, P, D)
    return Projection(weight.float().contiguous(), layers)


def _moments(features: FeatureSource, *, separation: bool) -> tuple[Tensor, Tensor, int]:
    """S^T S over irrelevant shifts (L, H, D, D), and the sum (L, H, D) and number of oracle shifts.

    For the separation S has all documents, and relevant ones stand in for the oracle.
    """
    gram, target, count = torch.zeros(()), torch.zeros(()), 0
    for number in range(len(features)):
        query = features[number]
        labels = torch.tensor(query.relevant).repeat_interleave(query.tokens)
        shifts = query.shifts.double().cpu()
        documents = shifts[:, :, : len(labels)]
        rows = documents if separation else documents[:, :, ~labels]
        positive = documents[:, :, labels] if separation else shifts[:, :, len(labels) :]
        gram = gram + rows.mT @ rows
        target = target + positive.sum(2)
        count += positive.shape[2]
    return gram, target, count
