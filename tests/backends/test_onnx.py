"""Encoders on ONNX Runtime: the scores of torch, and the same score in every way."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import DOCUMENTS, ENCODER, QUERIES, QUERY, random_projection
from conftest import on_torch as load_on_torch
from safetensors.numpy import save_file

from rsrank_rag import RSRank
from rsrank_rag.artifact import hub
from rsrank_rag.backends.onnx import graph
from rsrank_rag.backends.onnx import session as onnx_runtime
from rsrank_rag.backends.onnx.cores import usable_cores
from rsrank_rag.backends.onnx.making import calibration_ids, fixed_parameters
from rsrank_rag.backends.options import LoadOptions
from rsrank_rag.backends.torch.backbone import Backbone
from rsrank_rag.errors import (
    ArtifactError,
    InputError,
    MissingDependencyError,
    pip_install,
)

ROOT = Path(__file__).parents[2]
PASSAGES = (ROOT / "examples" / "passages.txt").read_text(encoding="utf-8").splitlines()
DANCE = "How do honeybees tell each other where the flowers are?"
PAIRS = [
    (query, passage) for query in (DANCE, "bees", "Who was Ada Lovelace?") for passage in PASSAGES
]

# A score may move so far among other documents, in another order of sums.
NEIGHBOURS = 2e-7


def scores_of(ranker, pairs):
    return np.array([scored.score for scored in ranker.score_pairs(pairs)])


@pytest.fixture(scope="module")
def exact():
    """`mini` in float32 on ONNX Runtime."""
    return RSRank.from_pretrained(dtype="float32")


@pytest.fixture(scope="module")
def rounded():
    """`mini` as it is by default: documents in int8."""
    return RSRank.from_pretrained()


@pytest.fixture(scope="module")
def on_torch():
    return load_on_torch()


def test_both_runtimes_give_mini_the_same_scores_parts_and_windows(exact, on_torch):
    expected = scores_of(on_torch, PAIRS)
    for _ in ("cold", "warm"):
        np.testing.assert_allclose(scores_of(exact, PAIRS), expected, rtol=0, atol=1e-4)
    mine, other = (ranker.explain(DANCE, PASSAGES[0]) for ranker in (exact, on_torch))
    assert mine.tokens == other.tokens
    np.testing.assert_allclose(mine.head_parts, other.head_parts, rtol=0, atol=1e-4)
    np.testing.assert_allclose(mine.matches, other.matches, rtol=0, atol=1e-4)
    assert mine.score == pytest.approx(np.sum(mine.parts) + mine.similarity, abs=1e-6)
    long = " ".join(PASSAGES * 12)
    for options in ({"long_documents": "windows"}, {"extract": "sentences"}):
        results = [r.rank(DANCE, [long, *PASSAGES], **options).kept for r in (exact, on_torch)]
        assert [kept.index for kept in results[0]] == [kept.index for kept in results[1]]
        for ours, theirs in zip(*results, strict=True):
            assert (ours.text, ours.window) == (theirs.text, theirs.window)
            assert ours.score == pytest.approx(theirs.score, abs=1e-4)


@pytest.mark.parametrize("fusion", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_any_encoder_of_bert_s_kind_scores_as_on_torch(fusion, dtype, tiny_folder, tmp_path):
    made = RSRank.from_backbone(
        tiny_folder("bert"),
        random_projection("bert", range(fusion + 1, 4)),
        template=ENCODER.model_copy(update={"query_start": "[CLS]"}),
        fusion_layer=fusion,
        options=LoadOptions(device="cpu", dtype="float32"),
    )
    made.save_pretrained(tmp_path / "artifact", include_backbone=True)
    pairs = [(query, document) for query in QUERIES for document in DOCUMENTS]
    actual = RSRank.from_pretrained(tmp_path / "artifact", dtype=dtype)
    expected = scores_of(made, pairs)
    differences = np.abs(scores_of(actual, pairs) - expected)
    # Random weights are rounded more than trained ones.
    assert differences.max() < (1e-4 if dtype == "float32" else 0.2 * np.ptp(expected))


def test_a_score_in_int8_is_the_same_in_every_way_and_near_float32(rounded, exact, tmp_path):
    assert "documents in int8" in repr(rounded)
    assert "int8" not in repr(exact)
    expected = np.array(rounded.score(DANCE, PASSAGES))
    assert 0 < np.abs(expected - exact.score(DANCE, PASSAGES)).max() < 0.3
    ways = {
        "warm": rounded.score(DANCE, PASSAGES),
        "in another order": rounded.score(DANCE, PASSAGES[::-1])[::-1],
        "among others": scores_of(rounded, PAIRS)[: len(PASSAGES)],
    }
    cold = RSRank.from_pretrained(cache_size=0)
    ways["cold, one by one"] = [cold.score(DANCE, [passage])[0] for passage in PASSAGES]
    long = " ".join(PASSAGES)
    ways["beside a longer one"] = cold.score(DANCE, [*PASSAGES, long])[:-1]
    for way, scores in ways.items():
        np.testing.assert_allclose(scores, expected, rtol=0, atol=NEIGHBOURS, err_msg=way)


def test_few_tokens_of_documents_run_together_however_large_the_batch(rounded, monkeypatch):
    sizes = []
    run = onnx_runtime.Session.run

    def recorded(self, feeds):
        if self is rounded.backbone.session(rounded.backbone._documents):
            sizes.append(feeds["embedded"].shape[:2])
        return run(self, feeds)

    monkeypatch.setattr(onnx_runtime.Session, "run", recorded)
    monkeypatch.setattr(onnx_runtime, "RUN_TOKENS", 10**6)
    documents = [rounded.prompts.documents([text], 0)[0].ids for text in PASSAGES]
    documents.append((*documents[0], *documents[1] * 4)[:300])
    whole = rounded.backbone.prefill(documents)
    assert len(sizes) == 1
    monkeypatch.setattr(onnx_runtime, "RUN_TOKENS", 200)
    sizes.clear()
    prefixes = rounded.backbone.prefill(documents)
    assert sum(rows for rows, _ in sizes) == len(documents)
    assert all(rows * tokens <= 200 or rows == 1 for rows, tokens in sizes)
    assert list(map(len, prefixes)) == list(map(len, documents))
    for prefix, expected in zip(prefixes, whole, strict=True):
        np.testing.assert_allclose(prefix.states, expected.states, rtol=0, atol=1e-4)


def test_prefixes_on_disk_are_read_again_and_are_not_those_of_torch(tmp_path):
    first = RSRank.from_pretrained(cache_folder=tmp_path)
    assert first.index(PASSAGES) == len(PASSAGES)
    second = RSRank.from_pretrained(cache_folder=tmp_path)
    scores = second.score(DANCE, PASSAGES)
    assert second.stats()["disk_hits"] == len(PASSAGES)
    np.testing.assert_allclose(first.score(DANCE, PASSAGES), scores, rtol=0, atol=NEIGHBOURS)
    # Both runtimes write one format. Their numbers differ in the last digits, so the keys do.
    other = load_on_torch(cache_folder=tmp_path)
    ids = second.prompts.documents(PASSAGES[:1], 0)[0].ids
    key = second.cache.key(ids)
    assert other.cache.key(ids) != key
    packed = other.cache.tiers.disk.get(key)
    assert packed.unpack(torch.device("cpu"), torch.float32).states.shape == packed.codes.shape


FORKED = """
import os
from rsrank_rag import RSRank
from rsrank_rag.artifact import hub
ranker = RSRank.from_pretrained()
before = ranker.score("a query", ["a document"])
child = os.fork()
if not child:
    os._exit(0 if ranker.score("a query", ["a document"]) == before else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_forked_process_scores_with_sessions_of_its_own(threads):
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    subprocess.run([sys.executable, "-c", FORKED], env=environment, check=True, timeout=300)


@pytest.mark.parametrize("largest", [127, 63])
def test_an_int8_map_is_what_plain_arithmetic_makes_of_it(largest, tmp_path):
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(3, 5, 96)) * np.logspace(-1, 1, 96)
    numbers = numbers.astype(np.float32)
    weight = rng.normal(size=(40, 96)).astype(np.float32)
    bias = rng.normal(size=40).astype(np.float16)
    save_file({"map.weight": weight, "map.bias": bias}, tmp_path / "weights")
    scale, zero = fixed_parameters(numbers, [weight], after_gelu=False)
    config = {"layer_norm_eps": 1e-12, "num_attention_heads": 2, "hidden_size": 96}
    places = graph.places_in(tmp_path / "weights")
    encoder = graph.Encoder(config, "weights", places, {"map": (scale, zero)}, largest)
    encoder.outputs = encoder.linear(encoder.input("x"), ["map"])
    actual = onnx_runtime.Session(encoder.content(), tmp_path).run({"x": numbers})[0]
    codes = np.clip(np.rint(numbers / scale) + zero, 0, 255) - zero
    scaled = weight * scale
    steps = np.abs(scaled).max(1) / largest
    matrix = np.rint(scaled / steps[:, None])
    assert np.abs(matrix).max() == largest
    expected = codes @ (matrix * steps[:, None]).T.astype(np.float64) + bias
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3)


def test_a_graph_names_the_places_of_its_weights_and_holds_none(tmp_path):
    save_file({"a": np.ones(9, np.float32), "b": np.arange(999, dtype=np.float16)}, tmp_path / "w")
    made = graph.Graph("w", graph.places_in(tmp_path / "w"))
    made.outputs = [made.add("Add", made.input("x"), made.weight("b"))]
    assert len(made.content()) < 300
    actual = onnx_runtime.Session(made.content(), tmp_path).run({"x": np.ones(999, np.float32)})[0]
    assert (actual == 1 + np.arange(999)).all()


def products():
    """The file `products.onnx`: uint8 numbers (N, 64) times an int8 weight of 127s."""
    made = graph.Graph()
    codes = made.input("codes", onnx.TensorProto.UINT8)
    weight = made.constant(np.full((64, 8), 127, np.int8))
    one = made.constant(1.0)
    made.outputs = [made.add("MatMulIntegerToFloat", codes, weight, one, one)]
    return made.content()


def test_the_graph_that_tells_processors_apart_is_what_the_function_makes():
    file = Path(onnx_runtime.__file__).with_name("products.onnx")
    assert onnx.load(file) == onnx.load_from_string(products())
    assert onnx_runtime.largest_weight() in onnx_runtime.LARGEST_WEIGHTS


def without_graphs(folder):
    """Make an artifact one of a release that had no graphs."""
    config = hub.read_config(folder)
    weights = hub.read_weights(folder, config)
    hub.write_artifact(folder, config.model_copy(update={"graphs": {}}), weights, "")
    shutil.rmtree(folder / "graphs")


def test_an_artifact_without_graphs_needs_onnx_and_then_scores_as_with_them(
    fused, tmp_path, monkeypatch
):
    folder = tmp_path / "artifact"
    shutil.copytree(fused, folder)
    expected = RSRank.from_pretrained(folder).score(QUERY, DOCUMENTS)
    without_graphs(folder)
    assert RSRank.from_pretrained(folder).score(QUERY, DOCUMENTS) == expected
    for module in ("onnx", "rsrank_rag.backends.onnx.graph", "rsrank_rag.backends.onnx.making"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingDependencyError, match=re.escape(pip_install("lm"))):
        RSRank.from_pretrained(folder)


def test_a_changed_or_missing_graph_is_refused(fused, tmp_path):
    folder = tmp_path / "artifact"
    shutil.copytree(fused, folder)
    file = folder / "graphs" / "queries.onnx"
    file.write_bytes(file.read_bytes() + b"0")
    with pytest.raises(ArtifactError, match=r"queries\.onnx is missing or changed"):
        RSRank.from_pretrained(folder)


@pytest.mark.parametrize(
    "options",
    [{"device": "cuda"}, {"dtype": "bfloat16"}, {"dtype": "nf4"}],
)
def test_what_only_torch_can_do_is_refused_with_the_pip_command(options, monkeypatch):
    monkeypatch.setattr("rsrank_rag.backends.options.find_spec", lambda name: None)
    with pytest.raises(InputError, match=re.escape(pip_install("lm"))):
        RSRank.from_pretrained(**options)


def test_an_artifact_that_onnx_runtime_saved_scores_the_same_on_both_runtimes(exact, tmp_path):
    exact.save_pretrained(tmp_path / "copy")
    for load in (RSRank.from_pretrained, load_on_torch):
        copy = load(tmp_path / "copy", device="cpu", dtype="float32")
        assert copy.score(DANCE, PASSAGES) == pytest.approx(exact.score(DANCE, PASSAGES), abs=1e-4)


def test_the_calibration_run_has_the_same_tokens_every_time_within_the_template(exact):
    prompts = exact.prompts
    assert calibration_ids(prompts) == calibration_ids(prompts)
    ids = np.array(calibration_ids(prompts))
    first, last = len(prompts.instruction), ids.shape[1] - len(prompts.separator)
    assert (ids[:, :first] == prompts.instruction).all()
    assert (ids[:, last:] == prompts.separator).all()
    assert len(np.unique(ids[:, first:last])) > 32 * 14 / 2


def test_a_decoder_needs_torch_and_the_error_gives_the_pip_command(ranker, tmp_path, monkeypatch):
    monkeypatch.setattr("rsrank_rag.backends.options.find_spec", lambda name: None)
    ranker.save_pretrained(tmp_path / "decoder", include_backbone=True)
    message = f"'qwen3'.*{re.escape(pip_install('lm'))}"
    with pytest.raises(MissingDependencyError, match=message):
        RSRank.from_pretrained(tmp_path / "decoder")


def test_a_changed_or_damaged_encoder_is_refused(fused, tmp_path):
    folder = tmp_path / "artifact"
    shutil.copytree(fused, folder)
    weights = folder / "backbone" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(
        ArtifactError, match=r"model\.safetensors changed since this artifact was made"
    ):
        RSRank.from_pretrained(folder)


def test_memory_that_runs_out_halves_the_batch(exact, monkeypatch):
    run = onnx_runtime.Session.run
    failures = [RuntimeError("Failed to allocate memory for requested buffer of size 7")]

    class Failing:
        def run(self, outputs, feeds):
            raise failures.pop()

    session = exact.backbone.session(onnx_runtime.QUERIES)
    real = session._session

    def once(self, feeds):
        if self is session and failures:
            self._session = Failing()
        try:
            return run(self, feeds)
        finally:
            session._session = real

    expected = exact.score(DANCE, PASSAGES)
    monkeypatch.setattr(onnx_runtime.Session, "run", once)
    np.testing.assert_allclose(exact.score(DANCE, PASSAGES), expected, rtol=0, atol=NEIGHBOURS)
    assert not failures


def test_the_number_of_threads_is_that_of_openmp(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")
    assert onnx_runtime.thread_count() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert onnx_runtime.thread_count() == usable_cores()
    # A process that is bound to one core has one thread.
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0}, raising=False)
    assert onnx_runtime.thread_count() == 1


@pytest.mark.parametrize(
    ("kind", "options", "runtime"),
    [
        ("bert", {}, "onnx"),
        ("bert", {"dtype": "float32"}, "onnx"),
        ("bert", {"dtype": torch.float32}, "onnx"),
        ("bert", {"dtype": "bfloat16"}, "torch"),
        ("bert", {"device": "cpu"}, "onnx"),
        ("bert", {"dtype": "int8"}, "onnx"),
        ("bert", {"device": "cuda"}, "torch"),
        ("bert", {"device": "mps"}, "torch"),
        ("bert", {"dtype": "nf4"}, "torch"),
        ("qwen3", {}, "torch"),
    ],
)
def test_onnx_runtime_is_the_default_for_encoders_unless_a_gpu_is_named(kind, options, runtime):
    assert LoadOptions(**options).on_onnx(kind) == (runtime == "onnx")


def test_onnx_runtime_is_the_default_where_there_is_no_torch(monkeypatch):
    monkeypatch.setattr("rsrank_rag.backends.options.find_spec", lambda name: None)
    assert LoadOptions().on_onnx("qwen3")
    assert LoadOptions().onnx_dtype(int8=True) == "int8"
    assert RSRank.from_pretrained().score(QUERY, DOCUMENTS)


def test_an_encoder_that_the_user_named_is_checked_by_a_run_on_torch(fused):
    named = RSRank.from_pretrained(fused, backbone=fused / "backbone", device="cpu")
    assert isinstance(named.backbone, Backbone)
