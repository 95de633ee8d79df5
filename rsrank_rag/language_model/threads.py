"""How many threads torch computes with, and how idle ones wait. Knows nothing of torch until it is there."""

from __future__ import annotations

import logging
import math
import os
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Cores that this process may use: those it is bound to, and no more than its container's CPU quota, rounded up."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()  # version 2
    except (OSError, ValueError):
        try:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return bound
    if not quota.strip().isdigit():  # "max" in version 2, -1 in version 1: no quota
        return bound
    return max(1, min(bound, math.ceil(int(quota) / int(period))))


def use_threads(threads: int | None = None) -> int | None:
    """Bound torch's threads, and let idle ones sleep instead of spin: spinning costs most where cores are shared.

    ``OMP_NUM_THREADS`` and ``OMP_WAIT_POLICY`` win where they are set. Waiting is decided when torch is imported, so it
    changes only where this is called before; the number can be lowered afterwards, too. Without ``threads`` it is
    torch's own choice, but at most `usable_cores`. Gives the number that was set; None where torch's own choice stays.
    """
    torch, cores = sys.modules.get("torch"), usable_cores()
    if torch is None:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        asked = os.environ.get("OMP_NUM_THREADS")
        if threads is None and (asked is not None or cores == (os.cpu_count() or 1)):
            return None
        os.environ["OMP_NUM_THREADS"] = str(threads or cores)  # processes that are started from here inherit it
        return threads or cores
    if threads is None and ("OMP_NUM_THREADS" in os.environ or torch.get_num_threads() <= cores):
        return None
    torch.set_num_threads(threads or cores)
    logger.info("torch computes with %d threads on %d usable cores.", threads or cores, cores)
    return threads or cores
