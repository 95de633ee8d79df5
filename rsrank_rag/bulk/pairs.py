"""Columns of queries and documents in, columns of scores out: a callable for Ray Data, HF datasets and Spark."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from ..errors import InputError, RSRankError
from ..passages.titles import with_title
from ..reranker import BLANK_SCORE, Pair, Reranker
from ..service.backend import Outcome
from ..service.engine import DeviceLostError, Engine

CHUNK = 4096  # pairs that are scored together: enough to sort them into batches of like length
COLUMNS = ("score", "kept", "truncated", "error")  # what is added to a row

Cell = tuple[float | None, bool | None, bool | None, str | None]
"""What is written about one pair, in the order of `COLUMNS`."""


class PairScorer:
    """Adds scores to a batch of rows. The model is loaded at the first call, so that a scorer can be sent anywhere.

    A batch is a mapping of column names to values, such as a dict of lists or arrays, or a pandas frame. It has a
    column ``query`` and either ``document`` (a text a row) or ``documents`` (a list a row: of texts, or of objects with
    a ``text`` and perhaps a ``title``, which is read in front of it). Added are

    - ``score``: on the model's scale, `BLANK_SCORE` for a blank document; null where there is an error.
    - ``kept``: whether it is above the model's native threshold. False for a blank document; null where there is no
      score, or no such threshold.
    - ``truncated``: whether the document's end was not read.
    - ``error``: why there is no score, else null.

    each a value a row for ``document``, and a list of values a row for ``documents``.

    >>> from functools import partial
    >>> from rsrank_rag import RSRank
    >>> scorer = PairScorer(partial(RSRank.from_pretrained, "mini", prefix_cache=False))
    >>> batch = scorer({"query": ["Which animal gives milk?"], "document": ["A cow gives milk."], "id": [7]})
    >>> batch["kept"], batch["error"], batch["id"]
    ([True], [None], [7])

    ``make`` loads the model, and must be picklable where the scorer is sent to other processes; messages call it
    ``name``.
    """

    def __init__(self, make: Callable[[], Reranker], name: str = "the model") -> None:
        self.make, self.name = make, name

    def __getstate__(self) -> dict[str, Any]:
        return {"make": self.make, "name": self.name}

    @cached_property
    def _engine(self) -> Engine:
        return Engine(self.make(), self.name)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Score a batch, or raise what `form_of` does, or RSRankError if the model can score nothing at all."""
        columns = {str(name): batch[name] for name in batch}
        form = form_of(columns)
        rows = [self._row(q, d, form) for q, d in zip(columns["query"], columns[form], strict=True)]
        cells = iter(self._cells([pair for row in rows for pair in row]))
        found = [[next(cells) for _ in row] for row in rows]
        for place, name in enumerate(COLUMNS):
            values = [[cell[place] for cell in row] for row in found]
            columns[name] = values if form == "documents" else [row[0] for row in values]
        return columns

    @staticmethod
    def _row(query: Any, given: Any, form: str) -> list[Pair | str]:
        """The pairs of one row; a text says why there is none."""
        documents = [given] if form == "document" else given
        if isinstance(documents, (list, tuple)):
            documents = [_content(item) for item in documents]
        if isinstance(documents, (str, bytes, Mapping)) or not isinstance(documents, Iterable):
            return [f"The row's documents are no list but {_kind(documents)}."]
        if not isinstance(query, str):
            return [f"The query is no text but {_kind(query)}." for _ in documents]
        return [
            Pair(query, text)
            if isinstance(text, str)
            else f"The document is no text but {_kind(text)}."
            for text in documents
        ]

    def _cells(self, pairs: Sequence[Pair | str]) -> list[Cell]:
        cells: list[Cell] = [
            (None, None, None, pair if isinstance(pair, str) else None) for pair in pairs
        ]
        wanted = [(place, pair) for place, pair in enumerate(pairs) if not isinstance(pair, str)]
        for start in range(0, len(wanted), CHUNK):
            chunk = wanted[start : start + CHUNK]
            outcomes = self._outcomes([pair for _, pair in chunk])
            if any(outcome.fault == "internal" for outcome in outcomes):
                self._check()
            threshold = self._engine.reranker.threshold
            for (place, _), x in zip(chunk, outcomes, strict=True):
                if x.score is None:
                    cells[place] = None, None, None, x.error or "It could not be scored."
                else:
                    kept = (
                        None
                        if threshold is None
                        else x.score > threshold and x.score != BLANK_SCORE
                    )
                    cells[place] = x.score, kept, x.truncated, None
        return cells

    def _outcomes(self, pairs: Sequence[Pair]) -> list[Outcome]:
        try:
            return self._engine.step(pairs).outcomes
        except DeviceLostError as error:
            raise RSRankError(
                f"{self.name} fails on every pair, because its device no longer answers ({error.__cause__}). What was "
                "written before is kept: run it again."
            ) from error

    def _check(self) -> None:
        """A model that fails on everything must not fill files with errors."""
        outcome = self._outcomes([Pair("Which animal gives milk?", "The cow gives milk.")])[0]
        if outcome.fault == "internal":
            raise RSRankError(
                f"{self.name} fails on every pair, even on a simple one ({outcome.error}) What was written before is "
                "kept: find the cause and run it again."
            )


def form_of(columns: Iterable[str]) -> str:
    """``document`` or ``documents``: how rows hold what is to be scored; other forms raise InputError."""
    names = list(columns)
    forms = [name for name in ("document", "documents") if name in names]
    if "query" not in names or len(forms) != 1:
        raise InputError(
            f'Rows need a "query" and either a "document" or "documents" (a list); found {", ".join(names) or "none"}.'
        )
    taken = [name for name in COLUMNS if name in names]
    if taken:
        raise InputError(
            f"Rows have {', '.join(taken)} already, which would be overwritten. Rename what is there, or leave it out."
        )
    return forms[0]


def _content(item: Any) -> Any:
    """What is read of a document, of a labelled one as `rsrank evaluate` does it."""
    labelled = isinstance(item, Mapping) and isinstance(item.get("text"), str)
    return with_title(item["text"], item.get("title")) if labelled else item


def _kind(value: Any) -> str:
    name = type(value).__name__  # pandas writes null as NaN, NA and NaT
    null = (
        value is None
        or name in ("NAType", "NaTType")
        or (isinstance(value, float) and math.isnan(value))
    )
    return "null" if null else name
