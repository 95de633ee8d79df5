"""Loading and writing a model without the progress bars and reports of transformers."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers.utils.logging import set_tqdm_hook

_lock = threading.Lock()
# One entry for each block that runs: transformers' hook and its logger's level when it began.
_former: list[tuple[Any, int]] = []


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Around a call that loads or writes a model.

    Transformers shows a progress bar over the weights, and warns of the weights of layers that B
    does not need. The process is as before when the last of several concurrent blocks ends.
    """
    logger = logging.getLogger("transformers")
    with _lock:
        _former.append((set_tqdm_hook(_without_bar), logger.level))
        logger.setLevel(max(logger.getEffectiveLevel(), logging.ERROR))
    try:
        yield
    finally:
        with _lock:
            if len(_former) == 1:
                # The first entry holds the state from before all blocks.
                hook, level = _former[0]
                set_tqdm_hook(hook)
                logger.setLevel(level)
            _former.pop()


def _without_bar(
    tqdm: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Any:
    return tqdm(*arguments, **{**keywords, "disable": True})
