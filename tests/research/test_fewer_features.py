"""Features of fewer tokens and of fewer documents of a query."""

import torch
from training_helpers import labelled, toy, written

from research.features import ResearchRun, fewer_tokens
from research.recipe import ResearchRecipe, subsample


def test_fewer_tokens_are_spread_evenly():
    (query,) = toy(1, tokens=7)
    few = fewer_tokens(query, 3)
    assert (few.tokens, few.relevant) == (3, query.relevant)
    # Four documents and the oracle shift.
    for row in range(5):
        whole = query.shifts[:, :, 7 * row : 7 * row + 7]
        assert torch.equal(few.shifts[:, :, 3 * row : 3 * row + 3], whole[:, :, [1, 3, 5]])
    assert fewer_tokens(query, 7) is fewer_tokens(query, None) is query


def test_subsampling_keeps_both_classes_and_depends_on_the_query_alone():
    queries = labelled(4)
    few = subsample(queries, 4, seed=1)
    for query in few:
        labels = [document.relevant for document in query.documents]
        assert (sum(labels), len(labels)) == (2, 4)
    assert few == [subsample([query], 4, seed=1)[0] for query in queries]
    assert subsample(queries, None) == queries
    everything = subsample(queries, 100)
    assert [len(query.documents) for query in everything] == [
        len(query.documents) for query in queries
    ]


def test_a_recipe_reads_fewer_tokens_and_documents_and_no_titles(tiny_folder, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(f'name = "x"\nmodel = {{name = "{tiny_folder("qwen3")}", device = "cpu"}}\n')
    data = written(tmp_path / "own.jsonl", labelled(2))
    settings = ["max_tokens=2", "max_documents=4", "titles=false"]
    settings = ["model.dtype=float32", *(f"features.{setting}" for setting in settings)]
    run = ResearchRun(ResearchRecipe.load(str(path), settings, [data]), tmp_path / "run")
    assert {document.title for query in run.queries for document in query.documents} == {None}
    for query in run.extract():
        assert (query.tokens, len(query.relevant)) == (2, 4)
        assert query.shifts.shape[2] == 2 * 5
