"""Our attention equals that of transformers, with repeated keys and with padded keys."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from rsrank_rag.backends.options import LoadOptions
from rsrank_rag.backends.torch.attention import NAME, attend, use_grouped_attention
from rsrank_rag.backends.torch.check import open_backbone
from rsrank_rag.backends.torch.loading import load_model
from rsrank_rag.method.prefix import Prefixes

ROOT = Path(__file__).parents[2]


def by_hand(query, key, value, allowed, scale):
    """One query head, one token at a time."""
    rows, heads, count, dim = query.shape
    group = heads // key.shape[1]
    out = torch.zeros(rows, count, heads, dim)
    for n in range(rows):
        for h in range(heads):
            for t in range(count):
                weights = [
                    math.exp(scale * float(query[n, h, t] @ key[n, h // group, s]))
                    if allowed[n, 0, t, s]
                    else 0.0
                    for s in range(key.shape[2])
                ]
                for s, weight in enumerate(weights):
                    out[n, t, h] += weight / sum(weights) * value[n, h // group, s]
    return out


@pytest.mark.parametrize("additive", [False, True])
def test_each_query_head_attends_to_the_keys_of_its_group(additive):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 3, 4, generator=generator)
    key, value = torch.randn(2, 2, 2, 7, 4, generator=generator)
    allowed = torch.rand(2, 1, 3, 7, generator=generator) < 0.7
    allowed[..., 0] = True
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, -1e30) if additive else allowed
    actual, _ = attend(torch.nn.Identity(), query, key, value, mask, scaling=0.3, dropout=0.0)
    torch.testing.assert_close(actual, by_hand(query, key, value, allowed, 0.3))


@pytest.mark.parametrize("additive", [False, True])
def test_keys_that_a_mask_does_not_cover_are_not_seen(additive):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 2, 3, 4, generator=generator)
    key, value = torch.randn(2, 2, 2, 7, 4, generator=generator)
    allowed = torch.ones(2, 1, 3, 7, dtype=torch.bool)
    allowed[..., 5:] = False
    mask = (torch.zeros(allowed.shape).masked_fill(~allowed, -1e30) if additive else allowed)[
        ..., :5
    ]
    actual, _ = attend(torch.nn.Identity(), query, key, value, mask, scaling=0.3, dropout=0.0)
    torch.testing.assert_close(actual, by_hand(query, key, value, allowed, 0.3))


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3"])
def test_a_model_reads_the_same_values_with_and_without_repeated_keys(kind, tiny_folder):
    def read(model):
        backbone, actual = open_backbone(model), {}
        with torch.inference_mode():
            prefixes = Prefixes.join(backbone.prefill([tuple(range(5, 45)), (7, 8)]), 6)
            backbone.query_values([(9, 10, 11), (12, 13, 14)], prefixes, actual.__setitem__, [0, 1])
        return torch.stack([actual[layer] for layer in sorted(actual)])

    grouped, *_ = load_model(
        tiny_folder(kind), revision=None, options=LoadOptions(device="cpu", dtype="float32")
    )
    plain = AutoModel.from_pretrained(tiny_folder(kind)).eval()
    assert (grouped.config._attn_implementation, plain.config._attn_implementation) == (
        NAME,
        "sdpa",
    )
    expected = read(plain)
    # Rounding grows with the values: a few units in the last place of the largest.
    bound = 16 * torch.finfo(torch.float32).eps * float(expected.abs().max())
    torch.testing.assert_close(read(grouped), expected, rtol=0, atol=bound)


def test_models_with_other_attention_are_left_alone(tiny_folder):
    for kind, attention, after in (
        ("bert", "sdpa", NAME),
        ("qwen3", "eager", "eager"),
        ("falcon", "sdpa", "sdpa"),
    ):
        model = AutoModel.from_pretrained(tiny_folder(kind), attn_implementation=attention)
        use_grouped_attention(model)
        assert model.config._attn_implementation == after


def test_a_saved_model_does_not_ask_for_our_attention(tiny_folder, tmp_path):
    model, *_ = load_model(tiny_folder("qwen3"), revision=None, options=LoadOptions(device="cpu"))
    model.save_pretrained(tmp_path)
    assert NAME not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    AutoModel.from_pretrained(tmp_path)
