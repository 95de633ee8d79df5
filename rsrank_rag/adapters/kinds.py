"""Rerankers by name, such as ``mini`` or ``cross-encoder:NAME``.

The adapters, the commands and the evaluation use this one list. Importing this module loads no
model code, because the command line lists the names in its help. Therefore the list holds the full
name of each class, and a class is imported when a reranker of its kind is loaded.
`research.systems` adds the systems that only the paper's experiments need.
"""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel, FiniteFloat, ValidationError
from typing_extensions import Self

from ..backends.options import LoadOptions, ModelSource
from ..errors import InputError, nearest
from ..reranker import Fallback, Reranker


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of system.

    Attributes:
        class_path: Module, and the class or function that makes a reranker.
        default: What is loaded if nothing follows the colon; None if something must. Empty for a
            system without a model, whose name has no colon.
    """

    class_path: str
    default: str | None = None

    def form(self, name: str) -> str:
        """How users write a system of this kind, such as ``bm25`` or ``cross-encoder:NAME``.

        ``[:NAME]`` says that the name of a model may be left out.
        """
        if self.default is None:
            return f"{name}:NAME"
        return f"{name}[:NAME]" if self.default else name

    def load(self, source: ModelSource) -> Reranker:
        """Make a reranker of this kind; ``source.name`` is a Hub id, a folder or a file.

        Raises:
            RSRankError: The reranker cannot be loaded.
        """
        module, _, class_name = self.class_path.rpartition(".")
        make: Any = getattr(import_module(module), class_name)
        if self.default == "":
            system: Reranker = make()
        else:
            system = make(source.name, revision=source.revision, options=source)
        return system


# A fallback may be of infinite depth.
class TunedRule(BaseModel, extra="forbid", ser_json_inf_nan="constants"):
    """The file of ``rsrank tune --output NAME.json``: another system's name, and its rule.

    Attributes:
        model: The system's name, as everywhere.
        revision: Its commit, tag or branch on the Hub.
        threshold: The native threshold.
        max_gap: The native gap.
        fallback: The native fallback.
        data: Names of the labelled sets that chose the rule.
        notes: How the rule was found.
    """

    model: str
    revision: str | None = None
    threshold: FiniteFloat | None
    max_gap: FiniteFloat | None = None
    fallback: Fallback | None = None
    data: tuple[str, ...] = ()
    notes: str = ""

    @classmethod
    def read(cls, file: str) -> Self:
        """Read a file.

        Raises:
            InputError: It cannot be read, or has other fields.
        """
        try:
            return cls.model_validate_json(Path(file).read_bytes())
        except (OSError, ValidationError) as error:
            raise InputError(f"{file} is no file that rsrank tune wrote: {error}") from error


def load_tuned(file: str, *, revision: str | None, options: LoadOptions) -> Reranker:
    """The system that a file of `TunedRule` names, with the rule of the file.

    ``revision`` replaces the revision in the file.
    """
    tuned = TunedRule.read(file)
    system = load(
        ModelSource(
            **{**dict(options), "name": tuned.model, "revision": revision or tuned.revision}
        )
    )
    system.threshold = tuned.threshold
    system.max_gap = tuned.max_gap
    system.fallback = tuned.fallback
    system.labelled_data = tuned.data
    return system


# Settings that have an effect on RSRank only.
ONLY_RSRANK = (
    "backbone",
    "max_length",
    "token_budget",
    "deterministic",
    "cache_size",
    "cache_folder",
)

TUNED = Kind(f"{__name__}.load_tuned")
_ENCODERS = "rsrank_rag.evaluation.systems.sentence_transformers"

KINDS: dict[str, Kind] = {
    "bge-reranker-v2-m3": Kind(f"{_ENCODERS}.BGEReranker", "BAAI/bge-reranker-v2-m3"),
    "cross-encoder": Kind(f"{_ENCODERS}.CrossEncoder"),
    "bi-encoder": Kind(f"{_ENCODERS}.BiEncoder"),
    "bm25": Kind("rsrank_rag.evaluation.systems.bm25.BM25", default=""),
}


def forms() -> str:
    """The names of all systems, for help and errors."""
    return ", ".join(kind.form(name) for name, kind in KINDS.items())


def load(source: ModelSource) -> Reranker:
    """Load a reranker by its name, see `parse`.

    Raises:
        InputError: The name is not how a system is written, or a setting is only for RSRank.
        RSRankError: The reranker cannot be loaded.
    """
    from ..rsrank import RSRank

    kind, name = parse(source.name)
    if kind is not None:
        unused = [name for name in ONLY_RSRANK if getattr(source, name)]
        if unused:
            raise InputError(
                f"{source.name} is no RSRank model, so {', '.join(unused)} would have no effect. "
                "Leave it out."
            )
        return kind.load(source.model_copy(update={"name": name}))
    return RSRank.from_pretrained(**source.model_dump())


def parse(text: str) -> tuple[Kind | None, str]:
    """A system's kind, None for an RSRank artifact, and the Hub id, folder or file to load.

    Raises:
        InputError: There is no such system; the message lists all.
    """
    from ..artifact import hub

    name, colon, rest = text.partition(":")
    kind = KINDS.get(name)
    if text.endswith(".json"):
        return TUNED, text
    if kind is None:
        if "/" in text or hub.is_folder(text) or text in hub.builtin_names():
            return None, text
        suggestion = nearest(text, [*KINDS, *hub.builtin_names()])
        raise InputError(
            f"There is no system {text!r}.{suggestion} Give an RSRank artifact (folder or Hub id), "
            f"or: {forms()}."
        )
    model = rest or kind.default
    if model is None or (colon and not rest) or (rest and kind.default == ""):
        raise InputError(f"{text!r} is not how that system is written. Write {kind.form(name)}.")
    return kind, model
