"""HTTP connections that all rerankers of a process share, in an event loop of their own.

Callers come from threads and from event loops that end, and an httpx client belongs to one loop.
Therefore all requests are made in the loop of one daemon thread. A forked process starts its own.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

# huggingface-hub requires httpx or httpx2, depending on its version. Both have the same interface.
# `as httpx` lets other modules import the name from here.
if TYPE_CHECKING or not find_spec("httpx2"):
    import httpx as httpx
else:
    import httpx2 as httpx

Result = TypeVar("Result")


def start(work: Coroutine[Any, Any, Result]) -> Future[Result]:
    """Run a coroutine in the connections' event loop."""
    return asyncio.run_coroutine_threadsafe(work, _loop(os.getpid()))


def wait(future: Future[Result]) -> Result:
    """Wait for a result."""
    try:
        return future.result()
    finally:
        # This has an effect only if the wait was interrupted.
        future.cancel()


@lru_cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The event loop of a process, in a thread of its own.

    Two threads that call this function for the first time at once may start two loops. That does no
    harm, because each loop has a client of its own.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rsrank-http", daemon=True).start()
    return loop


@lru_cache
def client(loop: asyncio.AbstractEventLoop) -> httpx.AsyncClient:
    """The client of a loop."""
    # uvicorn closes a connection after 5 idle seconds, and a request that is sent just then fails.
    limits = httpx.Limits(keepalive_expiry=4.0)
    # The time limit of a whole call is in `RemoteReranker`, so only the connection has one here.
    return httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(None, connect=5.0))
