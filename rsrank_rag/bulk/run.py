"""Score files: in this process, or by actors on a Ray cluster."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..partial_files import appearing, is_running, write_text
from ..reranker import Reranker
from .files import SETTINGS, Shard, find_shards, form_of_file, read_rows, row_writer
from .on_ray import Actors, each
from .pairs import CHUNK, COLUMNS, PairScorer


def score_files(
    source: str,
    output: str | Path,
    make: Callable[[], Reranker],
    *,
    settings: Mapping[str, Any],
    actors: Actors | None = None,
    progress: Callable[..., Iterable[Any]] | None = None,
) -> Counter[str]:
    """Score the rows of files, and write a file of the same format and name for each.

    An output file appears when it is complete. The same call after an interruption skips the
    files that are there and not older than their input. Rows keep their order.

    Args:
        source: A ``.jsonl``, ``.jsonl.gz``, ``.csv`` or ``.parquet`` file, a folder or a pattern;
            columns as for `PairScorer`.
        output: Folder for the scored files.
        make: Loads the model; picklable if actors do the work.
        settings: What decides the scores, such as the ``model``'s name, as JSON. A folder that was
            begun with other settings is not continued.
        actors: Who does the work; None for this process.
        progress: Wraps the results as they come, as `rich.progress.track` does. It gets the results
            and, as ``total``, their number.

    Returns:
        Numbers of this run: ``files``, ``rows``, ``pairs`` (more than rows if these hold lists of
        documents), ``errors`` (pairs without a score), ``skipped`` (files that were there already).

    Raises:
        InputError: An input file cannot be used, or the folder is no output of these settings.
        RSRankError: The model fails on every pair, or an actor cannot go on.
    """
    folder = Path(output).absolute()
    shards = find_shards(source, folder)
    _check_settings(folder, settings)
    todo = [shard for shard in shards if not shard.is_done]
    for shard in todo:
        form_of_file(shard.source, CHUNK)
    write_text(folder / SETTINGS, json.dumps(settings, indent=1))
    for stale in folder.rglob("*.partial"):
        if not is_running(stale):
            stale.unlink(missing_ok=True)
    make_worker = partial(_make_worker, make, str(settings.get("model", "the model")))
    results: Iterable[Any]
    results = map(make_worker(), todo) if actors is None else each(make_worker, todo, actors)
    if progress is not None:
        results = progress(results, total=len(todo))
    return sum(results, Counter(skipped=len(shards) - len(todo)))


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    path = folder / SETTINGS
    if not path.exists():
        # A file of this name has itself as content.
        content = folder.iterdir() if folder.is_dir() else folder.parent.glob(folder.name)
        if any(file.suffix != ".partial" for file in content):
            raise InputError(
                f"--output {folder} is neither empty nor an output of rsrank score. Use another."
            )
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    differences = []
    for name, value in settings.items():
        if before.get(name) != value:
            differences.append(f"{name}: {before.get(name)!r} there, {value!r} now")
    if differences:
        raise InputError(
            f"--output {folder} was begun with other settings ({'; '.join(differences)}). "
            "Use the same settings or another folder."
        )


def _make_worker(make: Callable[[], Reranker], name: str) -> Callable[[Shard], Counter[str]]:
    return partial(score_shard, PairScorer(make, name))


def score_shard(scorer: PairScorer, shard: Shard) -> Counter[str]:
    """Write one file with its scores, a chunk of rows at a time; return the numbers."""
    form = form_of_file(shard.source, CHUNK)
    numbers = Counter(files=1)
    shard.target.parent.mkdir(parents=True, exist_ok=True)
    with (
        appearing(shard.target, prefix="_") as partial_path,
        row_writer(partial_path, shard.source, form) as write,
    ):
        for rows in read_rows(shard.source, CHUNK):
            scored = scorer({name: [row.get(name) for row in rows] for name in ("query", form)})
            for place, row in enumerate(rows):
                row |= {name: scored[name][place] for name in COLUMNS}
                errors = row["error"] if form == "documents" else [row["error"]]
                numbers.update(pairs=len(errors), errors=len(errors) - errors.count(None))
            write(rows)
            numbers.update(rows=len(rows))
    return numbers
