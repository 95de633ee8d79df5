"""The HTTP server before the app: uvicorn, and how it ends.

Slow heads, slow readers and floods of connections are a reverse proxy's business: see
docs/serving.md and examples/nginx.conf.
"""

from ..errors import needs

with needs("The service needs {}.", "serve", "starlette", "uvicorn"):
    import uvicorn
    from starlette.applications import Starlette


class Server(uvicorn.Server):
    """uvicorn around an app of `create_app`.

    After SIGTERM or Ctrl-C, /ready is 503, and the server takes no connections and ends when the
    requests in flight have been answered. A second signal ends it at once. The exit status is 0.
    """

    def __init__(self, app: Starlette) -> None:
        self.backend = app.state.backend
        self.is_signalled = False
        super().__init__(
            uvicorn.Config(app, http="h11", ws="none", log_config=None, access_log=False)
        )

    def handle_exit(self, sig: int, frame: object) -> None:
        """Begin to stop the server.

        uvicorn would raise the signal again at the end. This method does not, because the exit
        status must be 0.
        """
        self.is_signalled = True
        self.backend.is_ending = True
        self.force_exit = self.should_exit
        self.should_exit = True
        if self.force_exit or not self.started:
            self.backend.abort()
