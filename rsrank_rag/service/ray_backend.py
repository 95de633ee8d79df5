"""The service on a Ray cluster: replicas that each keep the prefixes of their share of the documents.

A request's pairs are scattered by a consistent hash of their documents, one call a replica, and gathered. The ring is
Ray Serve's own. Any replica can score any document, so where a call ends up decides how fast it is answered and nothing
else: while replicas come, go or die, calls may go astray, and scores stay what they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import importlib
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import MissingDependencyError, RSRankError
from ..method.explanation import Explanation
from ..reranker import Pair, Reranker
from .backend import DeadlineError, Description, Outcome, OverloadedError, UnavailableError
from .engine import Canary
from .scheduler import QueueLimits, Scheduler

try:
    from ray import cloudpickle, serve
    from ray.exceptions import ActorDiedError, RayActorError, RayTaskError
    from ray.serve.config import RequestRouterConfig
    from ray.serve.exceptions import RayServeException
    from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("ray", "mmh3"):
        raise
    raise MissingDependencyError(
        f"The service on Ray needs {error.name}. Install with: pip install 'rsrank-rag[ray]'"
    ) from error

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

APP, SHARDS = "rsrank-shards", "Shard"
"""Names of the Serve application that scores, and of its deployment."""

LIVES = 3
"""Replicas that may die on one pair before it is answered with an error."""

ATTEMPTS = 8
"""Times that a call is made to replicas that do not answer, with pauses that grow to `LONGEST_PAUSE` seconds."""

LONGEST_PAUSE = 2.0

WATCH_SECONDS = 5.0
"""Between two looks at whether the replicas are well."""

SILENCE = 30.0
"""Seconds without an answer after which they are taken not to be."""

BALANCE = 400
"""Points of a replica on the ring: with so many, shares differ by about a twentieth (one over the root)."""

_routers: weakref.WeakValueDictionary[str, ShardRouter] = weakref.WeakValueDictionary()
"""This process's routers, by application: Serve makes them and tells nobody."""


def _announce(router: ShardRouter) -> None:
    _routers[router.app_name] = router


class ShardRouter(ConsistentHashRouter):  # type: ignore[misc] # ray is not followed
    """Serve's ring, which can also be asked whose a document is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Before the base class: it may call update_replicas.
        self._ring_lock = threading.Lock()  # Serve updates the ring on a thread of its own
        super().__init__(*args, **kwargs)
        # Serve sends the class by value, with copies of the globals that it names; the module has its own.
        importlib.import_module(type(self).__module__)._announce(self)

    def update_replicas(self, replicas: list[Any]) -> None:
        """See `ray.serve.request_router.RequestRouter`."""
        with self._ring_lock:
            super().update_replicas(replicas)

    def owner(self, key: str) -> str | None:
        """The replica that a call with this session id goes to; None while there is none."""
        with self._ring_lock:
            ranked = self._lookup_ranked_replicas(key)
        there = (replica.unique_id for replica in ranked if replica in self.curr_replicas)
        return next(there, None)

    def there(self) -> set[str]:
        """All replicas."""
        return {replica.unique_id for replica in list(self.curr_replicas)}


@dataclass(frozen=True)
class Reply:
    """What a replica answers.

    Attributes:
        value: What was asked for.
        replica: Whose answer it is.
        stats: The counters of its `Scheduler`.
        complaint: What is wrong with it; None if nothing is.
    """

    value: Any
    replica: str
    stats: Mapping[str, float]
    complaint: str | None


class Shard:
    """One replica: a model with the prefixes of its documents, behind a `Scheduler`, in a process of its own.

    Args:
        make: Loads the model; picklable.
        name: What it is called.
        limits: Of the replica's queue.
        canary: Scored after each load; None for none.
    """

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, make: Callable[[], Reranker], name: str, limits: QueueLimits | None, canary: Canary | None
    ) -> None:
        self.scheduler = Scheduler(make, name, limits=limits, canary=canary)
        await self.scheduler.start()
        self._at_start = self.scheduler.readiness()
        self._ill_since: float | None = None

    async def score(self, pairs: list[Pair], client: str, timeout: float | None) -> Reply:
        """Outcomes; see `Backend.score`."""
        return self._reply(await self.scheduler.score(pairs, client=client, timeout=timeout))

    async def explain(self, pair: Pair, client: str, timeout: float | None) -> Reply:
        """An `Explanation`; see `Backend.explain`."""
        return self._reply(await self.scheduler.explain(pair, client=client, timeout=timeout))

    async def describe(self) -> Reply:
        """A `Description`."""
        return self._reply(self.scheduler.description)

    def _reply(self, value: Any) -> Reply:
        replica = serve.get_replica_context().replica_id.unique_id
        return Reply(value, replica, self.scheduler.stats(), self.scheduler.readiness())

    def check_health(self) -> None:
        """Let Serve put another replica in the place of one whose model cannot be brought back.

        Raises:
            UnavailableError: It has been without a model for longer than a batch may take.
        """
        trouble = self.scheduler.readiness()
        if trouble in (None, self._at_start):
            self._ill_since = None
            return
        self._ill_since = self._ill_since or time.monotonic()
        if time.monotonic() - self._ill_since > self.scheduler.limits.longest_step:
            raise UnavailableError(f"{trouble}")

    async def __del__(self) -> None:
        await self.scheduler.stop()


@dataclass
class _Group:
    """Pairs of a request that go to one replica: their places in the request."""

    places: list[int]
    deaths: int = 0


@dataclass
class _Request:
    """A request that is being scattered and gathered."""

    pairs: Sequence[Pair]
    client: str
    deadline: float | None
    found: list[Outcome | None] = field(default_factory=list)

    def left(self) -> float | None:
        return None if self.deadline is None else max(0.001, self.deadline - time.monotonic())


class RayBackend:
    """A `Backend` over the replicas of `deploy`. It holds no model: there may be one in any number of processes.

    Args:
        app: The Serve application that `deploy` made.
    """

    def __init__(self, app: str = APP) -> None:
        self.app = app
        self._handle: Any = None
        self._description: Description | None = None
        self._trouble: str | None = "It has not been started."
        self._stopping = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._suspects = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        self._latest: dict[str, Mapping[str, float]] = {}
        names = (
            "pairs",
            "tokens",
            "truncated",
            "unscored",
            "failed",
            "cancelled",
            "refused",
            "late",
            "calls",
            "retried",
        )
        self._counts = dict.fromkeys(names, 0)

    @property
    def description(self) -> Description:
        """See `Backend`."""
        if self._description is None:
            raise UnavailableError(f"No model is served. {self._trouble}", retry_after=1.0)
        return self._description

    def readiness(self) -> str | None:
        """See `Backend`."""
        return "The service is stopping." if self._stopping else self._trouble

    def stats(self) -> dict[str, float]:
        """Counters and levels, named as those of `Scheduler.stats`.

        What concerns requests is counted here; what concerns models is the sum over the replicas that are there now, as
        each said in its last answer. ``calls`` is the number of calls to replicas, ``retried`` of those that had to be
        made again, ``replicas`` how many there are.
        """
        router = _routers.get(self.app)
        there = set(self._latest) if router is None else router.there()
        sums: dict[str, float] = {}
        for replica, stats in self._latest.items():
            for name, value in stats.items() if replica in there else ():
                sums[name] = sums.get(name, 0) + value
        return {**sums, **self._counts, "replicas": len(there)}

    async def start(self) -> None:
        """See `Backend`. The replicas must have been deployed."""
        try:
            self._handle = serve.get_deployment_handle(SHARDS, self.app)
        except KeyError:
            raise UnavailableError(
                f"No replicas are deployed on this Ray cluster under the name {self.app!r}. Call deploy first."
            ) from None
        await self._look()
        if self._description is None:
            raise UnavailableError(f"The replicas do not answer. {self._trouble}")
        if self._trouble is not None:
            logger.warning("%s", self._trouble)
        self._watcher = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """See `Backend`. The replicas stay: others may be using them."""
        self._stopping = True
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        await self._idle.wait()

    async def score(self, pairs: Sequence[Pair], *, client: str = "", timeout: float | None = None) -> list[Outcome]:
        """See `Backend`."""
        self._admit()
        request = _Request(pairs, client, None if timeout is None else time.monotonic() + timeout)
        request.found = [None] * len(pairs)
        shares: dict[str, list[int]] = {}
        for place, pair in enumerate(pairs):
            shares.setdefault(self._owner(key_of(pair.document)), []).append(place)
        groups = [_Group(places) for places in shares.values()]
        await self._answered(self._all([self._score_group(request, group) for group in groups]), timeout, len(pairs))
        return [self._counted(outcome) for outcome in request.found if outcome is not None]

    async def explain(self, pair: Pair, *, client: str = "", timeout: float | None = None) -> Explanation:
        """See `Backend`."""
        self._admit()
        call = self._call(key_of(pair.document), "explain", lambda: (pair, client, timeout))
        try:
            explanation: Explanation = await self._answered(call, timeout, 0)
        except _DiedError:
            raise UnavailableError("The replica died on it; another one takes its place.", 5.0) from None
        return explanation

    def _admit(self) -> None:
        if self._handle is None or self._stopping:
            raise UnavailableError(f"No requests are taken. {self.readiness()}", retry_after=5.0)

    async def _answered(self, work: Any, timeout: float | None, pairs: int) -> Any:
        """Wait for work of a request, no longer than it wants to wait."""
        self._running += 1
        self._idle.clear()
        try:
            return await asyncio.wait_for(work, timeout)
        except (asyncio.TimeoutError, DeadlineError):
            self._counts["late"] += 1
            self._counts["cancelled"] += pairs
            raise DeadlineError(f"There was no answer in {timeout:g} seconds; the work has been cancelled.") from None
        except OverloadedError:
            self._counts["refused"] += 1
            raise
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    @staticmethod
    async def _all(work: Sequence[Any]) -> None:
        """Wait for all of it; if one part fails, the others are cancelled and have ended when this raises."""
        tasks = [asyncio.ensure_future(part) for part in work]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _owner(self, key: str) -> str:
        """Documents with the same owner share a call."""
        router = _routers.get(self.app)
        return (None if router is None else router.owner(key)) or key

    async def _score_group(self, request: _Request, group: _Group) -> None:
        """Score pairs on their replica; if it dies, on the next owner of their documents, in ever smaller groups."""
        pairs = [request.pairs[place] for place in group.places]
        try:
            # After a death, one after another: what a replica dies on must not take others with it each time.
            async with self._suspects if group.deaths else contextlib.nullcontext():
                outcomes: list[Outcome] = await self._call(
                    key_of(pairs[0].document), "score", lambda: (pairs, request.client, request.left())
                )
        except _DiedError:
            await self._again(request, group)
            return
        for place, outcome in zip(group.places, outcomes, strict=True):
            request.found[place] = outcome

    async def _again(self, request: _Request, group: _Group) -> None:
        """A replica died: the whole group gets another chance, for it may have died of something else; then halves."""
        deaths, places = group.deaths + 1, group.places
        if len(places) > 1 and deaths > 1:
            middle = len(places) // 2
            halves = [_Group(places[:middle], 1), _Group(places[middle:], 1)]
            await self._all([self._score_group(request, half) for half in halves])
        elif deaths < LIVES:
            await self._score_group(request, _Group(places, deaths))
        else:
            error = f"{LIVES} replicas died on it."
            request.found[places[0]] = Outcome(None, fault="internal", error=error)

    async def _call(self, key: str, method: str, arguments: Callable[[], tuple[Any, ...]]) -> Any:
        """Call the replica that a document belongs to.

        Raises:
            _DiedError: It died meanwhile.
            UnavailableError: Neither it nor others answer.
            RSRankError: What the replica raised.
        """
        for attempt in itertools.count():
            # Another session, another replica: the first one is there but of no use.
            session = f"{key}-{attempt}" if attempt else key
            response = self._send(session, method, *arguments())
            self._counts["calls"] += 1
            try:
                reply: Reply = await response
            except asyncio.CancelledError:
                response.cancel()
                raise
            except (RayActorError, RayTaskError, RSRankError) as error:
                await self._consider(error, attempt)
            else:
                self._latest[reply.replica] = reply.stats
                return reply.value
        raise AssertionError

    def _send(self, session: str, method: str, *arguments: Any) -> Any:
        # In a context of its own: calls made while Serve has a request in hand all get its id, and its consistent-hash
        # router then takes them for one another and loses some.
        call = getattr(self._handle.options(session_id=session), method).remote
        return contextvars.Context().run(call, *arguments)

    async def _consider(self, error: Exception, attempt: int) -> None:
        """Return if the call is to be made again, else raise what there is to say."""
        cause: BaseException = error
        while isinstance(cause, RayTaskError) and cause.cause is not None and cause.cause is not cause:
            cause = cause.cause
        if isinstance(cause, ActorDiedError):
            self._counts["retried"] += 1
            raise _DiedError from None
        if not isinstance(cause, (RayActorError, UnavailableError)):
            raise cause from None
        if attempt + 1 == ATTEMPTS:
            raise UnavailableError(f"The replicas do not answer: {cause}", retry_after=5.0) from None
        self._counts["retried"] += 1
        await asyncio.sleep(min(LONGEST_PAUSE, 0.05 * 2**attempt))

    async def _watch(self) -> None:
        for number in itertools.count():
            await asyncio.sleep(WATCH_SECONDS)
            await self._look(str(number))

    async def _look(self, key: str = "") -> None:
        """Ask some replica how it is."""
        response = self._send(f"look-{key}", "describe")
        try:
            reply: Reply = await asyncio.wait_for(response, SILENCE)
        except asyncio.TimeoutError:
            self._trouble = f"No replica has answered for {SILENCE:g} seconds."
        except (RayActorError, RayTaskError, RayServeException, RSRankError) as error:
            self._trouble = f"A replica does not answer: {str(error).splitlines()[-1]}"
        else:
            self._latest[reply.replica] = reply.stats
            self._description, self._trouble = reply.value, reply.complaint

    def _counted(self, outcome: Outcome) -> Outcome:
        self._counts["pairs"] += 1
        self._counts["tokens"] += outcome.tokens
        self._counts["truncated"] += outcome.truncated
        self._counts["unscored"] += outcome.fault == "unscored"
        self._counts["failed"] += outcome.fault in ("input", "internal")
        return outcome


class _DiedError(Exception):
    """A replica's process ended while it had the call."""


def key_of(document: str) -> str:
    """What a document's place on the ring depends on: all of its text."""
    return hashlib.blake2b(document.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Replicas:
    """How many replicas, and what each of them needs.

    Attributes:
        least: As many as there are at least.
        most: If more than ``least``, Serve adds and removes replicas with the load.
        cpus: CPU cores of each; also the threads of a model on a CPU.
        gpus: GPUs of each; a half lets two share one.
        waiting: Calls (of any number of documents) in a replica at a time above which Serve adds another.
        drain: Seconds that a replica which is to go has for the calls it holds.
    """

    least: int = 1
    most: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    waiting: float = 4.0
    drain: float = 120.0


def deploy(
    make: Callable[[], Reranker],
    name: str,
    replicas: Replicas | None = None,
    *,
    limits: QueueLimits | None = None,
    canary: Canary | None = Canary(),  # noqa: B008 - it is frozen
    app: str = APP,
) -> None:
    """Bring up the replicas on the connected Ray cluster, or change how many there are; returns when they can score.

    The same call with another number adds or removes replicas and leaves the others as they are.

    Args:
        make: Loads the model; picklable.
        name: What it is called.
        replicas: How many.
        limits: Of each replica's queue.
        canary: Scored after each load; None for none.
        app: What the Serve application is called.

    Raises:
        UnavailableError: They cannot be brought up, such as for a model that cannot be loaded.
    """
    chosen = replicas or Replicas()
    grows = chosen.most is not None and chosen.most > chosen.least
    deployment = serve.deployment(
        Shard,
        name=SHARDS,
        num_replicas=None if grows else chosen.least,
        autoscaling_config={
            "min_replicas": chosen.least,
            "max_replicas": chosen.most,
            "target_ongoing_requests": chosen.waiting,
        }
        if grows
        else None,
        max_ongoing_requests=10_000,  # the Scheduler refuses what is too much, and by documents
        graceful_shutdown_timeout_s=chosen.drain,
        ray_actor_options={"num_cpus": chosen.cpus, "num_gpus": chosen.gpus},
        request_router_config=RequestRouterConfig(
            request_router_class=f"{__name__}.{ShardRouter.__name__}",
            request_router_kwargs={"num_virtual_nodes": BALANCE},
        ),
    )
    # Without a version, Serve takes every call for new code and replaces all replicas, and their prefixes with them.
    arguments = (make, name, limits, canary)
    version = hashlib.blake2b(cloudpickle.dumps(arguments), digest_size=16).hexdigest()
    deployment = deployment.options(version=version, _internal=True)
    try:
        serve.run(deployment.bind(*arguments), name=app, route_prefix=None)
    except RuntimeError as error:
        raise UnavailableError(f"The replicas of {name} could not be brought up: {_why(app, error)}") from error


def _why(app: str, error: Exception) -> str:
    """The last line of what Serve knows about a deployment that failed."""
    status = serve.status().applications.get(app)
    messages = [] if status is None else [deployment.message for deployment in status.deployments.values()]
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else str(error)


def serve_on_ray(
    make: Callable[[], Reranker],
    name: str,
    build: Callable[[RayBackend], Any],
    replicas: Replicas | None = None,
    *,
    limits: QueueLimits | None = None,
    canary: Canary | None = Canary(),  # noqa: B008 - it is frozen
    host: str = "127.0.0.1",
    port: int = 8080,
    gateways: int = 1,
    every_node: bool = False,
    app: str = APP,
) -> None:
    """Answer over HTTP on the connected Ray cluster; returns when requests are answered. `take_down` ends it.

    Called again, it changes how many replicas and gateways there are. The address is that of the cluster's Serve: if
    one is running already, it keeps its own.

    Args:
        make: As for `deploy`, with ``name``, ``replicas``, ``limits``, ``canary`` and ``app``.
        name: What the model is called.
        build: Makes the ASGI app of a backend; picklable, such as ``partial(create_app, settings=settings)``.
        replicas: How many.
        limits: Of each replica's queue.
        canary: Scored after each load.
        host: Address to listen on.
        port: Port to listen on.
        gateways: Processes that scatter and gather.
        every_node: Listen on every node of the cluster which has a replica or gateway, and not on the head alone.
        app: What the Serve application is called.

    Raises:
        UnavailableError: It cannot be brought up.
    """

    def make_app() -> Any:
        return build(RayBackend(app))

    serve.start(proxy_location="EveryNode" if every_node else "HeadOnly", http_options={"host": host, "port": port})
    deploy(make, name, replicas, limits=limits, canary=canary, app=app)
    front = serve.deployment(
        serve.ingress(make_app)(),
        name="Gateway",
        num_replicas=gateways,
        max_ongoing_requests=10_000,
        ray_actor_options={"num_cpus": 0.1},
    )
    try:
        serve.run(front.bind(), name=f"{app}-http", route_prefix="/")
    except RuntimeError as error:
        raise UnavailableError(f"The gateway could not be brought up: {_why(f'{app}-http', error)}") from error


def take_down(app: str = APP) -> None:
    """Remove what `serve_on_ray` or `deploy` brought up, the gateways first: requests in flight are answered."""
    for name in (f"{app}-http", app):
        if name in serve.status().applications:
            serve.delete(name)
