"""Labelled passages: one query a line, with its documents and which of them are relevant."""

import gzip
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, StrictBool, ValidationError

from ..errors import InputError
from ..passages.titles import with_title


class LabelledDocument(BaseModel, frozen=True):
    """A passage and its label. Other fields of the line are ignored."""

    id: str
    text: str
    title: str | None = None
    relevant: StrictBool

    def content(self, *, titles: bool = True) -> str:
        """What a reranker reads: the text, with the title on a line before it if there is one."""
        return with_title(self.text, self.title if titles else None)


class LabelledQuery(BaseModel, frozen=True):
    """A query with its candidate documents."""

    id: str
    query: str
    documents: tuple[LabelledDocument, ...]


def dataset_name(path: str | Path) -> str:
    """The file's stem: its name without ``.jsonl`` or ``.jsonl.gz``.

    >>> dataset_name("dev/hotpotqa.sentence.jsonl.gz")
    'hotpotqa.sentence'
    """
    return Path(path).name.removesuffix(".gz").removesuffix(".jsonl")


def read_sets(paths: Iterable[str | Path]) -> dict[str, list[LabelledQuery]]:
    """The queries of each file, by its name, or by its path if files share a name.

    A file that is given twice is read once.
    """
    files = list(dict.fromkeys(map(Path, paths)))
    names = [dataset_name(path) for path in files]
    sets = {}
    for path, name in zip(files, names, strict=True):
        if names.count(name) > 1:
            name = str(path)
        sets[name] = read_labelled(path)
    return sets


def read_labelled(path: str | Path) -> list[LabelledQuery]:
    """Read ``.jsonl`` or ``.jsonl.gz``.

    Raises:
        InputError: There is no such file, or it cannot be read; the message has the number of a
            line that is wrong.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"There is no data file {path}.")
    opener: Callable[..., Any] = open
    if path.suffix == ".gz":
        opener = gzip.open
    queries = []
    try:
        # JSON may contain other line separators than this one.
        with opener(path, "rt", encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    queries.append(_query(line, f"{path}, line {number}"))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{path} could not be read: {error}") from error
    if not queries:
        raise InputError(f"{path} holds no queries.")
    return queries


def _query(line: str, place: str) -> LabelledQuery:
    try:
        return LabelledQuery.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "line"
        raise InputError(
            f"{place}: {field}: {first['msg']}. Each line must be "
            '{"id", "query", "documents": [{"id", "text", "relevant": true|false, "title"?}]}.'
        ) from None
