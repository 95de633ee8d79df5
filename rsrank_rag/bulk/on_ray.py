"""Work on a Ray cluster: actors that load their model once, and take items until none is left."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, RSRankError, required

# Computes the result of one item. Items and results must be picklable.
Worker = Callable[[Any], Any]

# How often an item is tried if the actor's process dies on it.
ATTEMPTS = 3


@dataclass(frozen=True)
class Actors:
    """The actors of a run.

    Attributes:
        count: How many; None for as many as fit into the cluster.
        cpus: Cores of an actor, and threads of its model on a CPU.
        gpus: GPUs of an actor; two actors with 0.5 share one.
        address: Of the cluster, such as ``"auto"`` or ``"ray://head:10001"``. None for
            ``RAY_ADDRESS``, or else for a cluster on this machine while the work takes.
    """

    count: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    address: str | None = None

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise InputError(f"--actors must be at least 1, got {self.count}.")
        if self.cpus < 0 or self.gpus < 0 or self.cpus + self.gpus == 0:
            raise InputError(f"An actor needs CPUs or GPUs, got {self.cpus:g} and {self.gpus:g}.")


@contextmanager
def cluster(address: str | None) -> Iterator[Any]:
    """Ray, connected. A connection or a local cluster that this function made ends with the block.

    Raises:
        RSRankError: There is no cluster at the address.
    """
    ray = required("ray", "--engine ray needs Ray.", "ray")
    if ray.is_initialized():
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS")
    options = {} if address else {"include_dashboard": False}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        raise RSRankError(
            f"There is no Ray cluster at {address or 'this machine'}: {error}"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def each(make: Callable[[], Worker], items: Sequence[Any], actors: Actors) -> Iterator[Any]:
    """The results of all items as they are ready, in any order.

    Args:
        make: Makes an actor's worker before its first item. It must be picklable.
        items: Picklable.
        actors: Who computes.

    Raises:
        RSRankError: A worker raised it, an item killed its actor several times, or no actor fits
            into the cluster.
    """
    if not items:
        return
    with cluster(actors.address) as ray:
        from ray.util import ActorPool

        actor = ray.remote(_Actor).options(
            num_cpus=actors.cpus,
            num_gpus=actors.gpus,
            max_restarts=-1,
            max_task_retries=ATTEMPTS - 1,
        )
        count = min(_count(ray, actors), len(items))
        pool = ActorPool([actor.remote(make, str(Path.cwd())) for _ in range(count)])
        try:
            for result, problem in pool.map_unordered(lambda a, item: a.run.remote(item), items):
                if problem:
                    raise RSRankError(problem)
                yield result
        except ray.exceptions.RayActorError as error:
            raise RSRankError(
                f"An actor's process died {ATTEMPTS} times on one item: out of memory, or "
                "something in the input ends it. Run the same command again: what is done stays. "
                f"Ray's message: {str(error).splitlines()[0]}"
            ) from error
        except ray.exceptions.RayError as error:
            last_line = str(error).strip().rpartition("\n")[2]
            raise RSRankError(f"An actor failed ({type(error).__name__}): {last_line}") from error


def _count(ray: Any, actors: Actors) -> int:
    """How many actors to start. One machine must have room for them; a cluster may grow."""
    if actors.count is not None and len(ray.nodes()) > 1:
        return actors.count
    resources = ray.cluster_resources()
    cpus = resources.get("CPU", 0)
    gpus = resources.get("GPU", 0)
    limits = []
    if actors.cpus:
        limits.append(int(cpus // actors.cpus))
    if actors.gpus:
        limits.append(int(gpus // actors.gpus))
    if min(limits) < (actors.count or 1):
        raise RSRankError(
            f"{actors.count or 1} actors of {actors.cpus:g} CPUs and {actors.gpus:g} GPUs were "
            f"asked for, and the cluster has {cpus:g} CPUs and {gpus:g} GPUs. Ask for less, or "
            "give the --address of a larger one."
        )
    return actors.count or min(limits)


class _Actor:
    """One actor, in a process of its own."""

    def __init__(self, make: Callable[[], Worker], folder: str) -> None:
        # Relative names are those of the caller. On a machine without the folder, full names work.
        with contextlib.suppress(OSError):
            os.chdir(folder)
        self.make = make
        self.worker: Worker | None = None

    def run(self, item: Any) -> tuple[Any, str]:
        """An item's result and "", or None and the message of an RSRankError.

        Ray would surround the message with the frames of both processes.
        """
        try:
            self.worker = self.worker or self.make()
            return self.worker(item), ""
        except RSRankError as error:
            return None, str(error)
