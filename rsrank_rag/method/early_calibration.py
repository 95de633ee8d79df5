"""Bounds for early decisions, measured on held-out queries and written into an artifact."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..errors import ScoringError
from ..evaluation.datasets import LabelledQuery
from ..rsrank import RSRank
from .batching import DoesNotFitError, Ids, run_batches
from .early import calibrate, check_readable
from .reading import NullRun


@torch.inference_mode()
def layer_parts(ranker: RSRank, query: str, documents: Sequence[str]) -> Tensor:
    """What each read layer adds to each document's score.

    Args:
        ranker: Whose scores.
        query: The question.
        documents: Texts. Those without tokens score 0 and are left out.

    Returns:
        (N, L), fp32, on the CPU; a row adds up to a score.
    """
    tokens = ranker.prompts.query(query)
    prompts = ranker.prompts.documents(documents, len(tokens.ids))
    wanted = [prompt.ids for prompt in prompts if not prompt.empty]
    run = NullRun(tokens)
    found: dict[Ids, Tensor] = {}

    def read(batch: list[Ids]) -> None:
        parts: list[Tensor] = []

        def keep(layer: int, shift: Tensor) -> None:
            parts.append(ranker.projection.cosines(layer, shift).mean(-1).sum(-1))

        ranker.reader.read(run, ranker.reader.prefill(batch, len(tokens.ids)), keep)
        found.update(zip(batch, torch.stack(parts, dim=1).cpu(), strict=True))

    try:
        run_batches(list(dict.fromkeys(wanted)), read, budget=ranker.token_budget, extra=len(tokens.ids))
    except DoesNotFitError as error:
        index = [prompt.ids for prompt in prompts].index(error.ids)
        raise ScoringError(
            f"Document {index} of the query {query!r} ({len(error.ids)} tokens with the template) does not fit into "
            "memory even by itself. Pass a smaller max_length, or load the model in 8-bit or on another device.",
            index,
        ) from None
    return torch.stack([found[ids] for ids in wanted]) if wanted else torch.zeros(0, len(ranker.projection.layers))


def calibrated(
    ranker: RSRank, queries: Iterable[LabelledQuery], *, miss_rate: float = 0.05, titles: bool = True
) -> RSRank:
    """The same ranker with bounds for ``early_decisions="calibrated"`` in its artifact.

    Labels are not used: what counts is which documents the full run keeps at zero.

    Args:
        ranker: Any.
        queries: Queries with documents that B was not trained on, and that look like those to come.
        miss_rate: Share of the kept documents that early decisions may lose.
        titles: Put a document's title, if it has one, in front of its text.

    Raises:
        InputError: Too few of the documents score above zero, or the artifact reads something that cannot leave early.
        ScoringError: A document does not fit into memory.
    """
    check_readable(ranker.config)
    parts = [layer_parts(ranker, q.query, [d.content(titles=titles) for d in q.documents]) for q in queries]
    every = torch.cat(parts) if parts else torch.zeros(0, len(ranker.projection.layers))
    found = calibrate(every, ranker.projection.layers, miss_rate=miss_rate, queries=len(parts))
    config = ranker.config.model_copy(update={"calibration": found})
    return RSRank(ranker.backbone, ranker.prompts, ranker.projection, config, prefix_cache=False)
