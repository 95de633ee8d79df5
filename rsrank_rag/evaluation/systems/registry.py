"""The systems of the paper's evaluation by name: from ``qwen3-reranker:8b`` to a loaded reranker.

Importing this loads no model code: the command line lists the names in its help.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...errors import InputError

if TYPE_CHECKING:
    from ...language_model.loading import LoadOptions
    from ...rsrank import RSRank
    from ..evaluate import System


_Loader = Callable[[str, "str | None", "LoadOptions"], "System"]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of system.

    Attributes:
        load: Makes it from a Hub id or folder, a revision and options.
        default: What is loaded where nothing stands after the colon; None where something must.
        short: Short names and the Hub ids they stand for.
        named: Whether there is anything to name.
    """

    load: _Loader
    default: str | None = None
    short: Mapping[str, str] = field(default_factory=dict)
    named: bool = True

    def form(self, name: str) -> str:
        """How it is written, such as ``monot5:base|3b|NAME``."""
        if not self.named:
            return name
        choices = "|".join([*self.short, "NAME"])
        return f"{name}:{choices}" if self.default is None else f"{name}[:{choices}]"


def _rsrank(name: str, revision: str | None, options: LoadOptions) -> RSRank:
    from ...rsrank import RSRank

    return RSRank.from_pretrained(
        name,
        revision=revision,
        device=options.device,
        dtype=options.dtype,
        load_in_8bit=options.load_in_8bit,
        load_in_4bit=options.load_in_4bit,
        load_in_fp8=options.load_in_fp8,
        local_files_only=options.local_files_only,
        token=options.token,
        cache_dir=options.cache_dir,
        trust_remote_code=options.trust_remote_code,
    )


def _of(module: str, name: str, *, alone: bool = False, **settings: Any) -> _Loader:
    """A loader that imports its system when it is used, so that naming the systems costs nothing."""

    def load(chosen: str, revision: str | None, options: LoadOptions) -> System:
        kind = getattr(import_module(f".{module}", __package__), name)
        made: System = kind() if alone else kind(chosen, revision=revision, options=options, **settings)
        return made

    return load


def _oracle(name: str, revision: str | None, options: LoadOptions) -> System:
    from .oracle import OracleSimilarity

    return OracleSimilarity(_rsrank(name, revision, options))


# Of these two, the sigmoid is used as the probability of relevance, which is one half at 0.
_CALIBRATED = _of("sentence_transformers", "CrossEncoder", threshold=0.0)
_QWEN3 = {size.lower(): f"Qwen/Qwen3-Reranker-{size}" for size in ("0.6B", "4B", "8B")}
_MONOT5 = {size: f"castorini/monot5-{size}-msmarco" for size in ("base", "3b")}

KINDS: dict[str, Kind] = {
    "rsrank": Kind(_rsrank),
    "oracle": Kind(_oracle),
    "qwen3-reranker": Kind(_of("qwen3_reranker", "Qwen3Reranker"), short=_QWEN3),
    "monot5": Kind(_of("monot5", "MonoT5"), short=_MONOT5),
    "llm2vec-gen": Kind(_of("llm2vec_gen", "LLM2VecGen"), default="McGill-NLP/LLM2Vec-Gen-Qwen3-8B"),
    "bge-reranker-v2-m3": Kind(_CALIBRATED, default="BAAI/bge-reranker-v2-m3"),
    "jina-reranker-v2": Kind(_CALIBRATED, default="jinaai/jina-reranker-v2-base-multilingual"),
    "cross-encoder": Kind(_of("sentence_transformers", "CrossEncoder")),
    "bi-encoder": Kind(_of("sentence_transformers", "BiEncoder")),
    "bm25": Kind(_of("bm25", "BM25", alone=True), default="", named=False),
}


def forms() -> str:
    """All names, as they are written."""
    return ", ".join(kind.form(name) for name, kind in KINDS.items())


def load_system(text: str, *, revision: str | None = None, options: LoadOptions | None = None) -> System:
    """Load a system by its name.

    Args:
        text: One of `KINDS`, with a short name, a Hub id or a folder after a colon; or an RSRank artifact alone:
            ``mini``, a folder, a Hub id.
        revision: Commit, tag or branch on the Hub of what the name stands for.
        options: Device, dtype, quantisation, access.

    Raises:
        InputError: There is no such system; all are listed.
        RSRankError: It cannot be loaded.
    """
    from ...language_model.loading import LoadOptions

    kind, name = parse(text)
    return kind.load(name, revision, options or LoadOptions())


def parse(text: str) -> tuple[Kind, str]:
    """What a system's name says: its kind, and the Hub id or folder to load.

    Raises:
        InputError: There is no such system; all are listed.
    """
    from ...artifact import hub

    name, colon, rest = text.partition(":")
    if name not in KINDS:
        if text in hub.builtin_names() or hub.is_folder(text) or ("/" in text and hub.is_hub_id(text)):
            return KINDS["rsrank"], text
        raise InputError(f"There is no system {text!r}. Give an RSRank artifact (folder or Hub id), or: {forms()}.")
    kind = KINDS[name]
    chosen = kind.short.get(rest, rest) if rest else kind.default
    if chosen is None or (colon and not (rest and kind.named)):
        raise InputError(f"{text!r} is not how that system is written. Write {kind.form(name)}.")
    return kind, chosen
