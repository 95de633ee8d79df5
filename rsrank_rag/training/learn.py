"""B from features by any method: gradient, a closed form, or none at all (random); and its curve over sample sizes."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..evaluation.metrics import ScoredQuery, f1_at, mean, ranking_metrics
from ..method.projection import Projection
from .batches import scored
from .closed_form import closed_form
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
