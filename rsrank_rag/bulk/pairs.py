"""Columns of queries and documents in, columns of scores out.

`PairScorer` is a callable for Ray Data, HF datasets and Spark.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

from ..errors import InputError, RSRankError
from ..passages.titles import with_title
from ..reranker import BLANK_SCORE, Pair, Reranker
from ..service.backend import Outcome
from ..service.engine import DeviceLostError, Engine

# Pairs that are scored together: enough to sort them into batches of similar length.
CHUNK = 4096

# A model that fails on this pair fails on every pair.
SIMPLE_PAIR = Pair("Which animal gives milk?", "The cow gives milk.")


class PairResult(NamedTuple):
    """The columns that are added to a row, or their values for one pair; see `PairScorer`."""

    score: float | None = None
    kept: bool | None = None
    truncated: bool | None = None
    error: str | None = None


COLUMNS = PairResult._fields


class PairScorer:
    """Adds scores to a batch of rows. The model is loaded at the first call.

    A batch is a mapping of column names to values, such as a dict of lists or arrays, or a pandas
    frame. It has a column ``query`` and either ``document`` (a text in each row) or ``documents``
    (a list in each row, of texts or of objects with a ``text`` and perhaps a ``title``, which is
    read in front of the text). The columns that are added have a value for each row with
    ``document``, and a list of values for each row with ``documents``:

    - ``score``: on the model's scale, `BLANK_SCORE` for a blank document; null if there is an
      error.
    - ``kept``: whether the score is above the model's native threshold. False for a blank
      document; null without a score or without such a threshold.
    - ``truncated``: whether the document's end was not read.
    - ``error``: why there is no score, else null.

    >>> from functools import partial
    >>> from rsrank_rag import RSRank
    >>> scorer = PairScorer(partial(RSRank.from_pretrained, "mini", prefix_cache=False))
    >>> batch = {"query": ["Which animal gives milk?"], "document": ["A cow gives milk."]}
    >>> scored = scorer(batch)
    >>> scored["kept"], scored["error"]
    ([True], [None])

    Args:
        make: Loads the model. It must be picklable if the scorer is sent to other processes.
        name: What messages call the model.
    """

    def __init__(self, make: Callable[[], Reranker], name: str = "the model") -> None:
        self.make = make
        self.name = name

    def __getstate__(self) -> dict[str, Any]:
        return {"make": self.make, "name": self.name}

    @cached_property
    def _engine(self) -> Engine:
        return Engine(self.make(), self.name)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Score a batch.

        Raises:
            InputError: The columns are not those that `form_of` wants.
            RSRankError: The model fails on every pair.
        """
        columns = {str(name): batch[name] for name in batch}
        form = form_of(columns)
        rows = []
        for query, value in zip(columns["query"], columns[form], strict=True):
            rows.append(_pairs_of_row(query, value, form))
        results = self._results([pair for row in rows for pair in row])
        results_by_row = [list(islice(results, len(row))) for row in rows]
        for place, name in enumerate(COLUMNS):
            values: list[Any] = [[result[place] for result in row] for row in results_by_row]
            if form == "document":
                values = [value for (value,) in values]
            columns[name] = values
        return columns

    def _results(self, pairs: Sequence[Pair | str]) -> Iterator[PairResult]:
        """One result for each pair, or for the text that says why there is no pair."""
        for start in range(0, len(pairs), CHUNK):
            chunk = pairs[start : start + CHUNK]
            outcomes = iter(self._outcomes([pair for pair in chunk if isinstance(pair, Pair)]))
            for pair in chunk:
                if isinstance(pair, str):
                    yield PairResult(error=pair)
                else:
                    yield self._result(next(outcomes))

    def _result(self, outcome: Outcome) -> PairResult:
        score = outcome.score
        if score is None:
            return PairResult(error=outcome.error or "It could not be scored.")
        threshold = self._engine.reranker.threshold
        kept = None
        if threshold is not None:
            kept = score > threshold and score != BLANK_SCORE
        return PairResult(score, kept, outcome.truncated)

    def _outcomes(self, pairs: Sequence[Pair]) -> list[Outcome]:
        """Score pairs.

        Raises:
            RSRankError: The model fails on a simple pair, too: it must not fill files with errors.
        """
        if not pairs:
            return []
        try:
            outcomes = self._engine.score(pairs)
            if not any(outcome.fault == "internal" for outcome in outcomes):
                return outcomes
            (simple,) = self._engine.score([SIMPLE_PAIR])
            if simple.fault != "internal":
                return outcomes
            reason = simple.error
        except DeviceLostError as error:
            reason = f"its device does not answer any more: {error.__cause__}"
        raise RSRankError(
            f"{self.name} fails on every pair, even on a simple one ({reason}). Find the cause and "
            "run the same command again: finished files stay."
        )


def form_of(columns: Iterable[str]) -> str:
    """The name of the column that is scored: ``document`` or ``documents``.

    Raises:
        InputError: There is neither or both, no ``query``, or a column that would be overwritten.
    """
    names = list(columns)
    forms = [name for name in ("document", "documents") if name in names]
    if "query" not in names or len(forms) != 1:
        raise InputError(
            'Rows need a "query" and either a "document" or "documents" (a list); '
            f"found {', '.join(names) or 'none'}."
        )
    taken = [name for name in COLUMNS if name in names]
    if taken:
        raise InputError(
            f"Rows have {', '.join(taken)} already, which would be overwritten. "
            "Rename these columns, or leave them out."
        )
    return forms[0]


def _pairs_of_row(query: Any, value: Any, form: str) -> list[Pair | str]:
    """The pairs of one row; a text instead of a pair says why there is none."""
    documents = [value] if form == "document" else value
    not_a_list = isinstance(documents, (str, bytes, Mapping))
    if not_a_list or not isinstance(documents, Iterable):
        return [f"The row's documents are no list but {_kind(documents)}."]
    pairs: list[Pair | str] = []
    for document in documents:
        text = document
        if isinstance(document, Mapping) and isinstance(document.get("text"), str):
            text = with_title(document["text"], document.get("title"))
        if not isinstance(query, str):
            pairs.append(f"The query is no text but {_kind(query)}.")
        elif not isinstance(text, str):
            pairs.append(f"The document is no text but {_kind(text)}.")
        else:
            pairs.append(Pair(query, text))
    return pairs


def _kind(value: Any) -> str:
    """The name of a value's type; pandas writes null as NaN, NA and NaT."""
    name = type(value).__name__
    is_nan = isinstance(value, float) and math.isnan(value)
    if value is None or is_nan or name in ("NAType", "NaTType"):
        return "null"
    return name
