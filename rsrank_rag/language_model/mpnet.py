"""MPNet as an encoder of BERT's kind: its weights' names, its positions, and its position bias.

MPNet (arXiv 2004.09297) is BERT with a bias for relative positions in the attention of all layers,
and without token types. Layers of an artifact's own above MPNet's have no such bias.

Axes: S tokens of a text, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .quantisation import Numbers

MODEL_TYPE = "mpnet"

BIAS = "encoder.relative_attention_bias.weight"

# Parts of MPNet's names, and of BERT's.
NAMES = {
    "attention.attn.q.": "attention.self.query.",
    "attention.attn.k.": "attention.self.key.",
    "attention.attn.v.": "attention.self.value.",
    "attention.attn.o.": "attention.output.dense.",
    "attention.LayerNorm.": "attention.output.LayerNorm.",
}

# The first position of a text; those before it belong to padding.
FIRST_POSITION = 2

# Keys that are so far away, or farther, share a bias.
FARTHEST = 128


def as_bert(weights: Mapping[str, Any]) -> dict[str, Any]:
    """MPNet's weights under BERT's names, with positions from 0 and a token type of zeros.

    They are arrays of numpy or tensors of torch.
    """
    renamed = {}
    for name, weight in weights.items():
        for part, of_bert in NAMES.items():
            name = name.replace(part, of_bert)
        renamed[name] = weight
    places = "embeddings.position_embeddings.weight"
    renamed[places] = renamed[places][FIRST_POSITION:]
    renamed["embeddings.token_type_embeddings.weight"] = 0 * renamed[places][:1]
    return renamed


def position_bias(table: Numbers, length: int) -> Numbers:
    """What MPNet adds to attention scores before the softmax, (1, H, S, S).

    Args:
        table: The bias of each bucket of distances, (buckets, H).
        length: S.
    """
    half = len(table) // 2
    exact = half // 2
    places = np.arange(length)
    offsets = places - places[:, None]
    distances = np.abs(offsets)
    # Small distances have buckets of their own, the others grow with the logarithm.
    far = np.log(np.maximum(distances, exact).astype(np.float32) / exact)
    far = exact + (far / math.log(FARTHEST / exact) * (half - exact)).astype(np.int64)
    buckets = np.where(distances < exact, distances, np.minimum(far, half - 1))
    buckets += half * (offsets > 0)
    return np.ascontiguousarray(table[buckets].transpose(2, 0, 1)[None])
