"""The HTTP server before the app: uvicorn, whose connections have limits, and which says that it is going to end.

A client that has shown no key yet costs little: a request's head may have 16 KB (h11's limit, which the faster
`httptools` has not) and some seconds; of more connections than there is room for, the longest idle one goes.
"""

import asyncio
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from ..errors import needs

with needs("The service needs {}.", "serve", "h11", "uvicorn", "fastapi", "starlette"):
    import h11
    import uvicorn
    from fastapi import FastAPI
    from starlette.types import Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol

from .error_responses import RETRY_AFTER, error_response
from .middleware import QUIET

logger = logging.getLogger(__name__)

SPARE = 64  # file descriptors not for connections: listener, the model's process, logs, files of prefixes
RESERVE = (
    16  # connections beyond the limit if none is idle; only health and metrics are answered there
)
EVENTS = 100  # heads and pieces of bodies of one connection that are looked at before it is another's turn
GRACE = 5  # seconds that a request in flight has beyond its timeout, when the service stops


@dataclass(frozen=True)
class Limits:
    """Of connections, whatever is sent over them."""

    connections: int = 1000  # open at a time; fewer where the process may not open so many files
    head_seconds: float = (
        10.0  # for a request's head to arrive, and for a client to go on reading an answer
    )
    notice: float = 5.0  # seconds from SIGTERM, in which /ready is 503 and requests are taken, to the listener's end


class _Parser(h11.Connection):
    """Gives so many events at a time and no more: chunks of a byte each would hold up everybody else for seconds."""

    left = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA | h11.PAUSED]:
        self.left -= 1
        return super().next_event() if self.left >= 0 else h11.PAUSED


class _Connection(H11Protocol):
    owner: "Server"
    conn: _Parser
    since = 0.0
    timer: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Whether no request is being answered: none has come, or not the whole of its head."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn = _Parser(h11.SERVER)
        self.since = self.loop.time()
        self._await_head()
        if len(self.connections) > self.owner.most:
            others: set[_Connection] = self.connections - {self}  # type: ignore[assignment]
            idle = [other for other in others if other.idle or other.cycle.more_body]
            if idle:
                self.owner.end_connection(min(idle, key=lambda other: other.since), "crowded")
            elif len(self.connections) > self.owner.most + RESERVE:
                self.owner.end_connection(self, "crowded")
            else:
                self.app = self.owner.crowded

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.idle:
            self._no_limit()
        elif self.timer is None:  # the head of the next request, or more than was asked for
            self._await_head()

    def handle_events(self) -> None:
        self.conn.left = EVENTS
        super().handle_events()
        if self.conn.left < 0:
            self.flow.read_paused = False  # so that nobody but `_go_on` has more read
            self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Handle what is here already, and read on."""
        if not self.transport.is_closing():
            if not self.flow.read_paused:
                self.transport.resume_reading()
            self.handle_events()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state is h11.IDLE:
            super().send_400_response(msg)
        else:  # in the body of a request that has its answer, or was to have another one
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(math.inf)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._no_limit()

    def connection_lost(self, exc: Exception | None) -> None:
        self._no_limit()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()

    def _await_head(self) -> None:
        self.timer = self.loop.call_later(
            self.owner.limits.head_seconds, self.owner.end_connection, self, "slow head"
        )

    def _watch_reader(self, before: float) -> None:
        """Close the connection unless its client has read something since the last look; look again later."""
        left = self.transport.get_write_buffer_size()
        if left >= before:
            self.owner.end_connection(self, "slow reader")
            return
        self._no_limit()
        self.timer = self.loop.call_later(self.owner.limits.head_seconds, self._watch_reader, left)

    def _no_limit(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def _files() -> float:
    """How many files this process may have open."""
    most = os.sysconf("SC_OPEN_MAX") if hasattr(os, "sysconf") else -1
    return most if most > 0 else math.inf


class Server(uvicorn.Server):
    """uvicorn around an app of `create_app`. Its end has notice and, if all was answered, the exit status 0.

    Args:
        app: The app.
        limits: Of connections.
        started: Called when requests are taken.
    """

    def __init__(
        self, app: FastAPI, limits: Limits, started: Callable[[], None] = lambda: None
    ) -> None:
        self.app, self.limits, self.when_started = app, limits, started
        self.most = int(
            min(limits.connections, max(RESERVE, _files() - SPARE - RESERVE))
        )  # connections
        self.ends = math.inf  # these two on time.monotonic's clock
        self.warned = -math.inf  # when it was last logged that connections are closed
        timeout = app.state.settings.timeout
        super().__init__(
            uvicorn.Config(
                app,
                http=type("Connection", (_Connection,), {"owner": self}),
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=None if timeout is None else math.ceil(timeout) + GRACE,
            )
        )
        app.state.metrics.connections = lambda: len(self.server_state.connections)

    def end_connection(self, connection: _Connection, why: str) -> None:
        """Close a connection at once; it is counted, and logged now and then."""
        self.app.state.metrics.closed.labels(why).inc()
        if time.monotonic() - self.warned > 10:
            self.warned = time.monotonic()
            logger.warning(
                "Connections are closed (%s); rsrank_closed_connections_total counts them.", why
            )
        connection.transport.abort()

    async def crowded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app, for a connection of the reserve."""
        text = "Too many connections are open. Try again later."
        full = error_response(503, text, headers={"Retry-After": f"{RETRY_AFTER:.0f}"})
        await (self.app if scope["path"] in QUIET else full)(scope, receive, send)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: D102 - uvicorn's
        await super().startup(sockets)
        if self.started:
            self.when_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; at the second signal at once, at the third without answering what is in flight.

        The signal is not raised again afterwards, as uvicorn would: an end that was asked for is no failure.
        """
        self.app.state.backend.end_soon()
        now = time.monotonic()
        self.force_exit = self.should_exit
        self.should_exit = self.ends < math.inf
        self.ends = min(self.ends, now + (self.limits.notice if sig == signal.SIGTERM else 0.0))

    async def on_tick(self, counter: int) -> bool:  # noqa: D102 - uvicorn's
        self.should_exit = self.should_exit or time.monotonic() >= self.ends
        return await super().on_tick(counter)
