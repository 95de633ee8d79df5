"""How many threads torch computes with, and how idle ones wait. Knows nothing of torch until it is there."""

import logging
import math
import os
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Cores that this process may use: those it is bound to, and no more than its container's CPU quota, rounded up."""
    bound = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()  # version 2
    except (OSError, ValueError):
        try:
            quota, period = (
                (cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        except OSError:
            return bound
    if not quota.strip().isdigit():  # "max" in version 2, -1 in version 1: no quota
        return bound
    return max(1, min(bound, math.ceil(int(quota) / int(period))))


def use_threads(threads: int | None = None) -> None:
    """Bound torch's threads, and let idle ones sleep instead of spin: spinning costs most where cores are shared.

    ``OMP_NUM_THREADS`` and ``OMP_WAIT_POLICY`` win where they are set. Waiting is decided when torch is imported, so it
    changes only where this is called before; the number can be lowered afterwards, too. Without ``threads`` it is
    torch's own choice, but at most `usable_cores`.
    """
    torch, cores = sys.modules.get("torch"), usable_cores()
    there = (os.cpu_count() or 1) if torch is None else torch.get_num_threads()
    wanted = threads is not None or ("OMP_NUM_THREADS" not in os.environ and cores < there)
    if torch is None:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if wanted:
            os.environ["OMP_NUM_THREADS"] = str(
                threads or cores
            )  # processes that are started from here inherit it
    elif wanted:
        torch.set_num_threads(threads or cores)
        logger.info("torch computes with %d threads on %d usable cores.", threads or cores, cores)
