"""The service on a Ray cluster: Ray Serve's proxy before replicas of the app.

Needs the extra: pip install '.[ray]'. docs/scale.md says what the replicas promise.
"""

from collections.abc import Callable
from typing import Any

from ray import serve
from ray.serve import Application
from starlette.applications import Starlette


class _Replica:
    # Ray Serve sets this attribute.
    app: Starlette

    def check_health(self) -> None:
        """Raise the error that kept the app from starting, which Serve does not report itself."""
        if self.app.state.failure is not None:
            raise self.app.state.failure


def application(build: Callable[[], Starlette], **options: Any) -> Application:
    """The service for `ray.serve.run`, which returns when the replicas answer.

    The scheduler in a replica limits waiting documents, so Serve does not limit requests.

    Args:
        build: Makes the app in each replica, such as
            ``create_app(Scheduler(load, "mini"), settings)``. It must be picklable.
        options: Of `ray.serve.deployment`, such as ``num_replicas`` or ``ray_actor_options``.
    """
    defaults = {"max_ongoing_requests": 10_000, "graceful_shutdown_timeout_s": 120.0}
    # Serve calls a function, and takes any other callable for the app itself.
    replica = serve.ingress(lambda: build())(_Replica)
    return serve.deployment(replica, name="Service", **{**defaults, **options}).bind()
