"""Columns of queries and documents in, columns of scores out.

`PairScorer` is a callable for HF datasets, Spark and the like.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ..errors import InputError, RSRankError
from ..ranking.rule import passes
from ..reranker import Pair, Reranker
from ..service.engine import DeviceLostError, Engine
from ..service.messages import Outcome, Task

# The columns that are read.
PAIR = ("query", "document")

# A model that fails on this pair fails on every pair.
SIMPLE_PAIR = Pair("Which animal gives milk?", "The cow gives milk.")


class PairResult(NamedTuple):
    """The columns that are added to a row, or their values for one pair; see `PairScorer`."""

    score: float | None = None
    above_threshold: bool | None = None
    truncated: bool | None = None
    error: str | None = None


COLUMNS = PairResult._fields


@dataclass(eq=False)
class PairScorer:
    """Adds scores to a batch of rows. The model is loaded at the first call.

    A batch is a mapping of column names to values, such as a dict of lists or arrays, or a pandas
    frame. It has the columns ``query`` and ``document``, of texts. Added are:

    - ``score``: on the model's scale, `BLANK_SCORE` for a blank document; null if there is an
      error.
    - ``above_threshold``: whether the score is above the model's native threshold. The rest of the
      rule needs all documents of a query. False for a blank document; null without a score or
      without such a threshold.
    - ``truncated``: whether the document's end, or the middle of a long query, was not read.
    - ``error``: why there is no score, else null.

    >>> from functools import partial
    >>> from rsrank_rag import RSRank
    >>> scorer = PairScorer(partial(RSRank.from_pretrained, "mini"))
    >>> batch = {"query": ["Which animal gives milk?"], "document": ["A cow gives milk."]}
    >>> scored = scorer(batch)
    >>> scored["above_threshold"], scored["error"]
    ([True], [None])

    Args:
        make: Loads the model. It must be picklable if the scorer is sent to other processes.
        name: What messages call the model.
    """

    make: Callable[[], Reranker]
    name: str = "the model"

    def __getstate__(self) -> dict[str, Any]:
        return {"make": self.make, "name": self.name}

    @cached_property
    def _engine(self) -> Engine:
        return Engine(self.make())

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Score a batch.

        Raises:
            InputError: As `check_columns`.
            RSRankError: The model fails on every pair.
        """
        columns = {str(name): batch[name] for name in batch}
        check_columns(columns)
        pairs = {}
        for place, texts in enumerate(zip(columns["query"], columns["document"], strict=True)):
            if all(isinstance(text, str) for text in texts):
                pairs[place] = Pair(*texts)
        no_text = PairResult(error="The query or the document is no text.")
        results = [no_text] * len(columns["query"])
        for place, outcome in zip(pairs, self._outcomes(list(pairs.values())), strict=True):
            results[place] = self._result(outcome)
        for name in COLUMNS:
            columns[name] = [getattr(result, name) for result in results]
        return columns

    def _result(self, outcome: Outcome) -> PairResult:
        scored = outcome.scored
        if scored is None:
            return PairResult(error=outcome.error or "It could not be scored.")
        threshold = self._engine.reranker.threshold
        above = None
        if threshold is not None:
            above = passes(scored.score, threshold)
        return PairResult(scored.score, above, scored.truncated or outcome.query_truncated)

    def _outcomes(self, pairs: Sequence[Pair]) -> list[Outcome]:
        """Score pairs.

        Raises:
            RSRankError: The model fails on a simple pair, too: it must not fill files with errors.
        """
        try:
            outcomes = self._engine.run([Task(pair) for pair in pairs])
            if not any(outcome.fault == "internal" for outcome in outcomes):
                return outcomes
            (simple,) = self._engine.run([Task(SIMPLE_PAIR)])
            if simple.fault != "internal":
                return outcomes
            reason = simple.error
        except DeviceLostError as error:
            reason = f"its device does not answer any more: {error.__cause__}"
        raise RSRankError(
            f"{self.name} fails on every pair, even on a simple one ({reason}). Find the cause."
        )


def check_columns(names: Collection[str], rows: str = "Rows") -> None:
    """Check that rows have the columns of `PAIR`, and none that would be overwritten.

    Args:
        names: The columns.
        rows: What messages call the rows.

    Raises:
        InputError: A column of `PAIR` is missing, or there is a column of `COLUMNS` already.
    """
    if not set(PAIR).issubset(names):
        raise InputError(
            f'{rows} need a "query" and a "document"; found {", ".join(sorted(names)) or "none"}.'
        )
    taken = [name for name in COLUMNS if name in names]
    if taken:
        raise InputError(
            f"{rows} have {', '.join(taken)} already, which would be overwritten. "
            "Rename these columns, or leave them out."
        )
