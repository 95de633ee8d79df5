"""What several of the systems do with batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ...errors import ScoringError
from ...method.batching import Batches, DoesNotFitError, Ids, Item
from ...method.scoring import Row
from ...rsrank import RSRank

Result = TypeVar("Result")


def run_batches(sequences: Sequence[Item], run: Callable[[list[Item]], object], *, budget: int) -> int:
    """Hand all sequences to ``run``, as `Batches` cuts them. Gives the budget that fitted.

    Raises:
        DoesNotFitError: One sequence alone runs out of memory.
    """
    batches = Batches(sequences, budget)
    for batch in batches:
        with batches.attempt():
            run(batch)
    return batches.budget


def compute_each(
    sequences: Sequence[Ids], compute: Callable[[list[Ids]], Tensor], *, budget: int
) -> tuple[list[Tensor], int]:
    """What a model gives for each sequence, computed in batches; equal sequences are computed once.

    `compute`: one batch of N sequences -> (N, ...).

    Returns:
        One result a sequence, in input order, and the budget that fitted.

    Raises:
        ScoringError: A sequence does not fit into memory even alone; its position is given.
    """
    found: dict[Ids, Tensor] = {}

    def run(batch: list[Ids]) -> None:
        found.update(zip(batch, compute(batch), strict=True))

    try:
        budget = run_batches(list(dict.fromkeys(sequences)), run, budget=budget)
    except DoesNotFitError as error:
        index = sequences.index(error.ids)
        raise ScoringError(
            f"Document {index} ({len(error.ids)} tokens with the prompt) does not fit into memory even by itself. Pass "
            "a smaller max_length, or load the model in 8-bit or on another device.",
            index,
        ) from None
    return [found[ids] for ids in sequences], budget


def read_documents(
    ranker: RSRank, query: str, texts: Sequence[str], read: Callable[[list[Row]], Iterable[Result]]
) -> list[Result | None]:
    """What is read of each document's row with the query, in batches; None for a document without tokens.

    `texts`: its documents; equal ones are read once. `read`: one batch of rows -> one result a row.

    Raises:
        InputError: The query is empty or too long.
        ScoringError: A document does not fit into memory even alone; its position is given.
    """
    asked = ranker.prompts.query(query)
    prompts = ranker.prompts.documents(texts, len(asked.ids))
    found: dict[Ids, Result] = {}

    def run(batch: list[Row]) -> None:
        found.update(zip((row.document for row in batch), read(batch), strict=True))

    rows = [Row(ids, asked) for ids in dict.fromkeys(prompt.ids for prompt in prompts if not prompt.empty)]
    try:
        run_batches(rows, run, budget=ranker.token_budget)
    except DoesNotFitError as error:
        index = next(i for i, prompt in enumerate(prompts) if prompt.ids == error.ids.document)
        raise ScoringError(f"Document {index} does not fit into memory even by itself.", index) from None
    return [None if prompt.empty else found[prompt.ids] for prompt in prompts]


def pad_right(batch: Sequence[Ids], padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids (N, T) and their mask (N, T). Padding on the right leaves the positions of real tokens alone."""
    longest = max(map(len, batch))
    ids = torch.tensor([[*row, *[padding] * (longest - len(row))] for row in batch], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch], device=device)
    return ids, mask
