"""Read, write and publish artifacts: a config, B and a model card in a folder."""

import hashlib
import json
import reprlib
import shutil
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..backends.options import ENCODER_FILES, LoadOptions
from ..errors import ArtifactError, BackboneError, nearest
from ..method.formula import Array, Weights, to_numpy
from ..partial_files import replacing
from .card import is_hub_id, model_card
from .config import INSIDE, RSRankConfig, content_digest
from .graphs import GRAPHS

CONFIG = "config.json"
PROJECTION = "projection.safetensors"
CARD = "README.md"
LIMITS = "limits.txt"

ARTIFACT_FILES = [CONFIG, PROJECTION, CARD, LIMITS, "backbone/*", f"{GRAPHS}/*"]

BUILTIN = Path(__file__).parents[1] / "models"

DEFAULT_LOADING = LoadOptions()

# Types that B and its optional weights are stored in.
STORED = (np.float32, np.float16)

# Bytes that the header of B's file may have. It names three tensors at most, and a header of many
# megabytes takes seconds and gigabytes to parse.
HEADER_BYTES = 100_000


def builtin_names() -> list[str]:
    """The names of the models that ship inside the package."""
    return sorted(path.parent.name for path in BUILTIN.glob(f"*/{CONFIG}"))


def resolve(
    name: str | Path, revision: str | None = None, load: LoadOptions = DEFAULT_LOADING
) -> Path:
    """The folder of an artifact: of a built-in name, a local path or a Hub id, in this order.

    Nothing is written into a local folder. What is on the Hub is downloaded into its cache.

    Raises:
        ArtifactError: There is no such artifact, or the Hub cannot be reached.
    """
    name = str(name)
    builtin = builtin_names()
    if name in builtin or is_folder(name):
        if revision is not None:
            raise ArtifactError(
                f"Revision {revision!r} was requested of {name!r}, a local folder, but only "
                "artifacts on the Hub have revisions. Leave revision out."
            )
        return BUILTIN / name if name in builtin else Path(name)
    failure = (
        f"The artifact {name!r} is neither built in ({', '.join(builtin)}) nor a local folder "
        "(other rerankers, and files of `rsrank tune`, are no artifacts)"
    )
    suggestion = nearest(name, builtin)
    if not is_hub_id(name) or (suggestion and "/" not in name):
        raise ArtifactError(f"{failure}. Check the name (owner/name) or the path.{suggestion}")
    try:
        return download(name, revision, load, ARTIFACT_FILES)
    except BackboneError as error:
        raise ArtifactError(f"{failure}. {error}") from error


def download(
    name: str, revision: str | None, load: LoadOptions, files: list[str] = ENCODER_FILES
) -> Path:
    """Download files of a Hub repository into the Hub's cache, and return their folder.

    Args:
        name: ``owner/name``.
        revision: Commit, tag or branch; None for the main branch.
        load: Token, cache folder, and whether the network may be used.
        files: Names or patterns of the files.

    Raises:
        BackboneError: The files cannot be downloaded.
    """
    from huggingface_hub import snapshot_download

    from ..backends.hub_errors import HUB_ERRORS

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files, **load.hub))
    except HUB_ERRORS as error:
        raise BackboneError(
            f"{name!r} (revision {revision or 'main'}) could not be downloaded: {reason(error)} "
            "Check the name (owner/name) and the revision. If it is private, log in ('hf auth "
            "login') or pass token=... Without a network, pass the path of a local copy."
        ) from error


def is_folder(name: str | Path) -> bool:
    """Whether a name is that of a local folder."""
    try:
        return bool(name) and Path(name).is_dir()
    # The name is too long for a path, or a parent folder may not be read.
    except (OSError, ValueError):
        return False


def read_config(folder: Path) -> RSRankConfig:
    """Read and validate ``config.json``.

    Raises:
        ArtifactError: The file is missing, unreadable, invalid or of another format version.
    """
    return RSRankConfig.parse(_config_text(folder), source=str(folder / CONFIG))


def _config_text(folder: Path) -> str:
    path = folder / CONFIG
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(
            f"{path} cannot be read ({error}), so {folder} is no RSRank artifact. Give a folder "
            "made by save_pretrained, or download it again."
        ) from error


def read_weights(folder: Path, config: RSRankConfig) -> Weights:
    """Read B and its optional weights, checked against the config.

    Raises:
        ArtifactError: The file is missing or damaged, holds other tensors than the config
            describes or values that are not finite, or was written with another config.
    """
    path = folder / PROJECTION
    try:
        with path.open("rb") as start:
            length = int.from_bytes(start.read(8), "little")
        if length > HEADER_BYTES:
            raise SafetensorError(f"its header has {length:,} bytes")
        with safe_open(path, framework="np") as file:
            written = (file.metadata() or {}).get("sha256")
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    except (SafetensorError, OSError, TypeError) as error:
        raise ArtifactError(
            f"{path} is missing or damaged ({error}). Download the artifact again."
        ) from error
    shapes = {"weight": config.shape, "head_weight": config.shape[:2]}
    if config.fusion_layer:
        # Weights of the cosine and MaxSim terms, which are computed below the fusion layer.
        shapes["agreement"] = (3,)
    for name in sorted({"weight", *tensors}):
        tensor = tensors.get(name, np.empty(0))
        if tensor.shape != shapes.get(name) or tensor.dtype not in STORED:
            raise ArtifactError(
                f"{path} holds {reprlib.repr(name)} of shape {tensor.shape} in {tensor.dtype}, but "
                f"{CONFIG} describes floats of 2 or 4 bytes of shapes {reprlib.repr(shapes)}. The "
                "two files do not belong together. Download the artifact again."
            )
        invalid = int((~np.isfinite(tensor)).sum())
        if invalid:
            raise ArtifactError(
                f"{path}: {invalid} of {tensor.size} entries of {name} are NaN or infinite. "
                "Train it again."
            )
    if written != _digests(content_digest(_config_text(folder)), tensors):
        raise ArtifactError(
            f"{path} was written with another {CONFIG}, or one of the two was changed (by sha256). "
            "Restore the original, download the artifact again, or save it with save_pretrained."
        )
    singles = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    return Weights(layers=config.layers, **singles)


def _digests(config_digest: str, tensors: dict[str, Array]) -> str:
    """The sha256 of the config and of each tensor, as the file's metadata holds them."""
    digests = {"config": config_digest}
    for name, tensor in tensors.items():
        digests[name] = hashlib.sha256(tensor.tobytes()).hexdigest()
    return json.dumps(digests, sort_keys=True)


def write_artifact(folder: Path, config: RSRankConfig, weights: Weights, card: str) -> None:
    """Write config.json, projection.safetensors and README.md into an existing folder.

    A tensor is stored in float16 if this changes no entry, else in float32.
    """
    (folder / CONFIG).write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    tensors = {}
    for name, array in weights.state_dict().items():
        tensor = np.ascontiguousarray(to_numpy(array), dtype=np.float32)
        with np.errstate(over="ignore"):
            half = tensor.astype(np.float16)
        tensors[name] = half if np.array_equal(half, tensor) else tensor
    # safetensors writes several metadata entries in random order. With one entry, the same B gives
    # the same bytes. `save_file` is not used, because its files can be read by their owner only.
    metadata = {"sha256": _digests(config.digest, tensors)}
    (folder / PROJECTION).write_bytes(save(tensors, metadata=metadata))
    (folder / CARD).write_text(card, encoding="utf-8")


def write_derived(folder: Path, config: RSRankConfig, weights: Weights, base: Path) -> None:
    """Write an artifact that was made from another one, completely or not at all.

    Args:
        folder: Folder of the new artifact.
        config: The new config.
        weights: B and its optional weights.
        base: Folder of the base. Its language model is copied if ``config`` names a model inside
            the artifact, and its graphs and limits are copied if it has any.
    """
    with replacing(folder) as new:
        write_artifact(new, config, weights, model_card(config))
        if config.backbone.name == INSIDE:
            shutil.copytree(base / INSIDE, new / INSIDE)
        if config.graphs:
            shutil.copytree(base / GRAPHS, new / GRAPHS)
        if (base / LIMITS).is_file():
            shutil.copy(base / LIMITS, new)
        else:
            # An earlier artifact may have left its limits.
            (folder / LIMITS).unlink(missing_ok=True)


def reason(error: BaseException) -> str:
    """An error and its cause in words, because the Hub's client wraps errors, some without text."""
    parts = []
    for part in (error, error.__cause__):
        if part is not None:
            text = " ".join(str(part).split()).rstrip(".") or "no details"
            parts.append(f"{type(part).__name__}: {text}.")
    return " ".join(parts)
