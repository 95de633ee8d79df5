"""Files of rows: JSON lines, CSV and Parquet, read and written a chunk of rows at a time."""

import csv
import glob
import gzip
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, required
from ..method.template import clean
from .pairs import COLUMNS, form_of

ENDINGS = (".jsonl", ".jsonl.gz", ".csv", ".parquet")

# An output folder has a file of this name with the settings of its scores.
SETTINGS = "_settings.json"

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
    """The files of a file name, a folder or a pattern, sorted, and where their scores go.

    Names that begin with ``_`` or ``.`` are left out, as are output folders within the input.

    Raises:
        InputError: There is no file, or one of another kind.
    """
    folder = Path(source)
    if folder.is_dir():
        outputs = {path.parent for path in folder.rglob(SETTINGS)} | {output}
        paths = []
        for path in sorted(folder.rglob("*")):
            hidden = any(name[0] in "_." for name in path.relative_to(folder).parts)
            if path.name.endswith(ENDINGS) and not hidden and outputs.isdisjoint(path.parents):
                paths.append(path)
    else:
        names = [source]
        if not folder.exists():
            # `Path.glob` takes no absolute pattern.
            names = sorted(glob.glob(source, recursive=True))  # noqa: PTH207
        paths = [path for path in map(Path, names) if path.name[0] not in "_."]
        folder = Path(os.path.commonpath([path.parent for path in paths] or [folder]))
    for path in paths:
        if not path.name.endswith(ENDINGS):
            raise InputError(f"--input {source}: {path} is none of {', '.join(ENDINGS)}.")
    if not paths:
        raise InputError(f"--input {source}: there is no {', '.join(ENDINGS)} there.")
    return [Shard(path.absolute(), output / path.relative_to(folder)) for path in paths]


def read_rows(path: Path, count: int) -> Iterator[list[Row]]:
    """The rows of a file, at most ``count`` at a time.

    Raises:
        InputError: The file cannot be read, or a row is no JSON object or has too many cells.
    """
    done = 0
    try:
        for rows in _parquet(path, count) if path.suffix == ".parquet" else _lines(path, count):
            yield rows
            done += len(rows)
    except (OSError, EOFError, ValueError, RecursionError, csv.Error, zlib.error) as error:
        raise InputError(f"{path} cannot be read after row {done}: {error}") from error


def _parquet(path: Path, count: int) -> Iterator[list[Row]]:
    with _arrow().parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(count):
            yield batch.to_pylist()


def _lines(path: Path, count: int) -> Iterator[list[Row]]:
    # Characters of a cell; Python's limit is 131,072, and a document may be longer.
    csv.field_size_limit(1 << 30)
    # A table may begin with a byte order mark.
    with open_text(path, "rt", path.suffix == ".gz") as file:
        rows = _table_rows(file) if path.suffix == ".csv" else _json_rows(file)
        while chunk := list(itertools.islice(rows, count)):
            yield chunk


def _table_rows(file: Iterable[str]) -> Iterator[Row]:
    reader = csv.DictReader(file, strict=True)
    names = reader.fieldnames or []
    if len(set(names)) < len(names):
        raise ValueError(f"two columns have the same name: {', '.join(names)}")
    for row in reader:
        if None in row:
            raise ValueError("the next row has more cells than the header names columns")
        yield row


def _json_rows(file: Iterable[str]) -> Iterator[Row]:
    for line in file:
        if not line.strip():
            continue
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"the next line is no JSON object but {type(row).__name__}")
        # JSON can spell lone surrogates, which neither tokenizers nor UTF-8 accept.
        if "\\u" in line:
            row = json.loads(clean(json.dumps(row, ensure_ascii=False)))
        yield row


def open_text(path: Path, mode: str, compressed: bool) -> Any:
    """Open a text file in UTF-8, compressed by gzip or not."""
    encoding = "utf-8-sig" if mode == "rt" else "utf-8"
    opener: Callable[..., Any] = gzip.open if compressed else open
    return opener(path, mode, encoding=encoding, newline="")


def _arrow() -> Any:
    required("pyarrow.parquet", "Parquet files need pyarrow.", "parquet")
    return required("pyarrow", "Parquet files need pyarrow.", "parquet")


def form_of_file(path: Path, count: int) -> str:
    """The column that is scored, ``document`` or ``documents``, by the file's first rows.

    Raises:
        InputError: The rows cannot be read, or have not the columns that `form_of` wants.
    """
    rows = next(read_rows(path, count), [])
    if not rows:
        return "document"
    try:
        return form_of(dict.fromkeys(name for row in rows for name in row))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


@contextmanager
def row_writer(path: Path, source: Path, form: str) -> Iterator[Callable[[Sequence[Row]], object]]:
    """Give a function that writes rows of a file, with their scores, in the format of that file."""
    if source.suffix == ".parquet":
        pa = _arrow()
        schema = pa.parquet.read_schema(source)
        kinds = (pa.float64(), pa.bool_(), pa.bool_(), pa.string())
        for name, kind in zip(COLUMNS, kinds, strict=True):
            schema = schema.append(pa.field(name, pa.list_(kind) if form == "documents" else kind))
        with pa.parquet.ParquetWriter(path, schema) as output:
            yield lambda rows: output.write_table(pa.Table.from_pylist(rows, schema))
        return
    with open_text(path, "wt", source.suffix == ".gz") as file:
        if source.suffix == ".csv":
            with open_text(source, "rt", False) as table:
                names = next(csv.reader(table), [])
            writer = csv.DictWriter(file, [*names, *COLUMNS])
            writer.writeheader()
            yield writer.writerows
        else:
            yield lambda rows: file.writelines(
                json.dumps(row, ensure_ascii=False) + "\n" for row in rows
            )
