"""The HTTP server before the app: uvicorn with limits.

Slow heads, slow readers and floods of connections are a reverse proxy's business: see
docs/serving.md and examples/nginx.conf.
"""

import math
from types import FrameType

from ..errors import needs

with needs("The service needs {}.", "serve", "starlette", "uvicorn"):
    import uvicorn
    from starlette.applications import Starlette

# Connections and requests at a time. Above that, requests are answered with status 503.
CONNECTIONS = 1000

# Seconds that a connection stays open after an answer.
IDLE_SECONDS = 5

# Bytes of a request's head. The longest header that clients send is a key or a trace.
HEAD_BYTES = 16_384

# Seconds that a request in flight has beyond its timeout, when the service stops.
GRACE = 5


class Server(uvicorn.Server):
    """uvicorn around an app of `create_app`.

    After SIGTERM or Ctrl-C, /ready is 503, and the server takes no connections and ends when the
    requests in flight have been answered. A second signal ends it at once. The exit status is 0.
    """

    def __init__(self, app: Starlette) -> None:
        self.backend = app.state.backend
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=CONNECTIONS,
            timeout_keep_alive=IDLE_SECONDS,
            h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_graceful_shutdown=math.ceil(app.state.settings.timeout) + GRACE,
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop the server.

        uvicorn would raise the signal again at the end. This method does not, because the exit
        status must be 0.
        """
        self.backend.is_ending = True
        self.force_exit = self.should_exit
        self.should_exit = True
        if self.force_exit or not self.started:
            self.backend.abort()
