"""RSRank: backbone, template and B joined into a reranker."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from tqdm.auto import tqdm

from .artifact import hub
from .artifact.config import RSRankConfig, TrainingRecord
from .artifact.identity import check_after_run, check_before_run, describe
from .errors import ArtifactError, InputError, ScoringError
from .language_model.loading import load_model
from .language_model.options import LoadOptions, ModelSource
from .method.backbone import Backbone
from .method.batching import ALIKE, DoesNotFitError, Ids, run_batches, token_budget_for
from .method.explanation import Explanation
from .method.grouping import Row, groups_of, places_of
from .method.projection import Projection
from .method.reading import NullRun, ShiftReader
from .method.template import PromptTokenizer, Template, TokenisedDocument, TokenisedQuery
from .prefixes.settings import Choice, as_prefix_cache
from .prefixes.store import PrefixStore
from .reranker import BLANK_SCORE, Pair, Reranker, Scored, as_list

ALIKE_KEPT = 0.4
"""As `batching.ALIKE`, for documents that are kept or packed into one row: padding costs them attention only."""

JOINED_BYTES = {"cpu": 128_000_000, "cuda": 4_000_000_000, "mps": 1_000_000_000}
"""Kept prefixes that are joined for one batch."""

DEVICE_BYTES = {"cpu": 256_000_000, "mps": 1_000_000_000}
"""Prefixes kept by default; on CUDA a quarter of what is free after loading."""

INSIDE = "./backbone"
"""How an artifact names a language model that lies in its own folder."""


class RSRank(Reranker):
    """Keeps the documents that shift a query's value vectors the way relevant ones do.

    Make one with `from_pretrained`. Calls from several threads are safe.

    Args:
        backbone: The frozen language model.
        prompts: Its tokenizer with the artifact's template.
        projection: B.
        config: The artifact's config.
        token_budget: Padded tokens of documents and query in one batch; None for the device's default.
        prefix_cache: Where documents' prefixes are kept between calls; see `from_pretrained`.

    Raises:
        InputError: A choice that cannot be used.
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
    ) -> None:
        if token_budget is not None and token_budget < 1:
            raise InputError(f"token_budget must be at least 1, got {token_budget}.")
        self.backbone, self.prompts, self.config = backbone, prompts, config
        # A copy: the caller may be training the original.
        self.projection = Projection(projection.weight.detach().clone(), projection.layers).to(backbone.device)
        self.projection.requires_grad_(False)
        self.reader = ShiftReader(
            backbone,
            prompts,
            config.layers,
            signal=config.signal,
            null_prefix=config.null_prefix,
            store=store_for(backbone, config, prefix_cache),
        )
        self.token_budget = token_budget or token_budget_for(backbone.device)
        self._halved: list[int] = []  # sizes of batches; threads may append without a lock

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
        )
        elsewhere = None if backbone is None else str(backbone)
        source = ModelSource(str(name), revision, load, elsewhere, max_length, token_budget, prefix_cache)
        return cls.from_source(source)

    @classmethod
    def from_source(cls, source: ModelSource) -> RSRank:
        """As `from_pretrained`, from one object that holds all of its arguments."""
        load = source.load
        folder = hub.resolve(
            source.name,
            revision=source.revision,
            local_files_only=load.local_files_only,
            token=load.token,
            cache_dir=load.cache_dir,
        )
        config = hub.read_config(folder)
        projection = Projection(hub.read_projection(folder, config), config.layers)
        inside = config.backbone.name == INSIDE
        model = source.backbone or (folder / config.backbone.name if inside else config.backbone.name)
        pinned = config.backbone.revision if source.backbone is None and not inside else None
        last_layer = config.layers[-1]
        loaded = load_model(model, revision=pinned, options=load, last_layer=last_layer)
        check_before_run(loaded, config.backbone, str(model))
        core = Backbone(loaded.model, last_layer, num_layers=loaded.num_layers)
        check_after_run(core, config.backbone, str(model))
        limits = (core.max_length, config.max_length, source.max_length)
        prompts = PromptTokenizer(
            loaded.tokenizer,
            config.template,
            max_length=min(limit for limit in limits if limit is not None),
            shared_positions=core.causal,
        )
        return cls(
            core, prompts, projection, config, token_budget=source.token_budget, prefix_cache=source.prefix_cache
        )

    @classmethod
    def from_backbone(
        cls,
        name: str | Path,
        projection: Projection,
        *,
        template: Template | None = None,
        revision: str | None = None,
        options: LoadOptions | None = None,
        training: TrainingRecord | None = None,
        license: str | None = None,
    ) -> RSRank:
        """Join a language model and a B into a new artifact, to be saved with `save_pretrained`.

        Args:
            name: Local folder or Hub id of the language model.
            projection: B for it.
            template: Text around document and query.
            revision: The model's revision on the Hub, recorded in the artifact.
            options: How to load the model.
            training: Where B comes from, recorded in the artifact.
            license: SPDX-like identifier for the model card, such as ``"apache-2.0"``.

        Raises:
            BackboneError: The model cannot be loaded or read.
            ArtifactError: B's shape does not fit it.
        """
        last_layer = projection.layers[-1]
        loaded = load_model(name, revision=revision, options=options or LoadOptions(), last_layer=last_layer)
        core = Backbone(loaded.model, last_layer, num_layers=loaded.num_layers)
        prompts = PromptTokenizer(
            loaded.tokenizer, template or Template(), max_length=core.max_length, shared_positions=core.causal
        )
        config = RSRankConfig(
            backbone=describe(core, prompts, str(name), revision),
            layers=projection.layers,
            projection_dim=projection.weight.shape[2],
            template=prompts.template,
            training=training or TrainingRecord(),
            license=license,
        )
        if tuple(projection.weight.shape) != config.shape:
            raise ArtifactError(
                f"B has shape {tuple(projection.weight.shape)}, but {core.name} needs (L, H, P, D) = {config.shape}."
            )
        return cls(core, prompts, projection, config)

    def save_pretrained(self, folder: str | Path, *, include_backbone: bool = False) -> None:
        """Write the artifact: config.json, projection.safetensors and a model card.

        Args:
            folder: Where to; made if need be.
            include_backbone: Also write the language model and its tokenizer, so that the folder is all one needs.
                Always so for an artifact that came with its own model. Layers after the last one that B reads are not
                loaded and so not written: the folder holds a language model with fewer layers, and says so.
        """
        path, config = Path(folder), self.config
        if include_backbone or config.backbone.name == INSIDE:
            inside = {"name": INSIDE, "revision": None, "num_layers": self.backbone.loaded_layers}
            spec = config.backbone.model_copy(update=inside)
            config = config.model_copy(update={"backbone": spec})
            self.backbone.model.save_pretrained(path / INSIDE)
            self.prompts.tokenizer.save_pretrained(path / INSIDE)
        hub.write_artifact(path, config, self.projection.weight, hub.model_card(config))

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
        """Publish the artifact on the Hugging Face Hub.

        Args:
            repo_id: ``owner/name``; made if it does not exist.
            include_backbone: Also upload the language model, as `save_pretrained` does.
            private: Whether a new repository is private.
            revision: Branch; made if it does not exist.
            token: Access token with write permission; None for the one of ``hf auth login``.
            commit_message: First line of the commit.

        Returns:
            The commit's address.

        Raises:
            ArtifactError: The Hub refused, or the artifact names a language model that only this machine has.
        """
        source = self.config.backbone.name
        if not include_backbone and source != INSIDE and not hub.is_hub_id(source):
            raise ArtifactError(
                f"The artifact's language model is the local folder {source!r}, which nobody else could load. Make "
                "the artifact with the model's Hub id, or pass include_backbone=True to upload the model with it."
            )
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder, include_backbone=include_backbone)
            return hub.push(
                Path(folder), repo_id, private=private, revision=revision, token=token, message=commit_message
            )

    def index_size(self, documents: Sequence[str]) -> tuple[int, int]:
        """How many distinct documents `index` would read, and the bytes of disk that their prefixes take."""
        waiting = self._unindexed(documents)
        return len(waiting), self._disk_bytes(waiting)

    def _disk_bytes(self, waiting: Iterable[Ids]) -> int:
        core = self.backbone
        per_token = 2 * core.last_layer * core.num_heads * (core.head_dim + 2)  # int8 and a scale for each head
        return sum(map(len, waiting)) * per_token

    def index(self, documents: Sequence[str], *, show_progress: bool = False) -> int:
        """Read documents ahead of time, so that later calls find their prefixes on disk. It can be interrupted.

        Args:
            documents: Texts.
            show_progress: Show a progress bar.

        Returns:
            How many were not there yet.

        Raises:
            InputError: This ranker keeps no prefixes on disk, they could not be written or are more than the folder
                may hold, or something is not text.
            ScoringError: A document does not fit into memory even alone.
        """
        waiting, store = self._unindexed(documents), self.reader.store
        assert store is not None
        size = self._disk_bytes(waiting)
        if store.disk_limit is not None and size > store.disk_limit:
            raise InputError(
                f"The prefixes take {size / 1e9:.2f} GB and the folder may hold {store.disk_limit / 1e9:.2f} GB: the "
                "first would have left before the last is written. Raise disk=, or index fewer documents."
            )
        failed = store.stats()["write_errors"]
        with tqdm(total=len(waiting), disable=not show_progress, unit="doc", desc="reading") as bar:
            try:
                with torch.inference_mode():
                    run_batches(
                        list(waiting),
                        lambda batch: store.add(batch, self.reader.run),
                        budget=self.token_budget,
                        done=bar.update,
                        halved=self._halved.append,
                    )
            except DoesNotFitError as error:
                raise _too_large(error.ids, 0, waiting[error.ids]) from None
        failed = store.stats()["write_errors"] - failed
        if failed:
            raise InputError(
                f"{failed} of {len(waiting)} prefixes could not be written (is the disk full?). Make room and index "
                "again: what was written is not read again."
            )
        return len(waiting)

    def _unindexed(self, documents: Sequence[str]) -> dict[Ids, int]:
        """Documents that are not on disk, and where each first stands."""
        store = self.reader.store
        if store is None or not store.has_disk:
            raise InputError("There is no folder to keep prefixes in. Load the model with prefix_cache=FOLDER.")
        prompts = self.prompts.documents(as_list(documents), 0)
        first: dict[Ids, int] = {}
        for position, prompt in enumerate(prompts):
            if not prompt.empty:
                first.setdefault(prompt.ids, position)
        return {ids: position for ids, position in first.items() if not store.holds(ids)}

    def stats(self) -> dict[str, int]:
        """Batches halved because memory ran out (``memory_retries``).

        With the hits, misses, bytes and evictions of the prefixes, if any are kept.
        """
        kept = {} if self.reader.store is None else self.reader.store.stats()
        return {"memory_retries": len(self._halved), **kept}

    def score(self, query: str, documents: Sequence[str], *, show_progress: bool = False) -> list[float]:
        """Score documents for one query, in input order (paper, Section 4.3).

        Args:
            query: The question. It is never cut.
            documents: Texts. One that is too long is cut at its end; one without text scores `BLANK_SCORE`.
            show_progress: Show a progress bar.

        Returns:
            One score a document, within plus or minus layers x heads; above 0 means relevant.

        Raises:
            InputError: The query is empty or too long, or something is not text.
            ScoringError: A document could not be scored; it is named.
        """
        return self._score_lists([query], [documents], show_progress).scores[0]

    def score_many(
        self, queries: Sequence[str], documents: Sequence[Sequence[str]], *, show_progress: bool = False
    ) -> list[list[float]]:
        """Score each query's own documents. A document that several queries share is read only once.

        Args:
            queries: Questions.
            documents: For each query, its documents.
            show_progress: Show a progress bar.

        Raises:
            InputError: As `score`, or the two lists differ in length.
            ScoringError: As `score`.
        """
        if isinstance(queries, str) or len(queries) != len(documents):
            raise InputError(
                f"score_many needs one list of documents for each query, got {len(documents)} lists for "
                f"{'one string' if isinstance(queries, str) else f'{len(queries)} queries'}."
            )
        return self._score_lists(queries, documents, show_progress).scores

    def score_pairs(self, pairs: Sequence[Pair]) -> list[Scored]:
        """Score pairs of any queries and documents: pairs of several queries share batches.

        Args:
            pairs: Each with a query of its own, or the same as others.

        Returns:
            One result a pair, in input order.

        Raises:
            InputError: As `score`.
            ScoringError: As `score`; the position in ``pairs`` is given.
        """
        rows = {query: row for row, query in enumerate(dict.fromkeys(pair.query for pair in pairs))}
        queries = [self.prompts.query(query) for query in rows]
        documents: list[list[TokenisedDocument]] = [[] for _ in rows]
        places, columns = [], dict[tuple[int, int], int]()
        for number, pair in enumerate(pairs):
            row = rows[pair.query]
            places.append((row, len(documents[row])))
            columns[places[-1]] = number
            documents[row] += self.prompts.documents([pair.document], len(queries[row].ids), max_tokens=pair.max_tokens)
        try:
            found = self._score_tokenised(queries, documents, False)
        except _UnscoredError as error:
            raise error.at(columns[error.row, error.column]) from None
        return [found.scored(row, column) for row, column in places]

    def score_documents(self, query: str, documents: Sequence[str], *, show_progress: bool = False) -> list[Scored]:
        """As `score`, with what else there is to say of each document.

        Raises:
            InputError: As `score`.
            ScoringError: As `score`.
        """
        found = self._score_lists([query], [documents], show_progress)
        return [found.scored(0, column) for column in range(len(found.scores[0]))]

    def _score_lists(
        self,
        queries: Sequence[str],
        documents: Sequence[Sequence[str]],
        show_progress: bool,
    ) -> _Found:
        tokenised = [self.prompts.query(query) for query in queries]
        prompts = [
            self.prompts.documents(as_list(texts), len(tokens.ids))
            for tokens, texts in zip(tokenised, documents, strict=True)
        ]
        return self._score_tokenised(tokenised, prompts, show_progress)

    @torch.inference_mode()
    def _score_tokenised(
        self,
        queries: Sequence[TokenisedQuery],
        documents: Sequence[Sequence[TokenisedDocument]],
        show_progress: bool,
    ) -> _Found:
        """Scores of every query's documents, group by group."""
        store = self.reader.store
        places = places_of(documents)
        groups = groups_of(places, queries, joined=self.reader.null_prefix != "matched", keeps=store is not None)
        found = _Found.empty(queries, documents)
        runs = {row: NullRun(query) for row, query in enumerate(queries)}
        packs = self.backbone.packs

        def score_batch(batch: list[Row]) -> None:
            for rows, sums in self._sums(batch, runs):
                for item, row, score in zip(batch, rows, sums.tolist(), strict=True):
                    for column in (column for owner, column in places[item.ids] if owner == row):
                        found.scores[row][column] = _finite(score, row, column)

        total = sum(len(group.rows) for group in groups)
        with tqdm(total=total, disable=not show_progress, unit="doc", desc="scoring") as bar:
            for group in groups:
                room = max(len(queries[row].ids) for row in group.queries)
                kept = {row for row in group.rows if store is not None and store.has(row.ids)}
                try:
                    # Apart, because a kept document costs only the query's tokens: more of them fill a batch. First,
                    # because the new ones may push them out.
                    run_batches(
                        list(kept),
                        score_batch,
                        budget=self._budget_of_kept(),
                        extra=room,
                        alike=ALIKE_KEPT,
                        done=bar.update,
                        halved=self._halved.append,
                    )
                    run_batches(
                        [row for row in group.rows if row not in kept],
                        score_batch,
                        budget=self.token_budget,
                        extra=room,
                        alike=ALIKE_KEPT if packs else ALIKE,
                        done=bar.update,
                        halved=self._halved.append,
                    )
                except DoesNotFitError as error:
                    raise _too_large(error.ids.ids, *places[error.ids.ids][0]) from None
        return found

    def _budget_of_kept(self) -> int:
        """Padded tokens of a batch whose documents are kept: what their joined prefixes may take."""
        core = self.backbone
        per_token = 2 * core.last_layer * core.num_heads * core.head_dim * core.dtype.itemsize
        return max(
            self.token_budget,
            min(JOINED_BYTES.get(core.device.type, JOINED_BYTES["cpu"]) // per_token, 8 * self.token_budget),
        )

    def _sums(self, batch: list[Row], runs: dict[int, NullRun]) -> Iterator[tuple[list[int], Tensor]]:
        """Scores of one batch: each row's query, and the rows' scores; once for each query that all of them share."""
        documents, queries = [row.ids for row in batch], batch[0].queries
        room = max(len(runs[query].query.ids) for row in batch for query in row.queries)
        if any(row.queries != queries for row in batch):
            own = [runs[row.queries[0]] for row in batch]
            sums = torch.zeros(len(batch), device=self.backbone.device)
            lengths = torch.tensor([run.query.length for run in own], device=self.backbone.device)
            prefixes = self.reader.prefill(documents, room, runs=own)
            self.reader.read_own(own, prefixes, partial(self._add_own, sums, lengths[:, None]))
            yield [row.queries[0] for row in batch], sums
            return
        # Where one query has to be run without a document, a row for it does for all of them.
        joined = self.reader.prefill(documents, room, runs=[runs[queries[0]]])
        for query in queries:
            sums = torch.zeros(len(batch), device=self.backbone.device)
            self.reader.read(runs[query], joined, partial(self._add, sums))
            yield [query] * len(batch), sums

    def _add_own(self, sums: Tensor, lengths: Tensor, layer: int, shift: Tensor) -> None:
        """As `_add`, with queries of different lengths (N, 1): a shift of 0, as behind a shorter one, adds nothing."""
        sums += (self.projection.cosines(layer, shift).sum(-1) / lengths).sum(-1)

    def _add(self, sums: Tensor, layer: int, shift: Tensor) -> None:
        """Fold one layer's shifts into the scores (N,) and forget them."""
        sums += self.projection.cosines(layer, shift).mean(-1).sum(-1)

    @torch.inference_mode()
    def explain(self, query: str, document: str, *, max_tokens: int | None = None) -> Explanation:
        """Take a score apart, exactly, per query token, layer and head. A document without text has no parts.

        Args:
            query: The question.
            document: One document.
            max_tokens: Read at most so many tokens of the document.

        Raises:
            InputError: As `score`.
            ScoringError: As `score`.
        """
        tokens = self.prompts.query(query)
        prompt = self.prompts.documents([document], len(tokens.ids), max_tokens=max_tokens)[0]
        terms: list[Tensor] = []
        if prompt.empty:
            return Explanation(query, document, BLANK_SCORE, False, (), self.projection.layers, (), ())

        def keep(layer: int, shift: Tensor) -> None:
            terms.append(self.projection.cosines(layer, shift)[0] / tokens.length)  # (H, T)

        def read(batch: list[Ids]) -> None:
            self.reader.read(NullRun(tokens), self.reader.prefill(batch, len(tokens.ids)), keep)

        try:
            run_batches([prompt.ids], read, budget=1)
        except DoesNotFitError as error:
            raise _too_large(error.ids, 0, 0) from None
        parts = torch.stack(terms).permute(2, 0, 1).double()  # (T, L, H)
        return Explanation(
            query=query,
            document=document,
            score=_finite(float(parts.sum()), 0, 0),
            truncated=prompt.truncated,
            tokens=tuple(self.prompts.text_of(tokens.ids[tokens.scored])),
            layers=self.projection.layers,
            parts=tuple(tuple(row) for row in parts.sum(-1).tolist()),
            head_parts=tuple(tuple(tuple(heads) for heads in row) for row in parts.tolist()),
        )


@dataclass(frozen=True)
class _Found:
    """What is known of every query's documents: see `Scored`."""

    scores: list[list[float]]
    truncated: list[list[bool]]
    tokens: list[list[int]]

    @classmethod
    def empty(cls, queries: Sequence[TokenisedQuery], documents: Sequence[Sequence[TokenisedDocument]]) -> _Found:
        """What is known before anything has been scored."""
        return cls(
            scores=[[BLANK_SCORE] * len(row) for row in documents],  # of those without text
            truncated=[[document.truncated for document in row] for row in documents],
            tokens=[
                [len(query.ids) + len(document.ids) for document in row]
                for query, row in zip(queries, documents, strict=True)
            ],
        )

    def scored(self, row: int, column: int) -> Scored:
        """One document's."""
        return Scored(self.scores[row][column], self.truncated[row][column], self.tokens[row][column])


class _UnscoredError(ScoringError):
    """A document that could not be scored, of several queries'."""

    def __init__(self, what: str, row: int, column: int) -> None:
        super().__init__(f"Document {column}{f' of query {row}' if row else ''} {what}", column)
        self.what, self.row, self.column = what, row, column

    def at(self, place: int) -> ScoringError:
        """The same, by its place among pairs."""
        return ScoringError(f"Document {place} {self.what}", place)


def store_for(core: Backbone, config: RSRankConfig, choice: Choice) -> PrefixStore | None:
    """The prefix store that a choice of ``prefix_cache`` stands for.

    Raises:
        InputError: Not a choice.
    """
    chosen = as_prefix_cache(choice)
    if chosen is None:
        return None
    limit = chosen.device
    if limit is None and core.device.type == "cuda":
        limit = torch.cuda.mem_get_info(core.device)[0] // 4
    elif limit is None:
        limit = DEVICE_BYTES.get(core.device.type, DEVICE_BYTES["cpu"])
    identity = {
        "backbone": config.backbone.name,
        "revision": config.backbone.revision,
        "weights": core.fingerprint(),
        "tokenizer": config.backbone.tokenizer,
        "template": config.template.model_dump(),
        "layers": core.loaded_layers if config.signal == "hidden" else core.last_layer,
        "bits": core.bits,
    }
    return PrefixStore(
        identity,
        device=core.device,
        dtype=core.dtype,
        device_bytes=limit,
        host_bytes=chosen.host,
        folder=chosen.folder,
        disk_bytes=chosen.disk,
        salt=chosen.salt,
    )


def _finite(score: float, row: int, column: int) -> float:
    if math.isfinite(score):
        return score
    raise _UnscoredError(f"scored {score}. The model overflowed on it: load it in bfloat16 or float32.", row, column)


def _too_large(ids: Ids, row: int, column: int) -> ScoringError:
    return _UnscoredError(
        f"({len(ids)} tokens with the template) does not fit into memory even by itself. "
        "Pass a smaller max_length, or load the model in 8-bit or on another device.",
        row,
        column,
    )
