"""MiniLM's outputs for every passage, computed once and read from disk in training.

Axes: N texts, S tokens, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from model import Mini, pooled
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModel, BertModel

import data

QUERY_TOKENS, DOCUMENT_TOKENS, LONGER_TOKENS = 62, 200, 158
CHUNK = 5000
"""Padded tokens of documents run at once."""
CLS, SEP = 101, 102


class Encoder:
    """MiniLM as it is, in bfloat16: token states after its last layer, and pooled embeddings."""

    def __init__(self, start: str) -> None:
        self.tokenizer = Tokenizer.from_file(str(Path(start) / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.model = minilm(start).to(torch.bfloat16)

    def ids(self, texts: Iterable[str], most: int) -> list[list[int]]:
        """Token ids of [CLS] text [SEP], cut after ``most`` tokens of text."""
        encoded = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [[CLS, *item.ids[:most], SEP] for item in encoded]

    def entering(self, model: Mini, texts: Sequence[str], most: int) -> tuple[Tensor, Tensor]:
        """See `pairs.Entering`: the layers below are the model's, with gradients."""
        ids, valid = padded(self.ids(texts, most))
        return model.below(model.embed(ids).bfloat16(), valid, 0, model.base), valid

    @torch.no_grad()
    def run(
        self,
        texts: Sequence[Sequence[int]],
        states: HiddenStates | None = None,
        numbers: Sequence[int] = (),
    ) -> Tensor:
        """Pooled embeddings (N, C); token states go to ``states`` under these numbers."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        embedded = torch.zeros(len(texts), self.model.config.hidden_size)
        while order:
            count = 1
            while count < len(order) and len(texts[order[count]]) * (count + 1) <= CHUNK:
                count += 1
            chunk, order = order[:count], order[count:]
            ids, valid = padded([texts[i] for i in chunk])
            hidden = self.model(input_ids=ids, attention_mask=valid.long()).last_hidden_state
            embedded[chunk] = pooled(hidden, valid)
            for row, i in enumerate(chunk):
                if states is not None:
                    states.append(numbers[i], hidden[row, : len(texts[i])])
        return embedded

    def embed(self, texts: Iterable[str]) -> Tensor:
        """Pooled embeddings of texts."""
        return self.run(self.ids(texts, 254))


class HiddenStates:
    """Token states on disk, in bfloat16."""

    def __init__(self, path: Path, width: int) -> None:
        self.path, self.width, self.end = path, width, 0
        self.place: dict[int, int] = {}
        self._file = path.open("wb")

    def append(self, number: int, hidden: Tensor) -> None:
        """Keep one text's states, (S, C)."""
        self._file.write(hidden.contiguous().view(torch.int16).numpy().tobytes())
        self.place[number] = self.end
        self.end += len(hidden)

    def close(self, count: int) -> np.ndarray:
        """Finish; where each of ``count`` texts begins, in tokens."""
        self._file.close()
        return np.array([self.place.get(number, -1) for number in range(count)])


@dataclass
class Stored:
    """Texts and what the encoder makes of them.

    Attributes:
        ids: Token ids of each text, [CLS] text [SEP].
        place: Where each text's token states begin in ``hidden``.
        embedded: Pooled embeddings, (texts, C).
        hidden: Token states of all texts, one after the other, (tokens, C), the bits of bfloat16.
    """

    ids: list[list[int]]
    place: np.ndarray
    embedded: Tensor
    hidden: np.ndarray

    def states(self, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Token states of texts (N, S, C), and which are none of the padding, (N, S)."""
        lengths = [len(self.ids[p]) for p in places]
        found = np.zeros((len(places), max(lengths), self.hidden.shape[1]), dtype=np.int16)
        for row, (p, length) in enumerate(zip(places, lengths, strict=True)):
            start = int(self.place[p])
            found[row, :length] = self.hidden[start : start + length]
        return torch.from_numpy(found).view(torch.bfloat16), padding(lengths)


def minilm(start: str) -> BertModel:
    """The encoder that everything starts from."""
    return AutoModel.from_pretrained(start, add_pooling_layer=False, dtype=torch.float32).eval()


def padded(texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids and which of them are none of the padding, both (N, S)."""
    valid = padding(list(map(len, texts)))
    width = valid.shape[1]
    return torch.tensor([[*text, *[0] * (width - len(text))] for text in texts]), valid


def padding(lengths: Sequence[int]) -> Tensor:
    """Where texts of these lengths are, and no padding, (N, S)."""
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def inner(valid: Tensor) -> Tensor:
    """Which of [CLS] text [SEP] are the text's own."""
    own = valid.clone()
    own[:, 0] = False
    own[torch.arange(len(valid)), valid.sum(1) - 1] = False
    return own | (~own.any(1, keepdim=True) & valid)


def scored_tokens(valid: Tensor) -> Tensor:
    """Which of [CLS] query [SEP] are scored: the query's own, (Q, T) as float."""
    scored = valid.clone()
    scored[:, 0] = False
    scored[torch.arange(len(valid)), valid.sum(1) - 1] = False
    return scored.float()


@dataclass
class Prepared:
    """Everything that is computed once.

    Attributes:
        training: Examples.
        validation: Examples kept apart.
        texts: Their texts.
        ids: Token ids of each text, [CLS] text [SEP].
        place: Where each text's token states begin in the file of states.
        embedded: Pooled embeddings, (texts, C), fp16.
    """

    training: list[data.Example]
    validation: list[data.Example]
    texts: data.Texts
    ids: list[list[int]]
    place: np.ndarray
    embedded: np.ndarray

    def stored(self, states: Path) -> Stored:
        """With the token states on disk."""
        embedded = torch.from_numpy(self.embedded)
        hidden = np.memmap(states, dtype=np.int16, mode="r").reshape(-1, embedded.shape[1])
        return Stored(self.ids, self.place, embedded, hidden)


def prepare(folder: Path, output: Path, start: str, seed: int) -> Prepared:
    """Read the sets, run the encoder, mine negatives, make queries; or load an earlier result."""
    done = output / "prepared.pt"
    if done.exists():
        return torch.load(done, weights_only=False)
    texts, encoder = data.Texts(), Encoder(start)
    training, validation = data.load(folder, list(data.SETS), texts)
    training = data.capped(training)
    states = HiddenStates(output / "hidden.bin", encoder.model.config.hidden_size)
    ids, embedded = run_over([*training, *validation], texts, encoder, states)
    data.mine(training, texts, encoder.embed, embedded)
    made = data.statements(training, texts, 1200, seed)
    made += data.words(training, texts, 4000, seed)
    made += data.greetings(training, 600, seed)
    more = encoder.ids(texts.texts[len(ids) :], LONGER_TOKENS)
    embedded = torch.cat(
        [embedded, encoder.run(more, states, range(len(ids), len(ids) + len(more)))]
    )
    ids += more
    prepared = Prepared(
        training + made, validation, texts, ids, states.close(len(ids)), embedded.half().numpy()
    )
    torch.save(prepared, done)
    return prepared


def prepare_unseen(folder: Path, output: Path, start: str) -> Prepared:
    """Validation queries of the sets that nothing is trained on."""
    texts, encoder = data.Texts(), Encoder(start)
    _, validation = data.load(folder, list(data.UNSEEN), texts)
    states = HiddenStates(output / "unseen.bin", encoder.model.config.hidden_size)
    ids, embedded = run_over(validation, texts, encoder, states)
    return Prepared([], validation, texts, ids, states.close(len(ids)), embedded.half().numpy())


def run_over(
    examples: Sequence[data.Example], texts: data.Texts, encoder: Encoder, states: HiddenStates
) -> tuple[list[list[int]], Tensor]:
    """Token ids of all texts, and embeddings (texts, C) of those that examples use."""
    needed = sorted({p for e in examples for p in (*e.relevant, *e.others)})
    needed += sorted({texts.bare[p] for p in needed if p in texts.bare} - set(needed))
    ids = [
        [CLS, *item[1:-1][: data.cut(len(item), DOCUMENT_TOKENS, LONGER_TOKENS)], SEP]
        for item in encoder.ids(texts.texts, DOCUMENT_TOKENS)
    ]
    embedded = torch.zeros(len(ids), states.width)
    embedded[needed] = encoder.run([ids[i] for i in needed], states, needed)
    print(f"{len(needed)} texts, {states.end} tokens", flush=True)
    return ids, embedded
