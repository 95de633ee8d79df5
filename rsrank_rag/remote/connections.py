"""HTTP connections that all rerankers of one address share, in an event loop of their own.

Callers come from threads and from event loops that end, and an httpx client belongs to one loop.
Therefore all requests are made in the loop of one daemon thread. A client that is closed while
requests use it is closed by the last of them. A forked process has a loop and clients of its own,
because both are stored by process id.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from ..errors import InputError

Result = TypeVar("Result")

# uvicorn closes a connection after 5 idle seconds, and a request that is sent just then fails.
LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=100, keepalive_expiry=4.0)

# The time limit of a whole call is in `Transport`, so only the connection has one here.
TIMEOUT = httpx.Timeout(None, connect=5.0)


@dataclass(eq=False)
class SharedClient:
    """A client and how many requests use it."""

    http: httpx.AsyncClient
    requests: int = 0


_loops: dict[int, asyncio.AbstractEventLoop] = {}
_clients: dict[tuple[int, str], SharedClient] = {}


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in the connections' event loop and wait for its result."""
    future = _start(work)
    try:
        return future.result()
    finally:
        # This has an effect only if the wait was interrupted.
        future.cancel()


async def arun(work: Coroutine[Any, Any, Result]) -> Result:
    """As `run`, without blocking the event loop of the caller. Cancelling it cancels the work."""
    return await asyncio.wrap_future(_start(work))


def _start(work: Coroutine[Any, Any, Result]) -> Future[Result]:
    loop = _loops.get(os.getpid())
    if loop is None:
        new = asyncio.new_event_loop()
        # Another thread may have stored a loop since the look-up.
        loop = _loops.setdefault(os.getpid(), new)
        if loop is new:
            threading.Thread(target=new.run_forever, name="rsrank-http", daemon=True).start()
        else:
            new.close()
    return asyncio.run_coroutine_threadsafe(work, loop)


@asynccontextmanager
async def client(address: str) -> AsyncIterator[httpx.AsyncClient]:
    """The client of an address, open until the block ends. For use in the connections' loop.

    Raises:
        InputError: The environment's proxy or certificate settings cannot be used.
    """
    key = (os.getpid(), address)
    if key not in _clients:
        try:
            _clients[key] = SharedClient(httpx.AsyncClient(limits=LIMITS, timeout=TIMEOUT))
        except (ImportError, ValueError, OSError, httpx.InvalidURL) as error:
            raise InputError(
                "The environment's proxy or certificate settings (ALL_PROXY, NO_PROXY, "
                f"SSL_CERT_FILE, ...) cannot be used: {error}"
            ) from error
    shared = _clients[key]
    shared.requests += 1
    try:
        yield shared.http
    finally:
        shared.requests -= 1
        if not shared.requests and _clients.get(key) is not shared:
            await shared.http.aclose()


async def _close(address: str) -> None:
    shared = _clients.pop((os.getpid(), address), None)
    if shared is not None and not shared.requests:
        await shared.http.aclose()


def close(address: str) -> None:
    """Close the connections of an address after the requests in progress, from any thread."""
    run(_close(address))
