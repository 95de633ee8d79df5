"""Files of rows: JSON lines and Parquet, read and written a chunk of rows at a time."""

import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, required
from ..method.template import clean
from .pairs import COLUMNS

ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")

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
        read = _parquet if path.suffix == ".parquet" else _lines
        for rows in read(path, count):
            yield rows
            done += len(rows)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise InputError(f"{path} cannot be read after row {done}: {error}") from error


def _parquet(path: Path, count: int) -> Iterator[list[Row]]:
    with _arrow().parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(count):
            yield batch.to_pylist()


def _lines(path: Path, count: int) -> Iterator[list[Row]]:
    with _open_text(path, "rt", path.suffix) as file:
        rows = (_json_row(line) for line in file if line.strip())
        while chunk := list(itertools.islice(rows, count)):
            yield chunk


def _json_row(line: str) -> Row:
    row: Row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"the next line is no JSON object but {type(row).__name__}")
    # JSON can spell lone surrogates, which neither tokenizers nor UTF-8 accept.
    if "\\u" in line:
        row = json.loads(clean(json.dumps(row, ensure_ascii=False)))
    return row


def _open_text(path: Path, mode: str, suffix: str) -> Any:
    opener: Callable[..., Any] = gzip.open if suffix == ".gz" else open
    return opener(path, mode, encoding="utf-8", newline="\n")


def _arrow() -> Any:
    required("pyarrow.parquet", "Parquet files need pyarrow.", "parquet")
    return required("pyarrow", "Parquet files need pyarrow.", "parquet")


@contextmanager
def row_writer(path: Path, source: Path) -> Iterator[Callable[[Sequence[Row]], object]]:
    """Give a function that writes rows of a file, with their scores, in the format of that file."""
    if source.suffix == ".parquet":
        pa = _arrow()
        schema = pa.parquet.read_schema(source)
        lists = "documents" in schema.names
        kinds = (pa.float64(), pa.bool_(), pa.bool_(), pa.string())
        for name, kind in zip(COLUMNS, kinds, strict=True):
            schema = schema.append(pa.field(name, pa.list_(kind) if lists else kind))
        with pa.parquet.ParquetWriter(path, schema) as output:
            yield lambda rows: output.write_table(pa.Table.from_pylist(rows, schema))
    else:
        with _open_text(path, "wt", source.suffix) as file:
            yield lambda rows: file.writelines(
                json.dumps(row, ensure_ascii=False) + "\n" for row in rows
            )
