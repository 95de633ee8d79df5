"""Documents in int8: what is computed, for whom it is chosen, and what it is not taken for."""

import copy
from pathlib import Path

import pytest
import torch
from conftest import DOCUMENTS, QUERIES, load_ranker

from rsrank_rag import RSRank
from rsrank_rag.errors import InputError
from rsrank_rag.language_model import int8
from rsrank_rag.language_model.int8 import RoundedLinear
from rsrank_rag.language_model.options import LoadOptions

pytestmark = pytest.mark.skipif(not int8.is_fast(), reason="needs an x86 processor with VNNI")

EXACT = 1e-4  # fp32: rounding alone


@pytest.fixture(autouse=True)
def without_bfloat16(monkeypatch):
    monkeypatch.setattr("rsrank_rag.language_model.options.has_fast_bfloat16", lambda device: False)


def slowly(linear):
    """The same map by plain arithmetic: a scale for each output's weights and for each token, sums in float64."""
    scales = linear.weight.abs().amax(1, keepdim=True) / 127
    weights = (linear.weight / scales).round().double() * scales

    def forward(inputs):
        size = (inputs.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-12)  # padding may be zeros
        outputs = ((inputs / size).round().double() * size) @ weights.T
        return (outputs if linear.bias is None else outputs + linear.bias).float()

    return forward


def test_a_map_is_what_plain_arithmetic_makes_of_it_and_no_token_depends_on_others():
    torch.manual_seed(0)
    for bias in (True, False):
        linear = torch.nn.Linear(96, 40, bias=bias).requires_grad_(False)
        inputs = torch.randn(3, 5, 96) * torch.logspace(-2, 2, 5)[:, None]
        found = RoundedLinear(linear)(inputs)
        torch.testing.assert_close(found, slowly(linear)(inputs))
        alone = torch.stack([RoundedLinear(linear)(token[None])[0] for token in inputs.flatten(0, 1)])
        assert torch.equal(found.flatten(0, 1), alone)
    assert torch.equal(RoundedLinear(linear)(torch.zeros(2, 96)), torch.zeros(2, 40))


def all_scores(ranker):
    return torch.tensor([ranker.score(query, DOCUMENTS) for query in QUERIES])


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_scores_are_those_of_documents_that_ran_through_rounded_maps(kind, tiny_folder):
    ranker, slow = (load_ranker(tiny_folder(kind), kind, dtype=dtype) for dtype in ("int8", "float32"))
    assert ranker.identity() != slow.identity()
    exact, scores = all_scores(slow), all_scores(ranker)
    slow.backbone.for_documents = copy.deepcopy(slow.backbone.model)
    for module in slow.backbone.for_documents.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = slowly(module)
    moved = float((scores - exact).abs().max())
    assert moved > EXACT
    # A token on the border between two whole numbers becomes the one here and the other there, by processor.
    torch.testing.assert_close(scores, all_scores(slow), rtol=0, atol=moved / 20)
    one_by_one = [[ranker.score(query, [document])[0] for document in DOCUMENTS] for query in QUERIES]
    torch.testing.assert_close(scores, torch.tensor(one_by_one), rtol=0, atol=EXACT)
    assert "documents in int8" in repr(ranker)


def test_it_is_chosen_where_it_is_good_enough_and_there_is_no_bfloat16(monkeypatch):
    for fast, good, dtype in [(False, True, "int8"), (False, False, "float32"), (True, True, "bfloat16")]:
        monkeypatch.setattr("rsrank_rag.language_model.options.has_fast_bfloat16", lambda device, fast=fast: fast)
        assert LoadOptions("cpu").settled_dtype(int8=good) == dtype
        assert LoadOptions("cpu", "int8").settled_dtype() == "int8"
        assert LoadOptions("cpu", "float32").settled_dtype(int8=good) == "float32"
    monkeypatch.setattr("rsrank_rag.language_model.options.has_fast_bfloat16", lambda device: False)
    monkeypatch.setattr(int8, "is_fast", lambda: False)
    assert LoadOptions("cpu").settled_dtype(int8=True) == "float32"


def test_the_built_in_model_is_read_so_and_keeps_to_its_scores():
    chosen, exact = (
        RSRank.from_pretrained(device="cpu", dtype=dtype, prefix_cache=False) for dtype in (None, "float32")
    )
    assert "documents in int8" in repr(chosen)
    passages = (Path(__file__).parents[1] / "examples" / "passages.txt").read_text("utf-8").splitlines()
    for query in ("How do bees find flowers?", "honey", "night trains in winter"):
        moved = torch.tensor(chosen.score(query, passages)) - torch.tensor(exact.score(query, passages))
        assert 0 < moved.abs().max() < 0.25  # as far as any of 8,142 moved, see docs/benchmarks.md


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"device": "cpu", "load_in_8bit": True}])
def test_it_is_refused_where_there_is_none(options):
    with pytest.raises(InputError, match="dtype='int8' needs an x86 CPU with VNNI"):
        LoadOptions(dtype="int8", **options).settled_dtype()


def test_systems_that_cannot_read_so_refuse_it():
    with pytest.raises(InputError, match="'int8' is not a dtype"):
        LoadOptions("cpu", "int8").resolved_dtype()
