"""RSRank: backbone, template and B joined into a reranker."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from pydantic import ValidationError
from typing_extensions import Self, Unpack

from .artifact.config import RSRankConfig
from .artifact.identity import prefix_identity
from .artifact.opening import Parts, new_artifact, open_artifact
from .artifact.saving import PushOptions, push_artifact, save_artifact
from .backends.options import LoadArguments, LoadOptions, ModelSource
from .errors import InputError, check_names, check_text, finite, problems_of, too_large
from .method.batches import DoesNotFitError, Ids, Row, token_budget_for
from .method.formula import Weights, similarity_windows
from .method.scoring import RowTerms, ShiftReader, row_terms, score_in_batches
from .method.template import PromptTokenizer, TokenisedDocument, TokenisedQuery
from .prefixes.cache import CachedPrefixes, PrefixTiers
from .ranking.explanation import Explanation
from .reranker import BLANK_SCORE, Pair, PairLike, Reranker, Scored, as_list, as_pairs, by_query

if TYPE_CHECKING:
    from .backends.base import LanguageModel
    from .backends.torch.projection import Projection

# A token of a query attends to so many tokens in the time in which the model runs one token.
# Measured with `mini` on a CPU, with queries of 10 to 500 tokens: 150 to 300.
ATTENDED_PER_TOKEN = 192

DEFAULT_SETTINGS = ModelSource()


class RSRank(Reranker):
    """Scores a document by the shift of the query's value vectors (arXiv 2606.17468).

    Make one with `from_pretrained`. Calls from several threads are safe.

    Args:
        backbone: The frozen language model.
        prompts: Its tokenizer with the artifact's template.
        projection: B and its optional weights.
        config: The artifact's config.
        settings: Its token budget and prefix cache.

    Raises:
        InputError: The prefix cache's folder cannot be used.
    """

    # Measured: long articles are ranked and selected better in windows (docs/benchmarks.md).
    long_documents = "windows"

    def __init__(
        self,
        backbone: "LanguageModel",
        prompts: PromptTokenizer,
        projection: Weights,
        config: RSRankConfig,
        settings: ModelSource = DEFAULT_SETTINGS,
    ) -> None:
        self.backbone = backbone
        self.prompts = prompts
        self.projection = backbone.on_device(projection)
        self.config = config
        self.name = config.backbone.name
        self.threshold = config.threshold
        self.max_gap = config.max_gap
        self.fallback = config.fallback
        self.labelled_data = config.training.data
        tiers = PrefixTiers.of(
            settings.cache_size,
            settings.cache_folder,
            device=backbone.device,
            dtype=backbone.dtype,
        )
        # Only a folder can hold prefixes of other models. Without one, the weights are not hashed.
        identity = prefix_identity(backbone, config) if tiers.disk is not None else {}
        self.cache = CachedPrefixes(identity, tiers)
        self.reader = ShiftReader(backbone, prompts, config.layers, self.cache)
        self.token_budget = settings.token_budget or token_budget_for(backbone.device)
        if settings.deterministic:
            # One row a batch: no number depends on the other rows.
            self.token_budget = 1

    @classmethod
    def from_pretrained(cls, name: str | Path = "mini", **options: Unpack[LoadArguments]) -> Self:
        """Load an artifact and the language model it belongs to.

        Args:
            name: Name of an artifact that ships with the package, such as ``"mini"``, a local
                folder, or a Hub id.
            **options: The fields of `ModelSource`, all of them optional: ``revision``,
                ``backbone``, ``device``, ``dtype``, ``max_length``, ``token_budget``,
                ``cache_size``, ``cache_folder``, ``deterministic``, ``local_files_only``,
                ``token`` and ``cache_dir``.

        Raises:
            InputError: An argument is out of range, or arguments exclude each other.
            TypeError: There is no such argument.
            ArtifactError: The artifact is missing, damaged, or belongs to another model.
            BackboneError: The language model cannot be loaded or read.
            MissingDependencyError: Quantised weights need bitsandbytes, or the language model
                needs torch, which is not installed.
        """
        check_names("from_pretrained", options, LoadArguments.__annotations__)
        # Pydantic checks and converts them.
        arguments: dict[str, Any] = {"name": name, **options}
        source = ModelSource(**arguments)
        ranker = cls(*open_artifact(source), source)
        ranker.name = source.name
        return ranker

    @classmethod
    def from_backbone(
        cls,
        name: str | Path,
        projection: "Projection | Weights",
        *,
        revision: str | None = None,
        options: LoadOptions | None = None,
        **fields: Any,
    ) -> Self:
        """Join a language model and a B into a new artifact.

        Args:
            name: Local folder or Hub id of the language model.
            projection: B and its optional weights.
            revision: The language model's revision on the Hub, recorded in the artifact.
            options: How to load the language model.
            **fields: Fields of `RSRankConfig`: ``template``, ``fusion_layer``,
                ``similarity_window``, ``attention_window``, ``training``, ``license``, ...

        Raises:
            BackboneError: The language model cannot be loaded or read.
            ArtifactError: B's shape does not fit it, or there is no such field.
        """
        return cls(*new_artifact(str(name), projection, revision, options, fields))

    def save_pretrained(self, folder: str | Path, *, include_backbone: bool = False) -> None:
        """Write the artifact completely or not at all: config, B and a model card.

        Args:
            folder: Where to. The folder is made if it does not exist. Its other files stay.
            include_backbone: Save the language model and its tokenizer, too: with torch without the
                layers after the last one that B reads, with ONNX Runtime as they are. An artifact
                that contains its language model is always saved with the language model.

        Raises:
            InputError: ``threshold`` was set to something else than a finite number, or
                ``max_gap`` or ``fallback`` to something that a config cannot hold.
            OSError: The folder cannot be written.
        """
        save_artifact(Path(folder), self._parts(), include_backbone)

    def push_to_hub(
        self, repo_id: str, *, include_backbone: bool = False, **options: Unpack[PushOptions]
    ) -> str:
        """Publish the artifact on the Hugging Face Hub; gives the commit's address.

        ``repo_id`` is ``owner/name``; the repository is made if it does not exist. For the other
        arguments see `save_pretrained` and `PushOptions`.

        Raises:
            ArtifactError: The Hub refused, or the language model is a local folder.
        """
        check_names("push_to_hub", options, PushOptions.__annotations__)
        return push_artifact(self._parts(), repo_id, include_backbone, options)

    def _parts(self) -> Parts:
        """The parts to save, with the rule that is set.

        Raises:
            InputError: A config cannot hold the rule.
        """
        fields = self.config.model_dump()
        for name in ("threshold", "max_gap", "fallback"):
            fields[name] = getattr(self, name)
        try:
            config = RSRankConfig.model_validate(fields)
        except ValidationError as error:
            raise InputError(f"{problems_of(error)}.") from None
        return Parts(self.backbone, self.prompts, self.projection, config)

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
        tokenised = self._tokenise(pairs)
        key_of = cache(self.cache.key)
        row_of_pair: list[Row | None] = []
        for query, document in tokenised:
            if document.empty:
                row_of_pair.append(None)
            else:
                row_of_pair.append(Row(document.ids, query, key_of(document.ids)))
        rows = [row for row in dict.fromkeys(row_of_pair) if row is not None]
        self.prompts.words.check(rows)
        try:
            scores = score_in_batches(self.reader, self.projection, rows, self.token_budget)
        except DoesNotFitError as error:
            raise too_large(len(error.ids.document), row_of_pair.index(error.ids)) from None
        result = []
        for place, (row, (query, document)) in enumerate(zip(row_of_pair, tokenised, strict=True)):
            score = BLANK_SCORE if row is None else finite(scores[row], place)
            tokens = len(query.ids) + len(document.ids)
            result.append(Scored(score, document.truncated, tokens))
        return result

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
        tokenised = self._tokenise(pairs)
        keys = [self.cache.key(document.ids) for _, document in tokenised]
        cached = self.cache.tiers.cached(keys)
        costs = []
        for (query, document), key in zip(tokenised, keys, strict=True):
            length = len(query.ids)
            cost = length + length * (length + len(document.ids)) // ATTENDED_PER_TOKEN
            if key not in cached:
                cost += len(document.ids)
            costs.append(cost)
        return costs

    def _tokenise(
        self, pairs: Sequence[PairLike]
    ) -> list[tuple[TokenisedQuery, TokenisedDocument]]:
        """Token ids of each pair's query and document; errors as `score`."""
        pairs = as_pairs(pairs)
        tokenised: dict[int, tuple[TokenisedQuery, TokenisedDocument]] = {}
        for text, of_query in by_query(pairs).items():
            texts = [pairs[place].document for place in of_query]
            query = self.prompts.query(text)
            documents = self.prompts.documents(texts, len(query.ids))
            for place, document in zip(of_query, documents, strict=True):
                tokenised[place] = (query, document)
        return [tokenised[place] for place in range(len(pairs))]

    def explain(self, query: str, document: str) -> Explanation:
        """Take a score apart, exactly, per query token, layer and head.

        Args:
            query: The query. It is not cut.
            document: The document. Without text, it has no parts, and `BLANK_SCORE`.

        Raises:
            InputError: As `score`.
            ScoringError: As `score`.
        """
        tokens, prompt = self._tokenise([Pair(query, document)])[0]
        shape = (tokens.length, len(self.projection.layers), self.backbone.num_heads)
        terms = RowTerms(BLANK_SCORE, np.zeros(shape), np.zeros(1 + tokens.length))
        window = None
        if not prompt.empty:
            try:
                terms = row_terms(self.reader, self.projection, Row(prompt.ids, tokens))
            except DoesNotFitError:
                raise too_large(len(prompt.ids), 0) from None
            if terms.window:
                length = len(prompt.ids)
                windows = similarity_windows(length, self.config.similarity_window)
                window = self.prompts.span_of(document, length, *windows[terms.window])
        by_token = terms.shift.tolist()
        matches = terms.similarity[1:].tolist()
        return Explanation(
            query=query,
            document=document,
            score=finite(terms.score, 0),
            truncated=prompt.truncated,
            tokens=tuple(self.prompts.text_of(tokens.ids[tokens.scored])),
            layers=self.projection.layers,
            parts=tuple(tuple(map(math.fsum, layers)) for layers in by_token),
            head_parts=tuple(tuple(map(tuple, layers)) for layers in by_token),
            similarity=float(terms.similarity.sum()),
            matches=tuple(matches) if any(matches) else (),
            similarity_window=window,
        )

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
        # Token ids, with their first position.
        positions: dict[Ids, int] = {}
        for position, document in enumerate(self.prompts.documents(as_list(documents), 0)):
            if not document.empty:
                positions.setdefault(document.ids, position)
        try:
            return self.cache.write(
                positions, self.backbone, self.token_budget, show_progress=show_progress
            )
        except DoesNotFitError as error:
            raise too_large(len(error.ids), positions[error.ids]) from None

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
