"""Ends a call whose caller no longer waits."""

from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event

_call_ended: ContextVar[Event | None] = ContextVar("call_ended", default=None)


@contextmanager
def waiting() -> Iterator[None]:
    """A context manager for a caller that waits for calls in other threads.

    The calls get a copy of the caller's context variables. When the caller leaves the block, for
    whatever reason, `check_cancelled` ends those that still run.
    """
    ended = Event()
    token = _call_ended.set(ended)
    try:
        yield
    finally:
        ended.set()
        _call_ended.reset(token)


def check_cancelled() -> None:
    """End this call if its caller no longer waits. Long calls come here before each batch.

    Raises:
        CancelledError: The caller has left `waiting`.
    """
    ended = _call_ended.get()
    if ended is not None and ended.is_set():
        raise CancelledError
