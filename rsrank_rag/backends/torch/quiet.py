"""Progress bars and messages of other libraries, which are kept away while a call runs."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers.utils.logging import set_tqdm_hook

# A lock for each process, because a thread that holds the lock does not exist in a forked process.
# It is held while transformers is quiet, so that the former settings return whichever thread ends
# last.
_locks: dict[int, threading.RLock] = {}


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Around a call that loads or writes a model. Concurrent calls wait for each other.

    Transformers shows a progress bar over the weights, and warns of the weights of layers that B
    does not need.
    """
    logger = logging.getLogger("transformers")
    with _locks.setdefault(os.getpid(), threading.RLock()):
        level = logger.level
        hook = set_tqdm_hook(_without_bar)
        logger.setLevel(max(logger.getEffectiveLevel(), logging.ERROR))
        try:
            yield
        finally:
            set_tqdm_hook(hook)
            logger.setLevel(level)


def _without_bar(
    tqdm: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Any:
    return tqdm(*arguments, **{**keywords, "disable": True})


class _WithoutCasts(logging.Filter):
    """Drops the message of bitsandbytes that inputs are cast, which comes with every product."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "inputs will be cast" not in str(record.msg)


@contextmanager
def quiet_products() -> Iterator[None]:
    """Around runs of a model with int8 weights. Concurrent calls each add a filter of their own."""
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    without_casts = _WithoutCasts()
    logger.addFilter(without_casts)
    try:
        yield
    finally:
        logger.removeFilter(without_casts)
