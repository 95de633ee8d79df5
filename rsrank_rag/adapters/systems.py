"""Rerankers by name, such as ``mini`` or ``cross-encoder:NAME``: one list for adapters, commands and the evaluation.

Importing this module loads no model code, because the command line lists the names in its help. The list holds the
full name of each class, and the class is imported when a reranker of its kind is loaded. `research.systems` adds the
systems that only the paper's experiments need.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from ..errors import ArtifactError, InputError, nearest
from ..language_model.options import LoadOptions, ModelSource
from ..reranker import Reranker

logger = logging.getLogger(__name__)

# Seconds to wait for the Hub before a model of another library is read from the cache.
HUB_TIMEOUT = 4.0


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of system."""

    home: str  # module and class
    default: str | None = (
        None  # what is loaded where nothing stands after the colon; None where something must
    )
    short: Mapping[str, str] = field(
        default_factory=dict
    )  # short names and the Hub ids they stand for
    named: bool = True  # whether there is anything to name
    settings: Mapping[str, Any] = field(
        default_factory=dict
    )  # arguments beside name, revision and options
    # Whether it is made of an RSRank ranker instead of a name.
    wraps_ranker: bool = False

    def form(self, name: str) -> str:
        """How it is written, such as ``monot5:base|3b|NAME``."""
        if not self.named:
            return name
        choices = "|".join([*self.short, "NAME"])
        return f"{name}:{choices}" if self.default is None else f"{name}[:{choices}]"

    def load(self, source: ModelSource) -> Any:
        """Make it from a Hub id or folder."""
        if self is KINDS["rsrank"]:
            return _ranker(source)
        module, class_name = self.home.rsplit(".", 1)
        make = getattr(import_module(module), class_name)
        if self.wraps_ranker:
            return make(_ranker(source))
        if not self.named:
            return make()
        options = _options_for_hub(source)
        return make(source.name, revision=source.revision, options=options, **self.settings)


def _options_for_hub(source: ModelSource) -> LoadOptions:
    """The source's options, with the cache alone if the Hub cannot be reached.

    Other libraries ask the Hub for each of a model's files, and try each time for over a minute.
    """
    from huggingface_hub import constants, get_session

    from ..artifact import hub
    from ..language_model.hub_errors import HUB_ERRORS

    if source.load.local_files_only or hub.is_folder(source.name):
        return source.load
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
    except HUB_ERRORS as error:
        logger.warning(
            "The Hub cannot be reached (%s); %s is read from the cache.", error, source.name
        )
        return replace(source.load, local_files_only=True)
    return source.load


def _ranker(source: ModelSource) -> Reranker:
    from ..artifact import hub
    from ..rsrank import RSRank

    try:
        return RSRank.from_source(source)
    except ArtifactError as error:
        if source.name in hub.builtin_names() or not (
            hub.is_folder(source.name) or hub.is_hub_id(source.name)
        ):
            raise
        others = ", ".join(
            f"{kind}:{source.name}" for kind in ("cross-encoder", "bi-encoder", "qwen3-reranker")
        )
        raise ArtifactError(
            f"{error} If it is a reranker of another kind, say which: {others}, ..."
        ) from error


_ENCODERS = "rsrank_rag.evaluation.systems.sentence_transformers"
_CALIBRATED = {
    "threshold": 0.0
}  # the sigmoid of what these cross-encoders give is the probability of relevance
KINDS: dict[str, Kind] = {
    "rsrank": Kind("rsrank_rag.rsrank.RSRank"),
    "bge-reranker-v2-m3": Kind(
        f"{_ENCODERS}.CrossEncoder", default="BAAI/bge-reranker-v2-m3", settings=_CALIBRATED
    ),
    "jina-reranker-v2": Kind(
        f"{_ENCODERS}.CrossEncoder",
        default="jinaai/jina-reranker-v2-base-multilingual",
        settings=_CALIBRATED,
    ),
    "cross-encoder": Kind(f"{_ENCODERS}.CrossEncoder"),
    "bi-encoder": Kind(f"{_ENCODERS}.BiEncoder"),
    "bm25": Kind("rsrank_rag.evaluation.systems.bm25.BM25", default="", named=False),
}


def forms() -> str:
    """All names, as they are written."""
    return ", ".join(kind.form(name) for name, kind in KINDS.items())


def load(source: ModelSource) -> Reranker:
    """Load a reranker: its name is one of `KINDS`, with a name after a colon, or that of an RSRank artifact alone.

    Raises InputError: the name is not how a system is written, the system needs labels to score, or something is set
    that only RSRank has; RSRankError: it cannot be loaded.
    """
    known = source.name.partition(":")[0] in KINDS or _alike(source.name)
    kind, name = parse(source.name) if known else (KINDS["rsrank"], source.name)
    if kind is KINDS["rsrank"]:
        return kind.load(replace(source, name=name))  # type: ignore[no-any-return]
    idle = [
        what
        for what in ("backbone", "max_length", "token_budget")
        if getattr(source, what) is not None
    ]
    idle += ["deterministic"] * source.load.deterministic
    idle += ["prefix_cache"] * (
        not isinstance(source.prefix_cache, bool)
    )  # to keep nothing is no wish
    if idle:
        raise InputError(
            f"{source.name} is no RSRank model, so {', '.join(idle)} would have no effect. Leave it out."
        )
    system = kind.load(replace(source, name=name))
    if not isinstance(system, Reranker):
        raise InputError(
            f"{source.name} needs labels to score, so it can only be measured. Choose another system."
        )
    return system


def load_system(
    text: str, *, revision: str | None = None, options: LoadOptions | None = None
) -> Any:
    """Load a system by its name to measure it: a `Reranker`, or a scorer that knows the labels."""
    kind, name = parse(text)
    return kind.load(ModelSource(name, revision, options or LoadOptions()))


def parse(text: str) -> tuple[Kind, str]:
    """What a system's name stands for: its kind, and the Hub id or folder to load; InputError lists all systems."""
    from ..artifact import hub

    name, colon, rest = text.partition(":")
    if name not in KINDS:
        if (
            text in hub.builtin_names()
            or hub.is_folder(text)
            or ("/" in text and hub.is_hub_id(text))
        ):
            return KINDS["rsrank"], text
        raise InputError(
            f"There is no system {text!r}.{_alike(text)} Give an RSRank artifact (folder or Hub id), or: {forms()}."
        )
    kind = KINDS[name]
    chosen = kind.short.get(rest, rest) if rest else kind.default
    if chosen is None or (colon and not (rest and kind.named)):
        raise InputError(f"{text!r} is not how that system is written. Write {kind.form(name)}.")
    if kind.short and "/" not in chosen and not hub.is_folder(chosen):
        raise InputError(f"There is no system {text!r}.{_alike(text)} Write {kind.form(name)}.")
    return kind, chosen


def _alike(text: str) -> str:
    """A question whether one of the names that are like it was meant; nothing for a folder and what may be a Hub id."""
    from ..artifact import hub

    if "/" in text or hub.is_folder(text) or text in hub.builtin_names():
        return ""
    whole = [f"{name}:{size}" for name, kind in KINDS.items() for size in kind.short]
    return nearest(text, [*KINDS, *whole, *hub.builtin_names()])
