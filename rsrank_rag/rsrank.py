"""RSRank: backbone, template and B joined into a reranker."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from tqdm.auto import tqdm

from . import hub
from .backbone import Backbone, Prefixes
from .config import BackboneSpec, RSRankConfig, TrainingRecord
from .errors import ArtifactError, InputError, ScoringError
from .explanation import Explanation
from .loading import LoadOptions, load_model
from .projection import Projection
from .reranker import Reranker
from .shift import representational_shift
from .template import PromptTokenizer, Template, TokenisedQuery

logger = logging.getLogger(__name__)

TOKEN_BUDGET = {"cuda": 16384, "cpu": 2048, "mps": 4096}
"""Padded document tokens in one batch, by device. A batch holds at least one document."""


INSIDE: dict[str, str | None] = {"name": "./backbone", "revision": None}
"""How an artifact names a language model that lies in its own folder."""


class RSRank(Reranker):
    """Keeps the documents that shift a query's value vectors the way relevant ones do.

    Make one with `from_pretrained`. Calls from several threads are safe.

    Args:
        backbone: The frozen language model.
        prompts: Its tokenizer with the artifact's template.
        projection: B.
        config: The artifact's config.
        token_budget: Padded document tokens in one batch; None for the device's default.
    """

    def __init__(
        self,
        backbone: Backbone,
        prompts: PromptTokenizer,
        projection: Projection,
        config: RSRankConfig,
        *,
        token_budget: int | None = None,
    ) -> None:
        if token_budget is not None and token_budget < 1:
            raise InputError(f"token_budget must be at least 1, got {token_budget}.")
        self.backbone, self.prompts, self.config = backbone, prompts, config
        self.projection = projection.to(backbone.device).requires_grad_(False)
        self.token_budget = token_budget or TOKEN_BUDGET.get(backbone.device.type, 2048)

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
        max_length: int | None = None,
        token_budget: int | None = None,
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
            max_length: Use at most this many positions; longer documents are cut.
            token_budget: Padded document tokens in one batch.
            local_files_only: Use what is already on disk, never the network.
            token: Hub access token.
            cache_dir: Hub cache folder.
            trust_remote_code: Let the model's repository run its own code. Off unless you say so.

        Raises:
            ArtifactError: The artifact is missing, damaged, or belongs to another model.
            BackboneError: The language model cannot be loaded or read.
            MissingDependencyError: 8-bit or 4-bit without bitsandbytes and accelerate.
        """
        options = LoadOptions(
            device, dtype, load_in_8bit, load_in_4bit, local_files_only, token, cache_dir, trust_remote_code
        )
        folder = hub.resolve(
            name, revision=revision, local_files_only=local_files_only, token=token, cache_dir=cache_dir
        )
        config = hub.read_config(folder)
        projection = Projection(hub.read_projection(folder, config), config.layers)
        inside = config.backbone.name.startswith("./")
        source = backbone or (folder / config.backbone.name if inside else config.backbone.name)
        pinned = config.backbone.revision if backbone is None and not inside else None
        model, tokenizer = load_model(source, revision=pinned, options=options)
        core = Backbone(model, last_layer=_checked_last_layer(model.config.get_text_config(), config, str(source)))
        limits = (core.max_length, config.max_length, max_length)
        prompts = PromptTokenizer(
            tokenizer,
            config.template,
            max_length=min(limit for limit in limits if limit is not None),
            shared_positions=core.causal,
        )
        _check_identity(core, prompts, config, str(source))
        return cls(core, prompts, projection, config, token_budget=token_budget)

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
    ) -> RSRank:
        """Join a language model and a B into a new artifact, to be saved with `save_pretrained`.

        Args:
            name: Local folder or Hub id of the language model.
            projection: B for it.
            template: Text around document and query.
            revision: The model's revision on the Hub, recorded in the artifact.
            options: How to load the model.
            training: Where B comes from, recorded in the artifact.

        Raises:
            BackboneError: The model cannot be loaded or read.
            ArtifactError: B's shape does not fit it.
        """
        model, tokenizer = load_model(name, revision=revision, options=options or LoadOptions())
        core = Backbone(model, last_layer=projection.layers[-1])
        prompts = PromptTokenizer(
            tokenizer, template or Template(), max_length=core.max_length, shared_positions=core.causal
        )
        spec = BackboneSpec(
            name=str(name),
            revision=revision,
            model_type=core.config.model_type,
            num_layers=core.num_layers,
            num_heads=core.num_heads,
            head_dim=core.head_dim,
            tokenizer=prompts.fingerprint,
            weights=core.weight_sample,
        )
        config = RSRankConfig(
            backbone=spec,
            layers=projection.layers,
            projection_dim=projection.weight.shape[2],
            template=prompts.template,
            training=training or TrainingRecord(),
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
                Always so for an artifact that came with its own model.
        """
        path, config = Path(folder), self.config
        if include_backbone or config.backbone.name.startswith("./"):
            config = config.model_copy(update={"backbone": config.backbone.model_copy(update=INSIDE)})
            self.backbone.model.save_pretrained(path / "backbone")
            self.prompts.tokenizer.save_pretrained(path / "backbone")
        hub.write_artifact(path, config, self.projection.weight, hub.model_card(config))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = False,
        revision: str | None = None,
        token: str | bool | None = None,
        commit_message: str = "Upload RSRank projection",
    ) -> str:
        """Publish the artifact on the Hugging Face Hub.

        Args:
            repo_id: ``owner/name``; made if it does not exist.
            private: Whether a new repository is private.
            revision: Branch; made if it does not exist.
            token: Access token with write permission; None for the one of ``hf auth login``.
            commit_message: First line of the commit.

        Returns:
            The commit's address.

        Raises:
            ArtifactError: The Hub refused.
        """
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return hub.push(
                Path(folder), repo_id, private=private, revision=revision, token=token, message=commit_message
            )

    def score(self, query: str, documents: Sequence[str], *, show_progress: bool = False) -> list[float]:
        """Score documents for one query, in input order (paper, Section 4.3).

        Args:
            query: The question. It is never cut.
            documents: Texts. One that is too long is cut at its end; one without tokens scores exactly 0.
            show_progress: Show a progress bar.

        Returns:
            One score a document, within plus or minus layers x heads; above 0 means relevant.

        Raises:
            InputError: The query is empty or too long, or something is not text.
            ScoringError: A document could not be scored; it is named.
        """
        return self._score_pairs([query], [documents], show_progress)[0][0]

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
                f"score_many needs one list of documents a query, got {len(documents)} for {queries!r:.80}."
            )
        return self._score_pairs(queries, documents, show_progress)[0]

    def _score_and_truncation(self, query: str, documents: Sequence[str]) -> tuple[list[float], list[bool]]:
        scores, truncated = self._score_pairs([query], [documents], False)
        return scores[0], truncated[0]

    @torch.inference_mode()
    def _score_pairs(
        self, queries: Sequence[str], documents: Sequence[Sequence[str]], show_progress: bool
    ) -> tuple[list[list[float]], list[list[bool]]]:
        """Scores and truncation flags of every query's documents; equal documents are prefilled once."""
        scores: list[list[float]] = []
        truncated: list[list[bool]] = []
        wanted: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # prefix ids -> (query, document) positions
        tokenised: list[TokenisedQuery] = []
        for row, (query, texts) in enumerate(zip(queries, documents, strict=True)):
            if isinstance(texts, (str, bytes)):
                raise InputError("documents must be a list of strings, got one string. Put it in a list.")
            tokens = self.prompts.query(query)
            prompts = self.prompts.documents(texts, len(tokens.ids))
            tokenised.append(tokens)
            scores.append([0.0] * len(texts))
            truncated.append([prompt.truncated for prompt in prompts])
            for column, prompt in enumerate(prompts):
                if not prompt.empty:  # without a document there is no shift: exactly 0
                    wanted.setdefault(prompt.ids, []).append((row, column))
        alone: dict[int, dict[int, Tensor]] = {}

        def score_batch(batch: list[tuple[int, ...]]) -> None:
            prefixes = self.backbone.prefill(batch)
            users: dict[int, list[int]] = {}
            for position, ids in enumerate(batch):
                for row in dict.fromkeys(row for row, _ in wanted[ids]):
                    users.setdefault(row, []).append(position)
            for row, positions in users.items():
                if row not in alone:
                    alone[row] = self._query_alone(tokenised[row])
                chosen = prefixes if len(positions) == len(batch) else prefixes.select(positions)
                found = self._scores(tokenised[row], chosen, alone[row])
                for position, value in zip(positions, found, strict=True):
                    for owner, column in wanted[batch[position]]:
                        if owner == row:
                            scores[row][column] = _finite(value, column)

        self._run_batches(list(wanted), score_batch, lambda ids: wanted[ids][0][1], show_progress)
        return scores, truncated

    def _query_alone(self, query: TokenisedQuery) -> dict[int, Tensor]:
        """The query-only run: each read layer's value vectors of the scored tokens, (1, H, T, D)."""
        values: dict[int, Tensor] = {}

        def keep(layer: int, value: Tensor) -> None:
            if self.projection.reads(layer):
                values[layer] = value[:, :, query.scored].float()

        self.backbone.query_values([query.ids], self.backbone.prefill([self.prompts.null_prefix]), keep)
        return values

    def _scores(self, query: TokenisedQuery, prefixes: Prefixes, alone: dict[int, Tensor]) -> list[float]:
        """One query after N prefixes; every layer is folded into the score as it passes."""
        total = torch.zeros(len(prefixes), device=self.backbone.device)

        def fold(layer: int, value: Tensor) -> None:
            if self.projection.reads(layer):
                shift = representational_shift(value[:, :, query.scored], alone[layer])
                total.add_(self.projection.cosines(layer, shift).mean(-1).sum(-1))

        self.backbone.query_values([query.ids], prefixes, fold)
        return [float(score) for score in total]

    def _run_batches(
        self,
        prefixes: list[tuple[int, ...]],
        run: Callable[[list[tuple[int, ...]]], None],
        position: Callable[[tuple[int, ...]], int],
        show_progress: bool,
    ) -> None:
        """Longest first, so that too large a budget shows at once; halve the budget when memory runs out."""
        waiting = sorted(prefixes, key=len)
        budget = self.token_budget
        with tqdm(total=len(waiting), disable=not show_progress, unit="doc", desc="scoring") as bar:
            while waiting:
                size = max(1, min(len(waiting), budget // len(waiting[-1])))
                batch = waiting[-size:]
                failed = False
                try:
                    run(batch)
                except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                    if not _is_out_of_memory(error):
                        raise
                    failed = True
                if not failed:
                    del waiting[-size:]
                    bar.update(size)
                    continue
                # Outside the except block: the traceback no longer holds the failed run's tensors.
                gc.collect()
                if self.backbone.device.type == "cuda":
                    torch.cuda.empty_cache()
                if size == 1:
                    index = position(batch[0])
                    raise ScoringError(
                        f"Document {index} ({len(batch[0])} tokens with the template) does not fit into memory even "
                        "by itself. Pass a smaller max_length, or load the model in 8-bit or on another device.",
                        index,
                    )
                budget = max(1, len(waiting[-1]) * size // 2)
                logger.warning("Out of memory with %d documents at once; going on with half as many.", size)

    @torch.inference_mode()
    def explain(self, query: str, document: str) -> Explanation:
        """Take a score apart, exactly, per query token, layer and head.

        Args:
            query: The question.
            document: One document.

        Raises:
            InputError: As `score`.
        """
        tokens = self.prompts.query(query)
        prompt = self.prompts.documents([document], len(tokens.ids))[0]
        alone = self._query_alone(tokens)
        terms: list[Tensor] = []

        def keep(layer: int, value: Tensor) -> None:
            if self.projection.reads(layer):
                shift = representational_shift(value[:, :, tokens.scored], alone[layer])
                terms.append(self.projection.cosines(layer, shift)[0] / tokens.length)  # (H, T)

        self.backbone.query_values([tokens.ids], self.backbone.prefill([prompt.ids]), keep)
        parts = torch.stack(terms).permute(2, 0, 1).double() * (not prompt.empty)  # (T, L, H)
        return Explanation(
            query=query,
            document=document,
            score=_finite(float(parts.sum()), 0),
            truncated=prompt.truncated,
            tokens=tuple(self.prompts.text_of(tokens.ids[tokens.scored])),
            layers=self.projection.layers,
            parts=tuple(tuple(row) for row in parts.sum(-1).tolist()),
            head_parts=tuple(tuple(tuple(heads) for heads in row) for row in parts.tolist()),
        )


def _finite(score: float, index: int) -> float:
    if math.isfinite(score):
        return score
    raise ScoringError(
        f"Document {index} scored {score}. The model overflowed on it: load it in bfloat16 or float32.", index
    )


def _is_out_of_memory(error: BaseException) -> bool:
    """CUDA has its own exception; the CPU allocator raises a plain RuntimeError."""
    return (
        not isinstance(error, RuntimeError)
        or isinstance(error, torch.OutOfMemoryError)
        or ("can't allocate memory" in str(error) or "out of memory" in str(error).lower())
    )


def _checked_last_layer(found: object, config: RSRankConfig, source: str) -> int:
    """Compare what can be compared before the model runs, so that a foreign one gives this error and no other."""
    layers, kind = getattr(found, "num_hidden_layers", None), getattr(found, "model_type", None)
    if (layers, kind) != (config.backbone.num_layers, config.backbone.model_type):
        raise ArtifactError(
            f"This artifact belongs to {config.backbone.name} ({config.backbone.model_type}, "
            f"{config.backbone.num_layers} layers), but {source} is a {kind} with {layers} layers. "
            "Load the backbone the artifact names, or train B for this one."
        )
    return config.layers[-1]


def _check_identity(core: Backbone, prompts: PromptTokenizer, config: RSRankConfig, source: str) -> None:
    spec = config.backbone
    advice = "Load the backbone the artifact names (and its revision), or train B for this one."
    if (core.num_heads, core.head_dim) != (spec.num_heads, spec.head_dim):
        raise ArtifactError(
            f"This artifact belongs to {spec.name} with {spec.num_heads} KV heads of {spec.head_dim}, but {source} "
            f"has {core.num_heads} of {core.head_dim}. {advice}"
        )
    if prompts.fingerprint != spec.tokenizer:
        raise ArtifactError(
            f"The tokenizer of {source} splits text differently from the one this artifact was made with "
            f"(fingerprint {prompts.fingerprint}, expected {spec.tokenizer}). {advice}"
        )
    found = core.weight_sample
    near = len(found) == len(spec.weights) and all(
        math.isclose(a, b, rel_tol=2**-7, abs_tol=1e-4) for a, b in zip(found, spec.weights, strict=True)
    )
    if not near:
        raise ArtifactError(
            f"The weights of {source} are not those of {spec.name} (revision {spec.revision or 'not pinned'}) that "
            f"this artifact was made with. {advice}"
        )
