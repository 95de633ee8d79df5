"""Files that appear only when they are complete, in folders that processes of several machines may share."""

from __future__ import annotations

import hashlib
import os
import platform
import threading
import time
from pathlib import Path

A_DAY = 24 * 3600


def partial_of(path: Path) -> Path:
    """Where to write a file until it is complete: ``name.PROCESS-THREAD-MACHINE.partial``."""
    return path.with_suffix(f".{os.getpid()}-{threading.get_ident()}-{_machine()}.partial")


def is_running(partial: Path) -> bool:
    """Whether whoever began a file may still be writing it. Of another machine nobody knows: a day is enough."""
    process, *rest = partial.name.split(".")[-2].split("-")
    try:
        age = time.time() - partial.stat().st_mtime
    except OSError:  # gone: its writer has finished it
        return True
    if len(rest) > 1 and rest[-1] != _machine():
        return age < A_DAY
    return may_be_running(process, age, posix=os.name == "posix")


def may_be_running(writer: str, age: float, *, posix: bool) -> bool:
    """Whether the process that began a file may still be at it.

    Args:
        writer: Its number, of this machine; anything else was no writer of ours.
        age: Seconds since the file was last written to.
        posix: Whether a process can be asked for. Windows has no such question: `os.kill` with signal 0 sends Ctrl+C
            there, and any other one ends the process. So only age counts.
    """
    try:
        number = int(writer)
    except ValueError:
        return False
    if not posix:
        return age < A_DAY
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _machine() -> str:
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def write_text(path: Path, text: str) -> None:
    """Write a file that appears only when it is complete; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(path)
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
