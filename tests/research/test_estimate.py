"""What a recipe will take, without the Hub."""

import pytest

from research.estimate import estimate_recipe
from research.recipe import ResearchRecipe, SetPart
from rsrank_rag.errors import InputError


def recipe_of(*sets):
    recipe = ResearchRecipe.load("qwen3-8b")
    return recipe.model_copy(update={"data": sets})


def test_the_papers_recipe_is_estimated_without_its_model_and_its_sets():
    estimate = estimate_recipe(recipe_of(SetPart(dataset="hotpotqa", queries=3)))
    assert (estimate.queries, estimate.pairs) == (3, 3 * 43)
    # Qwen3-8B has 8.2 billion weights, 0.6 of them in its unused head.
    assert estimate.memory == pytest.approx(2 * 7.57e9, rel=0.01)
    # Of 20 tokens for each of 43 documents and the oracle: 35 layers of 8 * 128 numbers.
    assert estimate.disk == 3 * 44 * 20 * 35 * 8 * 128 * 2
    assert estimate.hours > 0


def test_a_set_of_unknown_size_is_named():
    with pytest.raises(InputError, match="sizes of beir:scifact are not known"):
        estimate_recipe(recipe_of(SetPart(dataset="beir:scifact", queries=3)))
