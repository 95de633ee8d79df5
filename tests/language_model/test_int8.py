"""Documents in int8: what is computed, for whom it is chosen, and what it is not taken for."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import DOCUMENTS, QUERIES, load_ranker

from rsrank_rag import RSRank
from rsrank_rag.errors import InputError
from rsrank_rag.language_model import linear as maps
from rsrank_rag.language_model.linear import Int8Linear, QuantisationParameters
from rsrank_rag.language_model.options import LoadOptions, has_fast_int8
from rsrank_rag.language_model.quantisation import calibration_ids

pytestmark = pytest.mark.skipif(not has_fast_int8(), reason="needs an x86 processor with AVX2")

EXACT = 1e-4  # fp32: rounding alone


def pretend(monkeypatch, *instructions):
    """Let the processor have only these instructions."""
    monkeypatch.setattr(
        "rsrank_rag.language_model.options.cpu_has",
        lambda *names: not {*names}.isdisjoint(instructions),
    )


@pytest.fixture(autouse=True)
def without_bfloat16(monkeypatch):
    pretend(monkeypatch, "avx2")


def weights_of(linear, times=1.0):
    """Weights scaled for each input, then rounded to integers for each output, in float64."""
    weight = linear.weight.detach().double() * times
    scales = weight.abs().amax(1, keepdim=True) / maps.largest_weight()
    return (weight / scales).round() * scales


def slowly(linear):
    """A decoder's map by plain arithmetic: each token has a scale of its own."""

    def forward(inputs):
        size = (inputs.double().abs().amax(-1, keepdim=True) / 127).clamp_min(
            1e-12
        )  # padding may be zeros
        outputs = ((inputs / size).round() * size) @ weights_of(linear).T
        return (outputs if linear.bias is None else outputs + linear.bias).to(linear.weight.dtype)

    return forward


def slowly_within(linear, lowest, highest, beside=()):
    """An encoder's map by plain arithmetic: 255 steps over the seen range, after channel scaling.

    That is done alike for all maps that take the same numbers, those beside this one.
    """
    largest = torch.maximum(-lowest, highest).clamp_min(1e-4).double()
    weights = (
        torch.stack([each.weight.abs().amax(0) for each in (linear, *beside)])
        .amax(0)
        .clamp_min(1e-6)
    )
    by = (largest / weights).sqrt() if lowest.ndim else torch.ones(1).double()
    low, high = min(float((lowest / by).min()), -1e-6), max(float((highest / by).max()), 1e-6)
    size, zero = (high - low) / 255, round(-low / (high - low) * 255)

    def forward(inputs):
        steps = (inputs.double() / (by * size)).round().clamp(-zero, 255 - zero)
        outputs = steps @ weights_of(linear, by * size).T
        return (outputs if linear.bias is None else outputs + linear.bias).to(linear.weight.dtype)

    return forward


def test_a_map_is_what_plain_arithmetic_makes_of_it_and_no_token_depends_on_others():
    torch.manual_seed(0)
    for bias in (True, False):
        linear = torch.nn.Linear(96, 40, bias=bias).requires_grad_(False)
        inputs = torch.randn(3, 5, 96) * torch.logspace(-2, 2, 5)[:, None]
        found = Int8Linear(linear)(inputs)
        torch.testing.assert_close(found, slowly(linear)(inputs))
        alone = torch.stack([Int8Linear(linear)(token[None])[0] for token in inputs.flatten(0, 1)])
        assert torch.equal(found.flatten(0, 1), alone)
    assert torch.equal(Int8Linear(linear)(torch.zeros(2, 96)), torch.zeros(2, 40))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_map_of_a_known_range_is_what_plain_arithmetic_makes_of_it_and_cuts_what_is_outside(
    bias, dtype
):
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 40, bias=bias, dtype=dtype).requires_grad_(False)
    sizes = torch.logspace(-1, 1, 96)
    rounded = Int8Linear(linear, QuantisationParameters(-sizes, 2 * sizes, [linear.weight]))
    inputs = (torch.randn(7, 5, 96) * sizes).to(dtype)
    assert (inputs < -sizes).any()
    assert (inputs > 2 * sizes).any()
    expected = slowly_within(linear, -sizes, 2 * sizes)(inputs)
    found = rounded(inputs)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3
    )
    assert torch.equal(found[:1, :1], rounded(inputs[:1, :1]))
    far = torch.full((1, 96), 1e30, dtype=dtype)
    assert rounded(far).isfinite().all()


def test_one_map_hands_its_rounded_gelu_to_the_next():
    torch.manual_seed(0)
    first, second = (
        torch.nn.Linear(32, 64).requires_grad_(False),
        torch.nn.Linear(64, 32).requires_grad_(False),
    )
    inputs = torch.randn(50, 32)
    between = torch.nn.functional.gelu(first(inputs))
    entering, after = (inputs.amin(0), inputs.amax(0)), (between.min(), between.max())
    following = QuantisationParameters(*after, [second.weight])
    codes = Int8Linear(
        first, QuantisationParameters(*entering, [first.weight]), gelu=True, outputs=following
    )(inputs)
    assert codes.dtype == torch.uint8
    found = Int8Linear(second, following)(codes)
    expected = slowly_within(second, *after)(
        torch.nn.functional.gelu(slowly_within(first, *entering)(inputs))
    )
    # A number between two steps may become the one here and the other there.
    step = float(following.scale * second.weight.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=2 * step)
    torch.testing.assert_close(found, second(between), rtol=0, atol=0.1)


LARGEST = """
import torch
from rsrank_rag.language_model.linear import Int8Linear, QuantisationParameters
linear = torch.nn.Linear(64, 8, bias=False).requires_grad_(False)
torch.nn.init.ones_(linear.weight)
parameters = QuantisationParameters(torch.zeros(()), torch.ones(()), [linear.weight])
found = Int8Linear(linear, parameters)(torch.ones(3, 64))
torch.testing.assert_close(found, torch.full((3, 8), 64.0), rtol=1e-3, atol=0)
"""


@pytest.mark.parametrize("instructions", ["ALL", "AVX2"])
def test_the_largest_numbers_do_not_overflow_whatever_instructions_onednn_may_use(instructions):
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": instructions}
    subprocess.run([sys.executable, "-c", LARGEST], env=environment, check=True)


def all_scores(ranker):
    return torch.tensor([ranker.score(query, DOCUMENTS) for query in QUERIES])


def test_an_encoder_is_tried_out_on_the_same_tokens_every_time_within_its_template(tiny_folder):
    prompts = load_ranker(tiny_folder("bert"), "bert").prompts
    assert calibration_ids(prompts) == calibration_ids(prompts)
    ids = torch.tensor(calibration_ids(prompts))
    before, after = len(prompts.instruction), ids.shape[1] - len(prompts.separator)
    assert (ids[:, :before] == torch.tensor(prompts.instruction)).all()
    assert (ids[:, after:] == torch.tensor(prompts.separator, dtype=torch.long)).all()
    assert len(ids[:, before:after].unique()) > min(32 * 14, len(prompts.tokenizer)) / 2


def make_slow(model, ids):
    """Replace the maps of a model by plain arithmetic; with ids, an encoder's."""
    seen = {}
    parts = {
        name: part for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)
    }
    names = {part: name for name, part in parts.items()}

    def see(part, inputs):
        seen[names[part]] = inputs[0]

    hooks = [part.register_forward_pre_hook(see) for part in parts.values()]
    if ids is not None:
        with torch.no_grad():
            model(input_ids=torch.tensor(ids))
    for hook in hooks:
        hook.remove()
    for name, part in parts.items():
        if ids is None:
            part.forward = slowly(part)
        elif name in seen:
            numbers = seen[name].flatten(0, -2)
            beside = [parts[other] for other in seen if seen[other] is seen[name]]
            if "attention" not in name and "output" in name:  # after GELU
                part.forward = slowly_within(part, numbers.min(), 0.7 * numbers.max())
            else:
                part.forward = slowly_within(part, numbers.amin(0), numbers.amax(0), beside)


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_scores_are_those_of_documents_that_ran_through_rounded_maps(kind, tiny_folder):
    ranker, slow = (
        load_ranker(tiny_folder(kind), kind, dtype=dtype) for dtype in ("int8", "float32")
    )
    assert ranker.identity() != slow.identity()
    exact, scores = all_scores(slow), all_scores(ranker)
    slow.backbone.document_model = copy.deepcopy(slow.backbone.model)
    make_slow(
        slow.backbone.document_model, calibration_ids(slow.prompts) if kind == "bert" else None
    )
    moved = (scores - exact).abs()
    assert moved.max() > EXACT
    # A token on the border between two whole numbers becomes the one here and the other there, by
    # processor.
    between = (scores - all_scores(slow)).abs()
    assert between.max() < moved.max() / 5
    assert between.mean() < moved.mean() / 10
    one_by_one = [
        [ranker.score(query, [document])[0] for document in DOCUMENTS] for query in QUERIES
    ]
    torch.testing.assert_close(scores, torch.tensor(one_by_one), rtol=0, atol=EXACT)
    assert "documents in int8" in repr(ranker)


@pytest.mark.parametrize(
    ("instructions", "allowed", "dtype"),
    [
        (["avx2"], True, "int8"),
        (["avx2"], False, "float32"),
        ([], True, "float32"),
        (["avx2", "avx512_bf16"], True, "int8"),
        (["avx2", "avx512_bf16"], False, "bfloat16"),
        (["avx2", "avx512_bf16", "amx_tile"], True, "bfloat16"),
    ],
)
def test_int8_is_the_default_where_it_is_fastest_and_the_artifact_allows_it(
    monkeypatch, instructions, allowed, dtype
):
    pretend(monkeypatch, *instructions)
    assert LoadOptions("cpu").settled_dtype(int8=allowed) == dtype
    assert LoadOptions("cpu", "float32").settled_dtype(int8=allowed) == "float32"


def test_the_built_in_model_is_read_so_and_keeps_to_its_scores():
    chosen, exact = (
        RSRank.from_pretrained(device="cpu", dtype=dtype, prefix_cache=False)
        for dtype in (None, "float32")
    )
    assert "documents in int8" in repr(chosen)
    passages = (
        (Path(__file__).parents[2] / "examples" / "passages.txt").read_text("utf-8").splitlines()
    )
    for query in ("How do bees find flowers?", "honey", "night trains in winter"):
        moved = torch.tensor(chosen.score(query, passages)) - torch.tensor(
            exact.score(query, passages)
        )
        # Scores of four dev sets moved by 0.05 in the mean and 0.35 at most, see
        # research/docs/speed.md.
        assert 0 < moved.abs().max() < 0.4


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"device": "cpu", "load_in_8bit": True}])
def test_it_is_refused_where_there_is_none(options):
    with pytest.raises(InputError, match="dtype='int8' needs an x86 CPU with AVX2"):
        LoadOptions(dtype="int8", **options).settled_dtype()


def test_systems_that_cannot_read_so_refuse_it():
    with pytest.raises(InputError, match="'int8' is not a dtype"):
        LoadOptions("cpu", "int8").resolved_dtype()
