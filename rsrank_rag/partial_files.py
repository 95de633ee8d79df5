"""Write files and folders that appear only when they are complete, safely between processes."""

import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

A_DAY = 24 * 3600

# The folder in which `replacing` puts complete new content before it moves it into place.
COMPLETE = ".complete"


def partial_of(path: Path) -> Path:
    """The path of an incomplete file, which no other writer uses."""
    return path.with_suffix(f".{uuid4().hex}.partial")


def is_stale(partial: Path) -> bool:
    """Whether a partial file is older than a day, so that its writer was killed."""
    try:
        return time.time() - partial.stat().st_mtime > A_DAY
    # The file is gone, because its writer has finished it.
    except OSError:
        return False


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
        if is_stale(stale):
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
