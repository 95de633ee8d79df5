"""RSRank: backbone, template and B joined into a reranker."""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from tqdm.auto import tqdm
from typing_extensions import Self

from .artifact.config import RSRankConfig
from .artifact.identity import prefix_identity
from .artifact.pretrained import Pretrained
from .errors import InputError, check_count, check_text, finite, too_large
from .method.arrays import to_numpy
from .method.batches import (
    Batches,
    DoesNotFitError,
    Ids,
    device_kind,
    is_out_of_memory,
    token_budget_for,
)
from .method.formula import similarity_windows
from .method.prefix import padded_length
from .method.scoring import Row, ShiftReader, score_rows
from .method.template import PromptTokenizer, TokenisedDocument, TokenisedQuery
from .prefixes.cache import CachedPrefixes, PrefixTiers, check_room
from .prefixes.settings import cache_settings
from .ranking.explanation import Explanation
from .reading.parts import Span, stripped
from .reranker import (
    BLANK_SCORE,
    Pair,
    PairLike,
    Reranker,
    Scored,
    as_list,
    as_pairs,
    by_query,
)

if TYPE_CHECKING:
    from .backends.base import LanguageModel
    from .backends.torch.projection import Projection
    from .method.formula import Weights

logger = logging.getLogger(__name__)

# As `SIMILAR_LENGTH`, for documents with a cached prefix: their padding costs attention only.
CACHED_SIMILAR_LENGTH = 0.4

# The cached prefixes of one batch have at most so many bytes. On a CPU, glibc takes blocks of more
# than 32 MB from the system anew for each batch, and some batches then take three times as long.
JOINED_BYTES = {"cpu": 25_000_000, "cuda": 4_000_000_000, "mps": 1_000_000_000}

# The cached prefixes of one batch have at most so many times the tokens of the token budget. It is
# more than once, because only the queries of these rows run.
CACHED_BUDGETS = 8

# A token of a query attends to so many tokens in the time in which the model runs one token.
# Measured with `mini` on a CPU, with queries of 10 to 500 tokens: 150 to 300.
ATTENDED_PER_TOKEN = 192

# A call that takes longer is reported in the log.
SLOW_SECONDS = 10


class _Progress:
    """Logs once that a call takes long."""

    def __init__(self, texts: int) -> None:
        self.texts = texts
        self.scored = 0
        self.log_at = monotonic() + SLOW_SECONDS

    def log(self) -> None:
        """Write the line if it is time. Calls come here before each batch."""
        if monotonic() < self.log_at:
            return
        self.log_at = math.inf
        logger.warning(
            "%d of %d texts are scored after %d seconds. Fewer or shorter documents take less "
            "time, and so do long_documents='cut' and a smaller max_characters.",
            self.scored,
            self.texts,
            SLOW_SECONDS,
        )


class RSRank(Pretrained, Reranker):
    """Scores a document by the shift of the query's value vectors (arXiv 2606.17468).

    Make one with `from_pretrained`. Calls from several threads are safe.

    Args:
        backbone: The frozen language model.
        prompts: Its tokenizer with the artifact's template.
        projection: B and its optional weights.
        config: The artifact's config.
        token_budget: As in `from_pretrained`.
        cache_size: As in `from_pretrained`.
        cache_folder: As in `from_pretrained`.
        deterministic: As in `from_pretrained`.

    Raises:
        InputError: An argument is out of range.
    """

    # Measured: long articles are ranked and selected better in windows (docs/benchmarks.md).
    long_documents = "windows"

    def __init__(
        self,
        backbone: "LanguageModel",
        prompts: PromptTokenizer,
        projection: "Projection | Weights",
        config: RSRankConfig,
        *,
        token_budget: int | None = None,
        cache_size: int | str | None = None,
        cache_folder: str | Path | None = None,
        deterministic: bool = False,
    ) -> None:
        if token_budget is not None:
            check_count("token_budget", token_budget, 1)
        self.backbone = backbone
        self.prompts = prompts
        self.projection = backbone.frozen(projection)
        self.config = config
        self.name = config.backbone.name
        self.threshold = config.threshold
        self.max_gap = config.max_gap
        self.fallback = config.fallback
        self.labelled_data = config.training.data
        settings = cache_settings(cache_size, cache_folder)
        tiers = PrefixTiers.of(settings, device=backbone.device, dtype=backbone.dtype)
        # Only a folder can hold prefixes of other models. Without one, the weights are not hashed.
        identity = prefix_identity(backbone, config) if tiers.disk is not None else {}
        self.cache = CachedPrefixes(identity, tiers)
        self.reader = ShiftReader(backbone, prompts, config.layers, self.cache)
        self.token_budget = token_budget or token_budget_for(backbone.device)
        if deterministic:
            # One row a batch: no number depends on the other rows.
            self.token_budget = 1

    def __repr__(self) -> str:
        dtype = str(self.backbone.dtype)
        if self.backbone.documents_in_int8:
            dtype += ", documents in int8"
        return (
            f"RSRank({self.name!r}, device='{self.backbone.device}', dtype={dtype}, "
            f"rule='{self.native_rule}')"
        )

    def __copy__(self) -> Self:
        """A ranker that shares the model, B and the cached prefixes."""
        view = object.__new__(type(self))
        vars(view).update(vars(self))
        return view

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "An RSRank cannot be pickled. Pickle a function that loads it, such as "
            "functools.partial(RSRank.from_pretrained, NAME)."
        )

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """Score documents for one query, in input order; above 0 means relevant.

        This is the paper's Section 4.3. The query is not cut. A document that is too long is cut
        at its end; one without text scores `BLANK_SCORE`.

        Raises:
            InputError: The query is empty or too long, or an entry is not text.
            ScoringError: A document could not be scored; it is named.
        """
        pairs = [Pair(query, document) for document in as_list(documents)]
        if not pairs:
            # The query is checked even if there is nothing to score.
            check_text("A query", query)
            self.prompts.query(query)
        return [scored.score for scored in self.score_pairs(pairs)]

    def score_pairs(self, pairs: Sequence[PairLike]) -> list[Scored]:
        """Score pairs of any queries and documents, in input order, in shared batches.

        Equal pairs are scored once. A document of several pairs runs once in a batch, and once in
        all if its prefix is cached.

        Raises:
            InputError: As `score`.
            ScoringError: As `score`; the position in ``pairs`` is given.
        """
        tokenised = self._tokenise(as_pairs(pairs))
        places: dict[Row, list[int]] = {}
        key_of = cache(self.cache.key)
        for place, (query, document) in enumerate(tokenised):
            if document.empty:
                continue
            row = Row(document.ids, query, key_of(document.ids))
            places.setdefault(row, []).append(place)
        rows = list(places)
        self.prompts.words.check("queries", [row.query.ids for row in rows[:1]])
        self.prompts.words.check("documents", [row.document for row in rows])
        scores = [BLANK_SCORE] * len(tokenised)
        progress = _Progress(len(places))
        try:
            with self.backbone.inference():
                for batches in self._batches(rows):
                    self._run(batches, places, scores, progress)
        except DoesNotFitError as error:
            raise too_large(len(error.ids.document), places[error.ids][0]) from None
        return [
            Scored(score, document.truncated, len(query.ids) + len(document.ids))
            for score, (query, document) in zip(scores, tokenised, strict=True)
        ]

    def fit_query(self, query: str) -> str:
        """See `Reranker.fit_query`."""
        return self.prompts.fit_query(query)

    def token_costs(self, pairs: Sequence[Pair]) -> list[int]:
        """See `Reranker.token_costs`.

        The query's tokens attend to those of the document and to each other. A document with a
        cached prefix costs this attention only.

        Raises:
            InputError: As `score`.
        """
        costs = []
        for query, document in self._tokenise(pairs):
            length = len(query.ids)
            cost = length + length * (length + len(document.ids)) // ATTENDED_PER_TOKEN
            if self.cache.key(document.ids) not in self.cache.tiers:
                cost += len(document.ids)
            costs.append(cost)
        return costs

    def _tokenise(self, pairs: Sequence[Pair]) -> list[tuple[TokenisedQuery, TokenisedDocument]]:
        """Token ids of each pair's query and document; errors as `score`."""
        tokenised: dict[int, tuple[TokenisedQuery, TokenisedDocument]] = {}
        for text, of_query in by_query(pairs).items():
            query = self.prompts.query(text)
            documents = self.prompts.documents(
                [pairs[place].document for place in of_query],
                len(query.ids),
                [pairs[place].max_tokens for place in of_query],
            )
            for place, document in zip(of_query, documents, strict=True):
                tokenised[place] = (query, document)
        return [tokenised[place] for place in range(len(pairs))]

    def _batches(self, rows: Sequence[Row]) -> Iterator[Batches[Row]]:
        """Batches of rows whose queries have about the same length.

        Documents with a cached prefix have batches of their own: only their queries run, so that
        more of them fit into a batch. Of queries of one length, these batches come first, because
        new documents may replace the cached prefixes.
        """
        kind = device_kind(self.backbone.device)
        joined = JOINED_BYTES.get(kind, JOINED_BYTES["cpu"])
        joined //= max(1, self.backbone.bytes_per_token)
        cached_budget = max(self.token_budget, min(joined, CACHED_BUDGETS * self.token_budget))
        groups: dict[int, tuple[list[Row], list[Row]]] = {}
        for row in rows:
            new, cached = groups.setdefault(padded_length(len(row.query.ids)), ([], []))
            (cached if row.key in self.cache.tiers else new).append(row)
        for slots, (new, cached) in groups.items():
            yield Batches(cached, cached_budget, extra=slots, similar=CACHED_SIMILAR_LENGTH)
            yield Batches(new, self.token_budget, extra=slots)

    def _run(
        self,
        batches: Batches[Row],
        places: dict[Row, list[int]],
        scores: list[float],
        progress: "_Progress",
    ) -> None:
        """Score rows, and write each score to its row's places."""
        for batch in batches:
            progress.log()
            with batches.attempt():
                batch_scores, _, _ = score_rows(self.reader, self.projection, batch)
                for row, score in zip(batch, batch_scores.tolist(), strict=True):
                    for place in places[row]:
                        scores[place] = finite(score, place)
                progress.scored += len(batch)

    def explain(self, query: str, document: str, max_tokens: int | None = None) -> Explanation:
        """Take a score apart, exactly, per query token, layer and head.

        Args:
            query: The query. It is not cut.
            document: The document. Without text, it has no parts, and `BLANK_SCORE`.
            max_tokens: Read at most so many of the document's tokens; None for as many as fit.

        Raises:
            InputError: As `score`.
            ScoringError: As `score`.
        """
        tokens, prompt = self._tokenise(as_pairs([Pair(query, document, max_tokens)]))[0]
        score = BLANK_SCORE
        layers = self.projection.layers
        terms = np.zeros((tokens.length, len(layers), self.backbone.num_heads))
        similarity = np.zeros(1 + tokens.length)
        window = None
        if not prompt.empty:
            row = Row(prompt.ids, tokens)
            try:
                with self.backbone.inference():
                    parts = score_rows(self.reader, self.projection, [row])
                score = finite(float(parts[0][0]), 0)
                terms = to_numpy(parts[1][0]).transpose(2, 0, 1)
                windows = to_numpy(parts[2][0])
                best = int(windows.sum(-1).argmax())
                similarity = windows[best]
                if best:
                    window = self._characters(document, prompt, best)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise too_large(len(prompt.ids), 0) from None
        return Explanation(
            query=query,
            document=document,
            score=score,
            truncated=prompt.truncated,
            tokens=tuple(self.prompts.text_of(tokens.ids[tokens.scored])),
            layers=layers,
            parts=tuple(tuple(row) for row in terms.sum(-1).tolist()),
            head_parts=tuple(tuple(tuple(heads) for heads in row) for row in terms.tolist()),
            agreement=float(similarity.sum()),
            matches=tuple(similarity[1:].tolist()) if similarity[1:].any() else (),
            similarity_window=window,
        )

    def _characters(self, document: str, prompt: TokenisedDocument, number: int) -> Span:
        """Start and end of a similarity window, without the template, in characters."""
        length = len(prompt.ids)
        start, stop = similarity_windows(length, self.config.similarity_window)[number]
        token_ends, _ = self.prompts.token_ends(document)
        # How far the document has been read before each position.
        ends = [0] * (len(self.prompts.instruction) + 1)
        ends += token_ends[: length - self.prompts.overhead]
        return stripped(document, ends[: start + 1][-1], ends[: stop + 1][-1])

    def with_salt(self, salt: str) -> Self:
        """See `Reranker.with_salt`. The ranker shares the model and B."""
        view = self.__copy__()
        view.cache = self.cache.with_salt(salt)
        view.reader = replace(self.reader, cache=view.cache)
        return view

    def index(self, documents: Sequence[str], *, show_progress: bool = False) -> int:
        """Run documents ahead of time, and write their prefixes to disk.

        After an interruption, the next call runs only the documents whose prefixes are missing.

        Returns:
            The number of documents that were run.

        Raises:
            InputError: There is no folder, the prefixes could not be written, they take more than
                the folder may hold, or an entry is not text.
            ScoringError: A document does not fit into memory even alone.
        """
        disk = self.cache.tiers.disk
        if disk is None:
            raise InputError(
                "There is no folder for prefixes. Load the model with cache_folder=FOLDER."
            )
        # Token ids, with their first position.
        positions: dict[Ids, int] = {}
        for position, document in enumerate(self.prompts.documents(as_list(documents), 0)):
            if not document.empty:
                positions.setdefault(document.ids, position)
        check_room(disk, self.backbone, positions)
        missing = []
        for ids in positions:
            if self.cache.tiers.read_file(self.cache.key(ids)) is None:
                missing.append(ids)
        try:
            with tqdm(
                total=len(missing), disable=not show_progress, unit="doc", desc="reading"
            ) as bar:
                self.cache.write(missing, disk, self.backbone, self.token_budget, bar.update)
        except DoesNotFitError as error:
            raise too_large(len(error.ids), positions[error.ids]) from None
        return len(missing)

    def token_ends(self, document: str) -> tuple[list[int], int]:
        """See `Reranker.token_ends`."""
        return self.prompts.token_ends(document)

    def too_long(self, documents: Sequence[str]) -> list[bool]:
        """See `Reranker.too_long`."""
        return self.prompts.too_long(documents)

    def stats(self) -> dict[str, int]:
        """The fields of `prefixes.cache.Statistics`; empty if prefixes are not cached."""
        if not self.cache.tiers.is_on:
            return {}
        return self.cache.tiers.stats()
