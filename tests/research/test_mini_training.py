"""The training of the built-in model, on made-up data."""

import argparse
import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import DOCUMENTS, QUERIES
from recipe_modules import RECIPE, recipe_modules

from rsrank_rag import Fallback, RSRank, Rule
from rsrank_rag.evaluation.systems.bm25 import BM25

ROOT = Path(__file__).parents[2]
ARTIFACT = ROOT / "rsrank_rag" / "models" / "mini"
MODULES = (
    "batches", "choose", "data", "gpu", "measure", "model", "scores", "tables", "teacher", "texts",
    "train", "validate",
)  # fmt: skip


@pytest.fixture(scope="module")
def recipe():
    with recipe_modules(*MODULES) as modules:
        yield modules


def passages(number, document):
    return [
        {"id": f"{document}#{i}", "text": text, "title": "Notes", "relevant": i == number}
        for i, text in enumerate(DOCUMENTS)
    ]


@pytest.fixture(scope="module")
def folder(recipe, tmp_path_factory):
    """Labelled sets: sixty entries of everyday, thirty real documents, and the public sets."""
    folder = tmp_path_factory.mktemp("labelled")
    everyday, real = [], []
    for entry in range(60):
        for number, query in enumerate(QUERIES):
            row = {"id": f"part-{entry}-{number}", "query": f"{query} {entry}"}
            everyday.append(row | {"documents": passages(number, "everyday")})
    for source in range(30):
        for number, query in enumerate(QUERIES):
            row = {"id": f"real-{source}-{number}", "of": f"source-{source}"}
            row |= {"query": f"{query} {source}"}
            real.append(row | {"documents": passages(number, f"source-{source}/1")})
    other = [
        {"id": str(number), "query": query, "documents": passages(number, "notes")}
        for number, query in enumerate(QUERIES)
    ]
    sets = dict.fromkeys((*recipe.data.SETS, *recipe.data.UNSEEN), other)
    sets |= {recipe.data.EVERYDAY: everyday, recipe.data.REAL: real}
    for name, rows in sets.items():
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def pool(recipe, folder):
    return recipe.batches.Pool.of(folder)


@pytest.fixture(scope="module")
def config(recipe):
    path = RECIPE / "config.toml"
    loaded = recipe.train.tomllib.loads(path.read_text(encoding="utf-8"))
    loaded["batch"] |= {"everyday": 2, "document_queries": 2, "others": 1}
    return loaded


def sampler(recipe, pool, config, **changes):
    return recipe.batches.Sampler(
        pool, config["batch"] | changes, 0, lambda text: len(text) // 4, lambda query, text: None
    )


def test_a_typo_is_one_mistake_in_one_longer_word(recipe):
    query = "how do I renew my passport"
    seen = set()
    for seed in range(40):
        words = recipe.batches.typo(query, random.Random(seed), longest=True).split()
        assert words[:-1] == query.split()[:-1]
        assert words[-1] != "passport" or seed  # swapping the two s changes nothing
        seen.add(len(words[-1]))
    assert seen == {7, 8, 9}  # dropped, swapped or replaced, doubled
    assert recipe.batches.typo("a bus", random.Random(0)) == "a bus"


def test_training_and_validation_share_no_query(recipe, pool):
    for name in (recipe.data.EVERYDAY, recipe.data.REAL):
        trained = {example.query for example in pool.training[name]}
        validated = {example.query for example in pool.validation[name]}
        assert trained
        assert validated
        assert not trained & validated


def test_a_batch_is_a_function_of_its_step(recipe, pool, config):
    first, second = sampler(recipe, pool, config), sampler(recipe, pool, config)
    for step in range(4):
        assert first(step) == second(step)
    assert first(0) != first(1)


def test_a_joined_text_is_relevant_if_one_of_its_passages_is(recipe, pool, config):
    always = {"joined": 1.0, "joined_document": 1.0, "join": [3], "keywords": 0.0}
    always |= {"unanswered": 0.0, "title_query": 0.0, "most_tokens": 10_000}
    batch = sampler(recipe, pool, config, **always)(0)
    assert max(map(len, batch.parts)) == 3
    for query, labels in zip(batch.clean, batch.labels, strict=True):
        number = next((i for i, own in enumerate(QUERIES) if query and query.startswith(own)), None)
        for place, relevant in labels.items():
            held = number is not None and DOCUMENTS[number] in batch.texts[place]
            assert relevant == held


def test_a_packed_pool_has_the_same_training_queries(recipe, pool, tmp_path):
    path = tmp_path / "pool.json.xz"
    recipe.batches.pack(pool, path, 1, 2)
    packed = recipe.batches.Pool.of(path)
    for name in (recipe.data.EVERYDAY, recipe.data.REAL):
        assert packed.training[name] == pool.training[name]
    (example,) = packed.training["fm2.sentence"]
    assert [passage.relevant for passage in example.passages] == [True, False]


def test_similarity_is_that_of_the_best_window(recipe):
    generator = torch.Generator().manual_seed(0)
    lengths = [2, 9, 24, 25, 61]
    heads, dim, step = 2, 3, 12
    model = argparse.Namespace(
        window=24, pooled_weight=2.0, token_weight=3.0, bias=torch.tensor(-1.0)
    )
    hidden = torch.randn(len(lengths), max(lengths), 5, generator=generator)
    values = torch.randn(len(lengths), heads, max(lengths), dim, generator=generator)
    valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    own = torch.nn.functional.normalize(torch.randn(3, heads * dim, generator=generator), dim=1)
    embedded = torch.nn.functional.normalize(torch.randn(1, 5, generator=generator), dim=1)
    queries = argparse.Namespace(values=own, mean=torch.full((1, 3), 1 / 3), embedded=embedded)
    (similarities,) = recipe.scores.similarity(model, queries, hidden, valid, values)
    for text, length in enumerate(lengths):
        vectors = values[text].transpose(0, 1).flatten(1)
        cosines = torch.cosine_similarity(own[:, None], vectors[None], dim=-1)
        spans = [(0, length)]
        for start in range(0, length, step):
            if start == 0 or start + step < length:
                spans.append((start, min(start + 24, length)))
        sums = []
        for start, stop in spans:
            mean = hidden[text, start:stop].mean(0)
            near = torch.cosine_similarity(mean, embedded[0], dim=0)
            inside = slice(max(start, 1), min(stop, length - 1)) if length > 2 else slice(0, 2)
            sums.append(2 * near + 3 * cosines[:, inside].amax(1).mean())
        assert float(similarities[text]) == pytest.approx(float(max(sums)) - 1, abs=1e-5)


def test_a_text_s_tokens_see_the_first_one_and_their_neighbours_only(recipe):
    model = recipe.model.from_artifact(ARTIFACT, 24, 4).eval()
    model.fast = torch.float32
    texts = recipe.texts.Texts(ARTIFACT / "backbone" / "tokenizer.json")
    ids, valid = recipe.texts.padded(texts.ids([DOCUMENTS[3]], 400), torch.device("cpu"))
    changed = ids.clone()
    changed[0, -2] = 2000
    with torch.no_grad():
        one = model.below(model.embed(ids), valid, 0, 1, model.reach)
        two = model.below(model.embed(changed), valid, 0, 1, model.reach)
    moved = (one - two).abs().amax(2)[0] > 0
    assert not moved[:-6].any()
    assert moved[-6:].all()


def test_the_shift_s_own_loss_leaves_similarity_alone(recipe, config):
    batch = recipe.batches.Batch(
        queries=["a"], clean=[None], texts=["x", "y"], parts=[("x",), ("y",)],
        labels=[{0: True, 1: False}], groups=[{"1"}, {"2"}], sources=["notes"],
    )  # fmt: skip
    base = torch.zeros(1, 2, requires_grad=True)
    shift = torch.zeros(1, 2, requires_grad=True)
    embedded = torch.eye(2)
    output = recipe.scores.Output(base, shift, embedded[:1], embedded)
    anchor = recipe.train.Anchor([0], [0, 1], output)
    model = argparse.Namespace(projection=torch.zeros(1, 1, 2, 2))
    weights = dict.fromkeys(config["loss"], 0.0) | {"shift": 1.0, "sharpness": 20.0}
    total, _ = recipe.train.Objective(weights, lambda text: None)(model, batch, output, anchor)
    total.backward()
    assert shift.grad[0, 0] < 0 < shift.grad[0, 1]
    assert not base.grad.any()


def test_the_rule_that_is_chosen_keeps_each_answer_and_nothing_else(recipe):
    def row(*scores):
        relevant = np.array([True, False, False])
        return recipe.validate.Row(np.array(scores), np.zeros(3), relevant)

    rows = {recipe.data.EVERYDAY: [row(3.0, 1.0, 0.5)], "fiqa": [row(2.0, 0.5, -1.0)]}
    rule = recipe.choose.choose_rule(rows, 1.0)
    for each in (*rows[recipe.data.EVERYDAY], *rows["fiqa"]):
        assert list(rule.select(each.scores().tolist())) == [0]


def test_the_teacher_goes_on_where_it_was_stopped(recipe, tmp_path):
    def write(number, text):
        key = np.frombuffer(recipe.teacher.key_of(text), dtype=np.uint8)
        np.savez(tmp_path / f"{number:04d}.npz", keys=key[None], rows=np.int8([[3, 4]]))

    write(0, "bees")
    teacher = recipe.teacher.Teacher(tmp_path)
    write(1, "trains")
    assert teacher("trains") is None
    teacher.refresh()
    assert teacher("trains").tolist() == pytest.approx([0.6, 0.8])


def test_weights_that_are_split_are_joined_again(recipe, tmp_path, monkeypatch):
    weights = {"a": torch.ones(3), "b": torch.arange(4.0)}
    torch.save(weights, tmp_path / "mean.pt")
    monkeypatch.setattr(recipe.gpu, "PART", 8)
    recipe.gpu.split(tmp_path / "mean.pt", tmp_path)
    assert len(list(tmp_path.glob("part-*.pt"))) == 2
    recipe.gpu.join(tmp_path, tmp_path / "joined.pt")
    joined = torch.load(tmp_path / "joined.pt", weights_only=True)
    assert {name: tensor.tolist() for name, tensor in joined.items()} == {
        name: tensor.tolist() for name, tensor in weights.items()
    }


@pytest.fixture
def trainer(recipe, folder, config, tmp_path):
    (tmp_path / "teacher").mkdir()
    options = argparse.Namespace(
        data=folder, manuals=None, start=ARTIFACT, teacher=tmp_path / "teacher", steps=50,
        batches=1, device="cpu",
    )  # fmt: skip
    return lambda: recipe.train.Training(config, options)


@pytest.mark.slow
def test_repeated_steps_lower_the_loss_and_change_every_layer(recipe, trainer):
    made = trainer()
    made.config = made.config | {"warm_up": 1}
    batch = made.sampler(0)
    made.sampler = lambda step: batch
    before = [layer.value.weight.detach().clone() for layer in made.model.layers]
    parts = [made.update() for _ in range(3)]
    assert parts[-1]["labels"] < 0.98 * parts[0]["labels"]
    for weight, layer in zip(before, made.model.layers, strict=True):
        assert not torch.equal(weight, layer.value.weight)


@pytest.mark.slow
def test_a_run_that_was_killed_ends_where_an_unbroken_one_does(trainer, tmp_path):
    unbroken = trainer()
    for _ in range(3):
        unbroken.update()
    killed = trainer()
    for _ in range(2):
        killed.update()
    killed.save(tmp_path / "checkpoint.pt")
    resumed = trainer()
    resumed.load(tmp_path / "checkpoint.pt")
    resumed.update()
    pairs = zip(unbroken.model.parameters(), resumed.model.parameters(), strict=True)
    for expected, tensor in pairs:
        assert torch.equal(expected, tensor)


@pytest.mark.slow
def test_what_is_exported_scores_as_the_recipe_does(recipe, tmp_path):
    texts = recipe.texts.Texts(ARTIFACT / "backbone" / "tokenizer.json")
    model = recipe.model.from_artifact(ARTIFACT, 24, 16).eval()
    rule = Rule(threshold=0.25, max_gap=1.5, fallback=Fallback(0.5, 3.0))
    recipe.choose.export(model, 0.5, rule, tmp_path / "chosen", {"data": ["notes"]})
    recipe.choose.reference(model, texts, tmp_path / "chosen")
    command = [sys.executable, RECIPE / "export.py", "--weights", tmp_path / "chosen"]
    command += ["--start", ARTIFACT, "--output", tmp_path / "artifact"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "largest difference from the recipe's own scores" in output
    ranker = RSRank.from_pretrained(tmp_path / "artifact", device="cpu", dtype="float32")
    assert ranker.config.training.data == ("notes",)
    assert ranker.native_rule == Rule(threshold=0.0, max_gap=1.5, fallback=Fallback(0.5, 3.0))
    assert (ranker.config.similarity_window, ranker.config.attention_window) == (24, 32)


def test_keywords_keep_the_content_words(recipe):
    assert recipe.data.keywords("When was the bridge opened?") == "bridge opened"
    assert recipe.data.keywords("What is it?") == "What is it?"


def test_a_measurement_scores_the_model_and_its_rivals_and_shows_them_in_a_table(
    recipe, ranker, folder, tmp_path
):
    ranker.save_pretrained(tmp_path / "artifact", include_backbone=True)
    data = tmp_path / "dev"
    data.mkdir()
    (data / "notes.jsonl.gz").write_bytes((folder / "fm2.sentence.jsonl.gz").read_bytes())
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
