"""HTTP connections that all rerankers of one address share, in an event loop of their own.

Callers come from threads and from event loops that end, and an httpx client belongs to one loop.
Therefore all requests are made in the loop of one daemon thread. A client that is closed while
requests use it is closed by the last of them. A forked process has a loop and clients of its own,
because everything here is stored by process id.
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


@dataclass(eq=False)
class _Shared:
    client: httpx.AsyncClient
    requests: int = 0


_loops: dict[int, asyncio.AbstractEventLoop] = {}
_clients: dict[tuple[int, str], _Shared] = {}


def start(work: Coroutine[Any, Any, Result]) -> Future[Result]:
    """Run a coroutine in the connections' event loop."""
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
            _clients[key] = _Shared(httpx.AsyncClient(limits=LIMITS, timeout=None))
        except (ImportError, ValueError, OSError, httpx.InvalidURL) as error:
            raise InputError(
                "The environment's proxy or certificate settings (ALL_PROXY, NO_PROXY, "
                f"SSL_CERT_FILE, ...) cannot be used: {error}"
            ) from error
    shared = _clients[key]
    shared.requests += 1
    try:
        yield shared.client
    finally:
        shared.requests -= 1
        if not shared.requests and _clients.get(key) is not shared:
            await shared.client.aclose()


async def aclose(address: str) -> None:
    """Close the connections of an address after the requests in progress. For use in the loop."""
    shared = _clients.pop((os.getpid(), address), None)
    if shared is not None and not shared.requests:
        await shared.client.aclose()


def close(address: str) -> None:
    """As `aclose`, from any thread."""
    start(aclose(address)).result()
