"""Scoring files: here, or on a Ray cluster."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..adapters.systems import KINDS, parse
from ..artifact import hub
from ..artifact.config import INSIDE
from ..errors import InputError
from ..language_model.options import LoadOptions
from ..partial_files import digest_of
from ..reranker import Reranker
from . import files
from .files import Part, Plan
from .on_ray import Actors, each
from .pairs import PairScorer


@dataclass(frozen=True)
class Summary:
    """What is in a finished folder."""

    rows: int  # as many as in the input
    pairs: int  # queries with a document; more than rows where these hold lists of documents
    errors: int  # pairs without a score
    parts: int  # files
    found: int  # files that were there already


def _part_scorer(
    make: Callable[[], Reranker], name: str, plan: Plan, output: Path
) -> Callable[[Part], int]:
    """What scores parts one after another and returns how many rows each has."""
    scorer = PairScorer(make, name)

    def score(part: Part) -> int:
        table = files.read(plan, part)
        columns = [
            column for column in table.column_names if column in ("query", "document", "documents")
        ]
        found = scorer({column: table[column].to_pylist() for column in columns})
        files.write(output, plan, part, table, found)
        return part.rows

    return score


def model_identity(
    name: str, *, revision: str | None = None, local_files_only: bool = False
) -> str:
    """What tells a model from another: its name and a hash of what decides its scores, so far as it can be had here.

    Of an RSRank artifact config and B, and the language model's files: as the config records them, which is checked
    where it is loaded, or, of earlier releases, as they are. Of other systems the files of a local folder.
    """
    from ..artifact.identity import hashes

    kind, model = parse(name)
    found: dict[str, str] = {}
    if kind is KINDS["rsrank"]:
        folder = hub.resolve(model, revision, LoadOptions(local_files_only=local_files_only))
        config = hub.read_config(folder)
        hub.read_projection(folder, config)
        found = {file: digest_of(folder / file) for file in (hub.CONFIG, hub.PROJECTION)}
        spec = config.backbone
        model = "" if spec.files else str(folder / spec.name) if spec.name == INSIDE else spec.name
    if hub.is_folder(model):
        found |= hashes(Path(model))
    known = f" {hashlib.sha256(json.dumps(found).encode()).hexdigest()}" if found else ""
    return name + known + ("" if revision is None or kind is KINDS["rsrank"] else f" at {revision}")


def settled_dtype(
    load: LoadOptions, actors: Actors | None, name: str = "mini", revision: str | None = None
) -> str:
    """The dtype that those choose who do the work: it stands in the plan, and all of an output is computed in it."""
    here = partial(_dtype, load, name, revision)
    return (
        here(0)
        if actors is None
        else next(iter([*each(lambda: here, [0], replace(actors, count=1))]))
    )


def _dtype(load: LoadOptions, name: str, revision: str | None, _: object) -> str:
    """No function within another: Ray would copy `KINDS` with that, whose entries are told apart by ``is``."""
    kind, model = parse(name)
    return load.settled_dtype(
        int8=kind is KINDS["rsrank"] and hub.read_config(hub.resolve(model, revision, load)).int8
    )


def score_files(
    source: str,
    output: str | Path,
    make: Callable[[], Reranker],
    *,
    model: str,
    settings: Mapping[str, Any] | None = None,
    rows_per_part: int = files.ROWS,
    actors: Actors | None = None,
    progress: Callable[[Plan, Iterable[int]], Iterable[int]] | None = None,
) -> Summary:
    """Score the rows of files and write them, with their scores, into a folder.

    The same call goes on with what is missing after an interruption. Whatever the engine, the folder ends up the same,
    and its files hold the rows in input order.

    `source`: a ``.jsonl``, ``.jsonl.gz``, ``.csv`` or ``.parquet`` file, a folder or a pattern; columns as for
    `PairScorer`. `make`: loads the model; picklable if Ray ``actors`` do the work. `model`: what it is, and
    `settings`: what else changes scores; an output is not continued with others. `rows_per_part`: as many are lost at
    most for each process that is killed. `progress`: wraps the numbers of rows that are done, as they come.
    """
    if rows_per_part < 1:
        raise InputError(f"--rows-per-part must be at least 1, got {rows_per_part}.")
    folder = Path(output).absolute()
    plan = files.open_output(
        folder, str(source), {"model": model, **(settings or {})}, rows_per_part
    )
    todo = files.missing(folder, plan)
    # A plan may name many parts, which come one by one: an actor keeps what it needs to read them.
    maker = partial(_part_scorer, make, model, plan.model_copy(update={"parts": ()}), folder)
    done = map(maker(), todo) if actors is None else each(maker, todo, actors)
    for _ in done if progress is None else progress(plan, done):
        pass
    pairs, errors = files.finish(folder, plan)
    rows = sum(part.rows for part in plan.parts)
    return Summary(rows, pairs, errors, len(plan.parts), len(plan.parts) - len(todo))
