"""Arrays of numpy or of torch: the few calls in which they differ.

The formula, the scoring and the prefixes are written once, for both.
"""

import sys
from typing import Any

import numpy as np

Array = Any
"""A numpy array or a torch tensor."""

Numbers = np.ndarray[Any, Any]
"""A numpy array."""


def namespace(array: Any) -> Any:
    """The module of an array or a dtype: numpy or torch."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def cast(array: Array, dtype: str) -> Array:
    """The array in the dtype of this name; not a copy if the array already has this dtype."""
    kind = getattr(namespace(array), dtype)
    if isinstance(array, np.ndarray | np.generic):
        return array.astype(kind, copy=False)
    return array.to(kind)


def to_numpy(array: Array) -> Numbers:
    """A numpy array with the same numbers, in host memory."""
    if isinstance(array, np.ndarray | np.generic):
        return np.asarray(array)
    return np.asarray(array.detach().cpu())
