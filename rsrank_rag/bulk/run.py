"""Score files of rows."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..evaluation.datasets import opener
from ..partial_files import appearing, differences, remove_stale
from ..reranker import Reranker
from .files import Shard, find_shards, input_folder, read_rows
from .pairs import COLUMNS, PAIR, PairScorer, check_columns

# An output folder has a file of this name with the settings of its scores.
SETTINGS = "_settings.json"

# Rows that are scored together: enough to sort them into batches of similar length.
CHUNK = 4096


def score_files(
    source: str,
    output: str | Path,
    make: Callable[[], Reranker],
    *,
    settings: Mapping[str, Any],
    progress: Callable[..., Iterable[Any]] = lambda shards, total: shards,
) -> Counter[str]:
    """Score the rows of files, and write a file of the same name for each.

    An output file appears when it is complete. The same call after an interruption skips the
    files that are there and not older than their input. Rows keep their order.

    Args:
        source: A ``.jsonl`` or ``.jsonl.gz`` file, or a folder; columns as for `PairScorer`.
        output: Folder for the scored files.
        make: Loads the model.
        settings: What decides the scores, such as the ``model``'s name, as JSON. A folder that was
            begun with other settings, or for files of another folder, is not continued.
        progress: Wraps the files to score, as `tqdm.tqdm` does. It gets the files and, as
            ``total``, their number.

    Returns:
        Numbers of this run: ``files``, ``rows``, ``errors`` (rows without a score), ``skipped``
        (files that were there already).

    Raises:
        InputError: An input file cannot be used, or the folder is no output of these settings.
        RSRankError: The model fails on every pair.
    """
    folder = Path(output).absolute()
    shards = find_shards(source, folder)
    _check_folder(folder, {**settings, "input": str(input_folder(source))}, shards)
    remove_stale(folder)
    todo = [shard for shard in shards if not shard.is_done]
    scorer = PairScorer(make, str(settings.get("model", "the model")))
    numbers = Counter(skipped=len(shards) - len(todo))
    for shard in progress(todo, total=len(todo)):
        numbers.update(score_shard(scorer, shard))
    return numbers


def _check_folder(folder: Path, settings: Mapping[str, Any], shards: Iterable[Shard]) -> None:
    path = folder / SETTINGS
    if not path.exists() and any(shard.target.exists() for shard in shards):
        raise InputError(f"--output {folder} holds files of these names. Use another folder.")
    different = differences(path, settings)
    if different:
        raise InputError(
            f"--output {folder} was begun with other settings ({'; '.join(different)}). "
            "Use the same settings or another folder."
        )


def score_shard(scorer: PairScorer, shard: Shard) -> Counter[str]:
    """Write one file with its scores, a chunk of rows at a time.

    Returns:
        Numbers of this file: ``files`` (1), ``rows`` and ``errors``.

    Raises:
        InputError: The source cannot be read, or its columns cannot be used.
        RSRankError: The model fails on every pair.
    """
    numbers = Counter(files=1)
    source_rows = read_rows(shard.source)
    shard.target.parent.mkdir(parents=True, exist_ok=True)
    with appearing(shard.target) as partial_path, opener(shard.target)(partial_path, "wb") as file:
        while rows := list(islice(source_rows, CHUNK)):
            check_columns({name for row in rows for name in row}, f"Rows of {shard.source}")
            scored = scorer({name: [row.get(name) for row in rows] for name in PAIR})
            for place, row in enumerate(rows):
                row |= {name: scored[name][place] for name in COLUMNS}
                text = json.dumps(row, ensure_ascii=False) + "\n"
                # JSON can spell lone surrogates, which UTF-8 cannot.
                file.write(text.encode(errors="replace"))
            errors = len(rows) - scored["error"].count(None)
            numbers.update(rows=len(rows), errors=errors)
    return numbers
