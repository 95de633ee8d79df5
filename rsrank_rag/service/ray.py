"""The service on a Ray cluster: Ray Serve's proxy before replicas of the app."""

import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from fastapi import FastAPI

from ..errors import RSRankError, needs
from .backend import UnavailableError

with needs("The service on Ray needs {}.", "ray", "ray"):
    import ray
    from ray import serve
    from ray.serve.exceptions import RayServeException

# The name of the Serve application.
APP = "rsrank"


@dataclass(frozen=True)
class Replicas:
    """How many replicas there are, and what each of them needs.

    Attributes:
        least: Replicas at any time.
        most: Replicas under load; Serve adds and removes them. None for a fixed number.
        cpus: Cores of a replica, and threads of its model on a CPU.
        gpus: GPUs of a replica; two replicas with 0.5 share one.
        drain: Seconds that a replica has for its open requests before it is removed.
    """

    least: int = 1
    most: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    drain: float = 120.0


@contextmanager
def cluster(address: str | None) -> Iterator[None]:
    """Connect to Ray; what this function started ends with the block.

    Args:
        address: Of the cluster, such as ``"auto"`` or ``"ray://head:10001"``. None for
            ``RAY_ADDRESS``, or else for a cluster on this machine.

    Raises:
        RSRankError: There is no cluster at the address.
    """
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS")
    options = {} if address else {"include_dashboard": False}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        place = address or "this machine"
        raise RSRankError(f"There is no Ray cluster at {place}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


class _Replica:
    """Serve reports errors of `check_health`, and not those of an app's lifespan."""

    # Serve sets it.
    app: FastAPI

    def check_health(self) -> None:
        """Raise the error that kept the app from starting."""
        if self.app.state.failure is not None:
            raise self.app.state.failure


def serve_on_ray(
    build: Callable[[], FastAPI],
    replicas: Replicas | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
) -> None:
    """Bring up the service on the connected cluster; returns when it answers.

    A second call replaces the replicas without a gap. `take_down` ends the service.

    Args:
        build: Makes the app in each replica, such as
            ``create_app(Scheduler(load, "mini"), settings)``. It must be picklable.
        replicas: How many; one by default.
        host: Address on the cluster's head. A Serve that runs already keeps its own.
        port: Port on the cluster's head, likewise.

    Raises:
        UnavailableError: The app cannot be started.
    """
    replicas = replicas or Replicas()
    scaling = None
    if replicas.most is not None and replicas.most > replicas.least:
        scaling = {"min_replicas": replicas.least, "max_replicas": replicas.most}
    # The scheduler in a replica limits waiting documents, so Serve does not limit requests.
    deployment = serve.deployment(
        serve.ingress(lambda: _reporting(build()))(_Replica),
        name="Service",
        num_replicas=replicas.least if scaling is None else None,
        autoscaling_config=scaling,
        max_ongoing_requests=10_000,
        graceful_shutdown_timeout_s=replicas.drain,
        ray_actor_options={"num_cpus": replicas.cpus, "num_gpus": replicas.gpus},
    )
    serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
    try:
        serve.run(deployment.bind(), name=APP, route_prefix="/")
    except (RuntimeError, RayServeException) as error:
        raise UnavailableError(f"The replicas cannot be started: {_reason(error)}") from error


def _reporting(app: FastAPI) -> FastAPI:
    """The app, with errors of its start left to `_Replica.check_health`."""
    lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def quiet(started: FastAPI) -> AsyncIterator[None]:
        try:
            async with lifespan(started):
                yield
        except RSRankError:
            yield

    app.router.lifespan_context = quiet
    return app


def _reason(error: Exception) -> str:
    """The last line that Serve knows about a failed deployment, which is the app's own error."""
    status = serve.status().applications.get(APP)
    lines = []
    for deployment in status.deployments.values() if status else ():
        lines += [line.strip() for line in deployment.message.splitlines() if line.strip()]
    return lines[-1] if lines else str(error)


def take_down() -> None:
    """Remove the service after its open requests have been answered."""
    if APP in serve.status().applications:
        serve.delete(APP)
