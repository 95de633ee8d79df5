"""Keeps from the log what libraries say there and nobody can act on, for as long as it lasts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def only(wanted: Callable[[logging.LogRecord], bool], *names: str) -> Iterator[None]:
    """Have these loggers say only what is wanted.

    Args:
        wanted: Whether a record may pass.
        names: Of the loggers. What reaches their children is not filtered.
    """
    loggers = [logging.getLogger(name) for name in names]

    def own(record: logging.LogRecord) -> bool:  # one for each use: two threads may ask for the same
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
