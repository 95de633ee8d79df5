"""Early decisions: documents that can no longer be relevant leave the run before its last layer.

A score is a sum over layers, so the layers read so far bound the rest. In ``exact`` mode by arithmetic: each of the H
terms of a layer lies in [-1, 1]. In ``calibrated`` mode by experience: the rest of the sum, as it was for documents
that turned out relevant.

Axes: N documents, L read layers, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..artifact.config import Calibration, RSRankConfig
from ..errors import InputError

EarlyDecisions = Literal["exact", "calibrated"]

CHECKS = 6
"""Times that a run looks for documents to leave: each costs a moment, and waits for the device."""

ROUNDING = 1e-4
"""A layer's terms may sum to this much more than arithmetic says."""


def exact_bounds(layers: Sequence[int], heads: int) -> dict[int, float]:
    """What the layers after each one can add to a score at most: (L - l) * H.

    >>> exact_bounds([1, 2, 3], heads=2)[1]
    4.0002
    """
    rest = {layer: len(layers) - 1 - row for row, layer in enumerate(layers)}
    return {layer: rest[layer] * heads + rest[layer] * ROUNDING for layer in check_layers(layers)}


def check_layers(layers: Sequence[int]) -> tuple[int, ...]:
    """Layers after which a run looks: evenly spread, without the last.

    >>> check_layers(range(1, 8)), check_layers(range(1, 36))
    ((1, 2, 3, 4, 5, 6), (5, 10, 15, 20, 25, 30))
    """
    count = min(CHECKS, len(layers) - 1)
    return tuple(layers[round(len(layers) * (i + 1) / (count + 1)) - 1] for i in range(count))


def calibrate(parts: Tensor, layers: Sequence[int], *, miss_rate: float, queries: int) -> Calibration:
    """Bounds that lose at most a share of the documents that would be kept at zero.

    For each check, the (1 - miss_rate / checks) quantile, with the finite-sample correction of conformal prediction, of
    what the layers after it added to the scores of kept documents. The checks' miss rates add up to at most
    ``miss_rate`` for documents that come as these did.

    Args:
        parts: Each layer's part of each score, (N, L).
        layers: Their backbone layers.
        miss_rate: Between 0 and 1.
        queries: How many queries the documents belong to, for the record.

    Raises:
        InputError: Not a share, or too few kept documents to say anything.
    """
    if not 0 < miss_rate < 1:
        raise InputError(f"miss_rate must lie between 0 and 1, got {miss_rate}.")
    running = parts.double().cumsum(1)
    kept = running[running[:, -1] > 0]
    checks = check_layers(layers)
    if not checks:
        raise InputError("B reads one layer, so there is nothing to decide before its last one.")
    rank = math.ceil((len(kept) + 1) * (1 - miss_rate / len(checks)))
    if rank > len(kept):
        raise InputError(
            f"A miss rate of {miss_rate:g} needs at least {math.ceil(len(checks) / miss_rate) - 1} documents that "
            f"score above zero; there are {len(kept)}. Give more queries, or a larger miss rate."
        )
    rest = (kept[:, -1:] - kept).sort(0).values[rank - 1]  # (L,)
    found = {layer: float(rest[list(layers).index(layer)]) for layer in checks}
    return Calibration(miss_rate=miss_rate, bounds=found, queries=queries, documents=len(parts), kept=len(kept))


def check_readable(config: RSRankConfig) -> None:
    """Refuse what cannot be read layer by layer, with rows leaving.

    Raises:
        InputError: B reads hidden states, or the null prefix is as long as each document.
    """
    if config.signal == "hidden" or config.null_prefix == "matched":
        raise InputError(
            f"Early decisions do not work with signal={config.signal!r} and null_prefix={config.null_prefix!r}. Leave "
            "early_decisions out."
        )


def bounds_for(mode: EarlyDecisions, config: RSRankConfig) -> dict[int, float]:
    """What the layers after each checked one are taken to add at most.

    Raises:
        InputError: Not a mode, or the artifact was never calibrated, or it reads something this cannot do.
    """
    check_readable(config)
    if mode == "exact":
        return exact_bounds(config.layers, config.shape[1])
    if mode != "calibrated":
        raise InputError(f"early_decisions={mode!r} is not a mode. Use 'exact', 'calibrated' or None.")
    if config.calibration is None:
        raise InputError(
            "early_decisions='calibrated' needs an artifact with a calibration, and this one has none. Make one with: "
            "rsrank calibrate --model ARTIFACT --data labelled.jsonl --output NEW"
        )
    return config.calibration.bounds


class Undecided:
    """The running scores of one batch, and which of its documents are still in the run.

    Args:
        count: N.
        device: Where scores are summed.
        bounds: Layer -> what the layers after it add at most; empty to let every document run to the end.
        threshold: A document whose score cannot exceed it leaves.

    Attributes:
        scores: (N,) fp32. Of a document that left: the bound it left with.
        rows: Documents still in the run.
    """

    def __init__(self, count: int, device: torch.device, bounds: dict[int, float], threshold: float) -> None:
        self.scores = torch.zeros(count, device=device)
        self.rows = torch.arange(count, device=device)
        self.bounds, self.threshold = bounds, threshold

    def add(self, layer: int, part: Tensor) -> Tensor | None:
        """Add a layer's part of the scores of the documents still in the run.

        Args:
            layer: Backbone layer.
            part: (documents still in the run,).

        Returns:
            Rows that stay, counted among those that were still there; None if all do.
        """
        if not self.bounds:
            self.scores += part
            return None
        self.scores[self.rows] += part
        if layer not in self.bounds:
            return None
        most = self.scores[self.rows] + self.bounds[layer]
        stays = most > self.threshold
        if bool(stays.all()):
            return None
        leaving = self.rows[~stays]
        self.scores[leaving] = most[~stays]
        self.rows = self.rows[stays]
        return stays.nonzero()[:, 0]

    def left(self) -> list[bool]:
        """Which documents left early."""
        flags = torch.ones_like(self.scores, dtype=torch.bool)
        flags[self.rows] = False
        found: list[bool] = flags.tolist()
        return found
