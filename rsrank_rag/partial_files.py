"""Files and folders that appear only when they are complete, where processes of several machines may share them."""

import hashlib
import os
import platform
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

A_DAY = 24 * 3600

COMPLETE = ".complete"  # holds what is to take the place of a folder's content, from when all of it is there


def partial_of(path: Path) -> Path:
    """Where to write a file until it is complete: ``name.PROCESS-THREAD-MACHINE.partial``."""
    return path.with_suffix(f".{os.getpid()}-{threading.get_ident()}-{_machine()}.partial")


def is_running(partial: Path, *, posix: bool = os.name == "posix") -> bool:
    """Whether whoever began a file may still be writing it. Where nobody can be asked, a day is enough.

    That is so of another machine, and on Windows: there, `os.kill` with any signal sends Ctrl+C or ends the process.
    """
    process, *rest = partial.name.split(".")[-2].split("-")
    try:
        age = time.time() - partial.stat().st_mtime
    except OSError:  # gone: its writer has finished it
        return True
    if not process.isdecimal():  # no writer of ours
        return False
    if not posix or (len(rest) > 1 and rest[-1] != _machine()):
        return age < A_DAY
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's process
        pass
    return True


def _machine() -> str:
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


@contextmanager
def appearing(path: Path, prefix: str = "") -> Iterator[Path]:
    """Where to write a file, which takes its place when the block has ended; nothing is left of one that failed."""
    partial = partial_of(path.with_name(f"{prefix}{path.name}"))
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # on a full disk, others need the room


def write_text(path: Path, text: str) -> None:
    """Write a file that appears only when it is complete; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with appearing(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A folder whose content takes the place of what ``folder`` has of the same names, when the block has ended.

    If the process is killed before, nothing has changed; from then on `settle` does what is left to do.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settle(folder)
    for left in folder.glob(".new.*.partial"):
        if not is_running(left):
            shutil.rmtree(left)
    partial = partial_of(folder / ".new")
    partial.mkdir()
    try:
        yield partial
        partial.replace(folder / COMPLETE)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    settle(folder)


def settle(folder: Path) -> None:
    """Put what is complete into its place: what a process that was killed had no time for."""
    complete = folder / COMPLETE
    if complete.is_dir():
        for new in list(complete.iterdir()):
            old = folder / new.name
            if old.is_dir():
                shutil.rmtree(old)
            new.replace(old)
        complete.rmdir()


def digest_of(path: Path) -> str:
    """sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
