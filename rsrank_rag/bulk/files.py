"""Files of rows, cut into parts once and for all: each part is read, and later written, by itself.

The output is a folder: ``_plan.json`` says what was read, of which model, and where each part lies in the input;
``part-000000.parquet`` is the first part with its scores. A part appears only when it is complete, and counts as there
if it is of this plan and each of its bytes as it was written. So a run that was killed goes on, whoever does a part.
"""

import base64
import csv
import gzip
import hashlib
import io
import itertools
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from ..errors import InputError, needs
from ..method.template import clean
from ..partial_files import appearing, digest_of, is_running, write_text
from .pairs import COLUMNS, form_of

with needs("Parquet files need pyarrow.", "parquet", "pyarrow"):
    import pyarrow as pa
    from pyarrow import parquet

PLAN = "_plan.json"
ROWS = 10_000
ENDINGS = (".jsonl", ".jsonl.gz", ".csv", ".parquet")
SUMMARY = "rsrank"  # key of what a part says of itself, in its Parquet metadata

BLANK = "0" * 64
SEAL = b'"sha256":"'  # what a file's own hash stands behind, the last time that this occurs in it


class SourceFile(BaseModel, extra="forbid", frozen=True):
    """A file that was read."""

    path: str
    size: int
    modified: int
    sha256: str
    rows: int


class Part(BaseModel, extra="forbid", frozen=True):
    """Rows of one file. ``offset`` is the first one's byte in a file that can be entered there, else 0."""

    number: int
    file: int
    start: int
    rows: int
    offset: int = 0

    @property
    def name(self) -> str:
        """Of its file in the output folder."""
        return f"part-{self.number:06d}.parquet"


class Plan(BaseModel, extra="forbid", frozen=True):
    """What an output folder holds or will hold. ``sha256`` is the file's: see `sealed`."""

    format_version: Literal[2] = 2
    settings: dict[str, Any]
    rows_per_part: int
    arrow_schema: str
    files: tuple[SourceFile, ...]
    parts: tuple[Part, ...]
    sha256: str = BLANK

    @property
    def columns(self) -> Any:
        """Arrow schema of the input."""
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.arrow_schema)))


def find(source: str) -> list[Path]:
    """The files of a file name, a folder or a pattern, sorted.

    What begins with ``_`` or ``.`` is left out, as are, in a folder, other folders of that kind and what was written.
    """
    path = Path(source)
    if path.is_dir():
        outputs = {file.parent for file in path.rglob(PLAN)} - {
            path
        }  # of earlier runs, in the folder that is read
        found = [
            file
            for file in sorted(path.rglob("*"))
            if file.name.endswith(ENDINGS) and file.parent not in outputs
        ]
        found = [
            file
            for file in found
            if not any(name[0] in "_." for name in file.relative_to(path).parts)
        ]
    else:
        found = (
            [path]
            if path.exists()
            else sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        )
    for file in found:
        if not file.name.endswith(ENDINGS):
            raise InputError(f"--input {source}: {file} is none of {', '.join(ENDINGS)}.")
    found = [file for file in found if file.is_file() and not file.name.startswith(("_", "."))]
    if not found:
        raise InputError(f"--input {source}: there is no {', '.join(ENDINGS)} there.")
    return found


# The input


def plan(source: str, settings: Mapping[str, Any], rows_per_part: int) -> Plan:
    """Read the input once: every line must be JSON, and the columns of all files must agree; else InputError."""
    files, parts, schema = list[SourceFile](), list[Part](), pa.schema([])
    for path in find(source):
        rows = 0
        try:
            for found, offset, count in _survey(path, rows_per_part):
                try:
                    schema = pa.unify_schemas([schema, found], promote_options="permissive")
                except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                    raise InputError(
                        f"{path}, rows {rows} to {rows + count - 1}: the columns do not fit those of the rows before: "
                        f"{error}"
                    ) from error
                parts.append(
                    Part(number=len(parts), file=len(files), start=rows, rows=count, offset=offset)
                )
                rows += count
            status, digest = path.stat(), digest_of(path)
        except (
            OSError,
            EOFError,
            pa.ArrowInvalid,
            csv.Error,
            zlib.error,
            UnicodeDecodeError,
        ) as error:
            raise InputError(f"{path} cannot be read after row {rows}: {error}") from error
        name, size, modified = str(path.absolute()), status.st_size, status.st_mtime_ns
        files.append(SourceFile(path=name, size=size, modified=modified, sha256=digest, rows=rows))
    if not parts:
        raise InputError(f"--input {source}: there are no rows in {len(files)} files.")
    _check_types(schema)
    packed = base64.b64encode(schema.serialize().to_pybytes()).decode()
    about: dict[str, Any] = {
        "settings": dict(settings),
        "rows_per_part": rows_per_part,
        "arrow_schema": packed,
    }
    return Plan(**about, files=tuple(files), parts=tuple(parts))


def _survey(path: Path, rows: int) -> Iterator[tuple[Any, int, int]]:
    """Schema, first byte (0 where a file cannot be entered) and number of rows of each part."""
    if path.suffix == ".parquet":
        with parquet.ParquetFile(path) as file:
            schema, total = file.schema_arrow.remove_metadata(), file.metadata.num_rows
        yield from ((schema, 0, min(rows, total - start)) for start in range(0, total, rows))
        return
    lines = enumerate(_lines(path))
    while batch := list(itertools.islice(lines, rows)):
        table = _table([_parse(line, path, number) for number, (_, line) in batch])
        yield table.schema, batch[0][1][0] if path.suffix == ".jsonl" else 0, len(batch)


def _lines(path: Path, offset: int = 0) -> Iterator[tuple[int, bytes | dict[str, Any]]]:
    """Lines that are not blank, or rows of a CSV, and the bytes they begin at (of the unpacked file; a CSV's are 0)."""
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8-sig") as table:
            csv.field_size_limit(1 << 30)  # characters of a cell; 131,072 unless one says so
            reader = csv.DictReader(table, strict=True)
            if twice := [
                name
                for name in reader.fieldnames or ()
                if list(reader.fieldnames or ()).count(name) > 1
            ]:
                raise InputError(f"{path} has two columns called {twice[0]!r}. Rename one of them.")
            yield from ((0, row) for row in reader)
        return
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if line.strip():
                yield offset, line
            offset += len(line)


def _parse(line: bytes | dict[str, Any], path: Path, number: int) -> dict[str, Any]:
    if isinstance(line, dict):
        if None in line:
            raise InputError(
                f"{path}, row {number} (from 0) has more cells than the header names columns."
            )
        return line
    try:
        # Parquet has no objects without fields: they are carried along as null.
        row = json.loads(
            line.removeprefix(b"\xef\xbb\xbf"), object_hook=lambda found: found or None
        )
        if not isinstance(row, dict):
            raise ValueError(f"it is no object but {type(row).__name__}")
    except (ValueError, RecursionError) as error:  # also of an encoding that is not UTF-8
        raise InputError(f"{path}, row {number} (from 0) is no JSON object: {error}") from None
    if b"\\u" in line:  # JSON can spell lone surrogates, and Parquet cannot hold them
        row = json.loads(clean(json.dumps(row, ensure_ascii=False)))
    return dict(row)


def _table(rows: Sequence[Mapping[str, Any]], schema: Any = None) -> Any:
    """Rows as a table; a field that a row does not have is null."""
    names = dict.fromkeys(name for row in rows for name in row) if schema is None else schema.names
    arrays = {}
    for name in names:
        kind = None if schema is None else schema.field(name).type
        try:
            arrays[name] = pa.array([row.get(name) for row in rows], kind)
        except (
            pa.ArrowInvalid,
            pa.ArrowTypeError,
            pa.ArrowNotImplementedError,
            OverflowError,
        ) as error:
            raise pa.ArrowInvalid(
                f'column "{name}" holds values of several types ({error})'
            ) from None
    return pa.table(arrays)


def _check_types(schema: Any) -> None:
    """Raise InputError if the columns that are scored hold something else than text."""
    for name in ("query", form_of(schema.names)):
        kind = schema.field(name).type
        listed = isinstance(kind, (pa.ListType, pa.LargeListType))
        found = kind.value_type if listed else kind
        if (
            listed and pa.types.is_struct(found) and found.get_field_index("text") >= 0
        ):  # as `rsrank evaluate` does
            found = found.field("text").type
        found = found.value_type if pa.types.is_dictionary(found) else found
        if found not in (pa.string(), pa.large_string(), pa.string_view()) or listed != (
            name == "documents"
        ):
            wanted = "lists of texts" if name == "documents" else "texts"
            raise InputError(f'Column "{name}" must hold {wanted}, got {kind}.')


def read(made: Plan, part: Part) -> Any:
    """A part's rows as a table with the schema of the whole input; raises InputError if they are there no more."""
    path = Path(made.files[part.file].path)
    try:
        if path.suffix == ".parquet":
            return _read_parquet(path, part, made.columns)
        before = (
            0 if path.suffix == ".jsonl" else part.start
        )  # others cannot be entered in the middle
        lines = itertools.islice(_lines(path, part.offset), before, before + part.rows)
        rows = [_parse(line, path, part.start + i) for i, (_, line) in enumerate(lines)]
        if len(rows) != part.rows:
            raise EOFError(f"it ends after {len(rows)} of them")
        return _table(rows, made.columns)
    except (OSError, EOFError, pa.ArrowInvalid, csv.Error, zlib.error, UnicodeDecodeError) as error:
        raise InputError(
            f"Rows {part.start} to {part.start + part.rows - 1} of {path} cannot be read: {error}. Every machine "
            "has to see the file by this name, and it must not change."
        ) from error


def _read_parquet(path: Path, part: Part, schema: Any) -> Any:
    with parquet.ParquetFile(path) as file:
        starts = [
            0,
            *itertools.accumulate(
                file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)
            ),
        ]
        pairs = enumerate(itertools.pairwise(starts))
        groups = [
            g for g, (start, end) in pairs if end > part.start and start < part.start + part.rows
        ]
        table = (
            file.read_row_groups(groups)
            .slice(part.start - starts[groups[0]], part.rows)
            .replace_schema_metadata()
        )
    return pa.concat_tables([schema.empty_table(), table], promote_options="permissive")


# The output folder


def open_output(output: Path, source: str, settings: Mapping[str, Any], rows_per_part: int) -> Plan:
    """Begin an output folder, or go on with one that was begun in just the same way; InputError names what differs."""
    path = output / PLAN
    if not path.exists():
        if output.exists() and not (
            output.is_dir() and all(file.suffix == ".partial" for file in output.iterdir())
        ):
            raise InputError(
                f"--output {output} is no empty folder, and no output of rsrank score. Use another one."
            )
        made = plan(source, settings, rows_per_part)
        output.mkdir(parents=True, exist_ok=True)
        _write_whole(path, made.model_dump_json().encode())
    found = begun(output)
    paths = find(source)
    there = {
        **found.settings,
        "rows_per_part": found.rows_per_part,
        "input files": len(found.files),
    }
    asked = {**settings, "rows_per_part": rows_per_part, "input files": len(paths)}
    pairs = [(name, there.get(name), asked.get(name)) for name in sorted({*there, *asked})]
    different = [
        f"{name}: {old!r} there, {new!r} asked for" for name, old, new in pairs if old != new
    ]
    if len(found.files) == len(paths):
        different += [
            f"the content of {now}"
            for file, now in zip(found.files, paths, strict=True)
            if _new(file, now)
        ]
    if different:
        raise InputError(
            f"--output {output} was begun otherwise ({'; '.join(different)}). Ask for the same, or use another folder."
        )
    places = zip(found.files, paths, strict=True)
    moved = tuple(file.model_copy(update={"path": str(now.absolute())}) for file, now in places)
    return found.model_copy(update={"files": moved})


def begun(output: Path) -> Plan:
    """The plan of an output folder; InputError if it is damaged."""
    path = output / PLAN
    try:
        content = path.read_bytes()
        if sealed(content) != content:
            raise InputError(f"{path} is damaged. Use another folder.")
        return Plan.model_validate_json(content)
    except (OSError, ValidationError) as error:
        raise InputError(f"{path} cannot be read: {error}. Use another folder.") from None


def sealed(content: bytes) -> bytes:
    """A file that holds the sha256 of everything else in it, behind the last `SEAL`; the same bytes if it did so."""
    place = content.rfind(SEAL) + len(SEAL)
    before, after = content[:place], content[place + len(BLANK) :]
    return before + hashlib.sha256(before + after).hexdigest().encode() + after


def _new(file: SourceFile, path: Path) -> bool:
    """Whether the content is another one than it was; a file that nobody has touched is not read for that."""
    untouched = (file.path, file.modified) == (str(path.absolute()), path.stat().st_mtime_ns)
    return file.size != path.stat().st_size or not (untouched or file.sha256 == digest_of(path))


def missing(output: Path, made: Plan) -> list[Part]:
    """Parts that are not there, damaged or another's; what killed runs left half written is removed."""
    for partial in output.glob("_*.partial"):
        if not is_running(partial):
            partial.unlink(missing_ok=True)
    return [part for part in made.parts if not _is_there(output / part.name, made, part)]


def _is_there(path: Path, made: Plan, part: Part) -> bool:
    """Whether a file is this part, every byte as it was written."""
    content = path.read_bytes() if path.exists() else b""
    if not content or sealed(content) != content:  # nobody should try to read it as Parquet
        return False
    said = _said(pa.BufferReader(content))
    return (said.get("plan"), said.get("part")) == (made.sha256, part.number)


def _said(file: Any) -> dict[str, Any]:
    """What a part says of itself."""
    found = parquet.read_metadata(file).metadata or {}
    said: dict[str, Any] = json.loads(found.get(SUMMARY.encode(), "{}"))
    return said


def write(
    output: Path, made: Plan, part: Part, table: Any, found: Mapping[str, Sequence[Any]]
) -> None:
    """Write a part's rows with the columns that `PairScorer` found; the file appears only when it is complete."""
    listed = "documents" in table.column_names
    for name, kind in zip(
        COLUMNS, (pa.float64(), pa.bool_(), pa.bool_(), pa.string()), strict=True
    ):
        table = table.append_column(name, pa.array(found[name], pa.list_(kind) if listed else kind))
    errors = [error for row in found["error"] for error in row] if listed else list(found["error"])
    failed = sum(error is not None for error in errors)
    said = {
        **made.settings,
        "pairs": len(errors),
        "errors": failed,
        "part": part.number,
        "plan": made.sha256,
    }
    said["sha256"] = BLANK
    whole = io.BytesIO()
    with parquet.ParquetWriter(whole, table.schema) as file:
        file.write_table(table)
        file.add_key_value_metadata({SUMMARY: json.dumps(said, separators=(",", ":"))})
    _write_whole(output / part.name, whole.getvalue())


def finish(output: Path, made: Plan) -> tuple[int, int]:
    """Numbers of pairs and errors in a complete folder; raises InputError if a part cannot be read."""
    pairs = errors = 0
    for part in made.parts:
        path = output / part.name
        try:
            said = _said(path)
            pairs, errors = pairs + said["pairs"], errors + said["errors"]
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            raise InputError(f"{path} is damaged ({error}). Run the same command again.") from error
    return pairs, errors


def write_lines(output: Path) -> None:
    """Write what a complete folder holds as JSON lines, too: a file beside each part's."""
    for path in sorted(output.glob("part-*.parquet")):
        rows = parquet.read_table(path).to_pylist()
        text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        write_text(path.with_suffix(".jsonl"), text)


def _write_whole(path: Path, content: bytes) -> None:
    """Have a file, with the hash of its content in it, appear only when all of it is on the disk."""
    with appearing(path, prefix="_") as partial, partial.open("wb") as file:
        file.write(sealed(content))
        file.flush()
        os.fsync(file.fileno())
