"""Our attention gives what transformers' own gives: with repeated keys, or with padding."""

import json
import math
from threading import Thread

import pytest
import torch
from transformers import AutoModel

from rsrank_rag.language_model.attention import NAME, Packing, attend, attending, use_own_attention
from rsrank_rag.language_model.loading import load_model
from rsrank_rag.language_model.options import LoadOptions
from rsrank_rag.method.backbone import Backbone


def by_hand(query, key, value, allowed, scale):
    """One query head, one token at a time."""
    rows, heads, count, dim = query.shape
    group = heads // key.shape[1]
    out = torch.zeros(rows, count, heads, dim)
    for n in range(rows):
        for h in range(heads):
            for t in range(count):
                weights = [
                    math.exp(scale * float(query[n, h, t] @ key[n, h // group, s])) if allowed[n, 0, t, s] else 0.0
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
    found, _ = attend(torch.nn.Identity(), query, key, value, mask, scaling=0.3, dropout=0.0)
    assert torch.allclose(found, by_hand(query, key, value, allowed, 0.3), atol=1e-6)


def slow_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """What torch documents of its kernel for sequences of different lengths, a sequence at a time."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q == max_k == int(cu_seq_q.diff().max())
    assert enable_gqa or query.shape[1] == key.shape[1]
    out = torch.zeros_like(query)
    for start, stop in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        assert window_size in {(-1, 0), (-1, -1)}
        allowed = torch.ones(1, 1, stop - start, stop - start).tril(0 if window_size == (-1, 0) else stop)
        one = (states[None, start:stop].transpose(1, 2) for states in (query, key, value))
        out[start:stop] = by_hand(*one, allowed, scale)[0]
    return out


@pytest.mark.parametrize("way", ["_one_by_one", "_by_kernel"])
@pytest.mark.parametrize("heads", [6, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_attend_to_themselves_alone(way, heads, causal, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", slow_varlen)
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 1, 1, 4, 2, 2, 2]
    rows = [
        (torch.randn(1, heads, n, 4, generator=generator), *torch.randn(2, 1, 2, n, 4, generator=generator))
        for n in lengths
    ]
    packing = Packing.of(lengths, torch.device("cpu"), causal=causal)
    found = getattr(packing, way)(*(torch.cat(part, dim=2) for part in zip(*rows, strict=True)), 0.3)
    for (query, key, value), part in zip(rows, found.split(lengths, dim=1), strict=True):
        count = query.shape[2]
        allowed = torch.ones(1, 1, count, count).tril(0 if causal else count)
        assert torch.allclose(part, by_hand(query, key, value, allowed, 0.3), atol=1e-6)


@pytest.mark.parametrize("way", ["_spread_by_slice", "_spread_by_index"])
def test_a_packed_row_is_spread_with_nothing_behind_each_sequence(way):
    states = torch.arange(2 * 6 * 4.0).view(1, 2, 6, 4) + 1
    found = getattr(Packing.of([2, 1, 3], torch.device("cpu"), causal=True), way)(states, 5)
    assert found.shape == (3, 2, 5, 4)
    assert found.is_contiguous()
    for row, (start, length) in enumerate([(0, 2), (2, 1), (3, 3)]):
        assert torch.equal(found[row, :, :length], states[0, :, start : start + length])
        assert not found[row, :, length:].any()


def test_one_threads_packing_is_no_others(tiny_folder):
    query, key, value = torch.randn(3, 1, 2, 5, 4)
    packing = Packing.of([2, 3], torch.device("cpu"), causal=False)
    found = []
    with attending(packing):
        thread = Thread(target=lambda: found.append(attend(torch.nn.Identity(), query, key, value, None)[0]))
        thread.start()
        thread.join()
        inside, _ = attend(torch.nn.Identity(), query, key, value, None)
    after, _ = attend(torch.nn.Identity(), query, key, value, None)
    assert torch.equal(found[0], after)
    assert not torch.allclose(inside, after, atol=1e-3)


@pytest.mark.parametrize("option", [{"position_bias": torch.zeros(1)}, {"softcap": 50.0}])
def test_attention_with_more_to_it_cannot_be_packed(option):
    query, key, value = torch.randn(3, 1, 2, 5, 4)
    with attending(Packing.of([2, 3], torch.device("cpu"), causal=True)), pytest.raises(ValueError, match="packed"):
        attend(torch.nn.Identity(), query, key, value, None, **option)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3"])
def test_a_model_reads_the_same_values_with_and_without_repeated_keys(kind, tiny_folder):
    def read(model):
        backbone, found = Backbone(model), {}
        with torch.inference_mode():
            prefixes = backbone.prefill([list(range(5, 45)), [7, 8]], room=6)
            backbone.query_values([[9, 10, 11], [12, 13, 14]], prefixes, found.__setitem__)
        return torch.stack([found[layer] for layer in sorted(found)])

    grouped, *_ = load_model(tiny_folder(kind), revision=None, options=LoadOptions(device="cpu", dtype="float32"))
    plain = AutoModel.from_pretrained(tiny_folder(kind)).eval()
    assert (grouped.config._attn_implementation, plain.config._attn_implementation) == (NAME, "sdpa")
    assert torch.allclose(read(grouped), read(plain), atol=1e-6)


def test_models_with_other_attention_are_left_alone(tiny_folder):
    for kind, attention, after in (("bert", "sdpa", NAME), ("qwen3", "eager", "eager"), ("falcon", "sdpa", "sdpa")):
        model = AutoModel.from_pretrained(tiny_folder(kind), attn_implementation=attention)
        use_own_attention(model)
        assert model.config._attn_implementation == after


def test_a_saved_model_does_not_ask_for_our_attention(tiny_folder, tmp_path):
    model, *_ = load_model(tiny_folder("qwen3"), revision=None, options=LoadOptions(device="cpu"))
    model.save_pretrained(tmp_path)
    assert NAME not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    AutoModel.from_pretrained(tmp_path)
