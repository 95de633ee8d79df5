"""Files of rows, in JSON lines."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..evaluation.datasets import read_lines

ENDINGS = (".jsonl", ".jsonl.gz")


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


def input_folder(source: str) -> Path:
    """The folder that ``source`` names, or the folder of the file that it names."""
    path = Path(source).absolute()
    return path if path.is_dir() else path.parent


def find_shards(source: str, output: Path) -> list[Shard]:
    """The files to score, each with the file for its scores.

    The files of a folder are sorted. Names that begin with ``_`` or ``.`` are left out, and so is
    the output folder.

    Args:
        source: A file, or a folder.
        output: The folder for the scored files, as an absolute path.

    Raises:
        InputError: There is no ``.jsonl`` or ``.jsonl.gz`` file.
    """
    folder = input_folder(source)
    file = Path(source).absolute()
    paths = []
    if file.is_dir():
        for path in sorted(folder.rglob("*")):
            hidden = any(name[0] in "_." for name in path.relative_to(folder).parts)
            if path.name.endswith(ENDINGS) and not hidden and output not in path.parents:
                paths.append(path)
    elif file.is_file() and file.name.endswith(ENDINGS):
        paths.append(file)
    if not paths:
        raise InputError(f"--input {source}: there is no {', '.join(ENDINGS)} there.")
    return [Shard(path, output / path.relative_to(folder)) for path in paths]


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file.

    Raises:
        InputError: The file cannot be read, or a line is no JSON object.
    """
    for place, line in read_lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{place} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise InputError(f"{place} is no JSON object.")
        yield row
