"""Bi-encoders and cross-encoders of sentence-transformers behind the same contract."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import BackboneError, InputError, required
from ...language_model.options import LoadOptions
from ...reranker import Reranker

_ALLOW = "options=LoadOptions(trust_remote_code=True), --trust-remote-code on the command line"


class BiEncoder(Reranker):
    """Cosine of sentence embeddings (sentence-transformers). No natural threshold.

    Queries and documents get the prompts that the model has for them, if any. It is loaded in
    float32 unless `options` name a dtype; BackboneError and MissingDependencyError say why it could
    not be.
    """

    threshold: float | None = None

    def __init__(
        self, name: str | Path, *, revision: str | None = None, options: LoadOptions | None = None
    ) -> None:
        self._model = _load("SentenceTransformer", name, revision, options)

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """Cosine of query and document."""
        if not documents:
            return []
        target = self.encode_queries([query])[0]
        return [float(score) for score in self.encode_documents(documents) @ target]

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


class CrossEncoder(Reranker):
    """A sentence-transformers cross-encoder, by its raw output.

    BGE-reranker-v2 and Jina-reranker-v2 are used with the sigmoid of that output as the probability
    of relevance, so their native threshold is 0, where it is one half. Other models may be trained
    on order alone and have none.

    `threshold`: the native one, in logits. It is loaded in float32 unless `options` name a dtype;
    BackboneError and MissingDependencyError say why it could not be, such as that it gives more
    than one number a pair.
    """

    def __init__(
        self,
        name: str | Path,
        *,
        threshold: float | None = None,
        revision: str | None = None,
        options: LoadOptions | None = None,
    ) -> None:
        self.threshold = threshold
        self._model = _load("CrossEncoder", name, revision, options)
        if self._model.num_labels != 1:
            raise BackboneError(
                f"{str(name)!r} is no reranker: it gives {self._model.num_labels} numbers a pair, "
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


def _load(kind: str, name: str | Path, revision: str | None, options: LoadOptions | None) -> Any:
    what = "Bi-encoders and cross-encoders need sentence-transformers."
    sentence_transformers = required("sentence_transformers", what, "eval")
    from ...language_model.loading import LOAD_ERRORS

    options = options or LoadOptions()
    if options.weights is not None:
        raise InputError(
            f"{str(name)!r} is a sentence-transformers model, which is not loaded in 8-bit or "
            "4-bit here. Use dtype='bfloat16' (--dtype bfloat16) to save memory."
        )
    model = {"dtype": "float32" if options.dtype is None else options.resolved_dtype()}
    if options.trust_remote_code:
        _keep_what_jina_imports()
    hub = {
        "revision": revision,
        "local_files_only": options.local_files_only,
        "token": options.token,
    }
    cache = None if options.cache_dir is None else str(options.cache_dir)
    try:
        if kind == "CrossEncoder" and not options.trust_remote_code:
            _refuse_own_code(str(name), cache_dir=cache, **hub)
        how = {
            "device": str(options.resolved_device()),
            "trust_remote_code": options.trust_remote_code,
            **hub,
        }
        return getattr(sentence_transformers, kind)(
            str(name), cache_folder=cache, model_kwargs=model, **how
        )
    except LOAD_ERRORS as error:
        hint = ""
        if "trust_remote_code" in str(error) and not options.trust_remote_code:
            hint = f" Read that code, and allow it if you trust it: {_ALLOW}."
        raise BackboneError(
            f"{str(name)!r} could not be loaded as a {kind}: {error}{hint}"
        ) from error


def _refuse_own_code(name: str, **hub: Any) -> None:
    """Raise BackboneError for a model that needs its own code.

    Without that code, transformers would load it as the architecture that its config names. Its
    weights have other names there, and random ones would take their place with no more than a
    warning.
    """
    from transformers import PreTrainedConfig

    own = PreTrainedConfig.get_config_dict(name, **hub)[0].get("auto_map", {})
    if "AutoModelForSequenceClassification" in own:
        raise BackboneError(
            f"{name!r} brings its own model code ({own['AutoModelForSequenceClassification']}), "
            f"which is never run by itself. Read it, and allow it if you trust it: {_ALLOW}."
        )


def _keep_what_jina_imports() -> None:
    """Restore a function that transformers 5 moved and Jina-reranker-v2's code imports."""
    from transformers.models.xlm_roberta import modeling_xlm_roberta as module

    if not hasattr(module, "create_position_ids_from_input_ids"):
        found = module.XLMRobertaEmbeddings.create_position_ids_from_input_ids
        module.create_position_ids_from_input_ids = found
