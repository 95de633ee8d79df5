"""Scores of the lists of a batch by the whole model, with gradients in training.

A text's similarity is that of its best part. A part is a window of ``model.window`` positions of
the text's states, every half window, or the whole text. Cosine and MaxSim are those of the same
part. The similarity is computed for all queries and texts, the shift for those of one list.

Axes: Q queries, D texts, M tokens of all queries, N texts of a chunk, S positions, K parts, R pairs
of a query and a text of its list, T query tokens, C hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from batches import Batch
from model import Mini, pooled
from texts import DOCUMENT_TOKENS, QUERY_TOKENS, Texts, inner, padded
from torch import Tensor
from torch.nn import functional

CHUNK = 2600
"""Padded tokens of texts that are run at once."""


@dataclass
class Output:
    """Scores and embeddings of a batch.

    Attributes:
        base: Similarity of all queries and texts, with the bias, (Q, D).
        shift: The shift's part of the score, 0 outside of the lists, (Q, D).
        queries: Pooled embeddings of the queries, (Q, C).
        texts: Pooled embeddings of the texts, (D, C).
    """

    base: Tensor
    shift: Tensor
    queries: Tensor
    texts: Tensor


@dataclass
class Queries:
    """States and embeddings of the queries of a batch.

    Attributes:
        entering: Token states that enter the fusion layer, (Q, T, C).
        valid: Which of them are no padding, (Q, T).
        scored: Which of them count, (Q, T) as float.
        embedded: Pooled embeddings, (Q, C).
        values: Values of the fusion layer of the scored tokens, unit vectors, (M, C).
        mean: Shares of the tokens in their query's mean, (Q, M).
        alone: Values after the null prefix in the layers read, each (Q, H, T, D).
    """

    entering: Tensor
    valid: Tensor
    scored: Tensor
    embedded: Tensor
    values: Tensor
    mean: Tensor
    alone: list[Tensor]


def run(model: Mini, texts: Texts, batch: Batch) -> Output:
    """Run all queries and texts of a batch, with gradients unless torch has switched them off."""
    device = model.bias.device
    queries = read_queries(model, texts, batch.queries)
    ids = texts.ids(batch.texts, DOCUMENT_TOKENS)
    bases = []
    shifts = []
    embedded = []
    order: list[int] = []
    for chunk in chunks(ids):
        token_ids, valid = padded([ids[place] for place in chunk], device)
        entering = model.embed(token_ids).to(model.fast)
        hidden = model.below(entering, valid, 0, model.base, model.reach)
        keys_values = model.document(hidden)
        base = similarity(model, queries, hidden, valid, keys_values[0][1])
        pairs = []
        for query, labels in enumerate(batch.labels):
            for place in labels:
                if place in chunk:
                    pairs.append((query, chunk.index(place)))
        bases.append(base)
        shifts.append(shift_of(model, queries, keys_values, valid, pairs))
        embedded.append(pooled(hidden, valid))
        order += chunk
    back = torch.tensor(order).argsort().to(device)
    return Output(
        torch.cat(bases, 1)[:, back],
        torch.cat(shifts, 1)[:, back],
        queries.embedded,
        torch.cat(embedded)[back],
    )


def read_queries(model: Mini, texts: Texts, queries: list[str]) -> Queries:
    """Run the queries by themselves and after the null prefix."""
    device = model.bias.device
    count = len(queries)
    ids, valid = padded(texts.ids(queries, QUERY_TOKENS), device)
    entering = model.below(model.embed(ids).to(model.fast), valid, 0, model.base)
    empty_ids, empty_valid = padded(texts.ids([""], QUERY_TOKENS), device)
    empty = model.below(model.embed(empty_ids).to(model.fast), empty_valid, 0, model.base)
    null = []
    for keys, values in model.document(empty):
        null.append((keys.expand(count, -1, -1, -1), values.expand(count, -1, -1, -1)))
    alone, own = model.values(entering, valid, null, empty_valid.expand(count, -1))
    is_scored = inner(valid)
    query_of, _ = is_scored.nonzero(as_tuple=True)
    mean = functional.one_hot(query_of, count).float().T
    vectors = own[0].transpose(1, 2).flatten(2)[is_scored]
    return Queries(
        entering,
        valid,
        is_scored.float(),
        pooled(entering, valid),
        functional.normalize(vectors.float(), dim=-1),
        mean / mean.sum(1, keepdim=True),
        alone,
    )


def similarity(
    model: Mini, queries: Queries, hidden: Tensor, valid: Tensor, values: Tensor
) -> Tensor:
    """The best part's similarity with the bias, (Q, N).

    Args:
        model: The weights of cosine and MaxSim, and the size of the windows.
        queries: The queries of the batch.
        hidden: Token states of texts, (N, S, C).
        valid: Which of them are no padding, (N, S).
        values: Values of the texts in the fusion layer, (N, H, S, D).
    """
    step = model.window // 2
    missing = -hidden.shape[1] % step
    states = functional.pad(hidden.float() * valid[..., None], (0, 0, 0, missing))
    halves = states.unflatten(1, (-1, step)).sum(2)
    vectors = functional.normalize(values.transpose(1, 2).flatten(2).float(), dim=-1)
    cosines = torch.einsum("mc,nsc->mns", queries.values, vectors)
    cosines = cosines.masked_fill(~inner(valid)[None], -1.0)
    cosines = functional.pad(cosines, (0, missing), value=-1.0)
    best = cosines.unflatten(2, (-1, step)).amax(3)
    count = valid.sum(1)
    starts = step * torch.arange(halves.shape[1], device=valid.device)
    counts = (starts == 0) | (starts + step < count[:, None])
    sums = halves + functional.pad(halves[:, 1:], (0, 0, 0, 1))
    matched = torch.maximum(best, functional.pad(best[..., 1:], (0, 1), value=-1.0))
    sums = torch.cat([sums, halves.sum(1, keepdim=True)], 1)
    matched = torch.cat([matched, best.amax(2, keepdim=True)], 2)
    counts = functional.pad(counts, (0, 1), value=True)
    near = torch.einsum("qc,nkc->qnk", queries.embedded, functional.normalize(sums, dim=-1))
    maxsim = torch.einsum("qm,mnk->qnk", queries.mean, matched)
    parts = model.pooled_weight * near + model.token_weight * maxsim
    return parts.masked_fill(~counts[None], -1e4).amax(2) + model.bias


def shift_of(
    model: Mini,
    queries: Queries,
    keys_values: list[tuple[Tensor, Tensor]],
    valid: Tensor,
    pairs: list[tuple[int, int]],
) -> Tensor:
    """The shift's part of the score, (Q, N); 0 where there is no pair."""
    result = torch.zeros(len(queries.valid), len(valid), device=valid.device)
    if not pairs:
        return result
    query, row = torch.tensor(pairs, device=valid.device).unbind(1)
    width = int(queries.valid[query].sum(1).max())
    documents = [(keys[row], values[row]) for keys, values in keys_values]
    read, _ = model.values(
        queries.entering[query, :width], queries.valid[query, :width], documents, valid[row]
    )
    alone = [values[query][:, :, :width] for values in queries.alone]
    terms = model.mean_shift_terms(read, alone, queries.scored[query, :width])
    return result.index_put((query, row), (terms * model.shift_weight).sum((1, 2)))


def chunks(ids: list[list[int]]) -> list[list[int]]:
    """Positions of texts of similar length, at most `CHUNK` padded tokens together."""
    result: list[list[int]] = [[]]
    for place in sorted(range(len(ids)), key=lambda place: len(ids[place])):
        if result[-1] and (len(result[-1]) + 1) * len(ids[place]) > CHUNK:
            result.append([])
        result[-1].append(place)
    return result
