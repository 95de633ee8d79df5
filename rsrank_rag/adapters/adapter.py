"""What the LangChain and LlamaIndex adapters share: settings, and the call to the model."""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import asdict, dataclass
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    SecretStr,
    Strict,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)
from typing_extensions import Self

from ..backends.options import QUANTISED_ARGUMENTS, CacheSettings, DeviceSettings, ModelSource, Name
from ..cancellation import waiting
from ..errors import InputError, RSRankError, check_names, nearest
from ..ranking import shadow
from ..reading.documents import InputDocument
from ..reading.parts import Extract, LongDocuments, Reading
from ..remote.address import service_address, usable_key
from ..reranker import (
    Fallback,
    Limits,
    Native,
    RankedDocument,
    RankOptions,
    RankResult,
    Reranker,
    Rule,
    Scale,
)
from . import model_thread as worker

if TYPE_CHECKING:
    from ..remote.client import RemoteReranker

logger = logging.getLogger(__name__)

# Metadata keys. The sentences that were kept, and the window that scored best, with their offsets
# in the document's text:
EXCERPTS, WINDOW = "rsrank_excerpts", "rsrank_window"
# That a document was cut, and why it was not ranked:
TRUNCATED, ERROR = "rsrank_truncated", "rsrank_error"
# That no document of the list scored above the threshold, and the fallback kept this one:
WEAK = "rsrank_weak"
MARKS = (EXCERPTS, WINDOW, TRUNCATED, ERROR, WEAK)

DEFAULT_MODEL = "mini"
KEEP_ALL = Rule()
SERVICE_SETTINGS = {"base_url", "api_key", "timeout", "max_retries"}


@dataclass(frozen=True, slots=True)
class Unranked(RankResult):
    """The documents as they came, with NaN scores, and the error that prevented scoring."""

    error: Exception


class ModelAdapter(DeviceSettings, CacheSettings):
    """A framework's object around a model that all objects with the same settings share.

    The model is loaded at the first call. With ``base_url``, a service holds the model and nothing
    is loaded here. Making an adapter needs no torch. Pickles and dumps hold the settings, never
    the model nor the service's key. For private models of the Hub set ``HF_TOKEN``.
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        arbitrary_types_allowed=True,
        # An input may be an access token.
        hide_input_in_errors=True,
        # Otherwise an infinite threshold would be written as None.
        ser_json_inf_nan="constants",
        use_attribute_docstrings=True,
    )

    model: Name | Reranker = DEFAULT_MODEL
    """'mini', a local folder or a Hub id; another system by its name, such as
    'cross-encoder:BAAI/bge-reranker-base'; or a Reranker that is already loaded."""
    revision: str | None = None
    """Commit, tag or branch on the Hub."""
    backbone: Name | None = None
    """Another place to load the language model from, such as a folder, instead of the Hub."""
    base_url: Annotated[str, AfterValidator(service_address)] | None = None
    """Address of a service (`rsrank serve`) that holds the model."""
    api_key: Annotated[SecretStr, AfterValidator(usable_key)] | None = Field(
        default=None, exclude=True, repr=False
    )
    """The service's key. Default: RSRANK_API_KEY at the time of a call. Never written down."""
    timeout: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds for a call with its retries."""
    max_retries: int = Field(default=3, ge=0, strict=True)
    """How often a request to a busy service is repeated."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_settings(cls, settings: Any) -> Any:
        if isinstance(settings, dict):
            for name in sorted(
                settings.keys() - cls.model_fields.keys() - QUANTISED_ARGUMENTS.keys()
            ):
                raise InputError(f"There is no setting {name!r}.{nearest(name, cls.model_fields)}")
        return settings

    @field_validator("*", mode="before")
    @classmethod
    def _number_of_numpy(cls, value: Any) -> Any:
        return value.item() if isinstance(value, np.generic) else value

    @model_validator(mode="after")
    def _refuse_settings_without_effect(self) -> Self:
        changed = set()
        for name, value in self:
            field = ModelAdapter.model_fields.get(name)
            if field is not None and name != "model" and value != field.default:
                changed.add(name)
        if isinstance(self.model, Reranker):
            reason = f"The model is a {type(self.model).__name__} that is already loaded"
        elif self.base_url is not None:
            reason = "The service loads the model"
            changed -= SERVICE_SETTINGS
        else:
            reason = "Without base_url there is no service"
            changed &= SERVICE_SETTINGS
        if changed:
            names = ", ".join(sorted(changed))
            raise InputError(f"{reason}, so {names} would have no effect. Leave it out.")
        return self

    @field_serializer("model")
    def _serialize_model(self, model: str | Reranker) -> str:
        if isinstance(model, Reranker):
            raise InputError(
                f"model is a {type(model).__name__} object, which cannot be written down. Give "
                "model a name or a folder instead. Whoever reads the settings loads it again."
            )
        return model

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy with the same model, key and callbacks. The other settings are immutable."""
        return self.model_copy()

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign a setting. A refused value leaves the adapter unchanged.

        pydantic assigns before it runs the validators of several fields.
        """
        before = dict(self.__dict__)
        try:
            super().__setattr__(name, value)
        except ValidationError:
            self.__dict__.update(before)
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self.model_dump()), ()

    @property
    def model_label(self) -> str:
        """Name for traces and messages: the model's name, or a service's address."""
        if isinstance(self.model, Reranker):
            return type(self.model).__name__
        if self.base_url is None:
            return self.model
        return self._service_model or self.base_url

    def warm_up(self) -> None:
        """Load the model now instead of at the first call, or wait until the service is ready."""
        remote = self._remote()
        if remote is None:
            worker.submit(self._source(), type).result()
        else:
            remote.warm_up()

    def close(self) -> None:
        """Free the model after the calls under way, for every adapter with these settings.

        The next call loads it again. A `Reranker` given as ``model`` stays.
        """
        if self.base_url is None:
            worker.close(self._source())

    def _source(self) -> ModelSource | Reranker:
        if isinstance(self.model, Reranker):
            return self.model
        # These values have been checked as settings of this adapter.
        return ModelSource.model_construct(
            name=self.model,
            revision=self.revision,
            backbone=self.backbone,
            device=self.device,
            dtype=self.dtype,
            cache_size=self.cache_size,
            cache_folder=self.cache_folder,
        )

    @property
    def _service_model(self) -> str | None:
        """Name of the model that a service must hold; None for the default."""
        if self.model == DEFAULT_MODEL:
            return None
        return str(self.model)

    def _remote(self) -> "RemoteReranker | None":
        """The client of a service, whose calls need no queue; None for a model of this process."""
        from ..remote.client import RemoteReranker

        if self.base_url is None:
            return self.model if isinstance(self.model, RemoteReranker) else None
        return RemoteReranker(
            self.base_url,
            model=self._service_model,
            api_key=self.api_key,
            timeout=self.timeout,
            max_retries=self.max_retries,
        )

    def _start(
        self, query: str, documents: Sequence[InputDocument], options: Mapping[str, Any]
    ) -> Future[RankResult]:
        """Begin `Reranker.rank`. A future that is cancelled leaves the queue."""
        remote = self._remote()
        if remote is not None:
            return remote.start(query, documents, **options)
        task = methodcaller("rank", query, documents, **options)
        return worker.submit(self._source(), task)


class RerankerAdapter(ModelAdapter):
    """A model adapter that keeps relevant documents. A call may set each part of the rule.

    'native' stands for the model's own value of a part. The paper's rule is
    ``max_gap=None, fallback=None``.
    """

    threshold: Annotated[float, Strict()] | Native | None = "native"
    """Keep what scores above it. None: rank only."""
    max_gap: Annotated[float, Strict()] | Native | None = "native"
    """Of these, keep documents at most so far below the best one. None: no gap."""
    fallback: Fallback | Native | None = "native"
    """What is kept if no document scores above the threshold, marked with rsrank_weak in the
    metadata: Fallback(max_gap, max_depth). None: nothing."""
    top_n: int | None = Field(default=None, strict=True)
    """Keep at most this many, the best ones."""
    on_error: Literal["raise", "keep"] = "raise"
    """When scoring fails: raise, or keep the first top_n documents, with rsrank_error in their
    metadata."""
    metadata_fields: tuple[str, ...] = ("title",)
    """Metadata keys whose values are read before the text, one a line. A value with which the text
    begins is left out, and so is a title that is none, such as a file name."""
    extract: Extract | None = None
    """'sentences': documents shrink to their sentences that reach the rule's bar."""
    context: int = Field(default=0, strict=True)
    """Keep also this many sentences before and after each kept sentence."""
    long_documents: LongDocuments | None = None
    """Documents that are too long for the model: 'windows' reads them in parts, and the best part
    counts; 'cut' reads the beginning. None: the model's default (RSRank: windows)."""
    scores: Scale = "raw"
    """'normalised': scores between 0 and 1, where 0.5 is the native threshold."""
    mode: Literal["drop", "shadow"] = "drop"
    """'shadow': return everything, and log what would have been dropped."""

    @model_validator(mode="after")
    def _check_limits_and_reading(self) -> Self:
        # The native threshold is known when the model is loaded; it is never None where the native
        # fallback is used.
        options = self._options({})
        Rule(threshold=0.0).with_limits(options)
        Reading.of(options)
        return self

    def _options(self, limits: Limits) -> Any:
        """All options of `Reranker.rank`: those of this adapter, with the limits of one call.

        A call without a threshold only ranks: the adapter's gap and fallback do not apply.

        Raises:
            TypeError: A keyword is not the name of a limit.
            InputError: A limit is out of range, or two contradict each other.
        """
        settings = dict(self)
        if limits.get("threshold", "native") is None:
            settings |= {"max_gap": "native", "fallback": "native"}
        settings |= limits
        names = RankOptions.__annotations__.keys() & settings.keys()
        options: Any = {name: settings[name] for name in names}
        if limits:
            check_names("A call", limits, Limits.__annotations__)
            Rule(threshold=0.0).with_limits(options)
        return options

    def _rank(
        self,
        query: str,
        documents: Sequence[InputDocument],
        limits: Limits,
        request_id: str | None = None,
    ) -> RankResult:
        """Rank and wait; errors as `_options`. Without documents, no model is needed.

        ``request_id`` is that of the framework's run, for the log of shadow mode.
        """
        options = self._options(limits)
        if not documents:
            return RankResult(query, KEEP_ALL, (), ())
        try:
            with waiting():
                future = self._start(query, documents, options)
                try:
                    result = future.result()
                finally:
                    # Has an effect only if the waiting was interrupted.
                    future.cancel()
        except Exception as error:
            return self._unranked(error, query, documents, options["top_n"])
        return self._checked(result, options, request_id)

    async def _arank(
        self,
        query: str,
        documents: Sequence[InputDocument],
        limits: Limits,
        request_id: str | None = None,
    ) -> RankResult:
        """As `_rank`, without blocking the event loop. A cancelled call ends at its next batch."""
        options = self._options(limits)
        if not documents:
            return RankResult(query, KEEP_ALL, (), ())
        try:
            with waiting():
                result = await asyncio.wrap_future(self._start(query, documents, options))
        except Exception as error:
            return self._unranked(error, query, documents, options["top_n"])
        return self._checked(result, options, request_id)

    def _unranked(
        self, error: Exception, query: str, documents: Sequence[InputDocument], top_n: int | None
    ) -> Unranked:
        """The documents in the order they came, if ``on_error`` is "keep"; else raise the error."""
        if self.on_error == "raise" or isinstance(error, CancelledError):
            raise error
        logger.warning(
            "%s failed, %d documents stay unranked: %r",
            self.model_label,
            len(documents),
            error,
            # The message of another library's error may say little.
            exc_info=None if isinstance(error, RSRankError) else error,
        )
        kept = []
        for index, document in enumerate(documents[:top_n]):
            kept.append(RankedDocument(index, document.text, math.nan))
        return Unranked(query, KEEP_ALL, tuple(kept), (), error)

    def _checked(
        self, result: RankResult, options: RankOptions, request_id: str | None
    ) -> RankResult:
        """The result. It is an InputError if neither a threshold nor ``top_n`` drops anything."""
        if options["threshold"] == "native" and result.rule == KEEP_ALL:
            raise InputError(
                f"{self.model_label} has no native threshold: nothing in its scores separates "
                "relevant from irrelevant documents. Give a threshold, a max_gap, a top_n, or "
                "threshold=None to rank and keep all."
            )
        if result.query_truncated:
            logger.warning("The query is too long; its first and its last part were read.")
        if self.mode == "shadow":
            shadow.log(result, request_id)
            result = shadow.everything(result)
        return result

    def _marked(
        self, metadata: Mapping[str, Any], result: RankResult, document: RankedDocument
    ) -> dict[str, Any]:
        """A copy of a document's metadata, with the marks of this call instead of an earlier one.

        It shares the values.
        """
        marks = {name: value for name, value in metadata.items() if name not in MARKS}
        if isinstance(result, Unranked):
            marks[ERROR] = f"{type(result.error).__name__}: {result.error}"
        if document.weak:
            marks[WEAK] = True
        if document.truncated:
            marks[TRUNCATED] = True
        if document.window is not None:
            marks[WINDOW] = asdict(document.window)
        if document.excerpts:
            marks[EXCERPTS] = [
                {"start": excerpt.start, "end": excerpt.end, "score": excerpt.score}
                for excerpt in document.excerpts
            ]
        return marks
