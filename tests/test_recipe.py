"""The recipe of the built-in model, on a tiny encoder and made-up data."""

import argparse
import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import DOCUMENTS, QUERIES

from rsrank_rag import RSRank
from rsrank_rag.evaluation.systems.bm25 import BM25

RECIPE = Path(__file__).parents[1] / "recipes" / "mini"


@pytest.fixture(scope="module")
def recipe():
    sys.path.insert(0, str(RECIPE))
    try:
        import data
        import train

        yield argparse.Namespace(data=data, train=train)
    finally:
        sys.path.remove(str(RECIPE))
        for name in ("data", "tables", "measure", "train"):
            sys.modules.pop(name)


@pytest.fixture(scope="module")
def labelled(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("labelled")
    rows = [
        {
            "id": str(number),
            "query": query,
            "documents": [
                {"id": str(i), "text": text, "title": f"Note {i}", "relevant": i == number}
                for i, text in enumerate(DOCUMENTS)
            ],
        }
        for number, query in enumerate(QUERIES)
    ]
    for name in recipe.data.SETS:
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def trainer(recipe, tiny_folder):
    options = argparse.Namespace(
        start=str(tiny_folder("bert")),
        steps=50,
        queries=2,
        extra_layers=1,
        lr=1e-4,
        projection_lr=2e-3,
        seed=0,
        statements=0.0,
        teacher=[0.5, 0.1],
        from_artifact=None,
    )
    return lambda **changed: recipe.train.Trainer(argparse.Namespace(**{**vars(options), **changed}))


def test_a_batch_is_a_function_of_its_step(recipe, labelled):
    first, second = (recipe.data.Batches(labelled, seed=0, queries=4) for _ in range(2))
    assert first(3) == second(3)
    assert first(3) != first(4)


def test_a_batch_labels_only_a_querys_own_relevant_documents(recipe, labelled):
    batch = recipe.data.Batches(labelled, seed=0, queries=4)(0)
    for query, labels in zip(batch.queries, batch.relevant, strict=True):
        texts = {text.split("\n")[-1] for text, label in zip(batch.documents, labels, strict=True) if label}
        number = next(n for n, own in enumerate(QUERIES) if query in (own, recipe.data.keywords(own)))
        assert texts == {DOCUMENTS[number]}


def test_keywords_keep_the_content_words(recipe):
    assert recipe.data.keywords("When was the bridge opened?") == "bridge opened"
    assert recipe.data.keywords("What is it?") == "What is it?"


def test_a_statement_is_a_sentence_of_the_passage_and_is_searched_for_without_it(recipe, labelled, tmp_path):
    text = "Harbour\nThe old harbour was closed in 1931. It had served the town for ages. Nobody knows who built it."
    query, rest = recipe.data.statement(text, random.Random(0))
    assert query in text
    assert query not in rest
    assert sorted(f"{query} {rest}".split()) == sorted(text.split())
    assert recipe.data.statement("Harbour\nOne sentence with a few words.", random.Random(0)) is None

    row = {"id": "0", "query": "unused", "documents": [{"id": "0", "text": text, "relevant": True}]}
    for name in recipe.data.SETS:
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.write(json.dumps(row))
    batch = recipe.data.Batches(tmp_path, seed=0, queries=2, statements=1.0)(0)
    assert all(query in text and query not in batch.documents[m] for m, query in enumerate(batch.queries))
    assert batch.relevant[0][0]
    assert batch.relevant[1][1]


def test_an_artifact_can_be_trained_further(recipe, trainer, tmp_path):
    made = trainer()
    made.export(tmp_path)
    further = trainer(from_artifact=tmp_path)
    assert further.projection.layers == made.projection.layers
    assert torch.allclose(further.projection.weight, made.projection.weight, atol=1e-6)
    for expected, found in zip(made.master.parameters(), further.master.parameters(), strict=True):
        assert torch.equal(expected.half().float(), found)


def test_the_trainers_scores_are_those_of_the_package(recipe, trainer, labelled, tmp_path):
    made = trainer()
    made.backbone.model.float()
    queries = [made.prompts.query(query) for query in QUERIES]
    with torch.no_grad():
        scores, _ = made.scores([p.ids for p in made.prompts.documents(DOCUMENTS, 0)], queries)
    made.export(tmp_path)
    ranker = RSRank.from_pretrained(tmp_path, device="cpu", dtype="float32")
    expected = ranker.score_many(QUERIES, [DOCUMENTS] * len(QUERIES))
    assert scores.T.flatten().tolist() == pytest.approx(
        [s for row in expected for s in row], abs=0.05
    )  # the export rounds to fp16


@pytest.mark.slow
def test_training_lowers_the_loss(recipe, trainer, labelled):
    made = trainer()
    batch = recipe.data.Batches(labelled, seed=0, queries=2)(0)
    losses = [made.loss(batch)[0].item()]
    for _ in range(25):
        made.update(batch)
    made.step = 0  # the weights of the terms change with the step
    losses.append(made.loss(batch)[0].item())
    assert losses[1] < 0.8 * losses[0]


def test_a_run_that_was_killed_ends_where_an_unbroken_one_does(recipe, trainer, labelled, tmp_path):
    batches = recipe.data.Batches(labelled, seed=0, queries=2)
    unbroken, killed, resumed = trainer(), trainer(), trainer()
    for step in range(4):
        unbroken.update(batches(step))
    for step in range(3):
        killed.update(batches(step))
        if step == 1:
            killed.save(tmp_path / "checkpoint.pt")  # the third step is lost
    resumed.load(tmp_path / "checkpoint.pt")
    while resumed.step < 4:
        resumed.update(batches(resumed.step))
    assert torch.equal(unbroken.projection.weight, resumed.projection.weight)
    for expected, found in zip(unbroken.master.parameters(), resumed.master.parameters(), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.slow
def test_the_command_trains_goes_on_and_writes_a_loadable_artifact(tiny_folder, labelled, tmp_path):
    command = [sys.executable, RECIPE / "train.py", "--data", labelled, "--output", tmp_path, "--queries", "2"]
    command += ["--start", tiny_folder("bert"), "--save-every", "1"]
    command += ["--steps", "2"]
    subprocess.run(command, check=True, capture_output=True)
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "going on from step 2" in output
    ranker = RSRank.from_pretrained(tmp_path / "artifact", device="cpu", dtype="float32")
    assert ranker.config.training.data
    assert len(ranker.score(QUERIES[0], DOCUMENTS)) == len(DOCUMENTS)


def test_a_checkpoint_of_other_options_is_refused(recipe, trainer, tmp_path):
    made = trainer()
    made.save(tmp_path / "checkpoint.pt")
    made.options = argparse.Namespace(**{**vars(made.options), "lr": 1.0})
    with pytest.raises(SystemExit, match=r"was made with .* Use another --output"):
        made.load(tmp_path / "checkpoint.pt")


def test_the_figures_of_a_measurement_end_up_in_the_artifact_and_its_card(recipe, ranker, labelled, tmp_path):
    ranker.save_pretrained(tmp_path / "artifact", include_backbone=True)
    data = tmp_path / "dev"
    data.mkdir()
    (data / "notes.jsonl.gz").write_bytes(next(labelled.glob("*.gz")).read_bytes())
    load = {"mini": lambda: RSRank.from_pretrained(tmp_path / "artifact", device="cpu"), "BM25": BM25}
    figures = recipe.train.measure(data, load)
    assert [row["dataset"] for row in figures["BM25"]["sets"]] == ["notes"]
    assert figures["mini"]["tau"] == 0.0
    recipe.train.store(tmp_path / "artifact", figures)
    stored = RSRank.from_pretrained(tmp_path / "artifact", device="cpu").config.training.metrics
    assert stored["notes"]["f1@0"] == pytest.approx(figures["mini"]["sets"][0]["f1@tau"])
    assert "| notes |" in (tmp_path / "artifact" / "README.md").read_text(encoding="utf-8")
    assert "| notes | no | 3 |" in recipe.train.table(figures)
