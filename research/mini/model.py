"""`mini` in plain torch, for training: MiniLM's six layers, and fusion layers above them.

Below layer ``fuse`` the query's tokens see only each other, from there on the document's, too. The
document's tokens see only the document, and stay what they are when they enter that layer. Layers
are counted from 0; ``run`` layers are run, and of the one above them only the value projection is
used.

Axes: N documents, S document tokens, R rows (pairs of a query and a document), T query tokens, H
heads, D head dimension, C hidden size, P projection dimension.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertModel

from rsrank_rag.method.formula import representational_shift, shift_terms

BERT_NAMES = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "last_norm": "output.LayerNorm",
}


class Layer(nn.Module):
    """One BERT layer; parameters are cast to the dtype of what they are applied to."""

    def __init__(self, layer: nn.Module, heads: int) -> None:
        super().__init__()
        attention = layer.attention
        inner = attention.self
        self.query = copy.deepcopy(inner.query)
        self.key = copy.deepcopy(inner.key)
        self.value = copy.deepcopy(inner.value)
        self.out = copy.deepcopy(attention.output.dense)
        self.norm = copy.deepcopy(attention.output.LayerNorm)
        self.up = copy.deepcopy(layer.intermediate.dense)
        self.down = copy.deepcopy(layer.output.dense)
        self.last_norm = copy.deepcopy(layer.output.LayerNorm)
        self.heads = heads
        self.drop = 0.0

    def split(self, x: Tensor) -> Tensor:
        """(N, S, C) as (N, H, S, D)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, each (N, H, S, D)."""
        return self.split(linear(x, self.key)), self.split(linear(x, self.value))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """The layer's output for tokens x that attend to keys and values."""
        q = self.split(linear(x, self.query))
        seen = attend(q, keys, values, mask)
        y = linear(seen.transpose(1, 2).flatten(2), self.out)
        x = norm(x + self.dropped(y), self.norm)
        y = linear(functional.gelu(linear(x, self.up)), self.down)
        return norm(x + self.dropped(y), self.last_norm)

    def dropped(self, x: Tensor) -> Tensor:
        """Dropout, while training."""
        return functional.dropout(x, self.drop) if self.training and self.drop else x


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention, (N, H, T, D). The fused kernel's backward pass is slow on a CPU."""
    if not query.requires_grad:
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    logits = (query * query.shape[-1] ** -0.5) @ keys.mT
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(
            ~mask, -1e4
        )
        logits = logits + bias
    return logits.softmax(-1) @ values


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """A linear layer in x's dtype."""
    return functional.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))


def norm(x: Tensor, layer: nn.LayerNorm) -> Tensor:
    """Layer norm in x's dtype."""
    return functional.layer_norm(
        x, layer.normalized_shape, layer.weight.to(x.dtype), layer.bias.to(x.dtype), layer.eps
    )


@dataclass(frozen=True)
class Shape:
    """What a model looks like.

    Attributes:
        fuse: First layer in which the query sees the document.
        run: Layers that are run.
        dim: P.
    """

    fuse: int = 6
    run: int = 8
    dim: int = 32

    @property
    def read(self) -> tuple[int, ...]:
        """Layers whose value vectors can differ with the document."""
        return tuple(range(self.fuse + 1, self.run + 1))


class Mini(nn.Module):
    """Encoder, B, and the weights of similarity.

    Args:
        encoder: With one layer more than ``shape.run``.
        shape: What to build of it.
        window: Positions of a window of local reading.
        reach: How far a document's tokens see, see `below`.

    Attributes:
        fast: The type of token states.
    """

    def __init__(
        self, encoder: BertModel, shape: Shape, window: int, reach: int | None = None
    ) -> None:
        super().__init__()
        self.shape, self.base = shape, shape.fuse
        self.window, self.reach = window, reach
        self.heads = encoder.config.num_attention_heads
        self.fast = torch.bfloat16
        self.embeddings = copy.deepcopy(encoder.embeddings)
        layers = encoder.encoder.layer[: shape.run + 1]
        self.layers = nn.ModuleList(Layer(layer, self.heads) for layer in layers)
        read, dim = len(shape.read), encoder.config.hidden_size // self.heads
        self.projection = nn.Parameter(torch.zeros(read, self.heads, shape.dim, dim))
        self.shift_weight = nn.Parameter(torch.zeros(read, self.heads))
        self.pooled_weight = nn.Parameter(torch.zeros(()))
        self.token_weight = nn.Parameter(torch.zeros(()))
        self.bias = nn.Parameter(torch.zeros(()))

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings, positions from 0."""
        e = self.embeddings
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = (
            e.word_embeddings(ids)
            + e.position_embeddings(positions)
            + e.token_type_embeddings.weight[0]
        )
        return functional.layer_norm(
            x, x.shape[-1:], e.LayerNorm.weight, e.LayerNorm.bias, e.LayerNorm.eps
        )

    def below(
        self, hidden: Tensor, valid: Tensor, first: int, last: int, reach: int | None = None
    ) -> Tensor:
        """Layers first to last - 1, each token seeing its own part only.

        Args:
            hidden: Token states, (N, S, C).
            valid: Which of them are no padding, (N, S).
            first: The first layer.
            last: The layer after the last one.
            reach: A token sees the first position, and tokens at most this far away; None for all.
        """
        mask = None if bool(valid.all()) else valid[:, None, None]
        if reach is not None and hidden.shape[1] > reach + 1:
            places = torch.arange(hidden.shape[1], device=hidden.device)
            near = (places[:, None] - places).abs() <= reach
            mask = (near | (places == 0)) & valid[:, None, None]
        for layer in self.layers[first:last]:
            hidden = layer(hidden, *layer.keys_values(hidden), mask)
        return hidden

    def document(self, hidden: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of a document in the fusion layers, from its states below the first."""
        layers = self.layers[self.shape.fuse : self.shape.run]
        return [layer.keys_values(hidden) for layer in layers]

    def values(
        self, hidden: Tensor, valid: Tensor, documents: list[tuple[Tensor, Tensor]], seen: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Value vectors of the query's tokens after documents.

        Args:
            hidden: States (R, T, C) that enter the fusion layer.
            valid: Which of them are no padding, (R, T).
            documents: Keys and values of the documents in each fusion layer.
            seen: Which positions of the documents are no padding, (R, S).

        Returns:
            Those of the layers read, and those of the fusion layers, each (R, H, T, D).
        """
        mask = torch.cat([seen, valid], dim=1)[:, None, None]
        read, own = [], []
        for number in range(self.shape.fuse, self.shape.run):
            layer = self.layers[number]
            keys, values = layer.keys_values(hidden)
            own.append(values)
            if number > self.shape.fuse:
                read.append(values)
            document_keys, document_values = documents[number - self.shape.fuse]
            hidden = layer(
                hidden,
                torch.cat([document_keys, keys], 2),
                torch.cat([document_values, values], 2),
                mask,
            )
        last = self.layers[self.shape.run]
        read.append(last.split(linear(hidden, last.value)))
        return read, own

    def mean_shift_terms(self, read: list[Tensor], alone: list[Tensor], scored: Tensor) -> Tensor:
        """The mean of the shift terms over the scored tokens before heads are weighed, (R, L, H).

        Args:
            read: Value vectors of the query's tokens after each document, L of (R, H, T, D).
            alone: Those after the null prefix.
            scored: Which tokens of the query count, (R, T) as float.
        """
        shifts = list(map(representational_shift, read, alone))
        terms = shift_terms(torch.stack(shifts, 1), self.projection)
        weights = scored / scored.sum(1, keepdim=True)
        return (terms * weights[:, None, None]).sum(-1)


def pooled(hidden: Tensor, valid: Tensor) -> Tensor:
    """Mean over a text's tokens, as a unit vector, (N, C)."""
    total = (hidden.float() * valid[..., None]).sum(1)
    return functional.normalize(total / valid.sum(1, keepdim=True), dim=-1)


def from_artifact(artifact: Path, window: int, reach: int | None = None) -> Mini:
    """The recipe's model with the weights of an artifact."""
    encoder = BertModel.from_pretrained(
        artifact / "backbone", add_pooling_layer=False, dtype=torch.float32
    )
    model = Mini(encoder, Shape(), window, reach)
    small = load_file(artifact / "projection.safetensors")
    with torch.no_grad():
        model.projection.copy_(small["weight"])
        model.shift_weight.copy_(small["head_weight"])
        for parameter, value in zip(
            (model.pooled_weight, model.token_weight, model.bias), small["agreement"], strict=True
        ):
            parameter.copy_(value)
    return model


def bert_weights(model: Mini) -> dict[str, Tensor]:
    """The encoder's weights under `BertModel`'s names; of the last layer, the value projection."""
    tensors = {}
    for name, tensor in model.embeddings.named_parameters():
        tensors[f"embeddings.{name}"] = tensor.detach()
    for number, layer in enumerate(model.layers):
        for own, name in BERT_NAMES.items():
            if number < model.shape.run or own == "value":
                for part, tensor in getattr(layer, own).named_parameters():
                    tensors[f"encoder.layer.{number}.{name}.{part}"] = tensor.detach()
    return tensors
