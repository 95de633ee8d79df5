"""Write files and folders that appear only when they are complete, safely between processes."""

import hashlib
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

A_DAY = 24 * 3600


def is_stale(partial: Path) -> bool:
    """Whether a partial file or folder is older than a day: its writer must have been killed."""
    try:
        return time.time() - partial.stat().st_mtime > A_DAY
    # The file is gone, because its writer has finished it.
    except OSError:
        return False


def remove_stale(folder: Path) -> None:
    """Remove partial files that killed writers have left in a folder.

    Only names as `appearing` writes them count, because the folder may hold other files.
    """
    for partial in folder.glob(f".{'[0-9a-f]' * 32}.partial"):
        if is_stale(partial):
            with suppress(OSError):
                partial.unlink()


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Give a path to write to, and move the file to ``path`` when the block has ended.

    If the block fails, the partial file is removed, so that a full disk is not filled further.
    """
    # No other writer uses this name. It is short, because the file's own may be as long as can be.
    partial = path.with_name(f".{uuid4().hex}.partial")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        # The error of a full disk names no file.
        error.filename = error.filename or str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file that appears only when it is complete; make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with appearing(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Give an empty folder to fill, and move its entries into ``folder`` when the block has ended.

    Entries of ``folder`` with the same names are replaced, others stay. If the block fails, or the
    process is killed in it, nothing is replaced. If the process is killed while it moves the
    entries, some are old and some are new.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(".new.*"):
        if is_stale(stale):
            shutil.rmtree(stale)
    with TemporaryDirectory(prefix=".new.", dir=folder) as partial:
        yield Path(partial)
        for new in list(Path(partial).iterdir()):
            old = folder / new.name
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            new.replace(old)


def digest_of(path: Path) -> str:
    """sha256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
