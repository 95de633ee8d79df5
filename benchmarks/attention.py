"""Grouped-query attention over a prefix in one layer of Qwen3-8B, with and without repeated keys.

python -m benchmarks.attention
"""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rsrank_rag.backends.torch.attention import attend as grouped_attention

DOCUMENTS, POSITIONS, TOKENS, HEADS, GROUPS, WIDTH = 16, 229, 25, 8, 4, 128


def main() -> None:
    """Time both, turn by turn, on one thread."""
    torch.set_num_threads(1)
    layer = SimpleNamespace(num_key_value_groups=GROUPS, is_causal=True)
    mask = torch.ones(DOCUMENTS, 1, TOKENS, POSITIONS, dtype=torch.bool)
    for dtype in (torch.float32, torch.bfloat16):
        keys, values = torch.randn(2, DOCUMENTS, HEADS, POSITIONS, WIDTH).to(dtype)
        queries = torch.randn(DOCUMENTS, TOKENS, HEADS * GROUPS, WIDTH).to(dtype).transpose(1, 2)
        times: dict[str, list[float]] = {"repeated": [], "grouped": []}
        found = {}
        for _ in range(16):
            for name, run in (("repeated", sdpa_attention_forward), ("grouped", grouped_attention)):
                started = time.perf_counter()
                found[name] = run(layer, queries, keys, values, mask, scaling=WIDTH**-0.5)[0]
                times[name].append(1e3 * (time.perf_counter() - started))
        repeated, grouped = (statistics.median(times[name][1:]) for name in times)
        same = torch.equal(found["repeated"], found["grouped"])
        print(f"{dtype}: repeated {repeated:.1f} ms, grouped {grouped:.1f} ms, equal bits: {same}")


if __name__ == "__main__":
    main()
