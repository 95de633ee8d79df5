"""Quantisation parameters of an encoder's documents in int8: fixed at load, from random pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...method.formula import Numbers

if TYPE_CHECKING:
    from ...method.template import PromptTokenizer

# In the calibration run, the output of GELU reaches ten times as far for single tokens as for
# others. At this part of the largest number, few tokens are clipped and all others are finer
# (research/docs/speed.md).
GELU_RANGE = 0.7


def calibration_ids(prompts: PromptTokenizer) -> list[tuple[int, ...]]:
    """Token ids of the calibration run: random pieces of words within the template.

    The ranges are as good as those of 300 passages (research/docs/speed.md). Without the template
    they would not be.
    """
    # The numbers that `torch.randint` draws of the same seed.
    numbers = np.random.RandomState(0).randint(0, 2**32, (32, 14), dtype=np.uint32)
    words = (numbers % prompts.vocabulary).tolist()
    return [(*prompts.instruction, *row, *prompts.separator) for row in words]


def ranges(numbers: Numbers, *, after_gelu: bool) -> tuple[Numbers, Numbers]:
    """The smallest and largest of numbers (..., C): for each channel, (C,); after GELU for all, ().

    One scale for all channels lets GELU and the next rounding happen in one step.
    """
    rows = numbers.reshape(-1, numbers.shape[-1]).astype(np.float32, copy=False)
    if after_gelu:
        return rows.min(), np.float32(GELU_RANGE) * rows.max()
    return rows.min(0), rows.max(0)


def fixed_parameters(
    lowest: Numbers, highest: Numbers, weights: Sequence[Numbers]
) -> tuple[Numbers, int]:
    """Scale and zero point of the numbers that enter linear maps.

    A number x becomes round(x / scale + zero_point), clipped to 0..255.

    Args:
        lowest: The smallest numbers, for each channel (C,) or for all ().
        highest: The largest numbers, likewise.
        weights: The weights of all maps that take these numbers, each (..., C).

    Returns:
        The scale, (C,) or (), and the zero point.
    """
    balance = np.ones((), np.float32)
    if lowest.ndim:
        # Single channels are ten times larger than others. As in SmoothQuant, the weights take
        # over the square root of the difference.
        largest = np.maximum(np.maximum(-lowest, highest), 1e-4)
        largest_weights = np.abs(np.concatenate(list(weights))).max(0)
        balance = np.sqrt(largest / np.maximum(largest_weights, 1e-6))
    low = min(float((lowest / balance).min()), -1e-6)
    high = max(float((highest / balance).max()), 1e-6)
    scale = np.asarray(balance * (high - low) / 255, np.float32)
    return scale, round(-low * 255 / (high - low))
