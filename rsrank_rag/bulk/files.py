"""Score a file of rows, in JSON lines."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..evaluation.datasets import opener, read_lines
from ..partial_files import appearing, remove_stale
from .columns import COLUMNS, PAIR, PairScorer, check_columns

ENDINGS = (".jsonl", ".jsonl.gz")

# Rows that are scored together: enough to sort them into batches of similar length. Rows of many
# bytes are scored in smaller chunks.
CHUNK = 4096
CHUNK_BYTES = 16_000_000

Row = dict[str, Any]


def score_file(
    source: Path,
    output: Path,
    scorer: PairScorer,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Counter[str]:
    """Write the rows of a file with their scores, in the same order.

    The output appears when it is complete, in place of an earlier one.

    Args:
        source: A ``.jsonl`` or ``.jsonl.gz`` file; columns as for `PairScorer`.
        output: The file to write, with one of these endings.
        scorer: Scores rows.
        progress: Wraps the chunks of rows, as `tqdm.tqdm` does.

    Returns:
        Numbers of ``rows`` and ``errors`` (rows without a score).

    Raises:
        InputError: The source cannot be used or changed meanwhile, or the output has no such name.
        RSRankError: The model fails on every pair.
    """
    _check_paths(source, output)
    output.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(output.parent)
    before = _version(source)
    numbers = Counter[str]()
    with appearing(output) as partial_path:
        with opener(output)(partial_path, "wb") as file:
            for rows in progress(_chunks(source)):
                _add_scores(rows, scorer, f"Rows of {source}")
                for row in rows:
                    text = json.dumps(row, ensure_ascii=False) + "\n"
                    # JSON can spell lone surrogates, which UTF-8 cannot.
                    file.write(text.encode(errors="replace"))
                    numbers.update(rows=1, errors=row["error"] is not None)
        if _version(source) != before:
            raise InputError(f"{source} changed while it was read. Nothing was written.")
    return numbers


def _check_paths(source: Path, output: Path) -> None:
    # A pipe has neither a size nor a time.
    if not source.is_file() or not source.name.endswith(ENDINGS):
        raise InputError(f"--input {source} is no file that ends in {' or '.join(ENDINGS)}.")
    # A name that is too long is an error now, not after the work.
    if output.is_dir() or not output.name.endswith(ENDINGS):
        raise InputError(f"--output {output} must be a file that ends in {' or '.join(ENDINGS)}.")
    if output.exists() and output.samefile(source):
        raise InputError("--output is the file of --input. Name another file.")


def _version(path: Path) -> tuple[int, int, int]:
    """What changes when a file is written or replaced."""
    state = path.stat()
    return state.st_ino, state.st_size, state.st_mtime_ns


def _chunks(path: Path) -> Iterator[list[Row]]:
    """The rows of a file, in chunks.

    Raises:
        InputError: The file cannot be read, or a line is no JSON object.
    """
    rows: list[Row] = []
    size = 0
    for place, line in read_lines(path):
        try:
            row = json.loads(line, parse_float=_finite, parse_constant=_finite)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{place} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise InputError(f"{place} is no JSON object.")
        rows.append(row)
        size += len(line)
        if len(rows) == CHUNK or size >= CHUNK_BYTES:
            yield rows
            rows = []
            size = 0
    if rows:
        yield rows


def _finite(text: str) -> float:
    """A number of JSON, which knows no NaN, and no numbers that are infinite in 64 bits."""
    number = float(text)
    if math.isfinite(number):
        return number
    raise ValueError(f"{text} is no finite number")


def _add_scores(rows: list[Row], scorer: PairScorer, name: str) -> None:
    check_columns({column for row in rows for column in row}, name)
    scored = scorer({column: [row.get(column) for row in rows] for column in PAIR})
    for place, row in enumerate(rows):
        row.update({column: scored[column][place] for column in COLUMNS})
