"""Other signals and other null prefixes than the method's own (paper, Appendix B.1 and B.2)."""

from __future__ import annotations

from functools import partial

from ..method.reading import ShiftReader
from ..training.features import Reading


def reading(signal: str, null: str) -> Reading:
    """What an ablation reads and subtracts."""
    return Reading(signal, null, partial(ShiftReader, signal=signal, null_prefix=null))  # type: ignore[arg-type]
