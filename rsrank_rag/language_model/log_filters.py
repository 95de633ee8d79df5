"""Keeps from log and terminal what libraries write there and nobody can act on, for as long as it lasts."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def only(wanted: Callable[[logging.LogRecord], bool], *names: str) -> Iterator[None]:
    """Have these loggers say only what is wanted."""
    loggers = [logging.getLogger(name) for name in names]

    def own(
        record: logging.LogRecord,
    ) -> bool:  # one for each use: two threads may ask for the same
        return wanted(record)

    for logger in loggers:
        logger.addFilter(own)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(own)


def importing_torchao() -> contextlib.AbstractContextManager[None]:
    """Import torchao, or what imports it, without a line for each of its kernels that does not fit this torch.

    Transformers' models import it wherever it is installed. What is used of it here needs none of those kernels.
    """
    idle = ("Failed to load", "cpp extensions", "register_constant", "no triton")
    return only(
        lambda record: not any(words in record.getMessage() for words in idle),
        "torchao",
        "torchao.kernel.intmm",
        "torch.utils._pytree",
    )


_lock, _before = threading.Lock(), list[Any]()


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Load a model without transformers' "Loading weights" bar, which has no place in an application or a notebook.

    Downloads keep theirs: they explain minutes of waiting. Several threads may load at once.
    """
    from transformers.utils import logging as bars

    with _lock:
        _before.append(
            bars.set_tqdm_hook(
                lambda make, args, kwargs: make(*args, **{**kwargs, "disable": True})
            )
        )
    try:
        yield
    finally:
        with _lock:  # the last to leave puts back what the first found
            found = _before.pop()
            if not _before:
                bars.set_tqdm_hook(found)
