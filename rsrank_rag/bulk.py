"""Score a file of pairs, in JSON lines."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import InputError, RSRankError
from .evaluation.datasets import opener, read_lines
from .partial_files import appearing, remove_stale
from .ranking.rule import passes
from .reranker import Pair, Reranker
from .service.engine import Engine, ProcessLostError
from .service.messages import Outcome, Task

ENDINGS = (".jsonl", ".jsonl.gz")

# The columns that are read, and those that are added.
PAIR = ("query", "document")
COLUMNS = ("score", "above_threshold", "truncated", "error")

# A model that fails on this pair fails on every pair.
SIMPLE_TASK = Task(Pair("Which animal gives milk?", "The cow gives milk."))

# Rows that are scored together: enough to sort them into batches of similar length. Rows of many
# bytes are scored in smaller chunks.
CHUNK = 4096
CHUNK_BYTES = 16_000_000

Row = dict[str, Any]


def score_file(
    source: Path,
    output: Path,
    load: Callable[[], Reranker],
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Counter[str]:
    """Write the rows of a file with their scores, in the same order.

    The output appears when it is complete, in place of an earlier one. Added to each row are:

    - ``score``: on the model's scale, `BLANK_SCORE` for a blank document; null if there is an
      error.
    - ``above_threshold``: whether the score is above the model's native threshold. The rest of the
      rule needs all documents of a query. False for a blank document; null without a score or
      without such a threshold.
    - ``truncated``: whether the document's end, or the middle of a long query, was not read.
    - ``error``: why there is no score, else null.

    Args:
        source: A ``.jsonl`` or ``.jsonl.gz`` file, whose rows have a ``query`` and a ``document``.
        output: The file to write, with one of these endings.
        load: Loads the model, when the first rows have been read.
        progress: Wraps the chunks of rows, as `tqdm.tqdm` does.

    Returns:
        Numbers of ``rows`` and ``errors`` (rows without a score).

    Raises:
        InputError: The source cannot be used or changed meanwhile, or the output has no such name.
        RSRankError: The model cannot be loaded, or fails on every pair.
    """
    _check_paths(source, output)
    output.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(output.parent)
    before = _version(source)
    numbers = Counter[str]()
    engine: Engine | None = None
    with appearing(output) as partial_path:
        with opener(output)(partial_path, "wb") as file:
            for rows in progress(_chunks(source)):
                engine = engine or Engine(load())
                _add_scores(rows, engine)
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
        InputError: The file cannot be read, or a line is no JSON object with the columns of `PAIR`
            and without those of `COLUMNS`.
    """
    rows: list[Row] = []
    size = 0
    for place, line in read_lines(path):
        try:
            row = json.loads(line, parse_float=_finite, parse_constant=_finite)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{place} is no JSON: {error}") from error
        if not isinstance(row, dict) or not row.keys() >= {*PAIR}:
            raise InputError(f'{place} is no JSON object with a "query" and a "document".')
        taken = [name for name in COLUMNS if name in row]
        if taken:
            raise InputError(
                f"{place} has {', '.join(taken)} already, which would be overwritten. "
                "Rename these columns, or leave them out."
            )
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


def _add_scores(rows: Sequence[Row], engine: Engine) -> None:
    """Add `COLUMNS` to rows."""
    scorable = []
    tasks = []
    for row in rows:
        row |= dict.fromkeys(COLUMNS)
        if isinstance(row["query"], str) and isinstance(row["document"], str):
            scorable.append(row)
            tasks.append(Task(Pair(row["query"], row["document"])))
        else:
            row["error"] = "The query or the document is no text."
    threshold = engine.reranker.threshold
    for row, outcome in zip(scorable, _outcomes(tasks, engine), strict=True):
        scored = outcome.scored
        if scored is None:
            row["error"] = outcome.error
            continue
        row["score"] = scored.score
        row["truncated"] = scored.truncated or outcome.query_truncated
        if threshold is not None:
            row["above_threshold"] = passes(scored.score, threshold)


def _outcomes(tasks: Sequence[Task], engine: Engine) -> list[Outcome]:
    """Score pairs.

    Raises:
        RSRankError: The model fails on a simple pair, too: it must not fill files with errors.
    """
    try:
        outcomes = engine.run(tasks)
        if not any(outcome.model_failed for outcome in outcomes):
            return outcomes
        (simple,) = engine.run([SIMPLE_TASK])
        if not simple.model_failed:
            return outcomes
        reason = f"it {simple.error}"
    except ProcessLostError as error:
        reason = f"its device does not answer any more: {error.__cause__}"
    raise RSRankError(f"The model fails on every pair, even on a simple one ({reason}).")
