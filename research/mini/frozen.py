"""all-mpnet-base-v2 as it is: token states of each text, computed once and read from disk.

Axes: N texts, S tokens, C hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from encode import padding
from model import Mini, Shape, load_layers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModel, BertConfig, BertModel

CLS, PAD, SEP = 0, 1, 2
BATCH = 6000
"""Padded tokens that are run at once."""
PART = 60_000
"""Tokens of a file of states."""

BIAS = "encoder.relative_attention_bias.weight"
"""MPNet's bias for relative positions in the attention of all layers; BERT has none."""
FIRST_POSITION = 2
"""The first position of a text in MPNet; those before it belong to padding."""
NAMES = {
    "attention.attn.q.": "attention.self.query.",
    "attention.attn.k.": "attention.self.key.",
    "attention.attn.v.": "attention.self.value.",
    "attention.attn.o.": "attention.output.dense.",
    "attention.LayerNorm.": "attention.output.LayerNorm.",
}
"""Parts of MPNet's names, and of BERT's."""

Key = tuple[int, str]
"""The most tokens of a text, and the text."""


class Frozen:
    """The encoder, and the states that are on disk.

    Args:
        start: Folder of the encoder.
        folder: Files of states, which `read` writes; None for states in memory only.
        dtype: Of the states.
    """

    def __init__(
        self, start: Path, folder: Path | None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.folder = folder
        self.tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.model = AutoModel.from_pretrained(start, dtype=dtype).eval()
        self.places: dict[Key, tuple[Tensor, int, int]] = {}
        self.files = 0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(folder.glob("*.pt")):
                self._add(torch.load(path, weights_only=True, mmap=True))

    def _add(self, part: dict) -> None:
        start = 0
        for most, text, length in part["texts"]:
            self.places[most, text] = (part["states"], start, length)
            start += length
        self.files += 1

    def ids(self, texts: Iterable[str], most: int) -> list[list[int]]:
        """Token ids of <s> text </s>, cut after ``most`` tokens of text."""
        encoded = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [[CLS, *item.ids[:most], SEP] for item in encoded]

    def entering(self, model: Mini, texts: Sequence[str], most: int) -> tuple[Tensor, Tensor]:
        """See `pairs.Entering`."""
        self.read([(most, text) for text in texts], keep=False)
        rows = []
        for text in texts:
            states, start, length = self.places[most, text]
            rows.append(states[start : start + length])
        hidden = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return hidden, padding([len(row) for row in rows])

    def read(self, keys: Iterable[Key], *, keep: bool = True) -> int:
        """Run the texts without states; the number of their tokens.

        Args:
            keys: Texts and their most tokens.
            keep: Write the states to disk.
        """
        todo = [key for key in dict.fromkeys(keys) if key not in self.places]
        ids = [self.ids([text], most)[0] for most, text in todo]
        total, start, tokens = sum(map(len, ids)), 0, 0
        for end in range(1, len(todo) + 1):
            tokens += len(ids[end - 1])
            if tokens >= PART or end == len(todo):
                part = {
                    "texts": [(*todo[at], len(ids[at])) for at in range(start, end)],
                    "states": self._run(ids[start:end]),
                }
                if keep and self.folder is not None:
                    path = self.folder / f"{self.files:04d}.pt"
                    torch.save(part, path.with_suffix(".new"))
                    path.with_suffix(".new").replace(path)
                    part = torch.load(path, weights_only=True, mmap=True)
                    print(f"{end} of {len(todo)} texts", flush=True)
                self._add(part)
                start, tokens = end, 0
        return total

    @torch.inference_mode()
    def _run(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Token states of all texts, one text after the other, (tokens, C)."""
        rows: list[Tensor] = [torch.empty(0)] * len(ids)
        order = sorted(range(len(ids)), key=lambda at: len(ids[at]))
        while order:
            count = 1
            while count < len(order) and len(ids[order[count]]) * (count + 1) <= BATCH:
                count += 1
            chunk, order = order[:count], order[count:]
            width = len(ids[chunk[-1]])
            padded = torch.tensor([[*ids[at], *[PAD] * (width - len(ids[at]))] for at in chunk])
            mask = (padded != PAD).long()
            hidden = self.model(input_ids=padded, attention_mask=mask).last_hidden_state
            for row, at in enumerate(chunk):
                rows[at] = hidden[row, : len(ids[at])]
        return torch.cat(rows)


def as_bert_model(start: Path) -> BertModel:
    """The encoder under BERT's names, without its position bias: fusion layers begin as copies."""
    config = AutoConfig.from_pretrained(start).to_dict()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    chosen = {name: config[name] for name in (*names, "vocab_size", "layer_norm_eps")}
    positions = config["max_position_embeddings"] - FIRST_POSITION
    bert = BertConfig(**chosen, max_position_embeddings=positions, type_vocab_size=1)
    model = BertModel(bert, add_pooling_layer=False)
    model.load_state_dict(
        {
            name: weight
            for name, weight in as_bert(load_file(start / "model.safetensors")).items()
            if name != BIAS and not name.startswith("pooler") and "position_ids" not in name
        }
    )
    return model.eval()


def as_bert(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """MPNet's weights under BERT's names, with positions from 0 and a token type of zeros."""
    renamed = {}
    for name, weight in weights.items():
        for part, of_bert in NAMES.items():
            name = name.replace(part, of_bert)
        renamed[name] = weight
    places = "embeddings.position_embeddings.weight"
    renamed[places] = renamed[places][FIRST_POSITION:]
    renamed["embeddings.token_type_embeddings.weight"] = torch.zeros_like(renamed[places][:1])
    return renamed


@torch.no_grad()
def trained(weights: Path, start: Path) -> Mini:
    """The model whose fusion layers, B and scalars train_base.py wrote into a folder."""
    description = json.loads((weights / "model.json").read_text(encoding="utf-8"))
    tensors = load_file(weights / "model.safetensors")
    shape = Shape(**{name: description[name] for name in ("fuse", "run", "dim")})
    model = Mini(as_bert_model(start), shape)
    load_layers(model, tensors)
    model.projection.copy_(tensors["projection"])
    model.shift_weight.copy_(tensors["shift_weight"])
    scalars = (model.pooled_weight, model.token_weight, model.bias)
    for parameter, value in zip(scalars, tensors["agreement"], strict=True):
        parameter.copy_(value)
    return model.eval()
