"""Weights in fp8: the scores they give, which model they are taken for, and where activations are rounded, too."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import DOCUMENTS, QUERIES, QUERY, load_ranker

from rsrank_rag import RSRank
from rsrank_rag.errors import ArtifactError, BackboneError, MissingDependencyError
from rsrank_rag.language_model.loading import _quantization
from rsrank_rag.language_model.options import LoadOptions
from rsrank_rag.language_model.weights import bits_of, fingerprint

quantization = pytest.importorskip("torchao.quantization")

EXACT = 1e-4  # fp32: rounding alone
BF16_NEIGHBOURS = 0.015  # measured 0.006
# Against unrounded ones, about twice the largest difference measured on tiny random decoders.
FP8 = 0.2  # measured 0.11
FP8_ACTIVATIONS = 0.3  # measured 0.15 by `rounded`; likewise 0.013 for neighbours, where bfloat16 tips the rounding
FP8_ACTIVATIONS_NEIGHBOURS = 0.03


def fp8(tensor):
    """Rounded to float8, with a scale for each row, which torchao rounds to the tensor's dtype."""
    scale = (tensor.abs().amax(-1, keepdim=True) / 448).float()
    levels = (tensor.float() / scale.clamp_min(1e-15)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (levels.float() * scale).to(tensor.dtype)


def rounded(folder, kind, *, activations=False, **options):
    """A ranker whose linear maps have rounded weights, by other code than torchao's."""
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # maps that are quantised round after each step, so these have to
        patch.setattr("rsrank_rag.language_model.loading.fuse_linear_maps", lambda model: None)
        ranker = load_ranker(folder, kind, **options)
    for module in ranker.backbone.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = fp8(module.weight.data)
            if activations:
                module.register_forward_pre_hook(lambda _module, inputs: (fp8(inputs[0]),))
    return ranker


def all_scores(ranker):
    return torch.tensor([ranker.score(query, DOCUMENTS) for query in QUERIES])


def scores_alone(ranker):
    return torch.tensor(
        [[ranker.score(query, [document])[0] for document in DOCUMENTS] for query in QUERIES]
    )


@pytest.mark.parametrize(("dtype", "beside"), [("float32", EXACT), ("bfloat16", BF16_NEIGHBOURS)])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "bert"])
def test_scores_are_those_of_rounded_weights_and_do_not_depend_on_neighbours(
    kind, dtype, beside, tiny_folder
):
    ranker = load_ranker(tiny_folder(kind), kind, dtype=dtype, load_in_fp8=True)
    scores = all_scores(ranker)
    torch.testing.assert_close(
        scores, all_scores(rounded(tiny_folder(kind), kind, dtype=dtype)), rtol=0, atol=EXACT
    )
    torch.testing.assert_close(scores, scores_alone(ranker), rtol=0, atol=beside)


def test_rounding_moves_scores_a_little(tiny_folder, tiny_ranker):
    exact = all_scores(tiny_ranker("qwen3"))
    moved = (
        (all_scores(load_ranker(tiny_folder("qwen3"), "qwen3", load_in_fp8=True)) - exact)
        .abs()
        .max()
    )
    assert 10 * EXACT < moved < FP8


def test_the_linear_maps_alone_are_rounded(tiny_folder):
    ranker = load_ranker(tiny_folder("qwen3"), "qwen3", dtype="bfloat16", load_in_fp8=True)
    model = ranker.backbone.model
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            assert module.weight.qdata.dtype == torch.float8_e4m3fn
            assert module.weight.scale.shape == (module.out_features, 1)
    assert type(model.get_input_embeddings().weight) is torch.nn.Parameter
    assert ranker.backbone.dtype == torch.bfloat16
    assert bits_of(ranker.backbone.model) == 8


def test_a_row_of_zeros_stays_one(tiny_folder, tmp_path):
    ranker = load_ranker(tiny_folder("qwen3"), "qwen3", dtype="bfloat16")
    with torch.no_grad():
        ranker.backbone.model.layers[1].mlp.up_proj.weight[3] = 0
    ranker.backbone.model.save_pretrained(tmp_path)
    ranker.prompts.tokenizer.save_pretrained(tmp_path)
    made = load_ranker(tmp_path, "qwen3", dtype="bfloat16", load_in_fp8=True)
    weight = made.backbone.model.layers[1].mlp.up_proj.weight.dequantize()
    assert not weight[3].any()
    assert weight[2].any()
    torch.testing.assert_close(all_scores(made), all_scores(ranker), rtol=0, atol=FP8)


def test_a_model_without_a_linear_map_is_refused(tiny_folder):
    with pytest.raises(BackboneError, match="has no linear maps that torchao keeps in fp8"):
        load_ranker(tiny_folder("gpt2"), "gpt2", load_in_fp8=True)


def test_a_torchao_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr("transformers.utils.is_torchao_available", lambda: False)
    with pytest.raises(
        MissingDependencyError, match=r"newer torchao.*pip install --upgrade torchao"
    ):
        _quantization(LoadOptions(device="cpu", load_in_fp8=True))


# Which model it is


def test_an_artifact_takes_fp8_of_its_model_and_of_no_other(tiny_folder, ranker, tmp_path):
    ranker.save_pretrained(tmp_path / "artifact")
    options = {"device": "cpu", "dtype": "float32", "load_in_fp8": True, "local_files_only": True}
    made = RSRank.from_pretrained(tmp_path / "artifact", prefix_cache=False, **options)
    torch.testing.assert_close(all_scores(made), all_scores(ranker), rtol=0, atol=FP8)
    other = type(made.backbone.model)(ranker.backbone.model.config)
    torch.manual_seed(99)
    other.init_weights()
    other.save_pretrained(tmp_path / "other")
    ranker.prompts.tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ArtifactError, match="value vectors differ by"):
        RSRank.from_pretrained(tmp_path / "artifact", backbone=tmp_path / "other", **options)


def test_an_artifact_with_its_model_in_fp8_loads_as_it_was_saved(tiny_folder, tmp_path):
    made = load_ranker(tiny_folder("qwen3"), "qwen3", load_in_fp8=True)
    made.save_pretrained(tmp_path, include_backbone=True)
    again = RSRank.from_pretrained(tmp_path, device="cpu", dtype="float32", prefix_cache=False)
    assert fingerprint(again.backbone.model) == fingerprint(made.backbone.model)
    assert again.score(QUERY, DOCUMENTS) == pytest.approx(made.score(QUERY, DOCUMENTS), abs=EXACT)


def test_prefixes_of_differently_rounded_weights_never_meet(tiny_folder, tmp_path):
    pytest.importorskip("bitsandbytes")
    forms = [{}, {"load_in_fp8": True}, {"load_in_8bit": True}, {"dtype": "bfloat16"}]
    forms.append({"dtype": "bfloat16", "load_in_fp8": True})
    identities = []
    for options in forms:
        made = load_ranker(tiny_folder("qwen3"), "qwen3", **options)
        kept = RSRank(
            made.backbone, made.prompts, made.projection, made.config, prefix_cache=tmp_path
        )
        kept.score(QUERY, DOCUMENTS)
        assert kept.stats()["disk_hits"] == 0
        identities.append(kept.reader.store._identity)
    assert len(set(identities)) == len(forms)


def test_the_fingerprint_in_fp8_is_stable_and_tells_weights_apart(tiny_folder):
    def load():
        return load_ranker(tiny_folder("qwen3"), "qwen3", load_in_fp8=True).backbone

    made, again = load(), load()
    assert fingerprint(made.model) == fingerprint(again.model)
    weight = again.model.layers[0].mlp.up_proj.weight
    for part in (weight.qdata.view(torch.uint8), weight.scale):
        kept = part.clone()
        part[0] = part[1]
        assert fingerprint(made.model) != fingerprint(again.model)
        part.copy_(kept)
    assert fingerprint(made.model) == fingerprint(again.model)


def test_the_fingerprint_tells_rounded_activations_from_exact_ones():
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    torch.manual_seed(0)
    weight, found = torch.randn(32, 64, dtype=torch.bfloat16), []
    for how in (None, QuantizeTensorToFloat8Kwargs(granularity=quantization.PerRow())) * 2:
        module = torch.nn.Linear(64, 32, bias=False)
        tensor = quantization.Float8Tensor.from_hp(
            weight, granularity=quantization.PerRow(), act_quant_kwargs=how
        )
        module.weight = torch.nn.Parameter(tensor, requires_grad=False)
        assert bits_of(module) == 8
        found.append(fingerprint(module))
    assert found[:2] == found[2:]
    assert found[0] != found[1]


# Where activations are rounded, too


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "rounds"),
    [
        ("cuda", (8, 0), "bfloat16", False),  # Ampere
        ("cuda", (8, 9), "bfloat16", True),  # Ada
        ("cuda", (9, 0), "bfloat16", True),  # Hopper
        ("cuda:1", (10, 0), "bfloat16", True),  # Blackwell
        ("cuda", (9, 0), "float16", False),  # torchao rounds row by row in bfloat16 only
        ("cuda", (9, 0), "float32", False),
        ("cpu", (9, 0), "bfloat16", False),
    ],
)
def test_activations_are_rounded_by_token_where_the_device_multiplies_fp8(
    monkeypatch, device, capability, dtype, rounds
):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    before = torch.get_float32_matmul_precision(), torch._inductor.config.coordinate_descent_tuning
    chosen = _quantization(LoadOptions(device=device, dtype=dtype, load_in_fp8=True)).quant_type
    if rounds:
        assert type(chosen) is quantization.Float8DynamicActivationFloat8WeightConfig
        assert {*chosen.granularity} == {quantization.PerRow()}
    else:
        assert type(chosen) is quantization.Float8WeightOnlyConfig
    assert not chosen.set_inductor_config
    assert before == (
        torch.get_float32_matmul_precision(),
        torch._inductor.config.coordinate_descent_tuning,
    )


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a CUDA device with fp8",
)
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_scores_with_rounded_activations_are_near_bfloat16_ones_and_do_not_depend_on_neighbours(
    kind, tiny_folder
):
    ranker = load_ranker(tiny_folder(kind), kind, device="cuda", dtype="bfloat16", load_in_fp8=True)
    plain = load_ranker(tiny_folder(kind), kind, device="cuda", dtype="bfloat16")
    torch.testing.assert_close(all_scores(ranker), all_scores(plain), rtol=0, atol=FP8_ACTIVATIONS)
    torch.testing.assert_close(
        all_scores(ranker), scores_alone(ranker), rtol=0, atol=FP8_ACTIVATIONS_NEIGHBOURS
    )


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_an_emulation_of_rounded_activations_keeps_to_the_same_bounds(kind, tiny_folder):
    plain = load_ranker(tiny_folder(kind), kind, dtype="bfloat16")
    ranker = rounded(tiny_folder(kind), kind, dtype="bfloat16", activations=True)
    torch.testing.assert_close(all_scores(ranker), all_scores(plain), rtol=0, atol=FP8_ACTIVATIONS)
    torch.testing.assert_close(
        all_scores(ranker), scores_alone(ranker), rtol=0, atol=FP8_ACTIVATIONS_NEIGHBOURS
    )


# What the user sees


@pytest.mark.slow
def test_loading_says_nothing_about_kernels_that_nobody_asked_for(tiny_folder):
    code = (
        "import logging\n"
        "from rsrank_rag.language_model.loading import load_model\n"
        "from rsrank_rag.language_model.options import LoadOptions\n"
        "load_model({folder!r}, revision=None, options=LoadOptions(device='cpu', load_in_fp8=True))\n"
        "assert not logging.getLogger('torchao').filters + logging.getLogger('torch.utils._pytree').filters\n"
        "logging.getLogger('torchao').warning('Failed to load, said later')\n"
    ).format(folder=str(tiny_folder("llama")))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    lines = [line for line in done.stderr.splitlines() if line and "Loading weights" not in line]
    assert lines == ["Failed to load, said later"]
