"""research.score_files: nothing is scored twice."""

import json

import pytest
import torch

from research import score_files
from rsrank_rag import RSRank
from rsrank_rag.backends.torch.projection import Projection
from rsrank_rag.errors import InputError
from rsrank_rag.evaluation.datasets import LabelledDocument, LabelledQuery
from rsrank_rag.evaluation.systems.bm25 import BM25


def labelled(*relevant):
    """A query with three documents."""
    texts = ("A bee dances.", "Trains run on rails.", "The clock was repaired.")
    documents = [
        LabelledDocument(id=str(i), text=text, relevant=i in relevant)
        for i, text in enumerate(texts)
    ]
    return LabelledQuery(id=str(relevant), query="What does a bee do?", documents=tuple(documents))


def test_stored_scores_are_read_and_those_of_other_documents_are_refused(tmp_path):
    queries = [labelled(0), labelled(1, 2)]
    sets = {"notes": queries}
    first = score_files.score_all({"BM25": BM25()}, sets, tmp_path)
    (tmp_path / "BM25, notes.json").write_text(
        json.dumps([{"id": query.id, "scores": [7.0, 8.0, 9.0]} for query in queries]), "utf-8"
    )
    again = score_files.score_all({"BM25": BM25()}, sets, tmp_path)
    assert list(first["BM25"]["notes"][0].relevant) == [True, False, False]
    assert list(again["BM25"]["notes"][0].scores) == [7.0, 8.0, 9.0]
    shorter = queries[0].model_copy(update={"documents": queries[0].documents[:2]})
    with pytest.raises(InputError, match="does not hold the scores of query"):
        score_files.read(tmp_path / "BM25, notes.json", [shorter])


def test_an_identity_is_of_all_that_was_trained(tiny_ranker):
    plain = tiny_ranker("qwen3")
    weight, layers = plain.projection.weight, plain.projection.layers
    ones = torch.ones(weight.shape[:2])
    others = [
        Projection(weight * 2, layers),
        Projection(weight, layers, head_weight=ones),
        Projection(weight, layers, head_weight=ones * 2),
        Projection(weight, layers, agreement=torch.ones(3)),
        Projection(weight, layers, agreement=torch.tensor([1.0, 2.0, 3.0])),
    ]
    rankers = [RSRank(plain.backbone, plain.prompts, other, plain.config) for other in others]
    assert len({score_files.identity(ranker) for ranker in [plain, *rankers]}) == 6
    again = RSRank(plain.backbone, plain.prompts, plain.projection, plain.config)
    assert score_files.identity(again) == score_files.identity(plain)
