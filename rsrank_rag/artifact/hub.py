"""Read, write and publish artifacts: a config, B and a model card in a folder."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..errors import ArtifactError, BackboneError, RSRankError, nearest
from ..language_model.options import LoadOptions
from ..method.arrays import Array, to_numpy
from ..method.formula import Weights
from ..partial_files import COMPLETE
from .card import UNNAMED
from .card import is_hub_id as is_hub_id
from .card import model_card as model_card
from .config import INSIDE, RSRankConfig, content_digest

if TYPE_CHECKING:
    from ..method.projection import Projection

CONFIG = "config.json"
PROJECTION = "projection.safetensors"
CARD = "README.md"
LIMITS = "limits.txt"

ARTIFACT_FILES = [CONFIG, PROJECTION, CARD, LIMITS, "backbone/*"]
ENCODER_FILES = [CONFIG, "tokenizer.json", "model.safetensors"]

BUILTIN = Path(__file__).parents[1] / "models"

DEFAULT_LOADING = LoadOptions()

# An artifact has a header of about 600 bytes. The library parses up to 100 MB, which takes minutes.
LARGEST_HEADER = 8192


def builtin_names() -> list[str]:
    """The names of the models that ship inside the package."""
    return sorted(path.parent.name for path in BUILTIN.glob(f"*/{CONFIG}"))


def resolve(
    name: str | Path, revision: str | None = None, load: LoadOptions = DEFAULT_LOADING
) -> Path:
    """The folder of an artifact: of a built-in name, a local path or a Hub id, in this order.

    Nothing is written into a local folder. What is on the Hub is downloaded into its cache.

    Raises:
        ArtifactError: There is no such artifact, the Hub cannot be reached, or the folder is
            half saved.
    """
    builtin = str(name) in builtin_names()
    if builtin or is_folder(name):
        if revision is not None:
            raise ArtifactError(
                f"Revision {revision!r} was requested of {str(name)!r}, a local folder, but "
                "only artifacts on the Hub have revisions. Leave revision out."
            )
        folder = BUILTIN / str(name) if builtin else Path(name)
        if (folder / COMPLETE).exists():
            raise ArtifactError(
                f"Saving {folder} was interrupted. Move the content of {folder / COMPLETE} into "
                f"{folder} and remove the empty folder, or save the artifact again."
            )
        return folder
    return _download(str(name), revision, load)


def _download(name: str, revision: str | None, load: LoadOptions) -> Path:
    failure = f"The artifact {name!r}"
    if revision:
        failure += f" at revision {revision!r}"
    failure += f" is neither built in ({', '.join(builtin_names())}) nor a local folder"
    suggestion = "" if "/" in name else nearest(name, builtin_names())
    if suggestion:
        raise ArtifactError(f"{failure}.{suggestion}")
    return _snapshot(name, revision, load, failure, ArtifactError, ARTIFACT_FILES)


def download_encoder(name: str, revision: str | None, load: LoadOptions) -> Path:
    """The folder of an encoder on the Hub, in the Hub's cache.

    Raises:
        BackboneError: It cannot be had.
    """
    failure = f"The language model {name!r} was asked for"
    return _snapshot(name, revision, load, failure, BackboneError, ENCODER_FILES)


def _snapshot(
    name: str,
    revision: str | None,
    load: LoadOptions,
    failure: str,
    kind: type[RSRankError],
    files: list[str],
) -> Path:
    """The folder of such files on the Hub; an error begins with ``failure``."""
    from huggingface_hub import snapshot_download

    from ..language_model.hub_errors import HUB_ERRORS

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files, **load.hub))
    except HUB_ERRORS as error:
        raise kind(f"{failure}, and {_download_problem(error, load)}") from error


def _download_problem(error: Exception, load: LoadOptions) -> str:
    """Why something could not be downloaded, and what to do."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.HFValidationError):
        return "it cannot be a Hub id (owner/name)."
    if isinstance(error, errors.RevisionNotFoundError):
        return "the Hub has this repository but not this revision."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "the Hub has no such repository, or it is private or gated: log in with "
            "'hf auth login' or pass token=..."
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        offline = load.local_files_only or constants.HF_HUB_OFFLINE
        place = "the local Hub cache" if offline else "the Hub"
        reason = str(error.__cause__ or error).rstrip(".")
        return (
            f"it could not be had from {place}: {reason}. Connect once to download it, or pass the "
            "path of a local copy."
        )
    return f"the download from {constants.ENDPOINT} failed: {_reason(error)} Try again."


def is_folder(name: str | Path) -> bool:
    """Whether a name is that of a local folder."""
    try:
        return bool(str(name)) and Path(name).is_dir()
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
    if not path.is_file():
        raise ArtifactError(
            f"{folder} holds no {CONFIG}, so it is no RSRank artifact. "
            "Give a folder made by save_pretrained."
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"{path} cannot be read as text ({error}). Download it again."
        raise ArtifactError(message) from error


def read_projection(folder: Path, config: RSRankConfig) -> "Projection":
    """As `read_weights`, for torch."""
    from torch import from_numpy

    from ..method.projection import Projection

    tensors = read_weights(folder, config).state_dict()
    tensors = {name: from_numpy(array) for name, array in tensors.items()}
    return Projection(tensors.pop("weight"), config.layers, **tensors)


def read_weights(folder: Path, config: RSRankConfig) -> Weights:
    """Read B and its optional weights, checked against the config.

    The header is checked before any tensor is read.

    Raises:
        ArtifactError: The file is missing or damaged, holds other tensors than the config
            describes or values that are not finite, or was written with another config.
    """
    path = folder / PROJECTION
    if not path.is_file():
        raise ArtifactError(
            f"{folder} holds no {PROJECTION}. The artifact is incomplete: download it again."
        )
    try:
        _check_header_size(path)
        with safe_open(path, framework="np") as file:
            _check_header(path, file, config)
            digests = _written_digests(file.metadata())
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    except (SafetensorError, OSError) as error:
        message = f"{path} is damaged or truncated ({error}). Download it again."
        raise ArtifactError(message) from error
    for tensor in tensors.values():
        invalid = int((~np.isfinite(tensor)).sum())
        if invalid:
            raise ArtifactError(
                f"{path}: {invalid} of {tensor.size} entries of B are NaN or infinite. "
                "Train it again."
            )
    expected = content_digest(_config_text(folder))
    if digests.get("config") != expected:
        raise ArtifactError(
            f"{path} was written with another {CONFIG} (sha256 {digests.get('config', 'missing')}, "
            f"but that of {CONFIG} is {expected}). Restore the original config.json, or save the "
            "artifact again with save_pretrained."
        )
    if digests != _digests(expected, tensors):
        raise ArtifactError(
            f"{path} is damaged: its numbers are not those that were written. Download it again."
        )
    return Weights(tensors.pop("weight"), config.layers, **tensors)


def _check_header_size(path: Path) -> None:
    """Refuse a header that is too long, before the library parses it."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > LARGEST_HEADER:
        raise ArtifactError(
            f"{path} is damaged or truncated: its header has {size:,} bytes, and that of an RSRank "
            f"artifact at most {LARGEST_HEADER:,}. Download it again."
        )


def _check_header(path: Path, file: Any, config: RSRankConfig) -> None:
    """Compare names, shapes and dtypes of tensors with the config."""
    shapes = {"weight": config.shape, "head_weight": config.shape[:2], "agreement": (3,)}
    names = list(file.keys())
    if "weight" not in names or not shapes.keys() >= set(names):
        raise ArtifactError(
            f"{path} holds {names or 'nothing'} where 'weight' was expected, and at most "
            "'head_weight' and 'agreement' with it. Give a folder made by save_pretrained."
        )
    for name in names:
        header = file.get_slice(name)
        shape = tuple(header.get_shape())
        label = "B" if name == "weight" else name
        if shape != shapes[name]:
            raise ArtifactError(
                f"{path} holds {label} of shape {shape}, but {CONFIG} describes (layers, heads, P, "
                f"head_dim) = {config.shape}. The two files do not belong together."
            )
        if header.get_dtype() != "F32":
            raise ArtifactError(
                f"{path} holds {label} as {header.get_dtype()}, and float32 (F32) is required. "
                "Save the artifact again with save_pretrained."
            )
    if "agreement" in names and not config.fusion_layer:
        raise ArtifactError(
            f"{path} has weights for cosine and MaxSim terms ('agreement'), but {CONFIG} has no "
            "fusion_layer, below which these are computed."
        )


def _written_digests(metadata: dict[str, str] | None) -> dict[str, str]:
    """The digests in the file's metadata; empty if they cannot be read."""
    try:
        digests = json.loads((metadata or {}).get("sha256", "{}"))
    except (ValueError, RecursionError):
        return {}
    return digests if isinstance(digests, dict) else {}


def _digests(config_digest: str, tensors: dict[str, Array]) -> dict[str, str]:
    digests = {"config": config_digest}
    for name, tensor in tensors.items():
        digests[name] = hashlib.sha256(tensor.tobytes()).hexdigest()
    return digests


def write_artifact(
    folder: Path, config: RSRankConfig, projection: "Projection | Weights", card: str
) -> None:
    """Write the three files of an artifact into an existing folder."""
    (folder / CONFIG).write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    tensors = {}
    for name, weight in projection.state_dict().items():
        tensors[name] = np.ascontiguousarray(to_numpy(weight), dtype=np.float32)
    # safetensors writes several metadata entries in random order. With one entry, the same B gives
    # the same bytes. `save_file` is not used, because its files can be read by their owner only.
    metadata = {"sha256": json.dumps(_digests(config.digest, tensors))}
    (folder / PROJECTION).write_bytes(save(tensors, metadata=metadata))
    (folder / CARD).write_text(card, encoding="utf-8")


def check_shareable(config: RSRankConfig, *, include_backbone: bool) -> None:
    """Refuse to publish an artifact whose language model is in a local folder that is not uploaded.

    Raises:
        ArtifactError: No other machine could load it.
    """
    source = config.backbone.name
    if not include_backbone and source != INSIDE and not is_hub_id(source):
        raise ArtifactError(
            f"The artifact's language model is the local folder {source!r}, which nobody else "
            "could load. Make the artifact with the model's Hub id, or pass include_backbone=True "
            "to upload the model with it."
        )


def contents(folder: Path, repo_id: str) -> dict[str, Path | bytes]:
    """The names and files that `push` uploads, with the repository's name in the card.

    Raises:
        ArtifactError: The folder contains a symbolic link, which may lead to a private file.
    """
    files: dict[str, Path | bytes] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise ArtifactError(
                f"{path} is a symbolic link, and push uploads regular files only. Replace the link "
                f"by its file, or push a copy: cp -rL {folder} COPY"
            )
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = path
    if CARD in files:
        card = (folder / CARD).read_text(encoding="utf-8")
    else:
        card = model_card(read_config(folder))
    files[CARD] = card.replace(UNNAMED, repo_id).encode()
    return files


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool,
    revision: str | None,
    token: str | bool | None,
    message: str,
) -> str:
    """Upload an artifact's folder to the Hub; gives the commit's address.

    The repository and the branch ``revision`` are made if they do not exist. The folder stays as
    it is.

    Raises:
        ArtifactError: The Hub refused, or the folder contains a symbolic link.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    from ..language_model.hub_errors import HUB_ERRORS

    api = HfApi(token=token)
    operations = []
    for name, content in contents(folder, repo_id).items():
        operations.append(CommitOperationAdd(name, content))
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.create_commit(repo_id, operations, revision=revision, commit_message=message)
    except HUB_ERRORS as error:
        raise ArtifactError(
            f"Pushing to {repo_id!r} failed: {_reason(error)} Check the name (owner/name) and that "
            "you are logged in with write access ('hf auth login')."
        ) from error
    return str(commit.commit_url)


def _reason(error: BaseException) -> str:
    """An error and its cause in words, because the Hub's client wraps errors, some without text."""
    parts = []
    for part in (error, error.__cause__):
        if part is not None:
            text = str(part).strip().rstrip(".") or "no details"
            parts.append(f"{type(part).__name__}: {text}.")
    return " ".join(parts)
