"""HTTP connections that all who talk to one address share, and the thread in whose event loop they live.

Callers come from threads and from event loops that end, and a client of httpx belongs to one loop: so all calls are
made in a loop of their own. A client that is given up while calls use it is closed by the last of them.
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

# uvicorn closes a connection after 5 idle seconds: one that is used just then fails.
_LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=100, keepalive_expiry=4.0)


@dataclass(eq=False)
class _Shared:
    client: httpx.AsyncClient
    users: int = 0


_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_clients: dict[str, _Shared] = {}  # by address; only the loop's thread looks
_inherited: list[
    Any
] = []  # from the process that this one was forked from, whose connections must not be closed


def begin(work: Coroutine[Any, Any, Result]) -> Future[Result]:
    """Begin some work, such as a call, in the loop of all connections."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="rsrank-http", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(work, _loop)


@asynccontextmanager
async def client(address: str) -> AsyncIterator[httpx.AsyncClient]:
    """The client for an address, which stays open while it is used; for work that was begun here."""
    if address not in _clients:
        try:
            _clients[address] = _Shared(httpx.AsyncClient(limits=_LIMITS))
        except (ImportError, ValueError, OSError, httpx.InvalidURL) as error:
            what = "The environment's proxy or certificate settings (ALL_PROXY, NO_PROXY, SSL_CERT_FILE, ...)"
            raise InputError(f"{what} cannot be used: {error}") from error
    shared = _clients[address]
    shared.users += 1
    try:
        yield shared.client
    finally:
        shared.users -= 1
        if not shared.users and _clients.get(address) is not shared:
            await shared.client.aclose()


async def give_up(address: str) -> None:
    """Close an address's connections when the calls that use them are done. The next call opens new ones."""
    shared = _clients.pop(address, None)
    if shared is not None and not shared.users:
        await shared.client.aclose()


def close(address: str) -> None:
    """As `give_up`, from any thread."""
    begin(give_up(address)).result()


def _after_fork() -> None:
    """A forked child has none of its parent's threads, and must not write into its parent's connections."""
    global _lock, _loop
    _inherited.append((_loop, dict(_clients)))
    _lock, _loop = threading.Lock(), None
    _clients.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
