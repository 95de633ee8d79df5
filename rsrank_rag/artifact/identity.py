"""Check that a language model is the one that the artifact was made with; B fits no other."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ArtifactError
from ..method.template import PromptTokenizer, private_copy
from ..partial_files import digest_of
from .config import BackboneSpec, RSRankConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

    from ..backends.base import LanguageModel
    from ..backends.torch.backbone import Backbone

logger = logging.getLogger(__name__)

# The largest relative distance of value vectors from the recorded ones, by the bits of the weights
# that were rounded more (16 or more count as 16). Other weights of the same shape differ by about
# the square root of 2.
TOLERANCE = {16: 0.1, 8: 0.3, 4: 0.7}

# Patterns of all files that transformers reads a score from: config, code, tokenizer and weights.
DECIDING = (
    "config*.json",
    "*.py",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges*",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "adapter_*",
    "*.safetensors",
    "*.safetensors.index.json",
)

# A larger tokenizer.json would fill the memory.
LARGEST_FILE = 200_000_000

# A tokenizer takes memory for every id up to the largest one.
LARGEST_ID = 10_000_000

_PROBE = (
    "Who wrote it, and when? 1984 naïve façade — 東京 Привет 😀\n\tdef f(x): return x**2 <s>[MASK]"
)

ADVICE = "Load the backbone the artifact names (and its revision), or train B for this one."


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase | Tokenizer) -> str:
    """Hash of how a tokenizer splits a fixed multilingual text, and of its vocabulary's size."""
    copy = private_copy(tokenizer, special_tokens=False)
    ids = [copy.get_vocab_size(), *copy.encode(_PROBE, add_special_tokens=False).ids]
    return hashlib.sha256(repr(ids).encode()).hexdigest()[:16]


def describe(
    core: Backbone,
    prompts: PromptTokenizer,
    name: str,
    revision: str | None,
    files: dict[str, str],
) -> BackboneSpec:
    """What an artifact records of its language model; ``files`` are the files' hashes."""
    return BackboneSpec(
        name=name,
        revision=revision,
        model_type=core.config.model_type,
        num_layers=core.num_layers,
        num_heads=core.num_heads,
        head_dim=core.head_dim,
        tokenizer=tokenizer_fingerprint(prompts.tokenizer),
        values=core.sample,
        bits=core.bits,
        files=files,
    )


def prefix_identity(core: LanguageModel, config: RSRankConfig) -> dict[str, object]:
    """All that a document's keys and values depend on, except its token ids, dtype and tenant.

    The files of the language model decide its weights: their hashes were checked at load.
    """
    return {
        "backbone": config.backbone.name,
        "revision": config.backbone.revision,
        "files": config.backbone.files,
        "template": config.template.model_dump(),
        "layers": core.last_layer,
        "fusion_layer": core.fusion_layer,
        "similarity_window": core.similarity_window,
        "attention_window": core.attention_window,
        **core.identity,
    }


def folder_of(
    name: str | Path, revision: str | None, cache_dir: str | Path | None = None
) -> Path | None:
    """The folder of a language model's files: a local one, or one in the Hub's cache.

    None if the model has not been downloaded.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(str(name), "config.json", cache_dir, revision)
    return Path(config).parent if isinstance(config, str) else None


def hashes(folder: Path | None) -> dict[str, str]:
    """sha256 of each file of a language model that can change a score, by name."""
    if folder is None:
        return {}
    paths = {path for pattern in DECIDING for path in folder.glob(pattern)}
    files = sorted(path for path in paths if path.is_file())
    # hashlib releases the interpreter's lock, so that files are hashed concurrently.
    with ThreadPoolExecutor() as threads:
        digests = list(threads.map(digest_of, files))
    return {path.name: digest for path, digest in zip(files, digests, strict=True)}


def check_files(
    spec: BackboneSpec, folder: Path, *, in_cache: bool, strict: bool
) -> dict[str, str]:
    """Compare every file that can change a score with the recorded hashes.

    In the Hub's cache, a file other than weights may be missing or additional: only requested files
    are downloaded, and other tools request other ones.

    Args:
        spec: What the artifact recorded.
        folder: Where the files are.
        in_cache: Whether this is the Hub's cache.
        strict: Refuse differences. False if the user named another model on purpose: then they
            are logged.

    Returns:
        The hashes of the files that are there.

    Raises:
        ArtifactError: Files are damaged, missing, added, or of another revision, or the tokenizer
            would fill the memory.
    """
    if (folder / "tokenizer.json").is_file():
        largest_id(folder / "tokenizer.json")
    recorded = spec.files
    present = hashes(folder)
    if not recorded:
        return present
    different = []
    for name in sorted(recorded.keys() | present.keys()):
        comparable = name in recorded and name in present
        if in_cache and not comparable and not name.endswith(".safetensors"):
            continue
        if recorded.get(name) != present.get(name):
            different.append(name)
    if not different:
        return present
    message = f"{folder}: {', '.join(different)} changed since this artifact was made (by sha256)"
    if strict:
        raise ArtifactError(
            f"{message}: damaged, or another revision. Download or copy the model again. To use "
            "these files nevertheless, pass their folder or Hub id as backbone=..."
        )
    logger.warning("%s. Scores may differ from the artifact's.", message)
    return present


def check_model(
    sample: Sequence[float],
    tokenizer: PreTrainedTokenizerBase | Tokenizer,
    spec: BackboneSpec,
    source: str,
    bits: int = 16,
) -> None:
    """Compare the tokenizer and the value vectors with those that the artifact was made with.

    Args:
        sample: The language model's `Backbone.sample`.
        tokenizer: Its tokenizer.
        spec: What the artifact recorded.
        source: The folder or Hub id of the language model, for errors.
        bits: The bits of its weights, a key of `TOLERANCE`.

    Raises:
        ArtifactError: The tokenizer splits text differently, or the value vectors differ by more
            than `TOLERANCE`.
    """
    fingerprint = tokenizer_fingerprint(tokenizer)
    if fingerprint != spec.tokenizer:
        raise ArtifactError(
            f"The tokenizer of {source} splits text differently from the one this artifact was "
            f"made with (fingerprint {fingerprint}, expected {spec.tokenizer}). {ADVICE}"
        )
    difference = math.inf
    if len(sample) == len(spec.values):
        # Euclidean, relative to the length of the recorded vector.
        difference = math.dist(sample, spec.values) / math.hypot(*spec.values, 1e-6)
    if not difference <= TOLERANCE[min(bits, spec.bits)]:
        raise ArtifactError(
            f"The weights of {source} are not those of {spec.name} (revision "
            f"{spec.revision or 'not pinned'}) that this artifact was made with: value vectors "
            f"differ by {difference:.0%}. {ADVICE}"
        )


def largest_id(path: Path) -> int:
    """The largest token id in a ``tokenizer.json``.

    Raises:
        ArtifactError: The file cannot be read, or it or the largest id is too large.
    """
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE:,} bytes")
        content = json.loads(path.read_bytes())
        vocabulary = content["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        added = [token["id"] for token in content["added_tokens"]]
        largest = int(max([*ids, *added]))
        if largest > LARGEST_ID:
            raise ValueError(f"it has the token id {largest}, which would fill the memory")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(
            f"{path} is no tokenizer that can be used ({type(error).__name__}: {error}). "
            "Download it again."
        ) from error
    return largest
