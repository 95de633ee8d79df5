"""Features of fewer tokens of a query."""

from dataclasses import dataclass, replace

from rsrank_rag.training.run import TrainingRun
from rsrank_rag.training.store import QueryFeatures

from .recipe import ResearchRecipe


@dataclass
class ResearchRun(TrainingRun):
    """Runs a recipe whose features may be of fewer tokens of a query."""

    recipe: ResearchRecipe

    def extract(self) -> list[QueryFeatures]:
        """As `TrainingRun.extract`, with at most as many tokens of a query as the recipe says."""
        most = self.recipe.features.max_tokens
        return [fewer_tokens(query, most) for query in super().extract()]


def fewer_tokens(query: QueryFeatures, most: int | None) -> QueryFeatures:
    """At most so many tokens of a query, evenly spread."""
    if most is None or query.tokens <= most:
        return query
    positions = [int(query.tokens / most * (i + 0.5)) for i in range(most)]
    layers, heads, _, width = query.shifts.shape
    by_token = query.shifts.reshape(layers, heads, -1, query.tokens, width)
    return replace(query, shifts=by_token[:, :, :, positions].flatten(2, 3), tokens=most)
