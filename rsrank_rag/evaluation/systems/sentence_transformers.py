"""Bi-encoders and cross-encoders of sentence-transformers behind the same contract."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...backends.options import LoadOptions
from ...errors import BackboneError, InputError, required
from ...reranker import Reranker


class Encoder(Reranker):
    """A model of sentence-transformers. It has no native threshold.

    The model is loaded in float32, unless ``options`` name a dtype.

    Args:
        name: Hub id or folder.
        revision: Commit, tag or branch on the Hub.
        options: How to load the model.

    Raises:
        BackboneError: The model cannot be loaded, or gives more than one number a pair.
        InputError: ``options`` ask for 8-bit or 4-bit weights.
        MissingDependencyError: sentence-transformers is not installed.
    """

    threshold: float | None = None

    kind: str
    """Name of the class of sentence-transformers."""

    runs_own_code = False
    """Whether code of the model's repository runs."""

    def __init__(
        self, name: str, *, revision: str | None = None, options: LoadOptions | None = None
    ) -> None:
        sentence_transformers = required(
            "sentence_transformers",
            "Bi-encoders and cross-encoders need sentence-transformers.",
            "systems",
        )
        from ...backends.torch.loading import LOAD_ERRORS

        options = options or LoadOptions()
        if options.quantised is not None:
            raise InputError(
                f"{name!r} is a sentence-transformers model, which is not loaded in 8-bit or 4-bit "
                "here. Use dtype='bfloat16' (--dtype bfloat16) to save memory."
            )
        dtype: Any = "float32"
        if options.dtype is not None:
            dtype = options.resolved_dtype()
        hub = {"revision": revision, **options.hub}
        try:
            if self.kind == "CrossEncoder" and not self.runs_own_code:
                _check_no_custom_code(name, hub)
            hub["cache_folder"] = hub.pop("cache_dir")
            self._model = getattr(sentence_transformers, self.kind)(
                name,
                device=str(options.resolved_device()),
                trust_remote_code=self.runs_own_code,
                model_kwargs={"dtype": dtype},
                **hub,
            )
        except LOAD_ERRORS as error:
            raise BackboneError(
                f"{name!r} could not be loaded as a {self.kind}: {error}"
            ) from error


class BiEncoder(Encoder):
    """The cosine of sentence embeddings.

    Queries and documents get the model's prompts, if the model has prompts.
    """

    kind = "SentenceTransformer"

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """Cosine of query and document."""
        if not documents:
            return []
        cosines = self.encode_documents(documents) @ self.encode_queries([query])[0]
        return [float(cosine) for cosine in cosines]

    def encode_queries(self, queries: Sequence[str]) -> Any:
        """Embeddings of length 1, a NumPy array of a row a query."""
        return self._model.encode_query(
            list(queries), normalize_embeddings=True, show_progress_bar=False
        )

    def encode_documents(self, documents: Sequence[str]) -> Any:
        """Embeddings of length 1, a NumPy array of a row a document."""
        return self._model.encode_document(
            list(documents), normalize_embeddings=True, show_progress_bar=False
        )


class CrossEncoder(Encoder):
    """A cross-encoder, by its raw output.

    The output has no native threshold, because a model may be trained on order alone.
    """

    kind = "CrossEncoder"

    def __init__(
        self, name: str, *, revision: str | None = None, options: LoadOptions | None = None
    ) -> None:
        super().__init__(name, revision=revision, options=options)
        if self._model.num_labels != 1:
            raise BackboneError(
                f"{name!r} is no reranker: it gives {self._model.num_labels} numbers a pair, "
                "not one score."
            )

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """The model's logit."""
        from torch.nn import Identity

        if not documents:
            return []
        pairs = [(query, document) for document in documents]
        scores = self._model.predict(pairs, activation_fn=Identity(), show_progress_bar=False)
        return [float(score) for score in scores]


class BGEReranker(CrossEncoder):
    """BGE-reranker-v2. The sigmoid of its output is the probability of relevance.

    So its native threshold is 0, where this probability is one half.
    """

    threshold = 0.0


def _check_no_custom_code(name: str, hub: Mapping[str, Any]) -> None:
    """Raise BackboneError if a model needs its own code.

    Without that code, a model whose config names an architecture of transformers would be loaded as
    that architecture. Its weights have other names there, and transformers would replace them by
    random ones with no more than a warning.
    """
    from transformers import PreTrainedConfig

    custom_code = PreTrainedConfig.get_config_dict(name, **hub)[0].get("auto_map", {})
    class_name = custom_code.get("AutoModelForSequenceClassification")
    if class_name is not None:
        raise BackboneError(
            f"{name!r} brings its own model code ({class_name}), which is not run here. Choose a "
            "model of an architecture of transformers."
        )
