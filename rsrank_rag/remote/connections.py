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
from typing import Any

import httpx

# uvicorn closes a connection after 5 idle seconds: one that is used just then fails.
_LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=100, keepalive_expiry=4.0)


@dataclass(eq=False)
class _Shared:
    """A client, of all threads, or of one event loop, which alone may use and close it."""

    client: Any
    users: int = 0
    given_up: bool = False
    closing: AsyncGenerator[None, None] | None = None


_Key = tuple[str, asyncio.AbstractEventLoop | None]
_lock = threading.Lock()
_clients: dict[_Key, _Shared] = {}


@contextmanager
def client(address: str) -> Iterator[httpx.Client]:
    """The client for an address, which stays open while it is used."""
    shared = _taken((address, None))
    try:
        yield shared.client
    finally:
        if _is_left(shared):
            shared.client.close()


@asynccontextmanager
async def async_client(address: str) -> AsyncIterator[httpx.AsyncClient]:
    """The running event loop's client for an address, which stays open while it is used."""
    key = (address, asyncio.get_running_loop())
    shared = _taken(key)
    try:
        if shared.closing is None:
            shared.closing = _closed_with_its_loop(key, shared)
            await anext(shared.closing)
        yield shared.client
    finally:
        if _is_left(shared):
            await _end(shared)


def close(address: str) -> None:
    """Close an address's connections when the calls that use them are done. The next call opens new ones."""
    for loop, shared in _given_up(address):
        _close(loop, shared)


async def aclose(address: str) -> None:
    """As `close`; the running event loop's connections are closed when it returns, unless they are in use."""
    for loop, shared in _given_up(address):
        if loop is asyncio.get_running_loop():
            await _end(shared)
        else:
            _close(loop, shared)


def _close(loop: asyncio.AbstractEventLoop | None, shared: _Shared) -> None:
    if loop is None:
        shared.client.close()
    elif not loop.is_closed():
        asyncio.run_coroutine_threadsafe(_end(shared), loop)


def _taken(key: _Key) -> _Shared:
    with _lock:
        for old in [old for old in _clients if old[1] is not None and old[1].is_closed()]:
            del _clients[old]  # ended without a chance to close them
        if key not in _clients:
            kind = httpx.Client if key[1] is None else httpx.AsyncClient
            _clients[key] = _Shared(kind(verify=_certificates(), limits=_LIMITS))
        _clients[key].users += 1
        return _clients[key]


def _is_left(shared: _Shared) -> bool:
    """One user less; whether it was the last one of what has been given up."""
    with _lock:
        shared.users -= 1
        return shared.given_up and not shared.users


def _given_up(address: str) -> list[tuple[asyncio.AbstractEventLoop | None, _Shared]]:
    """Forget an address's clients; those that nobody uses are to be closed by whoever calls this."""
    with _lock:
        found = [(key[1], _clients.pop(key)) for key in list(_clients) if key[0] == address]
        for _, shared in found:
            shared.given_up = True
        return [(loop, shared) for loop, shared in found if not shared.users]


async def _closed_with_its_loop(key: _Key, shared: _Shared) -> AsyncGenerator[None, None]:
    """An event loop that ends finishes its asynchronous generators first, so this one waits for that."""
    try:
        yield
    finally:
        with _lock:
            if _clients.get(key) is shared:
                del _clients[key]
        await shared.client.aclose()


async def _end(shared: _Shared) -> None:
    if shared.closing is not None:
        await shared.closing.aclose()


@cache
def _certificates() -> ssl.SSLContext:
    """Read once: it takes tens of milliseconds."""
    return httpx.create_ssl_context()


def _after_fork() -> None:
    """A forked child must not write into its parent's connections."""
    global _lock
    _lock = threading.Lock()
    _clients.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
