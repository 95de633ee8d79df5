"""Reading shifts: the backbone's signal at the query's tokens after a document, minus the same without it.

Scoring and training read through here, so that B sees the same numbers in both.

Axes: N documents, H heads, T scored query tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..artifact.config import NullPrefix, Signal
from ..errors import InputError
from ..prefixes.store import PrefixStore
from .backbone import Backbone
from .batching import Ids
from .probe import Consumer, Prefixes
from .shift import representational_shift
from .template import PromptTokenizer, TokenisedQuery

ShiftConsumer = Callable[[int, Tensor], Tensor | None]
"""Receives a read layer's index and its shifts, (N, H, T, D) fp32; may let documents leave, as `cache.Consumer`."""


@dataclass
class NullRun:
    """One query's signal without a document, kept for as long as the query is being scored.

    Attributes:
        query: The query.
        by_length: Layer -> (1, H, T, D), for each length of null prefix that was needed so far.
    """

    query: TokenisedQuery
    by_length: dict[int, dict[int, Tensor]] = field(default_factory=dict)


class ShiftReader:
    """Reads the shifts that B is made for.

    Args:
        backbone: The frozen language model.
        prompts: Its tokenizer with the artifact's template.
        layers: Layers to read.
        signal: Value vectors, keys, or the hidden states that enter a layer (then H = 1 and D is the hidden size).
        null_prefix: What stands for "no document" in the run that is subtracted; see `RSRankConfig`.
        store: Where documents' prefixes are kept; None runs every document anew.
    """

    def __init__(
        self,
        backbone: Backbone,
        prompts: PromptTokenizer,
        layers: Sequence[int],
        *,
        signal: Signal = "values",
        null_prefix: NullPrefix = "empty",
        store: PrefixStore | None = None,
    ) -> None:
        self.backbone, self.prompts, self.layers = backbone, prompts, frozenset(layers)
        self.signal, self.null_prefix, self.store = signal, null_prefix, store
        self._empty: Tensor | None = None  # the template without a document: the same for every query

    def prefill(self, documents: Sequence[Ids], room: int = 0, *, runs: Sequence[NullRun] = ()) -> Prefixes:
        """Documents' prefixes, from the store where it has them, with room for a query's tokens.

        Args:
            documents: Token ids of ``instruction + document + separator``.
            room: Tokens of the queries that will be run after them.
            runs: Queries that will be. Where the documents are joined from kept ones, a query that has not been run
                without a document gets a row for it: it then costs no pass of its own.
        """
        if self.store is None:
            return self.run(documents, room)
        fresh = len(_fresh(runs)) if self.null_prefix == "empty" else 0
        return self.store.prefill(documents, self.run, room, nulls=[self._no_document()] * fresh if fresh else ())

    def run(self, documents: Sequence[Ids], room: int = 0) -> Prefixes:
        """Run documents, as far as this signal needs them."""
        return self.backbone.prefill(documents, room=room, whole=self.signal == "hidden")

    def read(self, run: NullRun, prefixes: Prefixes, consume: ShiftConsumer) -> None:
        """One query after N prefixes: hand each read layer's shifts over, in ascending order.

        Args:
            run: The query; what is computed for it without a document is kept there.
            prefixes: From `prefill`.
            consume: Called once a layer. It may let documents leave where the null prefix is not "matched".
        """
        if prefixes.nulls:
            alone = run.by_length.get(0, {})
            self._signal(run.query, prefixes, _last_row_apart(alone, consume))
            run.by_length[0] = alone  # only now: a run that fails half-way leaves nothing behind
        else:
            self._signal(run.query, prefixes, self._subtracting(run, prefixes.lengths, consume))

    def read_own(self, runs: Sequence[NullRun], prefixes: Prefixes, consume: ShiftConsumer) -> None:
        """As `read`, with a query of its own after each prefix.

        Args:
            runs: One a document; the same one may stand there again.
            prefixes: From `prefill`.
            consume: Called once a layer with shifts (N, H, T, D), T being the longest query's: behind a shorter one's
                tokens they are 0. No document may leave.

        Raises:
            InputError: The null prefix depends on the document's length.
        """
        if self.null_prefix == "matched":
            raise InputError("With null_prefix='matched', queries are read one after another.")
        if self.null_prefix == "empty" and not prefixes.nulls:
            self._run_without_document(_fresh(runs))
        fresh = _fresh(runs)[: prefixes.nulls]
        tokens = _Tokens([run.query for run in (*runs, *fresh)], self.backbone.device)
        distinct = list({id(run): run for run in runs}.values())
        place = {id(run): number for number, run in enumerate(distinct)}
        owner = torch.tensor([place[id(run)] for run in runs], device=self.backbone.device)
        alone: dict[int, dict[int, Tensor]] = {id(run): {} for run in fresh}

        def subtract(layer: int, found: Tensor) -> None:
            if layer not in self.layers:
                return
            signal = tokens.scored(found, self._reached(layer)).float()
            for row, run in enumerate(fresh, start=len(runs)):
                alone[id(run)][layer] = signal[row : row + 1, :, : run.query.length].clone()
            shift = signal[: len(runs)]
            if self.null_prefix == "empty":
                nulls = tokens.padded([(alone.get(id(run)) or run.by_length[0])[layer] for run in distinct])
                shift = representational_shift(shift, nulls[owner])
            consume(layer, shift)

        queries = [run.query.ids for run in (*runs, *fresh)]
        self.backbone.own_query_values(queries, prefixes, subtract, signal=self.signal)
        for run in fresh:
            run.by_length[0] = alone[id(run)]

    def _run_without_document(self, runs: Sequence[NullRun]) -> None:
        """Fill in what queries give without a document, all of them in one pass."""
        if not runs:
            return
        queries = [run.query for run in runs]
        prefixes = Prefixes.of([self._no_document()] * len(runs), max(len(query.ids) for query in queries))
        found: list[dict[int, Tensor]] = [{} for _ in runs]

        tokens = _Tokens(queries, self.backbone.device)

        def keep(layer: int, signal: Tensor) -> None:
            if layer in self.layers:
                signal = tokens.scored(signal, self._reached(layer)).float()
                for row, query in enumerate(queries):
                    found[row][layer] = signal[row : row + 1, :, : query.length]

        self.backbone.own_query_values([query.ids for query in queries], prefixes, keep, signal=self.signal)
        for run, layers in zip(runs, found, strict=True):
            run.by_length[0] = layers

    def read_in_one_run(self, run: NullRun, documents: Sequence[Ids], consume: ShiftConsumer) -> None:
        """The same for documents of which nothing is kept: one that leaves early saves the work on its own tokens too.

        Args:
            run: The query.
            documents: Token ids of ``instruction + document + separator``.
            consume: Called once a layer.
        """
        subtract = self._subtracting(run, [len(ids) for ids in documents], consume)
        assert self.signal != "hidden"
        self.backbone.values_in_one_run(
            documents, run.query.ids, self._scored_tokens(run.query, subtract), signal=self.signal
        )

    def _subtracting(self, run: NullRun, lengths: Sequence[int], consume: ShiftConsumer) -> Consumer:
        """A consumer of signals that hands shifts on."""
        if self.null_prefix == "none":
            return lambda layer, found: consume(layer, found.float())
        wanted = [length if self.null_prefix == "matched" else 0 for length in lengths]
        missing = sorted(set(wanted) - set(run.by_length))
        if missing:
            found: dict[int, Tensor] = {}
            self._signal(
                run.query,
                self._null_prefixes(missing, len(run.query.ids)),
                lambda layer, value: found.__setitem__(layer, value),
            )
            for row, length in enumerate(missing):
                run.by_length[length] = {layer: value[row : row + 1] for layer, value in found.items()}

        def subtract(layer: int, found: Tensor) -> Tensor | None:
            alone = [run.by_length[length][layer] for length in (wanted if self.null_prefix == "matched" else [0])]
            return consume(layer, representational_shift(found, alone[0] if len(alone) == 1 else torch.cat(alone)))

        return subtract

    def _null_prefixes(self, lengths: Sequence[int], room: int) -> Prefixes:
        """The template before the query with filler up to each length; 0 stands for no document and no filler."""
        if any(lengths):
            return self.run([self.prompts.filled_prefix(length) for length in lengths], room)
        return Prefixes.of([self._no_document()], room)

    def _no_document(self) -> Tensor:
        """The template before the query, run once."""
        if self._empty is None:
            self._empty = self.run([self.prompts.null_prefix]).row(0)
        return self._empty

    def _signal(self, query: TokenisedQuery, prefixes: Prefixes, consume: Consumer) -> None:
        self.backbone.query_values([query.ids], prefixes, self._scored_tokens(query, consume), signal=self.signal)

    def _scored_tokens(self, query: TokenisedQuery, consume: Consumer) -> Consumer:
        """Pass on what B reads: its layers, at the tokens that are scored, in fp32."""

        def pass_on(layer: int, found: Tensor) -> Tensor | None:
            if layer not in self.layers:
                return None
            signal, reached = found[:, :, query.scored].float(), self._reached(layer)
            if reached is not None and reached < query.scored.start + query.length:
                signal = signal.clone()
                signal[:, :, max(0, reached - query.scored.start) :] = 0
            return consume(layer, signal)

        return pass_on

    def _reached(self, layer: int) -> int | None:
        """How many of a query's tokens can know of the document at a layer; None for all.

        Where all layers have windows, others cannot. Their shift is no more than rounding, and the direction of that
        would count as much as any other, so their signal is set to 0 with and without a document.
        """
        reach = self.backbone.reach(layer)
        if reach is None or self.null_prefix == "none":
            return None
        return max(0, reach - self.prompts.after_document)


def _fresh(runs: Sequence[NullRun]) -> list[NullRun]:
    """Those, each once, that have not been run without a document."""
    return list({id(run): run for run in runs if 0 not in run.by_length}.values())


def _last_row_apart(alone: dict[int, Tensor], consume: ShiftConsumer) -> Consumer:
    """A consumer of rows of which the last holds no document: it is subtracted from the others, and never leaves.

    Args:
        alone: The same signal by layer, if it is known; filled in if not.
        consume: Gets shifts.
    """
    known = bool(alone)

    def subtract(layer: int, found: Tensor) -> Tensor | None:
        if not known:
            alone[layer] = found[-1:].clone()
        stay = consume(layer, representational_shift(found[:-1], alone[layer]))
        return None if stay is None else torch.cat([stay, stay.new_tensor([len(found) - 1])])

    return subtract


class _Tokens:
    """The scored tokens of several queries, one query a row, padded to the longest.

    Args:
        queries: One a row.
        device: Of the signals.
    """

    def __init__(self, queries: Sequence[TokenisedQuery], device: torch.device) -> None:
        starts = torch.tensor([query.scored.start for query in queries], device=device)
        lengths = torch.tensor([query.length for query in queries], device=device)
        self.width = max(query.length for query in queries)
        columns = torch.arange(self.width, device=device)
        self.real = (columns < lengths[:, None])[:, None, :, None]  # (N, 1, T, 1)
        last = max(len(query.ids) for query in queries) - 1
        self.places = (starts[:, None] + columns).clamp(max=last)[:, None, :, None]

    def scored(self, found: Tensor, reached: int | None = None) -> Tensor:
        """Of signals (N, H, all tokens, D) those that are scored, (N, H, T, D), and 0 behind them.

        Args:
            found: The signals.
            reached: Tokens after the first so many get 0 as well.
        """
        chosen = found.gather(2, self.places.expand(-1, found.shape[1], -1, found.shape[3]))
        return chosen.where(self.real if reached is None else self.real & (self.places < reached), 0)

    def padded(self, rows: Sequence[Tensor]) -> Tensor:
        """Each row's (1, H, its tokens, D) as one (N, H, T, D)."""
        together = rows[0].new_zeros(len(rows), rows[0].shape[1], self.width, rows[0].shape[3])
        for number, row in enumerate(rows):
            together[number, :, : row.shape[2]] = row[0]
        return together
