"""Features of labelled queries: reading them, and their files."""

import json

import numpy as np
import pytest
import torch
from conftest import CHAT, ENCODER, LAYERS, random_projection
from training_helpers import labelled, written

from rsrank_rag import RSRank
from rsrank_rag.backends.options import LoadOptions
from rsrank_rag.backends.torch.check import open_backbone
from rsrank_rag.backends.torch.loading import load_model
from rsrank_rag.errors import TrainingError
from rsrank_rag.evaluation.datasets import LabelledDocument, LabelledQuery
from rsrank_rag.method.scoring import ShiftReader
from rsrank_rag.method.template import PromptTokenizer
from rsrank_rag.training.feature_scores import scored
from rsrank_rag.training.features import (
    FeatureExtractor,
    joined_documents,
)
from rsrank_rag.training.recipe import FeaturePart, Recipe
from rsrank_rag.training.run import TrainingRun
from rsrank_rag.training.store import read_features, write_features


@pytest.fixture(scope="module")
def loaded(tiny_folder):
    """Function: kind -> (backbone, prompts) of a tiny fp32 model."""
    made = {}

    def load(kind, **template):
        key = kind, tuple(template.items())
        if key not in made:
            model, tokenizer, _ = load_model(
                tiny_folder(kind), revision=None, options=LoadOptions(device="cpu", dtype="float32")
            )
            core = open_backbone(model)
            selected = (ENCODER if kind == "bert" else CHAT).model_copy(update=template)
            prompts = PromptTokenizer(
                tokenizer, selected, max_length=core.max_length, shared_positions=core.causal
            )
            made[key] = core, prompts
        return made[key]

    return load


@pytest.fixture
def extractor(loaded):
    core, prompts = loaded("qwen3")
    extractor = FeatureExtractor(ShiftReader(core, prompts, range(1, LAYERS)), FeaturePart())
    extractor.token_budget = 500
    return extractor


# Reading


def test_documents_that_are_read_together_are_cut_to_one_length(loaded):
    _, prompts = loaded("qwen3")
    room = prompts.document_limit(10)
    long, short = "word " * 2000, "bridge"
    ids = joined_documents(prompts, [long, short, long], 10)
    assert prompts.overhead + room - 2 < len(ids) <= prompts.overhead + room
    text = "".join(prompts.text_of(ids))
    first, middle, last = text.removeprefix("".join(prompts.text_of(prompts.instruction))).split(
        "\n"
    )[:3]
    assert middle == short
    assert abs(len(first) - len(last.split("<|im_end|>")[0])) < 20
    assert (
        "".join(prompts.text_of(joined_documents(prompts, [short, "frost"], 10))).count(
            "bridge\nfrost"
        )
        == 1
    )


# The store


def test_stored_shifts_are_those_that_scoring_reads(extractor, ranker):
    query = labelled(1)[0]
    actual = extractor.extract(query)
    projection = random_projection("qwen3")
    texts = [document.content() for document in query.documents]
    expected = RSRank(ranker.backbone, ranker.prompts, projection, ranker.config).score(
        query.query, texts
    )
    assert actual.relevant == tuple(document.relevant for document in query.documents)
    assert scored([actual], dict(projection.named_parameters()), device="cpu")[
        0
    ].scores == pytest.approx(expected, abs=0.02)  # fp16


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
    actual = extractor.extract(query.model_copy(update={"documents": documents}))
    assert actual.shifts[:, :, : actual.tokens].abs().max() == 0


def test_a_file_holds_what_was_extracted(extractor, tmp_path):
    features = extractor.extract(labelled(1)[0])
    path = tmp_path / "0.pt"
    write_features(path, features)
    again = read_features(path)
    for name, part in vars(features).items():
        assert np.array_equal(vars(again)[name], part), name


@pytest.fixture
def small_run(tiny_folder, tmp_path):
    """Function: number of queries, settings -> a run of a recipe on a tiny model."""

    def make(count=5, settings=(), data=None):
        path = tmp_path / "recipe.toml"
        path.write_text(
            f'name = "tiny"\nmodel = {{name = "{tiny_folder("qwen3")}", device = "cpu"}}\n'
        )
        file = written(tmp_path / "data.jsonl", data or labelled(count))
        recipe = Recipe.load(str(path), ["model.dtype=float32", *settings], [file])
        return TrainingRun(recipe, tmp_path / "run")

    return make


def test_reading_that_was_interrupted_goes_on_without_loss_or_repetition(
    small_run, monkeypatch, tmp_path
):
    calls = []
    extract = FeatureExtractor.extract

    def killed(self, query):
        calls.append(query.id)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return extract(self, query)

    monkeypatch.setattr(FeatureExtractor, "extract", killed)
    with pytest.raises(KeyboardInterrupt):
        small_run().extract()
    features = small_run().extract()
    # The unfinished query again, the finished ones not.
    assert calls == ["q0", "q1", "q2", "q3", "q3", "q4"]
    assert [query.relevant for query in features] == [
        tuple(document.relevant for document in query.documents) for query in labelled(5)
    ]
    assert not list((tmp_path / "run" / "features").glob("*.partial"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["features.dtype=bfloat16"], "dtype: 'float16' there, 'bfloat16' wanted"),
        (["features.last_layer=2"], r"layers: \[1, 2, 3\] there, \[1, 2\] wanted"),
        (["template.suffix=!"], "template: "),
        (["model.dtype=bfloat16"], "compute_dtype: 'torch.float32' there"),
    ],
)
def test_features_of_something_else_are_refused_with_what_differs(small_run, settings, message):
    small_run(2).extract()
    with pytest.raises(TrainingError, match=f"holds features of something else .*{message}"):
        small_run(2, settings).extract()


def test_features_of_other_queries_or_another_model_are_refused(small_run, tmp_path):
    small_run(2).extract()
    first, second = labelled(2)
    flipped = first.documents[0].model_copy(update={"relevant": not first.documents[0].relevant})
    relabelled = first.model_copy(update={"documents": (flipped, *first.documents[1:])})
    for other in (labelled(3)[1:], [relabelled, second]):
        with pytest.raises(TrainingError, match="data: "):
            small_run(2, data=other).extract()
    path = tmp_path / "run" / "features" / "store.json"
    described = json.loads(path.read_text())
    described["backbone"]["files"]["model.safetensors"] = "0" * 64
    path.write_text(json.dumps(described))
    with pytest.raises(TrainingError, match="backbone: "):
        small_run(2).extract()


def test_a_damaged_file_is_one_clear_error(extractor, tmp_path):
    path = tmp_path / "0.pt"
    write_features(path, extractor.extract(labelled(1)[0]))
    content = path.read_bytes()
    for damaged in (b"no features", content[: len(content) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(TrainingError, match=r"is damaged .* Remove it and run the same"):
            read_features(path)


def test_values_that_overflow_are_refused(loaded, monkeypatch):
    core, prompts = loaded("qwen3")
    reader = ShiftReader(core, prompts, range(1, LAYERS))
    read = reader.read
    monkeypatch.setattr(
        reader, "read", lambda rows, consume: read(rows, lambda i, s: consume(i, s * 1e6))
    )
    with pytest.raises(
        TrainingError, match=r"not finite in float16\. Set features\.dtype=bfloat16"
    ):
        FeatureExtractor(reader, FeaturePart()).extract(labelled(1)[0])


def test_a_query_whose_documents_have_no_tokens_is_named(loaded):
    core, prompts = loaded("bert")
    (query,) = labelled(1)
    # BERT's tokenizer removes characters that are not shown.
    unseen = [one.model_copy(update={"text": "\u200b", "title": None}) for one in query.documents]
    extractor = FeatureExtractor(ShiftReader(core, prompts, range(1, LAYERS)), FeaturePart())
    with pytest.raises(TrainingError, match=f"No document of query '{query.id}' has a token"):
        extractor.extract(query.model_copy(update={"documents": unseen}))
