"""What the LangChain and LlamaIndex adapters have in common: settings, the shared model, and calls to it."""

import asyncio
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    SecretStr,
    Strict,
    StrictBool,
    StrictInt,
    ValidationError,
    field_serializer,
    model_validator,
)
from typing_extensions import Self

from ..errors import InputError, RSRankError
from ..language_model.options import LoadSettings, ModelSource, Name
from ..passages.parts import Reading, ReadingOptions
from ..prefixes.settings import PrefixCache
from ..reranker import Limits, RankedDocument, RankOptions, RankResult, Reranker, check_limits
from . import worker

if TYPE_CHECKING:
    from ..remote.client import RemoteReranker

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
AnyReranker = TypeVar("AnyReranker", bound=Reranker)

EXCERPTS, WINDOW = "rsrank_excerpts", "rsrank_window"
"""Metadata keys: sentences that were kept, the window that scored best; offsets are those in the document's text."""
KEPT, TRUNCATED, ERROR = "rsrank_kept", "rsrank_truncated", "rsrank_error"
"""Metadata keys: whether a document passed (with ``keep_dropped``), that it was cut, why it was not ranked."""

_unranked_calls: Counter[str] = Counter()  # by model, of this process
_counting = threading.Lock()


@dataclass(frozen=True, slots=True)
class Unranked(RankResult):
    """What is handed on when nothing could be scored, and why: documents as they came, whose scores are NaN."""

    error: Exception


def _remote() -> Any:
    """The module that asks a service: imported here, so that httpx is loaded when it is used."""
    from ..remote import client

    return client


class ModelAdapter(LoadSettings):
    """A framework's object around a model that is loaded at first use and shared by all with the same settings.

    With ``base_url`` it is a service that holds the model instead, and nothing is loaded here. Making an adapter is
    cheap and needs no torch. Pickles and dumps hold the settings, never the model nor the service's key. There is no
    field for an access token of the Hub: set ``HF_TOKEN``, or load the model yourself and pass it.
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        arbitrary_types_allowed=True,
        hide_input_in_errors=True,  # it may be an access token
        ser_json_inf_nan="constants",  # an infinite threshold is not None
    )

    model: Name | Reranker = Field(
        default="mini",
        description="'mini', a local folder or a Hub id; another system by its name, such as "
        "'cross-encoder:BAAI/bge-reranker-base'; or a Reranker that is already loaded.",
    )
    revision: str | None = Field(default=None, description="Commit, tag or branch on the Hub.")
    backbone: Name | None = Field(
        default=None, description="Where to load the language model from instead."
    )
    max_length: int | None = Field(
        default=None, ge=1, description="Most positions; longer documents are cut."
    )
    cache_dir: Name | None = Field(default=None, description="Hub cache folder.")
    prefix_cache: StrictBool | StrictInt | Name | PrefixCache = Field(
        default=True,
        union_mode="left_to_right",
        description="Where documents' prefixes are kept: True, False, a size, a folder, or a PrefixCache.",
    )

    base_url: (
        Annotated[str, AfterValidator(lambda value: _remote().service_address(value))] | None
    ) = Field(
        default=None,
        description="Address of a service (`rsrank serve`) to ask, instead of loading a model.",
    )
    api_key: (
        Annotated[SecretStr, AfterValidator(lambda value: _remote().usable_key(value))] | None
    ) = Field(
        default=None,
        exclude=True,
        repr=False,
        description="The service's key, never written down; by default RSRANK_API_KEY at the time of a call.",
    )
    instruction: str | None = Field(
        default=None,
        pattern=r"\S",
        description="What to judge by, for a model that takes an instruction.",
    )
    timeout: float = Field(
        default=60.0, gt=0, allow_inf_nan=False, description="Seconds for a call, with its retries."
    )
    max_retries: int = Field(
        default=3, ge=0, strict=True, description="How often a busy service is asked again."
    )

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> Self:
        self.load_options()  # refuses two kinds of weights
        given = {
            name
            for name, field in ModelAdapter.model_fields.items()
            if getattr(self, name) != field.default
        }
        given -= {"model", "instruction"}
        of_service = given & {"base_url", "api_key", "timeout", "max_retries"}
        if isinstance(self.model, Reranker):
            idle, why = given, f"model is a {type(self.model).__name__} that is already loaded"
            advice = "Load it with those settings, or give model a name."
        elif self.base_url is not None:
            idle, why = given - of_service, "With base_url the model is loaded by the service"
            advice = "Start the service with those settings, or leave base_url out."
        else:
            idle, why = of_service, "Without base_url no service is asked"
            advice = "Give base_url, or leave the rest out."
        if idle:
            raise InputError(f"{why}, so {', '.join(sorted(idle))} would have no effect. {advice}")
        return self

    @field_serializer("model")
    def _only_names_are_written_down(self, model: str | Reranker) -> str:
        if isinstance(model, Reranker):
            raise InputError(
                f"model is a {type(model).__name__} object, which cannot be written down. Give model a name or a "
                "folder instead, and it is loaded again where the settings are read."
            )
        return model

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        # One model, however many copies; nor are the callbacks of a framework this object's own.
        for name in (
            "model",
            *(name for name, field in type(self).model_fields.items() if field.exclude),
        ):
            memo[id(getattr(self, name))] = getattr(self, name)
        return super().__deepcopy__(memo)

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign, or refuse and stay as it was: pydantic assigns before its validators of several fields run."""
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
        """The model's name for traces and messages; a service's address, unless it is asked for a model by name."""
        if isinstance(self.model, Reranker):
            return type(self.model).__name__
        return self.model if self.base_url is None else self._asked_for or self.base_url

    def warm_up(self) -> None:
        """Load the model now instead of at the first call; of a service, ask whether it is ready."""
        concurrent = self._concurrent()
        if concurrent is not None:
            concurrent.warm_up()
        else:
            self._submit(lambda reranker: None).result()

    def close(self) -> None:
        """Finish the calls under way and free the model, for every adapter with these settings.

        The next call loads it again. A `Reranker` given as ``model`` stays; of a service, the connections are closed.
        """
        if self.base_url is None:
            worker.close(self._source())
        else:
            _remote().connections.close(self.base_url)

    def _source(self) -> ModelSource | Reranker:
        if isinstance(self.model, Reranker):
            return self.model
        names = ("revision", "backbone", "max_length", "prefix_cache")
        chosen = {name: getattr(self, name) for name in names}
        return ModelSource(self.model, load=self.load_options(cache_dir=self.cache_dir), **chosen)

    @property
    def _asked_for(self) -> str | None:
        """The model that a service is asked for: the default is a name for here, not for there."""
        named = (
            isinstance(self.model, str) and self.model != ModelAdapter.model_fields["model"].default
        )
        return str(self.model) if named else None

    def _concurrent(self) -> "RemoteReranker | None":
        """What computes elsewhere, so that its calls need no queue; None for a model of this process."""
        if self.base_url is None:
            given: Any = self.model
            asks = isinstance(given, Reranker) and isinstance(given, _remote().RemoteReranker)
            return self._told(given) if asks else None
        names = ("base_url", "api_key", "timeout", "max_retries")
        chosen = {name: getattr(self, name) for name in names}
        remote: RemoteReranker = _remote().RemoteReranker(model=self._asked_for, **chosen)
        return self._told(remote)

    def _told(self, reranker: AnyReranker) -> AnyReranker:
        """The reranker, judging by this adapter's instruction if there is one."""
        return reranker if self.instruction is None else reranker.with_instruction(self.instruction)

    def _run(self, task: Callable[[Reranker], Result]) -> Result:
        concurrent = self._concurrent()
        if concurrent is not None:
            return task(concurrent)
        future = self._submit(task)
        try:
            return future.result()
        finally:
            future.cancel()  # no effect unless waiting was interrupted

    def _submit(self, task: Callable[[Reranker], Result]) -> Future[Result]:
        return worker.submit(self._source(), lambda reranker: task(self._told(reranker)))


class RerankerAdapter(ModelAdapter):
    """A model adapter that keeps what is relevant. Each of its three limits can also be given to a single call."""

    threshold: Annotated[float, Strict()] | Literal["native"] | None = Field(
        default="native",
        description="Keep what scores above it; by default the model's own. None ranks only.",
    )
    top_n: int | None = Field(
        default=None, strict=True, description="Keep at most this many above the threshold."
    )
    min_docs: int = Field(
        default=0, strict=True, description="Keep the best this many, even below the threshold."
    )
    keep_dropped: bool = Field(
        default=False, description="Hand on the dropped, too, marked: rsrank_kept is False."
    )
    on_error: Literal["raise", "keep"] = Field(
        default="raise",
        description="When scoring fails: raise, or keep the documents as they came, cut at top_n, with rsrank_error in "
        "their metadata.",
    )

    extract: Literal["sentences"] | None = Field(
        default=None,
        description="'sentences': documents shrink to those of their sentences that score above.",
    )
    context: int = Field(
        default=0, strict=True, description="Keep so many sentences around each of them, too."
    )
    heading: bool = Field(
        default=False,
        description="Documents begin with a line that is kept with any of their sentences.",
    )
    long_documents: Literal["cut", "windows"] | None = Field(
        default=None,
        description="'windows': read what is too long for the model in parts; the best one counts. 'cut': read its "
        "beginning. None: as the model does; RSRank in this process reads windows.",
    )

    @model_validator(mode="after")
    def _limits_make_sense(self) -> Self:
        check_limits(self.threshold, self.top_n, self.min_docs)
        Reading(self.extract, self.context, self.heading, self.long_documents or "cut")
        return self

    @property
    def unranked_calls(self) -> int:
        """How often ``on_error="keep"`` handed documents on unranked: in this process, for a model of this name."""
        return _unranked_calls[self.model_label]

    def _limits(self, limits: Limits) -> Limits:
        """This adapter's limits, with those of one call in their place."""
        unknown = ", ".join(sorted(set(limits) - set(Limits.__annotations__)))
        if unknown:
            raise TypeError(
                f"Unknown argument: {unknown}. A call takes {', '.join(Limits.__annotations__)}."
            )
        chosen: Limits = {
            "threshold": self.threshold,
            "top_n": self.top_n,
            "min_docs": self.min_docs,
            **limits,
        }
        check_limits(**chosen)
        return chosen

    def _asked(
        self, texts: Sequence[tuple[str, str]], limits: Limits
    ) -> tuple[list[str], RankOptions]:
        """What a reranker is asked; sentences are scored without what is read before a text, such as metadata."""
        fields, reading = type(self).model_fields, ReadingOptions.__annotations__
        chosen: Any = {
            name: getattr(self, name)
            for name in reading
            if getattr(self, name) != fields[name].default
        }
        options: Any = {**limits, **chosen}
        return [text if self.extract else before + text for before, text in texts], options

    def _rank(self, query: str, given: Sequence[tuple[str, str]], limits: Limits) -> RankResult:
        """Rank and wait; without documents, nothing is asked."""
        texts, options = self._asked(given, limits)
        if not texts:
            return RankResult(query, None, (), ())
        try:
            found = self._run(lambda reranker: reranker.rank(query, texts, **options))
        except Exception as error:
            return self._unranked(error, query, texts, limits)
        return self._checked(found, limits)

    async def _arank(
        self, query: str, given: Sequence[tuple[str, str]], limits: Limits
    ) -> RankResult:
        """Rank in the model's thread, or where it computes; a cancelled call leaves its queue."""
        texts, options = self._asked(given, limits)
        if not texts:
            return RankResult(query, None, (), ())
        concurrent = self._concurrent()
        try:
            if concurrent is not None:
                found = await concurrent.arank(query, texts, **options)
            else:
                found = await asyncio.wrap_future(
                    self._submit(lambda reranker: reranker.rank(query, texts, **options))
                )
        except Exception as error:
            return self._unranked(error, query, texts, limits)
        return self._checked(found, limits)

    def _unranked(
        self, error: Exception, query: str, texts: Sequence[str], limits: Limits
    ) -> Unranked:
        """All documents in the order they came, where ``on_error`` says so; else the error is raised."""
        if self.on_error == "raise" or isinstance(error, CancelledError):
            raise error
        trace = None if isinstance(error, RSRankError) else error  # whose message may say little
        logger.warning(
            "%s failed, %d documents stay unranked: %r",
            self.model_label,
            len(texts),
            error,
            exc_info=trace,
        )
        with _counting:
            _unranked_calls[self.model_label] += 1
        documents = tuple(RankedDocument(index, text, math.nan) for index, text in enumerate(texts))
        most = len(texts) if limits["top_n"] is None else limits["top_n"]
        return Unranked(query, None, documents[:most], documents[most:], error)

    def _checked(self, result: RankResult, limits: Limits) -> RankResult:
        """Refuse to keep everything where nobody has asked for that; log what an application would never hear of."""
        if result.threshold is None and limits["threshold"] == "native" and limits["top_n"] is None:
            raise InputError(
                f"{self.model_label} has no native threshold: nothing in its scores separates relevant from irrelevant "
                "documents. Give a threshold, a top_n, or threshold=None to rank and keep all."
            )
        documents = (*result.kept, *result.dropped)
        blank = sum(not document.text.strip() for document in documents)
        if blank:
            logger.warning("%d of %d documents hold no text to score.", blank, len(documents))
        cut = sum(document.truncated for document in documents)
        if cut:
            logger.info(
                "%d of %d documents were too long and scored by their beginning.",
                cut,
                len(documents),
            )
        if result.dropped and not result.kept:
            best, most, least = result.dropped[0].score, len(documents), result.threshold
            logger.debug(
                "All %d documents were dropped; the best scored %+.3f, not above %g.",
                most,
                best,
                least,
            )
        return result

    def _handed_on(
        self, result: RankResult
    ) -> Iterator[tuple[RankedDocument, dict[str, bool | str]]]:
        """What a call gives back, best first, with the marks that go into its metadata."""
        failure = (
            {ERROR: f"{type(result.error).__name__}: {result.error}"}
            if isinstance(result, Unranked)
            else {}
        )
        for was_kept, documents in (
            (True, result.kept),
            (False, result.dropped if self.keep_dropped else ()),
        ):
            for document in documents:
                kept = {KEPT: was_kept} if self.keep_dropped else {}
                yield (
                    document,
                    {**failure, **kept, **({TRUNCATED: True} if document.truncated else {})},
                )


def kept_of(document: RankedDocument, text: str) -> tuple[str, dict[str, Any]]:
    """What is kept of a text, before which more may have been read, and the marks that say where it stood."""
    before, marks, window = len(document.text) - len(text), dict[str, Any](), document.window
    if window is not None and document.text.endswith(text):
        marks[WINDOW] = {
            "start": max(window.start - before, 0),
            "end": window.end - before,
            "count": window.count,
        }
    if not document.excerpts:
        return text, marks
    marks[EXCERPTS] = [
        {"start": one.start - before, "end": one.end - before, "score": one.score}
        for one in document.excerpts
    ]
    return document.extract[before:], marks


def without_marks(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A copy, down to the lists inside, of what a store may still hold; without marks of an earlier call."""
    ours = (KEPT, TRUNCATED, ERROR, EXCERPTS, WINDOW)
    return {name: deepcopy(value) for name, value in metadata.items() if name not in ours}
