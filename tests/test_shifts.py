"""Shifts before and after B as vectors, against the scores and a plain reading."""

import sys

import numpy as np
import pytest
import torch
from conftest import DOCUMENTS, QUERIES

from rsrank_rag.errors import InputError, MissingDependencyError
from rsrank_rag.evaluation.datasets import LabelledDocument, LabelledQuery
from rsrank_rag.method.scoring import Row
from rsrank_rag.reproduction.shift_map import shift_vectors, umap_plane


def labelled(texts, relevant=frozenset({0})):
    documents = tuple(LabelledDocument(id=str(i), text=text, relevant=i in relevant) for i, text in enumerate(texts))
    return [LabelledQuery(id=query, query=query, documents=documents) for query in QUERIES]


def test_projected_vectors_add_up_to_the_scores(ranker):
    queries = labelled(DOCUMENTS, {0, 3})
    found = shift_vectors(ranker, queries)
    layers, heads, dim, width = ranker.projection.weight.shape
    assert found.before.shape == (len(QUERIES) * len(DOCUMENTS), layers * heads * width)
    assert found.after.shape == (len(QUERIES) * len(DOCUMENTS), layers * heads * dim)
    scores = [score for query in QUERIES for score in ranker.score(query, DOCUMENTS)]
    assert found.after.sum(1) / dim**0.5 == pytest.approx(scores, abs=1e-4)
    assert found.relevant.tolist() == [i in {0, 3} for _ in QUERIES for i in range(len(DOCUMENTS))]


@torch.inference_mode()
def test_vectors_before_b_are_the_shifts_mean_directions(ranker):
    found = shift_vectors(ranker, labelled(DOCUMENTS)[:1]).before
    tokens = ranker.prompts.query(QUERIES[0])
    for row, prompt in enumerate(ranker.prompts.documents(DOCUMENTS, len(tokens.ids))):
        parts = []

        def keep(layer, shift, parts=parts):
            for head in shift[0]:
                parts.append(sum(token / token.norm() for token in head) / len(head))

        ranker.reader.read([Row(prompt.ids, tokens)], keep)
        assert found[row] == pytest.approx(torch.cat(parts).numpy(), abs=1e-5)


def test_documents_without_tokens_are_left_out_and_repeated_ones_are_not(ranker):
    found = shift_vectors(ranker, labelled(["", DOCUMENTS[1], DOCUMENTS[1]])[:1])
    assert len(found.before) == len(found.after) == 2
    assert np.array_equal(found.before[0], found.before[1])
    assert found.relevant.tolist() == [False, False]
    assert len(shift_vectors(ranker, []).before) == 0


@pytest.mark.slow
def test_umap_lays_groups_apart_and_is_repeatable():
    pytest.importorskip("umap")
    rng = np.random.default_rng(0)
    centres = np.repeat(np.eye(2, 8) * 4, 20, axis=0)
    vectors = centres + rng.normal(0, 0.3, (40, 8))
    plane = umap_plane(vectors, neighbours=8)
    assert plane.shape == (40, 2)
    assert np.array_equal(plane, umap_plane(vectors, neighbours=8))
    near = np.linalg.norm(plane[:20] - plane[:20].mean(0), axis=1).max()
    assert np.linalg.norm(plane[:20].mean(0) - plane[20:].mean(0)) > 1.5 * near


def test_too_few_documents_for_umap_are_an_error():
    pytest.importorskip("umap")
    with pytest.raises(InputError, match="at least 4 documents, got 3"):
        umap_plane(np.ones((3, 4)))


def test_missing_umap_is_an_error_with_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "umap", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[umap\]'"):
        umap_plane(np.ones((30, 4)))
