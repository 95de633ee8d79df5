"""HTTP connections that all who talk to one address share: a client for threads, and one for each event loop.

A client that is given up while calls use it is closed by the last of them. An event loop closes its own when it ends.
A forked child opens new ones.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache

import httpx

# uvicorn closes a connection after 5 idle seconds: one that is used just then fails.
_LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=100, keepalive_expiry=4.0)


@dataclass(eq=False)
class _Threads:
    """A client for all threads."""

    client: httpx.Client
    users: int = 0
    given_up: bool = False


@dataclass(eq=False)
class _Loop:
    """A client of one event loop, which alone may use and close it."""

    client: httpx.AsyncClient
    users: int = 0
    given_up: bool = False
    closing: AsyncGenerator[None, None] | None = None


_lock = threading.Lock()
_threads: dict[str, _Threads] = {}
_loops: dict[tuple[str, asyncio.AbstractEventLoop], _Loop] = {}
_ending: set[asyncio.Task[None]] = set()


@contextmanager
def client(address: str) -> Iterator[httpx.Client]:
    """The client for an address, which stays open while it is used."""
    with _lock:
        if address not in _threads:
            _threads[address] = _Threads(httpx.Client(verify=_certificates(), limits=_LIMITS))
        shared = _threads[address]
        shared.users += 1
    try:
        yield shared.client
    finally:
        with _lock:
            shared.users -= 1
            last = shared.given_up and not shared.users
        if last:
            shared.client.close()


@asynccontextmanager
async def async_client(address: str) -> AsyncIterator[httpx.AsyncClient]:
    """The running event loop's client for an address, which stays open while it is used."""
    loop = asyncio.get_running_loop()
    with _lock:
        if (address, loop) not in _loops:
            for key in [key for key in _loops if key[1].is_closed()]:  # ended without a chance to close them
                del _loops[key]
            _loops[address, loop] = _Loop(httpx.AsyncClient(verify=_certificates(), limits=_LIMITS))
        shared = _loops[address, loop]
        shared.users += 1
    try:
        if shared.closing is None:
            shared.closing = _closed_with_its_loop(address, loop, shared)
            await anext(shared.closing)
        yield shared.client
    finally:
        with _lock:
            shared.users -= 1
            last = shared.given_up and not shared.users
        if last:
            await _end(shared)


def close(address: str) -> None:
    """Close an address's connections when the calls that use them are done. The next call opens new ones."""
    with _lock:
        threads = _threads.pop(address, None)
        loops = {key[1]: _loops.pop(key) for key in list(_loops) if key[0] == address}
        if threads is not None:
            threads.given_up = True
        for shared in loops.values():
            shared.given_up = True
        idle = None if threads is None or threads.users else threads
        idle_loops = {loop: shared for loop, shared in loops.items() if not shared.users}
    if idle is not None:
        idle.client.close()
    for loop, shared in idle_loops.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_end_soon, shared)


async def aclose(address: str) -> None:
    """As `close`; the running event loop's connections are closed when it returns, unless they are in use."""
    with _lock:
        shared = _loops.pop((address, asyncio.get_running_loop()), None)
        if shared is not None:
            shared.given_up = True
    close(address)
    if shared is not None and not shared.users:
        await _end(shared)


async def _closed_with_its_loop(
    address: str, loop: asyncio.AbstractEventLoop, shared: _Loop
) -> AsyncGenerator[None, None]:
    """An event loop that ends finishes its asynchronous generators first, so this one waits for that."""
    try:
        yield
    finally:
        with _lock:
            if _loops.get((address, loop)) is shared:
                del _loops[address, loop]
        await shared.client.aclose()


async def _end(shared: _Loop) -> None:
    if shared.closing is not None:
        await shared.closing.aclose()


def _end_soon(shared: _Loop) -> None:
    task = asyncio.get_running_loop().create_task(_end(shared))
    _ending.add(task)  # a loop holds its tasks only weakly
    task.add_done_callback(_ending.discard)


@cache
def _certificates() -> ssl.SSLContext:
    """Read once: it takes tens of milliseconds."""
    return httpx.create_ssl_context()


def _after_fork() -> None:
    """A forked child must not write into its parent's connections."""
    global _lock
    _lock = threading.Lock()
    _threads.clear()
    _loops.clear()
    _ending.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
