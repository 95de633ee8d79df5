"""MPNet with an artifact's own fusion layers: transformers' states below them, one score above."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from conftest import DOCUMENTS, ENCODER, HEAD_DIM, QUERIES, QUERY, word_piece_tokenizer
from hub_server import HubServer, connected, files_of
from safetensors.numpy import load_file, save_file
from training_helpers import labelled, written

from rsrank_rag import Projection, RSRank
from rsrank_rag.artifact.hub import FUSION
from rsrank_rag.errors import ArtifactError
from rsrank_rag.language_model.mpnet import BIAS, position_bias
from rsrank_rag.language_model.options import LoadOptions, ModelSource
from rsrank_rag.training.recipe import Recipe
from rsrank_rag.training.run import TrainingRun
from rsrank_rag.training.tune import Goal, tune

LAYERS, HEADS, WIDTH = 3, 4, 64

RUNTIMES = ("onnx", "torch")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """Folder of a tiny MPNet with random weights."""
    folder = tmp_path_factory.mktemp("mpnet")
    tokenizer = word_piece_tokenizer()
    config = transformers.MPNetConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=66,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    transformers.MPNetModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_artifact(folder, name, **options):
    """An artifact with two fusion layers of its own, made of random numbers."""
    rng = np.random.default_rng(0)
    fusion = {}
    for layer in range(LAYERS, LAYERS + 3):
        place = f"encoder.layer.{layer}"
        shapes = {
            **{f"attention.self.{part}": (WIDTH, WIDTH) for part in ("query", "key", "value")},
            "attention.output.dense": (WIDTH, WIDTH),
            "intermediate.dense": (128, WIDTH),
            "output.dense": (WIDTH, 128),
        }
        for part, shape in shapes.items():
            fusion[f"{place}.{part}.weight"] = rng.normal(0, 0.3, shape).astype(np.float16)
            fusion[f"{place}.{part}.bias"] = rng.normal(0, 0.1, shape[0]).astype(np.float16)
        for part in ("attention.output.LayerNorm", "output.LayerNorm"):
            fusion[f"{place}.{part}.weight"] = np.ones(WIDTH, np.float16)
            fusion[f"{place}.{part}.bias"] = np.zeros(WIDTH, np.float16)
    path = folder.with_suffix(".layers")
    save_file(fusion, path)
    projection = Projection(
        Projection.random((LAYERS + 1, LAYERS + 2), HEADS, 8, HEAD_DIM).weight.detach(),
        (LAYERS + 1, LAYERS + 2),
        agreement=torch.tensor([4.0, 2.0, -1.0]),
    )
    made = RSRank.from_backbone(
        name,
        projection,
        template=ENCODER.model_copy(update={"query_start": "[CLS]"}),
        fusion_layer=LAYERS,
        documents_stay=True,
        fusion_file=path,
        **options,
    )
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def artifact(encoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "artifact"
    return write_artifact(folder, encoder, options=LoadOptions("cpu", "float32"))


def load(name, runtime="onnx", **options):
    return RSRank.from_pretrained(
        name, **{"device": "cpu", "dtype": "float32", **options}, runtime=runtime
    )


@pytest.mark.parametrize("length", [1, 7, 64, 300])
def test_the_position_bias_is_that_of_transformers(length, encoder):
    model = transformers.MPNetModel.from_pretrained(encoder)
    expected = model.encoder.compute_position_bias(torch.zeros(1, length, WIDTH)).detach().numpy()
    table = load_file(encoder / "model.safetensors")[BIAS]
    np.testing.assert_array_equal(position_bias(table, length), expected)


@torch.no_grad()
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_states_below_the_fusion_layer_are_those_of_transformers_alone_and_among_others(
    runtime, encoder, artifact
):
    model = transformers.MPNetModel.from_pretrained(encoder).eval()
    core = load(artifact, runtime).backbone
    ids = [tuple(range(5, 5 + length)) for length in (3, 9, 40, 64)]
    together = core._entering(tuple(ids))
    for row, text in zip(together, ids, strict=True):
        expected = model(input_ids=torch.tensor([text])).last_hidden_state[0].numpy()
        (alone,) = core._entering((text,))
        np.testing.assert_allclose(alone, expected, rtol=0, atol=1e-4)
        np.testing.assert_allclose(row[: len(text)], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_score_is_the_same_on_both_runtimes_cold_cached_and_among_others(runtime, artifact):
    first = load(artifact)
    expected = [[first.score(query, [text])[0] for text in DOCUMENTS] for query in QUERIES]
    assert np.ptp(expected) > 0.1
    ranker = load(artifact, runtime)
    for again in (ranker, ranker, load(artifact, runtime, prefix_cache=False)):
        scores = [again.score(query, DOCUMENTS) for query in QUERIES]
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-4)


def test_documents_in_int8_score_near_float32(artifact):
    expected = np.array(load(artifact).score(QUERY, DOCUMENTS))
    rounded = np.array(load(artifact, dtype="int8").score(QUERY, DOCUMENTS))
    # Random weights are rounded more than trained ones.
    assert 0 < np.median(np.abs(rounded - expected)) < 0.1 * np.ptp(expected)


def test_an_artifact_with_fusion_layers_of_its_own_survives_saving_and_loading(artifact, tmp_path):
    first = load(artifact)
    expected = first.score(QUERY, DOCUMENTS)
    for include_backbone in (False, True):
        folder = tmp_path / str(include_backbone)
        first.save_pretrained(folder, include_backbone=include_backbone)
        assert load(folder).score(QUERY, DOCUMENTS) == expected
    joined = load(artifact, "torch")
    joined.save_pretrained(tmp_path / "torch")
    assert load(tmp_path / "torch").score(QUERY, DOCUMENTS) == expected
    with pytest.raises(ArtifactError, match="runtime='onnx' to save both"):
        joined.save_pretrained(tmp_path / "refused", include_backbone=True)


def test_a_tuned_and_a_fine_tuned_copy_bring_the_fusion_layers(artifact, tmp_path):
    expected = load(artifact).score(QUERY, DOCUMENTS)
    data = written(tmp_path / "own.jsonl", labelled(4))
    source = ModelSource(str(artifact), load=LoadOptions("cpu", "float32"))
    tune(source, data, tmp_path / "tuned", Goal("recall", 0.5), force=True)
    assert load(tmp_path / "tuned").score(QUERY, DOCUMENTS) == expected
    settings = ["model.device=cpu", "fine_tuning.penalties=[1e9]", "fine_tuning.folds=2"]
    recipe = Recipe.load("mini", settings, [data], str(artifact))
    run = TrainingRun(recipe, tmp_path / "run", force=True)
    run.run()
    assert load(run.artifact).score(QUERY, DOCUMENTS) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_language_model_comes_from_the_hub_by_name_and_revision(
    runtime, encoder, artifact, tmp_path
):
    with HubServer() as server, connected(server, tmp_path / "home"):
        commit = server.commit("harbour/tiny-mpnet", files_of(encoder))
        folder = write_artifact(
            tmp_path / "made",
            "harbour/tiny-mpnet",
            revision=commit,
            options=LoadOptions("cpu", "float32", cache_dir=tmp_path / "maker"),
        )
        server.commit("harbour/tiny-mpnet", {"config.json": b"{}"})
        server.commit("harbour/base", files_of(folder))
        ranker = load("harbour/base", runtime, cache_dir=tmp_path / "cache")
    expected = load(artifact, runtime).score(QUERY, DOCUMENTS)
    assert ranker.score(QUERY, DOCUMENTS) == expected


def test_fusion_layers_that_are_missing_or_changed_are_refused(artifact, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(artifact, folder)
    path = folder / FUSION
    content = path.read_bytes()
    path.write_bytes(content[:-2] + b"zz")
    for runtime in RUNTIMES:
        with pytest.raises(ArtifactError, match=r"fusion\.safetensors is missing, or not the file"):
            load(folder, runtime)
    path.unlink()
    with pytest.raises(ArtifactError, match=r"fusion\.safetensors is missing, or not the file"):
        load(folder)


def test_fusion_layers_must_begin_where_the_language_model_ends(artifact, tmp_path):
    config = json.loads((artifact / "config.json").read_text(encoding="utf-8"))
    config["fusion_layer"] = LAYERS - 1
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ArtifactError, match=f"fusion_sha256 needs fusion_layer={LAYERS}"):
        load(tmp_path)
