"""Work on a Ray cluster: actors that each load their model once and take items until there are none left."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, RSRankError, required

Worker = Callable[[Any], Any]  # does one item. Items and results can be pickled.

LIVES = 3  # times that an item is tried if the actor's process dies on it


@dataclass(frozen=True)
class Actors:
    """Who does the work.

    ``address`` is the cluster's, such as ``"auto"`` or ``"ray://head:10001"``; None for ``RAY_ADDRESS``, or else a
    cluster on this machine for as long as it takes.
    """

    count: int | None = None  # None for as many as the cluster has room for now
    cpus: float = 1.0  # cores of each; on a CPU also the number of threads that its model uses
    gpus: float = 0.0  # of each; a half lets two share one
    address: str | None = None

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise InputError(f"--actors must be at least 1, got {self.count}.")
        if self.cpus < 0 or self.gpus < 0 or self.cpus + self.gpus == 0:
            raise InputError(f"An actor needs CPUs or GPUs, got {self.cpus:g} and {self.gpus:g}.")


@contextmanager
def cluster(address: str | None) -> Iterator[Any]:
    """Ray, connected. What was begun here is ended here: a connection, or a cluster of this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = required("ray", "--engine ray needs Ray.", "ray")
    if ray.is_initialized():
        yield ray
        return
    own = {} if address or os.environ.get("RAY_ADDRESS") else {"include_dashboard": False}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        raise RSRankError(
            f"There is no Ray cluster at {address or os.environ.get('RAY_ADDRESS') or 'this machine'}: {error}"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def each(make: Callable[[], Worker], items: Sequence[Any], actors: Actors) -> Iterator[Any]:
    """Have every item done by some actor; results come as they are ready, in any order.

    ``make`` makes an actor's worker when its first item comes; it and the items must be picklable. RSRankError is what
    a worker raised; or an actor died again and again; or the cluster has no room for one.
    """
    if not items:
        return
    with cluster(actors.address) as ray:
        from ray.util import ActorPool

        hired = ray.remote(_Actor).options(
            num_cpus=actors.cpus,
            num_gpus=actors.gpus,
            max_restarts=-1,
            max_task_retries=LIVES
            - 1,  # or an item on which the process dies would be tried for ever
        )
        count = min(_count(ray, actors), len(items))
        pool = ActorPool([hired.remote(make, str(Path.cwd())) for _ in range(count)])
        try:
            for result, problem in pool.map_unordered(
                lambda actor, item: actor.do.remote(item), items
            ):
                if problem:
                    raise RSRankError(problem)
                yield result
        except ray.exceptions.RayError as error:
            raise RSRankError(_reason(error)) from error


def _count(ray: Any, actors: Actors) -> int:
    """How many actors; a machine of one's own that has no room for any would be waited for in vain."""
    there = ray.cluster_resources()
    rooms = [
        int(there.get(name, 0) // need)
        for name, need in (("CPU", actors.cpus), ("GPU", actors.gpus))
        if need
    ]
    if actors.count is not None and len(ray.nodes()) > 1:
        return actors.count  # the cluster may grow
    if min(rooms) < (actors.count or 1):
        raise RSRankError(
            f"{actors.count or 1} actors of {actors.cpus:g} CPUs and {actors.gpus:g} GPUs were asked for, and the "
            f"cluster has {there.get('CPU', 0):g} CPUs and {there.get('GPU', 0):g} GPUs. Ask for less, or give the "
            "--address of a larger one."
        )
    return actors.count or min(rooms)


def _reason(error: BaseException) -> str:
    """What ended the work, without Ray's frames."""
    import ray.exceptions

    cause: BaseException = error
    while isinstance(cause, ray.exceptions.RayTaskError) and cause.cause is not None:
        cause = cause.cause
    if isinstance(cause, ray.exceptions.RayActorError):
        return (
            f"An actor's process died {LIVES} times on one item: out of memory, or something in the input ends it. "
            f"Run the same command again: what is done stays. Ray's message: {str(cause).splitlines()[0]}"
        )
    lines = [line for line in str(cause).splitlines() if line.strip()] or [""]
    return f"An actor failed ({type(cause).__name__}): {lines[-1]}"


class _Actor:
    """One of those who do the work, in a process of its own."""

    def __init__(self, make: Callable[[], Worker], folder: str) -> None:
        with contextlib.suppress(OSError):  # a machine without it can still use full paths
            os.chdir(folder)  # relative names are those of whoever asked
        self.make = make
        self.worker: Worker | None = None

    def do(self, item: Any) -> tuple[Any, str]:
        """An item's result and "", or None and what is wrong: as an error, Ray would bury it in frames."""
        try:
            self.worker = self.worker or self.make()
            return self.worker(item), ""
        except RSRankError as error:
            return None, str(error)
