"""Does this language model belong to this artifact? B means nothing to any other model."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import try_to_load_from_cache

from ..errors import ArtifactError
from ..language_model.linear import largest_weight
from ..language_model.loading import LoadedModel
from ..language_model.weights import bits_of, fingerprint
from ..method.backbone import Backbone
from ..method.template import PromptTokenizer, private_copy
from ..partial_files import digest_of
from .config import BackboneSpec, RSRankConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TOLERANCE = {16: 0.1, 8: 0.3, 4: 0.7}
"""How far value vectors may lie from the recorded ones, by the weights' bits (16 or more count as 16).

Other weights of the same shape differ by about the square root of 2.
"""

TOKENIZER = (
    "tokenizer*.json",
    "tokenizer.model",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
)
DECIDING = ("config.json", *TOKENIZER, "vocab.*", "merges.txt", "modeling*.py", "configuration*.py")
"""Files beside the weights that decide a score."""

_PROBE = (
    "Who wrote it, and when? 1984 naïve façade — 東京 Привет 😀\n\tdef f(x): return x**2 <s>[MASK]"
)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Short hash of how a tokenizer splits a fixed multilingual string, and of its vocabulary's size."""
    copy = private_copy(tokenizer, special_tokens=False)
    ids = [copy.get_vocab_size(), *copy.encode(_PROBE, add_special_tokens=False).ids]
    return hashlib.sha256(repr(ids).encode()).hexdigest()[:16]


def describe(
    core: Backbone,
    prompts: PromptTokenizer,
    name: str,
    revision: str | None,
    files: Mapping[str, str] | None = None,
) -> BackboneSpec:
    """What an artifact records of its language model; ``files``: their hashes."""
    return BackboneSpec(
        name=name,
        revision=revision,
        model_type=core.config.model_type,
        num_layers=core.num_layers,
        num_heads=core.num_heads,
        head_dim=core.head_dim,
        tokenizer=tokenizer_fingerprint(prompts.tokenizer),
        values=core.findings.sample,
        files=dict(files or {}),
    )


def prefix_identity(core: Backbone, config: RSRankConfig) -> dict[str, object]:
    """Everything that a document's keys and values depend on beside its token ids, dtype and tenant.

    The weights are read whole (about 1 s/GB), because a sample does not see a damaged block.
    """
    read = {name: value for name, value in core.config.to_dict().items() if name not in _NOT_READ}
    return {
        "config": json.dumps(read, sort_keys=True, default=str),
        "backbone": config.backbone.name,
        "revision": config.backbone.revision,
        "weights": fingerprint(core.model),
        "tokenizer": config.backbone.tokenizer,
        "template": config.template.model_dump(),
        "layers": core.last_layer,
        "bits": bits_of(core.model),
        **({"fusion_layer": core.fusion_layer} if core.fusion_layer else {}),
        **({"documents_stay": True} if core.documents_stay else {}),
        **({"int8": largest_weight()} if core.for_documents else {}),
    }


def folder_of(
    name: str | Path, revision: str | None, cache_dir: str | Path | None = None
) -> Path | None:
    """Where a language model's files are: a folder here, or in the Hub's cache; None before they are downloaded."""
    if Path(name).is_dir():
        return Path(name)
    found = try_to_load_from_cache(str(name), "config.json", cache_dir, revision)
    return Path(found).parent if isinstance(found, str) else None


def hashes(folder: Path | None) -> dict[str, str]:
    """sha256 of each file of a language model that decides a score, by name."""
    if folder is None:
        return {}
    one = (folder / "model.safetensors").is_file()
    weights = (
        ("model.safetensors",)
        if one
        else ("model.safetensors.index.json", "model-*-of-*.safetensors")
    )
    found = {path for pattern in (*DECIDING, *weights) for path in folder.glob(pattern)}
    files = sorted(path for path in found if path.is_file())
    with ThreadPoolExecutor() as threads:  # hashing waits for no other thread
        return dict(zip((path.name for path in files), threads.map(digest_of, files), strict=True))


def check_files(spec: BackboneSpec, folder: Path | None, *, chosen: bool) -> None:
    """Compare every byte that decides a score; artifacts of earlier releases do not know what it was.

    A model that somebody ``chosen`` instead of the artifact's may have other files: then this is logged, no more.
    Else ArtifactError says that files are damaged or others.
    """
    found = hashes(folder) if spec.files else {}
    # What else a tokenizer may be read from differs between copies; weights that were never recorded are foreign.
    known = {
        file: spec.files.get(file, not file.endswith(".safetensors") and digest)
        for file, digest in found.items()
    }
    different = ", ".join(file for file, digest in found.items() if digest != known[file])
    what = f"{folder}: {different} not as when this artifact was made (by sha256)"
    if different and not chosen:
        raise ArtifactError(
            f"{what}: damaged, or another revision. Download or copy the model again; or, to use it as it is, name it: "
            "backbone=..."
        )
    if different:
        logger.warning("%s. Scores may differ from the artifact's.", what)


_NOT_READ = ("_name_or_path", "architectures", "transformers_version")

ADVICE = "Load the backbone the artifact names (and its revision), or train B for this one."


def check_before_run(loaded: LoadedModel, spec: BackboneSpec, source: str) -> None:
    """Refuse another architecture, depth or tokenizer before the model runs and fails in ways of its own."""
    model_type = loaded.model.config.get_text_config().model_type
    if (loaded.num_layers, model_type) != (spec.num_layers, spec.model_type):
        raise ArtifactError(
            f"This artifact belongs to {spec.name} ({spec.model_type}, {spec.num_layers} layers), but {source} is a "
            f"{model_type} with {loaded.num_layers} layers. {ADVICE}"
        )
    fingerprint = tokenizer_fingerprint(loaded.tokenizer)
    if fingerprint != spec.tokenizer:
        raise ArtifactError(
            f"The tokenizer of {source} splits text differently from the one this artifact was made with "
            f"(fingerprint {fingerprint}, expected {spec.tokenizer}). {ADVICE}"
        )


def check_after_run(core: Backbone, spec: BackboneSpec, source: str) -> None:
    """Refuse other heads or other value vectors than the ones the artifact was made with."""
    if (core.num_heads, core.head_dim) != (spec.num_heads, spec.head_dim):
        raise ArtifactError(
            f"This artifact belongs to {spec.name} with {spec.num_heads} KV heads of {spec.head_dim}, but {source} "
            f"has {core.num_heads} of {core.head_dim}. {ADVICE}"
        )
    difference = relative_difference(core.findings.sample, spec.values)
    if not difference <= TOLERANCE[bits_of(core.model)]:
        raise ArtifactError(
            f"The weights of {source} are not those of {spec.name} (revision {spec.revision or 'not pinned'}) that "
            f"this artifact was made with: value vectors differ by {difference:.0%}. {ADVICE}"
        )


def relative_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Distance of two fingerprints, relative to the expected one's length."""
    if len(found) != len(expected):
        return math.inf
    return math.dist(found, expected) / max(math.hypot(*expected), 1e-6)
