"""Memory that was freed goes back to the system: the C library keeps it, in pieces that texts of other lengths miss."""

from __future__ import annotations

import ctypes
import threading
import time

EVERY = 20.0
"""Seconds; a process that has just freed much keeps it for no longer."""


def trim_regularly(seconds: float = EVERY) -> bool:
    """Give free memory back again and again, from a thread of this process; whether the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False

    def run() -> None:
        while True:
            time.sleep(seconds)
            trim(0)  # ctypes lets other threads run meanwhile

    threading.Thread(target=run, name="rsrank-trim", daemon=True).start()
    return True
