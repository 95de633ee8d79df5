"""Files of rows, cut into parts once and for all: each part is read, and later written, by itself.

The output is a folder: ``_plan.json`` says what was read, of which model, and where each part lies in the input;
``part-000000.parquet`` is the first part with its scores. A part appears only when it is complete, so that a run that
was killed goes on, and whoever does a part, in whatever order, the folder ends up the same.
"""

from __future__ import annotations

import base64
import glob
import gzip
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import InputError, MissingDependencyError
from ..method.template import clean
from ..partial_files import is_running, partial_of
from .pairs import COLUMNS, form_of

if TYPE_CHECKING:
    import pyarrow

PLAN = "_plan.json"
ROWS = 10_000
ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")
BLOCK = 1 << 20
SUMMARY = b"rsrank"
"""Key of a part's counts in its Parquet metadata."""


class SourceFile(BaseModel):
    """A file that was read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    size: int
    modified: int
    sha256: str
    rows: int


class Part(BaseModel):
    """Rows of one file. ``offset`` is the first one's byte in a file that can be entered there, else 0."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: int
    file: int
    start: int
    rows: int
    offset: int = 0


class Plan(BaseModel):
    """What an output folder holds or will hold."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: Literal[1] = 1
    settings: dict[str, Any]
    rows_per_part: int
    arrow_schema: str
    files: tuple[SourceFile, ...]
    parts: tuple[Part, ...]

    @property
    def schema_(self) -> pyarrow.Schema:
        """Of the input."""
        return arrow().ipc.read_schema(arrow().py_buffer(base64.b64decode(self.arrow_schema)))


def arrow() -> Any:
    """The library that reads and writes Parquet.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "Parquet files need pyarrow. Install with: pip install 'rsrank-rag[parquet]'"
        ) from error
    return pyarrow


def find(source: str) -> list[Path]:
    """The files of a file name, a folder or a pattern, sorted. What begins with ``_`` or ``.`` is left out.

    Raises:
        InputError: There are none, or one is neither JSON lines nor Parquet.
    """
    path = Path(source)
    if path.is_dir():
        found = [file for file in sorted(path.rglob("*")) if file.name.endswith(ENDINGS)]
    else:
        found = [path] if path.exists() else [Path(name) for name in sorted(glob.glob(source, recursive=True))]  # noqa: PTH207 - takes any path
        for file in found:
            if not file.name.endswith(ENDINGS):
                raise InputError(f"--input {source}: {file} is none of {', '.join(ENDINGS)}.")
    found = [file for file in found if file.is_file() and not file.name.startswith(("_", "."))]
    if not found:
        raise InputError(f"--input {source}: there is no {', '.join(ENDINGS)} there.")
    return found


# Planning


def plan(source: str, settings: Mapping[str, Any], rows_per_part: int) -> Plan:
    """Read the input once: every line must be JSON, and the columns of all files must agree.

    Raises:
        InputError: A file cannot be read or does not fit the others; it and its rows are named.
    """
    pa = arrow()
    files: list[SourceFile] = []
    parts: list[Part] = []
    schema = pa.schema([])
    for path in find(source):
        survey = _survey_parquet if path.suffix == ".parquet" else _survey_lines
        rows, digest = 0, hashlib.sha256()
        try:
            for found, offset, count in survey(path, rows_per_part, digest):
                schema = _joined(schema, found, f"{path}, rows {rows} to {rows + count - 1}")
                parts.append(Part(number=len(parts), file=len(files), start=rows, rows=count, offset=offset))
                rows += count
        except (OSError, EOFError, pa.ArrowInvalid) as error:
            raise InputError(f"{path} cannot be read after row {rows}: {error}") from error
        status = path.stat()
        files.append(
            SourceFile(
                path=str(path.absolute()),
                size=status.st_size,
                modified=status.st_mtime_ns,
                sha256=digest.hexdigest(),
                rows=rows,
            )
        )
    if not parts:
        raise InputError(f"--input {source}: there are no rows in {len(files)} files.")
    _check_types(schema)
    return Plan(
        settings=dict(settings),
        rows_per_part=rows_per_part,
        arrow_schema=base64.b64encode(schema.serialize().to_pybytes()).decode(),
        files=tuple(files),
        parts=tuple(parts),
    )


def _survey_parquet(path: Path, rows: int, digest: Any) -> Iterator[tuple[Any, int, int]]:
    """Schema, 0 and number of rows of each part; the digest is fed with the file."""
    with arrow().parquet.ParquetFile(path) as file:
        schema, total = file.schema_arrow.remove_metadata(), file.metadata.num_rows
    _feed(path, digest)
    for start in range(0, total, rows):
        yield schema, 0, min(rows, total - start)


def _survey_lines(path: Path, rows: int, digest: Any) -> Iterator[tuple[Any, int, int]]:
    """Schema, first byte and number of rows of each part; the digest is fed with the file."""
    batch: list[tuple[int, dict[str, Any]]] = []
    for number, (offset, line) in enumerate(_lines(path)):
        batch.append((offset, _parse(line, path, number)))
        if len(batch) == rows:
            yield _part_of(path, batch)
            batch = []
    if batch:
        yield _part_of(path, batch)
    _feed(path, digest)


def _part_of(path: Path, batch: list[tuple[int, dict[str, Any]]]) -> tuple[Any, int, int]:
    return _table([row for _, row in batch]).schema, 0 if path.suffix == ".gz" else batch[0][0], len(batch)


def _lines(path: Path, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank and the bytes they begin at (of the unpacked file)."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if line.strip():
                yield offset, line
            offset += len(line)


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
        if not isinstance(row, dict):
            raise ValueError(f"it is no object but {type(row).__name__}")
    except (ValueError, RecursionError) as error:  # also of an encoding that is not UTF-8
        raise InputError(f"{path}, row {number} (from 0) is no JSON object: {error}") from None
    cleaned: dict[str, Any] = _cleaned(row) if b"\\u" in line else row
    return cleaned


def _cleaned(value: Any) -> Any:
    """Without lone surrogates, which JSON can spell and Parquet cannot hold."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return {clean(key): _cleaned(item) for key, item in value.items()} if isinstance(value, dict) else value


def _table(rows: Sequence[Mapping[str, Any]], schema: Any = None) -> Any:
    """Rows as a table; a field that a row does not have is null."""
    pa = arrow()
    names = dict.fromkeys(name for row in rows for name in row) if schema is None else schema.names
    arrays = {}
    for name in names:
        try:
            arrays[name] = pa.array(
                [row.get(name) for row in rows], None if schema is None else schema.field(name).type
            )
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError) as error:
            raise pa.ArrowInvalid(f'column "{name}" holds values of several types ({error})') from None
    return pa.table(arrays)


def _joined(schema: Any, found: Any, where: str) -> Any:
    pa = arrow()
    try:
        return pa.unify_schemas([schema, found], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise InputError(f"{where}: the columns do not fit those of the rows before: {error}") from None


def _check_types(schema: Any) -> None:
    """Raise InputError if the columns that are scored hold something else than text."""
    types = arrow().types

    def is_text(kind: Any) -> bool:
        kind = kind.value_type if types.is_dictionary(kind) else kind
        return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))

    form = form_of(schema.names)
    for name in ("query", form):
        kind = schema.field(name).type
        inner = kind.value_type if name == "documents" and hasattr(kind, "value_type") else kind
        if not is_text(inner) or (name == "documents") == is_text(kind):
            raise InputError(
                f'Column "{name}" must hold {"lists of texts" if name == "documents" else "texts"}, got {kind}.'
            )


def digest_of(path: Path) -> str:
    """sha256 of a file."""
    digest = hashlib.sha256()
    _feed(path, digest)
    return digest.hexdigest()


def _feed(path: Path, digest: Any) -> None:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)


# The output folder


def open_output(output: Path, source: str, settings: Mapping[str, Any], rows_per_part: int) -> Plan:
    """Begin an output folder, or go on with one that was begun in just the same way.

    Raises:
        InputError: The folder holds something else, or was made of other input, another model or other settings; what
            differs is named.
    """
    path = output / PLAN
    if not path.exists():
        if output.exists() and not (output.is_dir() and all(file.suffix == ".partial" for file in output.iterdir())):
            raise InputError(f"--output {output} is no empty folder, and no output of rsrank score. Use another one.")
        made = plan(source, settings, rows_per_part)
        output.mkdir(parents=True, exist_ok=True)
        _write(path, made.model_dump_json().encode())
        return made
    try:
        found = Plan.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is damaged: {error}. Use another folder.") from None
    asked = {**settings, "rows_per_part": rows_per_part}
    begun = {**found.settings, "rows_per_part": found.rows_per_part}
    different = [
        f"{name}: {begun.get(name)!r} there, {asked.get(name)!r} asked for"
        for name in sorted(set(asked) | set(begun))
        if asked.get(name) != begun.get(name)
    ]
    files, other = _same_files(found.files, find(source))
    different += other
    if different:
        raise InputError(
            f"--output {output} was begun otherwise ({'; '.join(different)}). Ask for the same, or use another folder."
        )
    return found.model_copy(update={"files": files})


def _same_files(begun: Sequence[SourceFile], paths: Sequence[Path]) -> tuple[tuple[SourceFile, ...], list[str]]:
    """The files as they lie now, and which of them have another content."""
    if len(begun) != len(paths):
        return tuple(begun), [f"{len(begun)} input files there, {len(paths)} asked for"]
    files, different = [], []
    for file, path in zip(begun, paths, strict=True):
        status, now = path.stat(), str(path.absolute())
        untouched = (file.path, file.size, file.modified) == (now, status.st_size, status.st_mtime_ns)
        if not untouched and (file.size != status.st_size or file.sha256 != digest_of(path)):
            different.append(f"the content of {path}")
        files.append(file.model_copy(update={"path": now}))
    return tuple(files), different


def path_of(output: Path, part: Part) -> Path:
    """File of a part's scores."""
    return output / f"part-{part.number:06d}.parquet"


def missing(output: Path, made: Plan) -> list[Part]:
    """Parts that are not there yet; what killed runs left half written is removed."""
    for partial in output.glob("_*.partial"):  # of runs that were killed
        if not is_running(partial):
            partial.unlink(missing_ok=True)
    there = {path.name for path in output.glob("part-*.parquet")}
    return [part for part in made.parts if path_of(output, part).name not in there]


def read(made: Plan, part: Part) -> Any:
    """A part's rows as a table with the schema of the whole input.

    Raises:
        InputError: The file cannot be read any more.
    """
    pa, path = arrow(), Path(made.files[part.file].path)
    try:
        if path.suffix == ".parquet":
            return _read_parquet(path, part, made.schema_)
        before = part.start if path.suffix == ".gz" else 0  # it cannot be entered in the middle
        lines = itertools.islice(_lines(path, part.offset), before, before + part.rows)
        rows = [_parse(line, path, part.start + i) for i, (_, line) in enumerate(lines)]
        if len(rows) != part.rows:
            raise EOFError(f"it ends after {len(rows)} of them")
        return _table(rows, made.schema_)
    except (OSError, EOFError, pa.ArrowInvalid) as error:
        raise InputError(
            f"Rows {part.start} to {part.start + part.rows - 1} of {path} cannot be read: {error}. Every machine "
            "has to see the file by this name, and it must not change."
        ) from error


def _read_parquet(path: Path, part: Part, schema: Any) -> Any:
    pa = arrow()
    with pa.parquet.ParquetFile(path) as file:
        groups, first, start = list[int](), 0, 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if start < part.start + part.rows and start + rows > part.start:
                first = first if groups else start
                groups.append(group)
            start += rows
        table = file.read_row_groups(groups).slice(part.start - first, part.rows)
    columns = {
        field.name: table[field.name].cast(field.type)
        if field.name in table.column_names
        else pa.nulls(part.rows, field.type)
        for field in schema
    }
    return pa.table(columns)


def write(output: Path, part: Part, table: Any, found: Mapping[str, Sequence[Any]]) -> tuple[int, int]:
    """Write a part with its scores; it appears only when it is complete.

    Args:
        output: Folder.
        part: Which one.
        table: Its rows.
        found: What `PairScorer` added.

    Returns:
        How many pairs it has, and how many of them have an error.
    """
    pa = arrow()
    listed = "documents" in table.column_names
    for name, kind in zip(COLUMNS, (pa.float64(), pa.bool_(), pa.bool_(), pa.string()), strict=True):
        table = table.append_column(name, pa.array(found[name], pa.list_(kind) if listed else kind))
    errors = [error for row in found["error"] for error in row] if listed else list(found["error"])
    pairs, failed = len(errors), sum(error is not None for error in errors)
    summary = json.dumps({"pairs": pairs, "errors": failed}).encode()
    table = table.replace_schema_metadata({SUMMARY: summary})
    path = path_of(output, part)
    partial = partial_of(path.with_name(f"_{path.name}"))
    with partial.open("wb") as file:
        pa.parquet.write_table(table, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return pairs, failed


def finish(output: Path, made: Plan) -> tuple[int, int]:
    """Pairs and errors of a complete folder.

    Raises:
        InputError: A part is damaged.
    """
    pa = arrow()
    pairs = errors = 0
    for part in made.parts:
        path = path_of(output, part)
        try:
            summary = json.loads(pa.parquet.read_schema(path).metadata[SUMMARY])
        except (OSError, pa.ArrowInvalid, KeyError, TypeError) as error:
            raise InputError(f"{path} is damaged ({error}). Remove it and run the same command again.") from error
        pairs, errors = pairs + summary["pairs"], errors + summary["errors"]
    return pairs, errors


def _write(path: Path, content: bytes) -> None:
    partial = partial_of(path)
    partial.write_bytes(content)
    partial.replace(path)
