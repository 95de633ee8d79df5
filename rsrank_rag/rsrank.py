"""RSRank: backbone, template and B joined into a reranker."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import torch
from tqdm.auto import tqdm
from typing_extensions import Self

from .artifact import hub
from .artifact.config import RSRankConfig, TrainingRecord
from .artifact.identity import prefix_identity
from .artifact.opening import Artifact, new_artifact, open_artifact, save_artifact
from .errors import InputError, ScoringError
from .language_model.options import LoadOptions, ModelSource
from .method.backbone import Backbone
from .method.batching import Batches, DoesNotFitError, Ids, is_out_of_memory, token_budget_for
from .method.explanation import Explanation
from .method.probe import whole_lanes
from .method.projection import Projection
from .method.scoring import Row, ShiftReader, score_parts, score_rows
from .method.template import PromptTokenizer, Template, TokenisedDocument, TokenisedQuery
from .prefixes.indexing import Indexer
from .prefixes.settings import Choice
from .prefixes.store import PrefixStore, store_for
from .reranker import BLANK_SCORE, Pair, Reranker, Scored, as_list, as_pairs

ALIKE_KEPT = 0.4
"""As `batching.ALIKE`, for documents that are kept: padding costs them attention only."""

JOINED_BYTES = {"cpu": 128_000_000, "cuda": 4_000_000_000, "mps": 1_000_000_000}
"""Kept prefixes that are joined for one batch."""

INSTRUCTIONS = 16
"""Rankers that are remembered, each with an instruction of its own: the template is tokenised once."""


class RSRank(Reranker):
    """Keeps the documents that shift a query's value vectors the way relevant ones do.

    Make one with `from_pretrained`, which explains the choices. Calls from several threads are safe.
    """

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
        self.backbone, self.prompts, self.config, self.name = backbone, prompts, config, config.backbone.name
        self.threshold = config.threshold
        # A copy: the caller may be training the original.
        self.projection = copy.deepcopy(projection).to(backbone.device).requires_grad_(False)
        store = store_for(backbone, partial(prefix_identity, backbone, config), prefix_cache)
        self.store: PrefixStore | None = store
        self.reader = ShiftReader(backbone, prompts, config.layers, store)
        self.token_budget = token_budget or token_budget_for(backbone.device)
        self._halved: list[int] = []  # sizes of batches; threads may append without a lock

    def __repr__(self) -> str:
        core = self.backbone
        return f"RSRank({self.name!r}, device='{core.device}', dtype={core.dtype}, threshold={self.threshold:g})"

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path = "mini",
        *,
        revision: str | None = None,
        backbone: str | Path | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        load_in_8bit: bool = False,
        load_in_4bit: bool = False,
        load_in_fp8: bool = False,
        max_length: int | None = None,
        token_budget: int | None = None,
        prefix_cache: Choice = True,
        deterministic: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        trust_remote_code: bool = False,
    ) -> RSRank:
        """Load an artifact and the language model it belongs to.

        Args:
            name: ``"mini"`` (ships with the package), a local folder, or a Hub id.
            revision: Commit, tag or branch of the artifact. The model's own revision stands in the artifact.
            backbone: Where to load the language model from instead, such as a local copy. It is checked.
            device: ``"cuda"``, ``"cpu"``, ...; None for the best one present.
            dtype: None for bfloat16 where it is fast, else float32.
            load_in_8bit: int8 weights through bitsandbytes (needs the ``8bit`` extra).
            load_in_4bit: nf4 weights through bitsandbytes (needs the ``8bit`` extra).
            load_in_fp8: float8 weights through torchao (needs the ``fp8`` extra).
            max_length: Use at most this many positions; longer documents are cut.
            token_budget: Padded tokens of documents and query in one batch.
            prefix_cache: Where documents' prefixes are kept, so that a document that comes back is not read again.
                True for some of the device's memory, a size such as ``"512MB"`` for so much of it, a folder for that
                and the disk, a `PrefixCache` or its fields for more, or False for nowhere.
            deterministic: Fill small calls up on processors (those with AMX) whose matrix kernels give a token other
                last digits among few others than among many. Elsewhere a CPU's scores never depend on neighbours.
            local_files_only: Use what is already on disk, never the network.
            token: Hub access token.
            cache_dir: Hub cache folder.
            trust_remote_code: Let the model's repository run its own code. Off unless you say so.

        Raises:
            ArtifactError: The artifact is missing, damaged, or belongs to another model.
            BackboneError: The language model cannot be loaded or read.
            MissingDependencyError: 8-bit or 4-bit without bitsandbytes, fp8 without torchao, any without accelerate.
        """
        load = LoadOptions(
            device=device,
            dtype=dtype,
            load_in_8bit=load_in_8bit,
            load_in_4bit=load_in_4bit,
            load_in_fp8=load_in_fp8,
            local_files_only=local_files_only,
            token=token,
            cache_dir=cache_dir,
            trust_remote_code=trust_remote_code,
            deterministic=deterministic,
        )
        elsewhere = None if backbone is None else str(backbone)
        return cls.from_source(
            ModelSource(str(name), revision, load, elsewhere, max_length, token_budget, prefix_cache)
        )

    @classmethod
    def from_source(cls, source: ModelSource) -> RSRank:
        """As `from_pretrained`, from one object that holds all of its arguments."""
        ranker = cls(
            *open_artifact(source),
            token_budget=source.token_budget,
            prefix_cache=source.prefix_cache,
            deterministic=source.load.deterministic,
        )
        ranker.name = source.name
        return ranker

    @classmethod
    def from_backbone(
        cls,
        name: str | Path,
        projection: Projection,
        *,
        template: Template | None = None,
        fusion_layer: int = 0,
        revision: str | None = None,
        options: LoadOptions | None = None,
        training: TrainingRecord | None = None,
        license: str | None = None,
    ) -> RSRank:
        """Join a language model (a local folder or a Hub id) and a B into a new artifact, for `save_pretrained`.

        Args:
            name: Of the language model.
            projection: B, and what else it weighs.
            template: Text around document and query.
            fusion_layer: The first layer in which queries see documents; B reads layers above it. Below it, a query's
                tokens see only ``query_start + query + suffix``.
            revision: The model's revision on the Hub, recorded in the artifact.
            options: How to load the model.
            training: Where B comes from, recorded in the artifact.
            license: SPDX-like identifier for the model card, such as ``"apache-2.0"``.

        Raises:
            BackboneError: The model cannot be loaded or read.
            ArtifactError: B's shape does not fit it.
        """
        record = training or TrainingRecord()
        chosen = ModelSource(str(name), revision, options or LoadOptions())
        text = template or Template()
        return cls(*new_artifact(chosen, projection, text, record, license=license, fusion_layer=fusion_layer))

    def save_pretrained(self, folder: str | Path, *, include_backbone: bool = False) -> None:
        """Write the artifact: config.json, projection.safetensors and a model card.

        With ``include_backbone``, and always where it came with its own, the language model and its tokenizer, too:
        without the layers after the last one that B reads, which are not loaded.
        """
        parts = Artifact(self.backbone, self.prompts, self.projection, self.config)
        save_artifact(Path(folder), parts, include_backbone=include_backbone)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        include_backbone: bool = False,
        private: bool = False,
        revision: str | None = None,
        token: str | bool | None = None,
        commit_message: str = "Upload RSRank projection",
    ) -> str:
        """Publish the artifact on the Hugging Face Hub; gives the commit's address.

        Repository (``owner/name``) and revision (a branch) are made if need be; ``private`` is for a new one.
        ``include_backbone`` is as in `save_pretrained`; the default token is that of ``hf auth login``.

        Raises:
            ArtifactError: The Hub refused, or the artifact names a language model that only this machine has.
        """
        hub.check_shareable(self.config, include_backbone=include_backbone)
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder, include_backbone=include_backbone)
            return hub.push(
                Path(folder), repo_id, private=private, revision=revision, token=token, message=commit_message
            )

    def index(self, documents: Sequence[str], *, show_progress: bool = False) -> int:
        """Read documents ahead of time, for later calls to find on disk; how many were new. It can be interrupted.

        Gives the number of those that were not there yet.

        Raises:
            InputError: This ranker keeps no prefixes on disk, they could not be written or are more than the folder
                may hold, or something is not text.
            ScoringError: A document does not fit into memory even alone.
        """
        indexer = Indexer(self.store, self.backbone, self.prompts)
        waiting = indexer.waiting(as_list(documents), whole=True)
        try:
            with _progress(len(waiting), show_progress, "reading") as bar:
                indexer.write(waiting, self.token_budget, bar.update)
        except DoesNotFitError as error:
            raise _too_large(error.ids, waiting[error.ids]) from None
        return len(waiting)

    def index_size(self, documents: Sequence[str]) -> tuple[int, int]:
        """How many distinct documents `index` would read, and the bytes of disk that their prefixes take."""
        indexer = Indexer(self.store, self.backbone, self.prompts)
        waiting = indexer.waiting(as_list(documents))
        return len(waiting), indexer.disk_bytes(waiting)

    def token_ends(self, document: str) -> tuple[list[int], int]:
        """See `Reranker.token_ends`."""
        return self.prompts.token_ends(document)

    def stats(self) -> dict[str, int]:
        """Batches halved because memory ran out (``memory_retries``).

        With the hits, misses, bytes and evictions of the prefixes, if any are kept.
        """
        return {"memory_retries": len(self._halved), **({} if self.store is None else self.store.stats())}

    def with_instruction(self, instruction: str) -> Self:
        """A ranker that judges by this instruction, if the artifact's template has a place for one.

        It shares model, B and kept prefixes, which are kept for each instruction apart.

        Raises:
            InputError: The artifact takes none, or the instruction is blank, too long or holds a special token.
        """
        twins: dict[str, Self] = self.__dict__.setdefault("_instructed", {})
        if instruction not in twins:
            template = self.config.template.with_instruction(instruction)
            tokenizer, most = self.prompts.tokenizer, self.prompts.max_length
            special = [token for token in tokenizer.get_added_vocab() if token in instruction]
            if special:  # it would be read as one, as in the template
                raise InputError(f"An instruction must be plain text, and this one holds {special[0]!r}.")
            twin = copy.copy(self)
            twin.prompts = PromptTokenizer(
                tokenizer, template, max_length=most, shared_positions=self.prompts.shared_positions
            )
            twin.reader = ShiftReader(self.backbone, twin.prompts, self.config.layers, self.store)
            if len(twins) >= INSTRUCTIONS:
                twins.pop(next(iter(twins)), None)
            twins[instruction] = twin
        return twins[instruction]

    def score(self, query: str, documents: Sequence[str], *, show_progress: bool = False) -> list[float]:
        """Score documents for one query, in input order (paper, Section 4.3); above 0 means relevant.

        The query is never cut. A document that is too long is cut at its end; one without text scores `BLANK_SCORE`.

        Raises:
            InputError: The query is empty or too long, or something is not text.
            ScoringError: A document could not be scored; it is named.
        """
        return [found.score for found in self.score_documents(query, documents, show_progress=show_progress)]

    @torch.inference_mode()
    def score_documents(self, query: str, documents: Sequence[str], *, show_progress: bool = False) -> list[Scored]:
        """As `score`, which raises the same errors, with what else there is to say of each document."""
        tokens = self.prompts.query(query)
        prompts = self.prompts.documents(as_list(documents), len(tokens.ids))
        return self._scored([(tokens, prompt) for prompt in prompts], show_progress=show_progress)

    @torch.inference_mode()
    def score_many(
        self, queries: Sequence[str], documents: Sequence[Sequence[str]], *, show_progress: bool = False
    ) -> list[list[float]]:
        """Score each query's own documents. A document that several queries share is read only once.

        Raises as `score`, and InputError where the two lists differ in length.
        """
        if isinstance(queries, str) or len(queries) != len(documents):
            asked = "one string" if isinstance(queries, str) else f"{len(queries)} queries"
            raise InputError(f"score_many needs a list of documents a query, got {len(documents)} lists for {asked}.")
        tokens = [self.prompts.query(query) for query in queries]
        given = zip(tokens, documents, strict=True)
        lists = [self.prompts.documents(as_list(texts), len(query.ids)) for query, texts in given]
        pairs = [(query, prompt) for query, prompts in zip(tokens, lists, strict=True) for prompt in prompts]
        places = [(row, place) for row, prompts in enumerate(lists) for place in range(len(prompts))]
        try:
            scores = iter(self._scored(pairs, show_progress=show_progress))
        except ScoringError as error:
            row, place = places[error.index]
            whose = f" of query {row}" if row else ""
            said = str(error).replace(f"Document {error.index}", f"Document {place}{whose}", 1)
            raise ScoringError(said, place) from None
        return [[next(scores).score for _ in prompts] for prompts in lists]

    def identity(self) -> str:
        """Short hash of the language model, how it is computed, the template and B."""
        found = prefix_identity(self.backbone, self.config) | {"dtype": str(self.backbone.dtype)}
        weights = self.projection.weight.detach().float().cpu().numpy().tobytes()
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode() + weights).hexdigest()[:16]

    @torch.inference_mode()
    def score_pairs(self, pairs: Sequence[Pair | tuple[str, str]]) -> list[Scored]:
        """Score pairs of any queries and documents, in input order: pairs of several queries share batches.

        Raises:
            InputError: As `score`.
            ScoringError: As `score`; the position in ``pairs`` is given.
        """
        pairs = as_pairs(pairs)
        queries = {query: self.prompts.query(query) for query in dict.fromkeys(pair.query for pair in pairs)}
        tokenised = []
        for pair in pairs:
            query = queries[pair.query]
            prompts = self.prompts.documents([pair.document], len(query.ids), max_tokens=pair.max_tokens)
            tokenised.append((query, prompts[0]))
        return self._scored(tokenised)

    def _scored(
        self, pairs: Sequence[tuple[TokenisedQuery, TokenisedDocument]], *, show_progress: bool = False
    ) -> list[Scored]:
        """Scores of pairs, in order. Each distinct one is a row; a document that stands in several is read once."""
        places: dict[Row, list[int]] = {}
        for place, (query, document) in enumerate(pairs):
            if not document.empty:
                places.setdefault(Row(document.ids, query), []).append(place)
        scores = [BLANK_SCORE] * len(pairs)
        with _progress(len(places), show_progress, "scoring") as bar:
            for batches in self._batches(list(places)):
                try:
                    for batch in batches:
                        with batches.attempt():
                            for row, score in zip(batch, score_rows(self.reader, self.projection, batch), strict=True):
                                for place in places[row]:
                                    scores[place] = _finite(score, place)
                            bar.update(len(batch))
                except DoesNotFitError as error:
                    raise _too_large(error.ids.document, places[error.ids][0]) from None
                finally:
                    self._halved += batches.halved
        return [
            Scored(score, document.truncated, len(query.ids) + len(document.ids))
            for score, (query, document) in zip(scores, pairs, strict=True)
        ]

    def _batches(self, rows: list[Row]) -> Iterator[Batches[Row]]:
        """Batches of rows whose queries have about the same length.

        Kept documents apart, because each costs only the query's tokens: more of them fill a batch. First, because
        the new ones may push them out.
        """
        by_room: dict[int, list[Row]] = {}
        for row in rows:
            by_room.setdefault(whole_lanes(len(row.query.ids)), []).append(row)
        for room, group in by_room.items():
            kept = {row for row in group if self.store is not None and self.store.is_kept(row.document)}
            if kept:
                joined = JOINED_BYTES.get(self.backbone.device.type, JOINED_BYTES["cpu"])
                most = min(joined // self.backbone.bytes_per_token, 8 * self.token_budget)
                budget = max(self.token_budget, most)
                yield Batches([row for row in group if row in kept], budget, extra=room, alike=ALIKE_KEPT)
            yield Batches([row for row in group if row not in kept], self.token_budget, extra=room)

    @torch.inference_mode()
    def explain(self, query: str, document: str, *, max_tokens: int | None = None) -> Explanation:
        """Take a score apart, exactly, per query token, layer and head; at most ``max_tokens`` of a document are read.

        A document without text has no parts, and `BLANK_SCORE`. Raises as `score`.
        """
        tokens = self.prompts.query(query)
        prompt = self.prompts.documents([document], len(tokens.ids), max_tokens=max_tokens)[0]
        parts = torch.zeros(tokens.length, len(self.projection.layers), self.backbone.num_heads)
        score, agreement = BLANK_SCORE, 0.0
        if not prompt.empty:
            try:
                parts, agreement = score_parts(self.reader, self.projection, Row(prompt.ids, tokens))
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise _too_large(prompt.ids, 0) from None
            score = _finite(float(parts.sum()) + agreement, 0)
        return Explanation(
            query=query,
            document=document,
            score=score,
            truncated=prompt.truncated,
            tokens=tuple(self.prompts.text_of(tokens.ids[tokens.scored])),
            layers=self.projection.layers,
            parts=tuple(tuple(row) for row in parts.sum(-1).tolist()),
            head_parts=tuple(tuple(tuple(heads) for heads in row) for row in parts.tolist()),
            agreement=agreement,
        )


def _progress(total: int, show: bool, what: str) -> tqdm[NoReturn]:
    return tqdm(total=total, disable=not show, unit="doc", desc=what)


def _finite(score: float, place: int) -> float:
    if math.isfinite(score):
        return score
    raise ScoringError(
        f"Document {place} scored {score}. The model overflowed on it: load it in bfloat16 or float32.", place
    )


def _too_large(ids: Ids, place: int) -> ScoringError:
    return ScoringError(
        f"Document {place} ({len(ids)} tokens with the template) does not fit into memory even by itself. "
        "Pass a smaller max_length, or load the model in 8-bit or on another device.",
        place,
    )
