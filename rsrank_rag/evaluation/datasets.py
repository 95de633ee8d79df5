"""Labelled passages: one query a line, with its documents and which of them are relevant."""

import codecs
import gzip
import logging
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, StrictBool, ValidationError

from ..errors import InputError, problems_of
from ..reading.documents import lines_before

logger = logging.getLogger(__name__)


class LabelledDocument(BaseModel, frozen=True):
    """A passage and its label. Other fields of the line are ignored."""

    id: str
    text: str
    title: str | None = None
    relevant: StrictBool

    def content(self) -> str:
        """What a reranker reads: the text, with the title on a line before it if there is one."""
        return lines_before(self.text, {"title": self.title}, ("title",)) + self.text


class LabelledQuery(BaseModel, frozen=True):
    """A query with its candidate documents."""

    id: str
    query: str = Field(pattern=r"\S")
    documents: tuple[LabelledDocument, ...]


LabelledSets = Mapping[str, Sequence[LabelledQuery]]
"""Queries by the name of their set."""


def dataset_name(path: str | Path) -> str:
    """The file's stem: its name without ``.jsonl`` or ``.jsonl.gz``.

    >>> dataset_name("dev/hotpotqa.sentence.jsonl.gz")
    'hotpotqa.sentence'
    """
    return Path(path).name.removesuffix(".gz").removesuffix(".jsonl")


def warn_of_reuse(model: str, used: Collection[str], names: Iterable[str]) -> None:
    """Log a warning for each set whose labels may have trained a model or chosen its threshold.

    Args:
        model: The model's name.
        used: See `Reranker.labelled_data`.
        names: Names of the sets that measure the model.
    """
    for name in names:
        if dataset_name(name) in used:
            logger.warning(
                "%s has the name of a labelled set that is recorded in %s: its labels trained the "
                "weights, or chose this or an earlier threshold. If they are these labels, figures "
                "may be too high for new queries.",
                name,
                model,
            )


def read_sets(paths: Iterable[str | Path]) -> dict[str, list[LabelledQuery]]:
    """The queries of each file, by `dataset_name`, or by path if an earlier file has that name.

    A path that is passed twice is read once.

    Raises:
        InputError: As `read_labelled`.
    """
    sets: dict[str, list[LabelledQuery]] = {}
    for path in dict.fromkeys(map(Path, paths)):
        name = dataset_name(path)
        if name in sets:
            name = str(path)
        sets[name] = read_labelled(path)
    return sets


def read_labelled(path: str | Path) -> list[LabelledQuery]:
    """Read ``.jsonl`` or ``.jsonl.gz``.

    Raises:
        InputError: The file cannot be read, or two queries have the same id; the message has the
            number of a line that is wrong.
    """
    queries: dict[str, LabelledQuery] = {}
    for place, line in read_lines(Path(path)):
        try:
            query = LabelledQuery.model_validate_json(line)
        except ValidationError as error:
            raise InputError(
                f"{place}: {problems_of(error)}. Each line must be "
                '{"id", "query", "documents": [{"id", "text", "relevant": true|false, "title"?}]}.'
            ) from None
        # A copy of a query would be measured with weights or a threshold that the query has chosen.
        if query.id in queries:
            raise InputError(
                f"{place}: another query has the id {query.id!r}. Give each query its own id, and "
                "remove copies."
            )
        queries[query.id] = query
    if not queries:
        raise InputError(f"{path} holds no queries.")
    return list(queries.values())


def read_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines of a file that are not blank, each with its place for messages.

    A file whose name ends in ``.gz`` is decompressed.

    Raises:
        InputError: The file cannot be read.
    """
    try:
        with opener(path)(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    # Some editors begin a file with a byte order mark.
                    yield f"{path}, line {number}", line.removeprefix(codecs.BOM_UTF8)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} could not be read: {error}") from error


def opener(path: Path) -> Callable[..., Any]:
    """What opens a file: `gzip.open` if its name ends in ``.gz``, else `open`."""
    if path.suffix == ".gz":
        return gzip.open
    return open
