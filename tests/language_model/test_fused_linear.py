"""Linear maps with bias and GELU in one pass: their results, and the maps left unchanged."""

from pathlib import Path

import pytest
import torch
from torch import nn

from rsrank_rag import RSRank
from rsrank_rag.language_model.linear import FusedLinear, fuse_linear_maps
from rsrank_rag.language_model.loading import load_model
from rsrank_rag.language_model.options import LoadOptions, has_fast_bfloat16, has_fast_int8

ROUNDED = 2.0**-8  # of bfloat16, relative
needs_bfloat16 = pytest.mark.skipif(
    not has_fast_bfloat16(torch.device("cpu")), reason="needs a processor that multiplies bfloat16"
)


def fused_maps(model):
    return [module for module in model.modules() if isinstance(module, FusedLinear)]


def load(folder, dtype):
    return load_model(folder, revision=None, options=LoadOptions("cpu", dtype)).model


@needs_bfloat16
@pytest.mark.parametrize("gelu", [False, True])
def test_a_map_is_as_exact_as_bfloat16_allows_and_no_token_depends_on_others(gelu):
    torch.manual_seed(0)
    linear = nn.Linear(96, 40, dtype=torch.bfloat16)
    inputs = 3 * torch.randn(7, 5, 96, dtype=torch.bfloat16)
    with torch.no_grad():
        found = FusedLinear(linear, gelu=gelu)(inputs)
        exact = inputs.double() @ linear.weight.double().T + linear.bias.double()
        exact = nn.functional.gelu(exact) if gelu else exact
        parts = torch.stack([FusedLinear(linear, gelu=gelu)(row[None])[0] for row in inputs])
    terms = (
        inputs.double().abs() @ linear.weight.double().abs().T
    )  # sums of 96 products round in float32
    assert ((found.double() - exact).abs() <= ROUNDED * exact.abs() + 1e-6 * terms).all()
    torch.testing.assert_close(parts, found, rtol=ROUNDED, atol=1e-5)


@needs_bfloat16
def test_gradients_are_those_of_torchs_own():
    torch.manual_seed(0)
    linear = nn.Linear(16, 8, dtype=torch.bfloat16)
    inputs = torch.randn(3, 16, dtype=torch.bfloat16)
    grads = []
    for forward in (FusedLinear(linear, gelu=True), lambda x: nn.functional.gelu(linear(x))):
        linear.zero_grad()
        forward(inputs).float().square().sum().backward()
        grads.append(linear.weight.grad.clone())
    assert grads[0].abs().max() > 0
    assert torch.equal(*grads)


@needs_bfloat16
def test_a_map_that_is_cast_afterwards_computes_in_its_new_dtype():
    torch.manual_seed(0)
    linear = nn.Linear(16, 8, dtype=torch.bfloat16)
    inputs = torch.randn(3, 16, dtype=torch.float64)
    with torch.no_grad():
        found = FusedLinear(linear, gelu=True).double()(inputs)
        assert torch.equal(found, nn.functional.gelu(linear.double()(inputs)))


@needs_bfloat16
def test_a_compiler_sees_torchs_own_maps():
    fused = FusedLinear(nn.Linear(16, 8, dtype=torch.bfloat16), gelu=True)
    with torch.no_grad():
        graph = torch.export.export(fused, (torch.ones(3, 16, dtype=torch.bfloat16),)).graph
    called = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    assert called == {"aten.linear.default", "aten.gelu.default"}


@needs_bfloat16
def test_an_encoder_in_bfloat16_has_them_with_gelu_where_it_stands_and_reads_as_exactly_as_before(
    tiny_folder,
):
    folder = tiny_folder("bert")
    model, exact = load(folder, "bfloat16"), load(folder, "float32")
    maps = fused_maps(model)
    assert len(maps) == 6 * model.config.num_hidden_layers
    assert sum(each.gelu for each in maps) == model.config.num_hidden_layers
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in exact.named_parameters()
    ]
    ids = torch.arange(1, 25)[None]
    with torch.no_grad():
        found, expected = model(ids).last_hidden_state.float(), exact(ids).last_hidden_state
    with torch.enable_grad():
        before = model(ids).last_hidden_state.detach().float()
    assert (found - expected).norm() <= 1.5 * (before - expected).norm()


@needs_bfloat16
def test_a_decoder_has_them_where_a_map_has_a_bias(tiny_folder):
    assert not fused_maps(load(tiny_folder("qwen3"), "bfloat16"))


def test_other_dtypes_and_processors_keep_torchs_own(tiny_folder, monkeypatch):
    assert not fused_maps(load(tiny_folder("bert"), "float32"))
    monkeypatch.setattr("rsrank_rag.language_model.linear.has_fast_bfloat16", lambda device: False)
    assert not fused_maps(load(tiny_folder("bert"), "bfloat16"))


@needs_bfloat16
def test_a_torch_without_the_private_product_keeps_its_own(tiny_folder, monkeypatch):
    model = load(tiny_folder("bert"), "float32").bfloat16()
    monkeypatch.setattr(
        FusedLinear, "forward", lambda self, inputs: torch.ops.mkldnn._no_such_product(inputs)
    )
    fuse_linear_maps(model)
    assert not fused_maps(model)


@needs_bfloat16
@pytest.mark.skipif(not has_fast_int8(), reason="needs an x86 processor with AVX2")
def test_documents_in_int8_keep_the_gelu_that_was_fused():
    chosen, exact = (
        RSRank.from_pretrained(device="cpu", dtype=dtype, prefix_cache=False)
        for dtype in ("int8", "float32")
    )
    assert fused_maps(chosen.backbone.model)
    passages = (
        (Path(__file__).parents[2] / "examples" / "passages.txt").read_text("utf-8").splitlines()
    )
    moved = torch.tensor(chosen.score("honey", passages)) - torch.tensor(
        exact.score("honey", passages)
    )
    assert 0 < moved.abs().max() < 0.4  # as in test_int8.py
