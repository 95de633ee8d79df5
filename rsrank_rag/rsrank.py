"""RSRank: backbone, template and B joined into a reranker."""

import copy
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence

import torch
from tqdm.auto import tqdm
from typing_extensions import Self

from .artifact.config import RSRankConfig
from .artifact.identity import prefix_identity
from .artifact.pretrained import Pretrained
from .errors import InputError, ScoringError, finite, too_large
from .method.backbone import Backbone
from .method.batching import Batches, DoesNotFitError, Ids, is_out_of_memory, token_budget_for
from .method.probe import whole_lanes
from .method.projection import Projection
from .method.scoring import Row, ShiftReader, score_parts, score_rows
from .method.side_by_side import LEAST_KEPT, at_once, run_all, shares
from .method.template import PromptTokenizer, TokenisedDocument, TokenisedQuery
from .passages.explanation import Explanation
from .prefixes.settings import Choice, as_prefix_cache
from .prefixes.store import PrefixStore, disk_bytes
from .reranker import BLANK_SCORE, Pair, Reranker, Scored, as_list, as_pairs

ALIKE_KEPT = (
    0.4  # as `batching.ALIKE`, for documents that are kept: padding costs them attention only
)

JOINED_BYTES = {
    "cpu": 128_000_000,
    "cuda": 4_000_000_000,
    "mps": 1_000_000_000,
}  # of kept prefixes that are joined

# Pairs whose ids wait to be scored; calls that fail leave theirs behind.
MOST_COUNTED = 1024

INSTRUCTIONS = 16  # rankers that are remembered, each with an instruction of its own: the template is tokenised once


class RSRank(Pretrained, Reranker):
    """Keeps the documents that shift a query's value vectors the way relevant ones do.

    Make one with `from_pretrained`, which explains the choices. Calls from several threads are safe.
    """

    long_documents = (
        "windows"  # measured: long articles are ranked and selected better so (docs/benchmarks.md)
    )

    def __init__(
        self,
        backbone: Backbone,
        prompts: PromptTokenizer,
        projection: Projection,
        config: RSRankConfig,
        *,
        token_budget: int | None = None,
        prefix_cache: Choice = True,
        deterministic: bool = False,
    ) -> None:
        if token_budget is not None and token_budget < 1:
            raise InputError(f"token_budget must be at least 1, got {token_budget}.")
        backbone = backbone.deterministic() if deterministic else backbone
        self.backbone, self.prompts, self.config, self.name = (
            backbone,
            prompts,
            config,
            config.backbone.name,
        )
        self.threshold = config.threshold
        # A copy: the caller may be training the original.
        self.projection = copy.deepcopy(projection).to(backbone.device).requires_grad_(False)
        chosen = as_prefix_cache(prefix_cache)
        # Only a folder may hold what other models wrote: without one, the weights need not be read.
        found = {} if chosen is None or chosen.folder is None else prefix_identity(backbone, config)
        self.store = (
            None
            if chosen is None
            else PrefixStore(found, chosen, device=backbone.device, dtype=backbone.dtype)
        )
        self.reader = ShiftReader(backbone, prompts, config.layers, self.store)
        self.token_budget = token_budget or token_budget_for(backbone.device)
        self._side_by_side = (
            backbone.device.type == "cpu" and not deterministic
        )  # fewer threads, other last digits?
        self._counted: dict[Pair, tuple[TokenisedQuery, TokenisedDocument]] = {}
        self._halved: list[int] = []  # sizes of batches

    def __repr__(self) -> str:
        core = self.backbone
        dtype = f"{core.dtype}, documents in int8" if core.for_documents else core.dtype
        return f"RSRank({self.name!r}, device='{core.device}', dtype={dtype}, threshold={self.threshold:g})"

    def index(self, documents: Sequence[str], *, show_progress: bool = False) -> int:
        """Read documents ahead of time, for later calls to find on disk; how many were new. It can be interrupted.

        Raises:
            InputError: This ranker keeps no prefixes on disk, they could not be written or are more than the folder
                may hold, or something is not text.
            ScoringError: A document does not fit into memory even alone.
        """
        store, waiting = self._unread(documents, whole=True)
        try:
            with tqdm(
                total=len(waiting), disable=not show_progress, unit="doc", desc="reading"
            ) as bar:
                store.write(waiting, self.backbone, self.token_budget, bar.update)
        except DoesNotFitError as error:
            raise too_large(len(error.ids), waiting[error.ids]) from None
        return len(waiting)

    def index_size(self, documents: Sequence[str]) -> tuple[int, int]:
        """How many distinct documents `index` would read, and the bytes of disk that their prefixes take."""
        _, waiting = self._unread(documents)
        return len(waiting), disk_bytes(self.backbone, waiting)

    def _unread(
        self, documents: Sequence[str], *, whole: bool = False
    ) -> tuple[PrefixStore, dict[Ids, int]]:
        if self.store is None or self.store.disk is None:
            raise InputError(
                "There is no folder to keep prefixes in. Load the model with prefix_cache=FOLDER."
            )
        return self.store, self.store.waiting(
            self.prompts.documents(as_list(documents), 0), whole=whole
        )

    def token_ends(self, document: str) -> tuple[list[int], int]:
        """See `Reranker.token_ends`."""
        return self.prompts.token_ends(document)

    def too_long(self, documents: Sequence[str]) -> list[bool]:
        """See `Reranker.too_long`."""
        return self.prompts.too_long(documents)

    def stats(self) -> dict[str, int]:
        """Batches halved because memory ran out (``memory_retries``).

        With the hits, misses, bytes and evictions of the prefixes, if any are kept.
        """
        return {
            "memory_retries": len(self._halved),
            **({} if self.store is None else self.store.stats()),
        }

    def with_instruction(self, instruction: str) -> Self:
        """A ranker that judges by this instruction, if the artifact's template has a place for one.

        It shares model, B and kept prefixes, which are kept for each instruction apart.

        Raises:
            InputError: The artifact takes none, or the instruction is blank, too long or holds a special token.
        """
        twins: dict[str, Self] = self.__dict__.setdefault("_instructed", {})
        twin = twins.get(instruction)  # other threads change what is there meanwhile
        if twin is None:
            template = self.config.template.with_instruction(instruction)
            tokenizer, most = self.prompts.tokenizer, self.prompts.max_length
            special = [token for token in tokenizer.get_added_vocab() if token in instruction]
            if special:  # it would be read as one, as in the template
                raise InputError(
                    f"An instruction must be plain text, and this one holds {special[0]!r}."
                )
            twin = copy.copy(self)
            twin.prompts = PromptTokenizer(
                tokenizer, template, max_length=most, shared_positions=self.prompts.shared_positions
            )
            twin.reader = ShiftReader(self.backbone, twin.prompts, self.config.layers, self.store)
            if len(twins) >= INSTRUCTIONS:
                twins.pop(next(iter(list(twins)), ""), None)
            twins[instruction] = twin
        return twin

    @torch.inference_mode()
    def with_salt(self, salt: str) -> Self:
        """See `Reranker.with_salt`."""
        self.reader.null_prefix()  # read once for all
        twin, twin.reader = copy.copy(self), copy.copy(self.reader)
        twin.reader.store = twin.store = None if self.store is None else self.store.with_salt(salt)
        twin.__dict__.pop("_instructed", None)
        return twin

    def score(
        self, query: str, documents: Sequence[str], *, show_progress: bool = False
    ) -> list[float]:
        """Score documents for one query, in input order (paper, Section 4.3); above 0 means relevant.

        The query is never cut. A document that is too long is cut at its end; one without text scores `BLANK_SCORE`.

        Raises:
            InputError: The query is empty or too long, or something is not text.
            ScoringError: A document could not be scored; it is named.
        """
        return [
            found.score
            for found in self.score_documents(query, documents, show_progress=show_progress)
        ]

    def score_documents(
        self, query: str, documents: Sequence[str], *, show_progress: bool = False
    ) -> list[Scored]:
        """As `score`, which raises the same errors, with what else there is to say of each document."""
        tokens = self.prompts.query(query)
        prompts = self.prompts.documents(as_list(documents), len(tokens.ids))
        return self._scored([(tokens, prompt) for prompt in prompts], show_progress=show_progress)

    def score_many(
        self,
        queries: Sequence[str],
        documents: Sequence[Sequence[str]],
        *,
        show_progress: bool = False,
    ) -> list[list[float]]:
        """Score each query's own documents. A document that several queries share is read only once.

        Raises as `score`, and InputError where the two lists differ in length.
        """
        if isinstance(queries, str) or len(queries) != len(documents):
            asked = "one string" if isinstance(queries, str) else f"{len(queries)} queries"
            raise InputError(
                f"score_many needs a list of documents a query, got {len(documents)} lists for {asked}."
            )
        tokens = [self.prompts.query(query) for query in queries]
        lists = [
            [(query, prompt) for prompt in self.prompts.documents(as_list(texts), len(query.ids))]
            for query, texts in zip(tokens, documents, strict=True)
        ]
        places = [(row, place) for row, pairs in enumerate(lists) for place in range(len(pairs))]
        try:
            scores = iter(self._scored([*itertools.chain(*lists)], show_progress=show_progress))
        except ScoringError as error:
            row, place = places[error.index]
            raise ScoringError(error.reason, place, query=row or None) from None
        return [[next(scores).score for _ in pairs] for pairs in lists]

    def identity(self) -> str:
        """Short hash of the language model, how it is computed, the template and B."""
        found = prefix_identity(self.backbone, self.config) | {"dtype": str(self.backbone.dtype)}
        digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode())
        for name, weights in sorted(self.projection.state_dict().items()):
            digest.update(name.encode() + weights.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def score_pairs(self, pairs: Sequence[Pair | tuple[str, str]]) -> list[Scored]:
        """Score pairs of any queries and documents, in input order: pairs of several queries share batches.

        Raises:
            InputError: As `score`.
            ScoringError: As `score`; the position in ``pairs`` is given.
        """
        return self._scored(self._tokenised(as_pairs(pairs)))

    def token_counts(self, pairs: Sequence[Pair]) -> list[int]:
        """Tokens that the model runs to score each pair, without those of a cached prefix.

        The ids are held until `score_pairs` takes them, so that a text is tokenised once.

        Raises:
            InputError: As `score`.
        """
        if len(self._counted) > MOST_COUNTED:
            self._counted.clear()
        counts = []
        for pair, (query, document) in zip(pairs, self._tokenised(pairs), strict=True):
            self._counted[pair] = (query, document)
            is_cached = self.store is not None and self.store.is_kept(document.ids)
            counts.append(len(query.ids) + (0 if is_cached else len(document.ids)))
        return counts

    def _tokenised(self, pairs: Sequence[Pair]) -> list[tuple[TokenisedQuery, TokenisedDocument]]:
        """Pairs as ids: those that `token_counts` holds, and the others tokenised now."""
        queries: dict[str, TokenisedQuery] = {}
        tokenised = []
        for pair in pairs:
            ids = self._counted.pop(pair, None)
            if ids is None:
                if pair.query not in queries:
                    queries[pair.query] = self.prompts.query(pair.query)
                query = queries[pair.query]
                documents = self.prompts.documents(
                    [pair.document], len(query.ids), max_tokens=pair.max_tokens
                )
                ids = (query, documents[0])
            tokenised.append(ids)
        return tokenised

    @torch.inference_mode()
    def _scored(
        self,
        pairs: Sequence[tuple[TokenisedQuery, TokenisedDocument]],
        *,
        show_progress: bool = False,
    ) -> list[Scored]:
        """Scores of pairs, in order. Each distinct one is a row; a document that stands in several is read once."""
        places: dict[Row, list[int]] = {}
        for place, (query, document) in enumerate(pairs):
            if not document.empty:
                places.setdefault(Row(document.ids, query), []).append(place)
        scores = [BLANK_SCORE] * len(pairs)
        with tqdm(total=len(places), disable=not show_progress, unit="doc", desc="scoring") as bar:

            @torch.inference_mode()
            def run(batches: Batches[Row]) -> None:
                batches.halved = self._halved  # threads may append without a lock
                for batch in batches:
                    with batches.attempt():
                        for row, score in zip(
                            batch, score_rows(self.reader, self.projection, batch), strict=True
                        ):
                            for place in places[row]:
                                scores[place] = finite(score, place)
                        bar.update(len(batch))

            try:
                for waiting in self._batches(list(places)):
                    run_all(run, waiting)
            except DoesNotFitError as error:
                raise too_large(len(error.ids.document), places[error.ids][0]) from None
        return [
            Scored(score, document.truncated, len(query.ids) + len(document.ids))
            for score, (query, document) in zip(scores, pairs, strict=True)
        ]

    def _batches(self, rows: list[Row]) -> Iterator[list[Batches[Row]]]:
        """Batches of rows whose queries have about the same length, those that may run at once together.

        Kept documents apart, because each costs only the query's tokens: more of them fill a batch. First, because
        the new ones may push them out.
        """
        by_room: dict[int, list[Row]] = {}
        for row in rows:
            by_room.setdefault(whole_lanes(len(row.query.ids)), []).append(row)
        together = at_once(torch.get_num_threads()) if self._side_by_side else 1
        joined = JOINED_BYTES.get(self.backbone.device.type, JOINED_BYTES["cpu"]) // together
        most = max(
            self.token_budget,
            min(joined // max(1, self.backbone.bytes_per_token), 8 * self.token_budget),
        )
        for room, group in by_room.items():
            new, kept = list[Row](), list[Row]()
            for row in group:
                (
                    kept if self.store is not None and self.store.is_kept(row.document) else new
                ).append(row)
            yield shares(kept, together, room, most, LEAST_KEPT, ALIKE_KEPT)
            yield shares(new, together, room, self.token_budget)

    @torch.inference_mode()
    def explain(self, query: str, document: str) -> Explanation:
        """Take a score apart, exactly, per query token, layer and head; raises as `score`.

        A document without text has no parts, and `BLANK_SCORE`.
        """
        tokens = self.prompts.query(query)
        prompt = self.prompts.documents([document], len(tokens.ids))[0]
        parts = torch.zeros(tokens.length, len(self.projection.layers), self.backbone.num_heads)
        score, agreement = BLANK_SCORE, torch.zeros(1 + tokens.length)
        if not prompt.empty:
            try:
                parts, agreement = score_parts(
                    self.reader, self.projection, Row(prompt.ids, tokens)
                )
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise too_large(len(prompt.ids), 0) from None
            score = finite(float(parts.sum() + agreement.sum()), 0)
        return Explanation(
            query=query,
            document=document,
            score=score,
            truncated=prompt.truncated,
            tokens=tuple(self.prompts.text_of(tokens.ids[tokens.scored])),
            layers=self.projection.layers,
            parts=tuple(tuple(row) for row in parts.sum(-1).tolist()),
            head_parts=tuple(tuple(tuple(heads) for heads in row) for row in parts.tolist()),
            agreement=float(agreement.sum()),
            matches=tuple(agreement[1:].tolist()) if bool(agreement[1:].any()) else (),
        )
