"""Write files and folders that appear only when they are complete, safely between processes."""

import hashlib
import json
import os
import platform
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

A_DAY = 24 * 3600

# The folder in which `replacing` puts complete new content before it moves it into place.
COMPLETE = ".complete"


def partial_of(path: Path) -> Path:
    """The path of an incomplete file: ``name.PROCESS-THREAD-MACHINE.partial``."""
    return path.with_suffix(f".{os.getpid()}-{threading.get_ident()}-{_machine()}.partial")


def is_running(partial: Path, *, posix: bool = os.name == "posix") -> bool:
    """Whether the process that began a partial file may still be writing it.

    Where the process cannot be queried, a file counts as being written for a day. This holds for
    processes of other machines, and on Windows, where `os.kill` with signal 0 ends the process.
    """
    process, *rest = partial.name.split(".")[-2].split("-")
    try:
        age = time.time() - partial.stat().st_mtime
    # The file is gone, because its writer has finished it.
    except OSError:
        return True
    # Not a name that `partial_of` made.
    if not process.isdecimal():
        return False
    other_machine = len(rest) > 1 and rest[-1] != _machine()
    if other_machine or not posix:
        return age < A_DAY
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return False
    # The process exists and belongs to another user.
    except PermissionError:
        pass
    return True


def _machine() -> str:
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Give a path to write to, and move the file to ``path`` when the block has ended.

    If the block fails, the partial file is removed, so that a full disk is not filled further.
    """
    partial = partial_of(path)
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file that appears only when it is complete; make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with appearing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def differences(path: Path, description: Mapping[str, Any]) -> list[str]:
    """Write what a folder's files are of; if an earlier run wrote that, say how it differs.

    Args:
        path: A JSON file in the folder.
        description: What JSON can hold.

    Returns:
        One phrase for each entry of the description that is another one in the file.
    """
    text = json.dumps(description, indent=2, sort_keys=True) + "\n"
    if not path.exists():
        write_text(path, text)
    before = json.loads(path.read_text(encoding="utf-8"))
    different = []
    for name, value in json.loads(text).items():
        if before.get(name) != value:
            different.append(f"{name}: {before.get(name)!r} there, {value!r} wanted")
    return different


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Give an empty folder to fill, and move its content into ``folder`` when the block has ended.

    Entries of ``folder`` with the same names are replaced, others stay. A process that is killed
    before the block ends changes nothing. One that is killed while the content is moved leaves
    `COMPLETE`, and the next call finishes the move.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _move_complete(folder)
    for stale in folder.glob(".new.*.partial"):
        if not is_running(stale):
            shutil.rmtree(stale)
    partial = partial_of(folder / ".new")
    partial.mkdir()
    try:
        yield partial
        partial.replace(folder / COMPLETE)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _move_complete(folder)


def _move_complete(folder: Path) -> None:
    complete = folder / COMPLETE
    if not complete.is_dir():
        return
    for new in list(complete.iterdir()):
        old = folder / new.name
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        new.replace(old)
    complete.rmdir()


def digest_of(path: Path) -> str:
    """sha256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
