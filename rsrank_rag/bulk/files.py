"""Files of rows: JSON lines, read and written a chunk of rows at a time."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import InputError

ENDINGS = (".jsonl", ".jsonl.gz")

Row = dict[str, Any]


@dataclass(frozen=True)
class Shard:
    """A file of rows, and the file for the same rows with their scores."""

    source: Path
    target: Path

    @property
    def is_done(self) -> bool:
        """Whether the target is there and not older than the source."""
        if not self.target.exists():
            return False
        return self.target.stat().st_mtime >= self.source.stat().st_mtime


def find_shards(source: str, output: Path) -> list[Shard]:
    """One file, or all files of a folder, sorted, and where their scores go.

    In a folder, names that begin with ``_`` or ``.`` are left out, and so is the output folder.

    Raises:
        InputError: There is no file, or it is of another kind.
    """
    folder = Path(source).absolute()
    paths = []
    if folder.is_dir():
        for path in sorted(folder.rglob("*")):
            hidden = any(name[0] in "_." for name in path.relative_to(folder).parts)
            if path.name.endswith(ENDINGS) and not hidden and output not in path.parents:
                paths.append(path)
    elif folder.is_file() and folder.name.endswith(ENDINGS):
        paths.append(folder)
        folder = folder.parent
    if not paths:
        raise InputError(f"--input {source}: there is no {', '.join(ENDINGS)} there.")
    return [Shard(path, output / path.relative_to(folder)) for path in paths]


def read_rows(path: Path, count: int) -> Iterator[list[Row]]:
    """The rows of a file, at most ``count`` at a time.

    Raises:
        InputError: The file cannot be read, or a line is no JSON object.
    """
    done = 0
    try:
        with open_text(path, "rt", path.suffix) as file:
            rows = (json.loads(line) for line in file if line.strip())
            while chunk := list(islice(rows, count)):
                if not all(isinstance(row, dict) for row in chunk):
                    raise ValueError("a line is no JSON object")
                yield chunk
                done += len(chunk)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise InputError(f"{path} cannot be read after row {done}: {error}") from error


def open_text(path: Path, mode: str, suffix: str) -> Any:
    """Open a file of lines; compressed, if its name ends in ``.gz``."""
    opener: Callable[..., Any] = open
    if suffix == ".gz":
        opener = gzip.open
    # JSON can spell lone surrogates, which UTF-8 cannot.
    return opener(path, mode, encoding="utf-8", errors="replace", newline="\n")
