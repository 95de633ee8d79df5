"""The systems of the paper's evaluation by name: from ``qwen3-reranker:8b`` to a loaded reranker.

Importing this loads no model code: the command line lists the names in its help.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import InputError

if TYPE_CHECKING:
    from ...language_model.loading import LoadOptions
    from ...rsrank import RSRank
    from ..evaluate import System


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of system.

    Attributes:
        load: Makes it from a Hub id or folder, a revision and options.
        default: What is loaded where nothing stands after the colon; None where something must.
        short: Short names and the Hub ids they stand for.
        named: Whether there is anything to name.
    """

    load: Callable[[str, str | None, LoadOptions], System]
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


def _oracle(name: str, revision: str | None, options: LoadOptions) -> System:
    from .oracle import OracleSimilarity

    return OracleSimilarity(_rsrank(name, revision, options))


def _qwen3_reranker(name: str, revision: str | None, options: LoadOptions) -> System:
    from .generative import Qwen3Reranker

    return Qwen3Reranker(name, revision=revision, options=options)


def _monot5(name: str, revision: str | None, options: LoadOptions) -> System:
    from .generative import MonoT5

    return MonoT5(name, revision=revision, options=options)


def _llm2vec_gen(name: str, revision: str | None, options: LoadOptions) -> System:
    from .llm2vec_gen import LLM2VecGen

    return LLM2VecGen(name, revision=revision, options=options)


def _calibrated_cross_encoder(name: str, revision: str | None, options: LoadOptions) -> System:
    """One whose sigmoid is the probability of relevance."""
    from .baselines import CrossEncoder

    return CrossEncoder(name, threshold=0.0, revision=revision, options=options)


def _cross_encoder(name: str, revision: str | None, options: LoadOptions) -> System:
    from .baselines import CrossEncoder

    return CrossEncoder(name, revision=revision, options=options)


def _bi_encoder(name: str, revision: str | None, options: LoadOptions) -> System:
    from .baselines import BiEncoder

    return BiEncoder(name, revision=revision, options=options)


def _bm25(name: str, revision: str | None, options: LoadOptions) -> System:
    from .baselines import BM25

    return BM25()


KINDS: dict[str, Kind] = {
    "rsrank": Kind(_rsrank),
    "oracle": Kind(_oracle),
    "qwen3-reranker": Kind(
        _qwen3_reranker, short={size.lower(): f"Qwen/Qwen3-Reranker-{size}" for size in ("0.6B", "4B", "8B")}
    ),
    "monot5": Kind(_monot5, short={size: f"castorini/monot5-{size}-msmarco" for size in ("base", "3b")}),
    "llm2vec-gen": Kind(_llm2vec_gen, default="McGill-NLP/LLM2Vec-Gen-Qwen3-8B"),
    "bge-reranker-v2-m3": Kind(_calibrated_cross_encoder, default="BAAI/bge-reranker-v2-m3"),
    "jina-reranker-v2": Kind(_calibrated_cross_encoder, default="jinaai/jina-reranker-v2-base-multilingual"),
    "cross-encoder": Kind(_cross_encoder),
    "bi-encoder": Kind(_bi_encoder),
    "bm25": Kind(_bm25, default="", named=False),
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
