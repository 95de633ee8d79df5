"""The service on a Ray cluster: Ray Serve's proxy before replicas of the same app, each with its own model."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI

from ..errors import RSRankError, needs
from .backend import UnavailableError

with needs("The service on Ray needs {}.", "ray", "ray"):
    from ray import serve
    from ray.serve.exceptions import RayServeException

APP = "rsrank"  # name of the Serve application
WAITING = 4.0  # requests in a replica at a time above which Serve adds another


@dataclass(frozen=True)
class Replicas:
    """How many replicas, and what each of them needs."""

    least: int = 1
    most: int | None = None  # if more than ``least``, Serve adds and removes replicas with the load
    cpus: float = 1.0  # cores of each; also the threads of a model on a CPU
    gpus: float = 0.0  # of each; a half lets two share one
    drain: float = 120.0  # seconds that a replica which is to go has for the requests it holds


class _Replica:
    """What Serve asks beside the app."""

    app: FastAPI  # from Serve

    def check_health(self) -> None:
        """Raise why the app could not be started; Serve shows what this raises, and not what a lifespan does."""
        if self.app.state.failure is not None:
            raise self.app.state.failure


def serve_on_ray(
    build: Callable[[], FastAPI],
    replicas: Replicas | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
) -> None:
    """Answer over HTTP on the connected Ray cluster; returns when requests are answered. `take_down` ends it.

    Called again, it puts new replicas in the place of the old ones, without a gap. The address is that of the cluster's
    Serve, on its head: if one is running already, it keeps its own. ``build``, which must be picklable, makes the app
    in each replica, such as by ``create_app(Scheduler(load, "mini"), settings)``; if it cannot be started, there is an
    UnavailableError.
    """

    def make_app() -> FastAPI:
        made = build()
        inner = made.router.lifespan_context

        @asynccontextmanager
        async def lifespan(started: FastAPI) -> AsyncIterator[None]:
            try:
                async with inner(started):
                    yield
            except RSRankError:
                yield  # `check_health` raises it

        made.router.lifespan_context = lifespan
        return made

    chosen = replicas or Replicas()
    most = chosen.most or chosen.least
    scaling = {
        "min_replicas": chosen.least,
        "max_replicas": most,
        "target_ongoing_requests": WAITING,
    }
    deployment = serve.deployment(
        serve.ingress(make_app)(_Replica),
        name="Service",
        num_replicas=None if most > chosen.least else chosen.least,
        autoscaling_config=scaling if most > chosen.least else None,
        max_ongoing_requests=10_000,  # the Scheduler refuses what is too much, and by documents
        graceful_shutdown_timeout_s=chosen.drain,
        ray_actor_options={"num_cpus": chosen.cpus, "num_gpus": chosen.gpus},
    )
    serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
    try:
        serve.run(deployment.bind(), name=APP, route_prefix="/")
    except (RuntimeError, RayServeException) as error:
        raise UnavailableError(f"The replicas could not be brought up: {_why(error)}") from error


def _why(error: Exception) -> str:
    """The last line of what Serve knows about a deployment that failed."""
    status = serve.status().applications.get(APP)
    messages = (
        [] if status is None else [deployment.message for deployment in status.deployments.values()]
    )
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else str(error)


def take_down() -> None:
    """Remove what `serve_on_ray` brought up; requests in flight are answered."""
    if APP in serve.status().applications:
        serve.delete(APP)
