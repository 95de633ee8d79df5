"""The HTTP server before the app: uvicorn with limits, which announces its end.

uvicorn's own settings bound the number of connections, the size of a request's head, and the time
that an idle connection stays open. Slow heads and slow readers are a reverse proxy's business: see
docs/serving.md and examples/nginx.conf.
"""

import asyncio
import ctypes
import math
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

from ..errors import needs

with needs("The service needs {}.", "serve", "h11", "uvicorn", "fastapi", "starlette"):
    import uvicorn
    from fastapi import FastAPI

# File descriptors that are not for connections: listener, model process, logs, cached prefixes.
SPARE_FILES = 64

# Bytes of a request's head. The longest header that clients send is a key or a trace.
HEAD_BYTES = 16_384

# Seconds that a request in flight has beyond its timeout, when the service stops.
GRACE = 5

# Seconds at the end. First, clients that have begun to connect may finish (LAST_CONNECTIONS). Then
# clients that are connected may send a last request (LAST_REQUESTS).
LAST_CONNECTIONS = 0.3
LAST_REQUESTS = 1.5

# A program for Linux's packet filter: drop a segment with SYN and without ACK, which asks for a new
# connection; take all others. Each instruction is a code, two jumps, and an operand.
SO_ATTACH_FILTER = 26
NO_NEW_CONNECTIONS = bytes.fromhex(
    # Load the byte with TCP's flags, and mask SYN and ACK.
    "3000 00 00 0d000000 5400 00 00 12000000"
    # If it is SYN alone, drop; else take.
    "1500 00 01 02000000 0600 00 00 00000000 0600 00 00 ffffffff"
)


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of connections.

    Attributes:
        connections: Connections and requests at a time; fewer where the process may not open so
            many files. Above that, requests are answered with status 503.
        idle_seconds: Seconds that a connection stays open after an answer.
        notice: Seconds from SIGTERM to the end of the listener. Meanwhile requests are taken,
            /ready is 503, and every answer asks its client to close the connection.
    """

    connections: int = 1000
    idle_seconds: int = 5
    notice: float = 5.0


class Server(uvicorn.Server):
    """uvicorn around an app of `create_app`. The exit status is 0 if every request was answered.

    Args:
        app: The app.
        limits: The limits of connections.
        when_started: Called once, when the server begins to take requests.
    """

    def __init__(
        self,
        app: FastAPI,
        limits: ConnectionLimits,
        when_started: Callable[[], None] = lambda: None,
    ) -> None:
        self.app = app
        self.limits = limits
        self.when_started = when_started
        self.end_time = math.inf
        timeout = app.state.settings.timeout
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=connection_limit(limits.connections) + 1,
            timeout_keep_alive=limits.idle_seconds,
            h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_graceful_shutdown=None if timeout is None else math.ceil(timeout) + GRACE,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: D102 - uvicorn's
        await super().startup(sockets)
        if self.started:
            self.when_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop the server.

        The first signal starts the notice period. A signal during this period ends the period. A
        later signal ends the server without answers to the requests in flight. uvicorn would raise
        the signal again at the end. This method does not, because the exit status must be 0.
        """
        self.app.state.backend.is_ending = True
        self.force_exit = self.should_exit
        self.should_exit = self.end_time < math.inf
        notice = self.limits.notice if sig == signal.SIGTERM else 0.0
        self.end_time = min(self.end_time, time.monotonic() + notice)

    async def on_tick(self, counter: int) -> bool:  # noqa: D102 - uvicorn's
        self.should_exit = self.should_exit or time.monotonic() >= self.end_time
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the connections that wait to be accepted, then end.

        The system resets connections that wait when a listener closes.
        """
        for listener in sockets or ():
            take_no_connections(listener)
        await asyncio.sleep(LAST_CONNECTIONS)
        end = time.monotonic() + LAST_REQUESTS
        while self.server_state.connections and time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(0.05)
        await super().shutdown(sockets)


def connection_limit(wanted: int) -> int:
    """The number of connections that the process can hold; at most ``wanted``.

    Each connection takes a file descriptor, and `SPARE_FILES` descriptors are for other files.
    """
    files = os.sysconf("SC_OPEN_MAX") if hasattr(os, "sysconf") else -1
    return min(wanted, max(16, files - SPARE_FILES)) if files > 0 else wanted


def take_no_connections(listener: socket.socket) -> None:
    """Ignore attempts to connect, on Linux; elsewhere do nothing.

    A client that tries to connect tries again after a second. By then the listener is closed, so
    the client is refused and knows that no request was taken. Connections that are complete can
    still be accepted.
    """
    if sys.platform == "linux":
        memory = ctypes.create_string_buffer(NO_NEW_CONNECTIONS)
        program = struct.pack("HL", len(NO_NEW_CONNECTIONS) // 8, ctypes.addressof(memory))
        # A sandbox may forbid filters. Then a connection of the last moment may be reset.
        with suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
