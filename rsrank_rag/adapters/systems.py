"""Rerankers by name, such as ``mini`` or ``cross-encoder:NAME``.

The adapters, the commands and the evaluation use this one list. Importing this module loads no
model code, because the command line lists the names in its help. Therefore the list holds the full
name of each class, and a class is imported when a reranker of its kind is loaded.
`research.systems` adds the systems that only the paper's experiments need.
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
    """One kind of system.

    Attributes:
        class_path: Module and class.
        default: What is loaded if nothing follows the colon; None if something must. Empty for a
            system without a model, whose name has no colon.
        short: Short names, and the Hub ids that they stand for.
        settings: Arguments in addition to name, revision and options.
        wraps_ranker: Whether it is made of an RSRank ranker instead of a name.
    """

    class_path: str
    default: str | None = None
    short: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    wraps_ranker: bool = False

    def form(self, name: str) -> str:
        """How it is written, such as ``monot5:base|3b|NAME``."""
        if self.default == "":
            return name
        choices = "|".join([*self.short, "NAME"])
        return f"{name}:{choices}" if self.default is None else f"{name}[:{choices}]"

    def load(self, source: ModelSource) -> Any:
        """Make it from a Hub id or folder."""
        if self is KINDS["rsrank"]:
            return _ranker(source)
        module, _, class_name = self.class_path.rpartition(".")
        system = getattr(import_module(module), class_name)
        if self.wraps_ranker:
            return system(_ranker(source))
        if self.default == "":
            return system()
        options = _options_for_hub(source)
        return system(source.name, revision=source.revision, options=options, **self.settings)


def _options_for_hub(source: ModelSource) -> LoadOptions:
    """The source's options, with the cache alone if the Hub cannot be reached.

    Other libraries request each of a model's files from the Hub, and try each for over a minute.
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
        name = source.name
        folder = hub.is_folder(name)
        if name in hub.builtin_names() or not (folder or hub.is_hub_id(name)):
            raise
        raise ArtifactError(
            f"{error} If it is a reranker of another kind, say which: cross-encoder:{name}, "
            f"bi-encoder:{name}, ..."
        ) from error


_ENCODERS = "rsrank_rag.evaluation.systems.sentence_transformers"

# The sigmoid of these cross-encoders' output is the probability of relevance: 0 is one half.
_CALIBRATED = {"threshold": 0.0}

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
    "bm25": Kind("rsrank_rag.evaluation.systems.bm25.BM25", default=""),
}


def forms() -> str:
    """All names, as they are written."""
    return ", ".join(kind.form(name) for name, kind in KINDS.items())


def load(source: ModelSource) -> Reranker:
    """Load a reranker.

    Its name is one of `KINDS`, with a name after a colon, or that of an RSRank artifact alone.

    Raises:
        InputError: The name is not how a system is written, the system needs labels to score, or
            a setting is only for RSRank.
        RSRankError: The reranker cannot be loaded.
    """
    kind = KINDS["rsrank"]
    name = source.name
    if name.partition(":")[0] in KINDS or _suggestion(name):
        kind, name = parse(name)
    if kind is not KINDS["rsrank"]:
        _check_settings(source)
    system = kind.load(replace(source, name=name))
    if not isinstance(system, Reranker):
        raise InputError(
            f"{source.name} needs labels to score, so it can only be measured. "
            "Choose another system."
        )
    return system


def _check_settings(source: ModelSource) -> None:
    """Raise InputError for settings that have an effect on RSRank only."""
    unused = []
    for name in ("backbone", "max_length", "token_budget"):
        if getattr(source, name) is not None:
            unused.append(name)
    if source.load.deterministic:
        unused.append("deterministic")
    # True and False are accepted: without a cache, both are as if not given.
    if not isinstance(source.prefix_cache, bool):
        unused.append("prefix_cache")
    if unused:
        raise InputError(
            f"{source.name} is no RSRank model, so {', '.join(unused)} would have no effect. "
            "Leave it out."
        )


def load_system(
    text: str, *, revision: str | None = None, options: LoadOptions | None = None
) -> Any:
    """Load a system by its name to measure it: a `Reranker`, or a scorer that knows the labels."""
    kind, name = parse(text)
    return kind.load(ModelSource(name, revision, options or LoadOptions()))


def parse(text: str) -> tuple[Kind, str]:
    """A system's kind, and the Hub id or folder to load.

    Raises:
        InputError: There is no such system; the message lists all.
    """
    from ..artifact import hub

    name, colon, rest = text.partition(":")
    if name not in KINDS:
        folder = hub.is_folder(text)
        if text in hub.builtin_names() or folder or ("/" in text and hub.is_hub_id(text)):
            return KINDS["rsrank"], text
        raise InputError(
            f"There is no system {text!r}.{_suggestion(text)} Give an RSRank artifact (folder or "
            f"Hub id), or: {forms()}."
        )
    kind = KINDS[name]
    model = kind.short.get(rest, rest) or kind.default
    if model is None or (colon and not rest) or (rest and kind.default == ""):
        raise InputError(f"{text!r} is not how that system is written. Write {kind.form(name)}.")
    if kind.short and "/" not in model and not hub.is_folder(model):
        raise InputError(
            f"There is no system {text!r}.{_suggestion(text)} Write {kind.form(name)}."
        )
    return kind, model


def _suggestion(text: str) -> str:
    """A question about a similar name; empty for a folder and for what may be a Hub id."""
    from ..artifact import hub

    if "/" in text or hub.is_folder(text) or text in hub.builtin_names():
        return ""
    names = [*KINDS, *hub.builtin_names()]
    for name, kind in KINDS.items():
        names += [f"{name}:{short}" for short in kind.short]
    return nearest(text, names)
