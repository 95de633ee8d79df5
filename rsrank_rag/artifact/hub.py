"""An artifact is a folder, here or on the Hugging Face Hub: config.json, projection.safetensors, README.md."""

import hashlib
import json
from pathlib import Path

import torch
from huggingface_hub import CommitOperationAdd, HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined] # public, but loaded lazily
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..errors import ArtifactError, nearest
from ..language_model.hub_errors import HUB_ERRORS
from ..language_model.options import LoadOptions
from ..method.projection import Projection
from ..partial_files import settle
from .config import INSIDE, RSRankConfig, content_digest

CONFIG, PROJECTION, CARD, LIMITS = (
    "config.json",
    "projection.safetensors",
    "README.md",
    "limits.txt",
)
BUILTIN = Path(__file__).parents[1] / "models"
USUAL = LoadOptions()


def builtin_names() -> list[str]:
    """Models that ship inside the package."""
    return sorted(path.parent.name for path in BUILTIN.glob(f"*/{CONFIG}"))


def resolve(name: str | Path, revision: str | None = None, load: LoadOptions = USUAL) -> Path:
    """Find an artifact's folder: a built-in name, a local path or a Hub id, in this order.

    Raises ArtifactError: nothing there, or the Hub cannot be reached.
    """
    if str(name) in builtin_names() or is_folder(name):
        if revision is not None:
            raise ArtifactError(
                f"Revision {revision!r} of {str(name)!r} was asked for, but that is a local folder: only artifacts on "
                "the Hub have revisions. Leave revision out."
            )
        return BUILTIN / str(name) if str(name) in builtin_names() else _settled(Path(name))
    asked = f"The artifact {str(name)!r}" + (f" at revision {revision!r}" if revision else "")
    found = f"is neither built in ({', '.join(builtin_names())}) nor a local folder"
    if alike := "" if "/" in str(name) else nearest(str(name), builtin_names()):
        raise ArtifactError(f"{asked} {found}.{alike}")
    try:
        files = [CONFIG, PROJECTION, CARD, LIMITS, "backbone/*"]
        folder = snapshot_download(str(name), revision=revision, allow_patterns=files, **load.hub)
    except HFValidationError:
        raise ArtifactError(f"{asked} {found}, and it cannot be a Hub id (owner/name).") from None
    except RevisionNotFoundError:
        raise ArtifactError(
            f"{asked} {found}; the Hub has this repository but not this revision."
        ) from None
    except RepositoryNotFoundError:
        raise ArtifactError(
            f"{asked} {found}, and the Hub has no such repository, or it is private or gated: log in with "
            "'hf auth login' or pass token=..."
        ) from None
    except LocalEntryNotFoundError as error:
        where = (
            "the local Hub cache"
            if load.local_files_only or constants.HF_HUB_OFFLINE
            else "the Hub"
        )
        reason = str(error.__cause__ or error).rstrip(".")
        raise ArtifactError(
            f"{asked} {found}, and it could not be had from {where}: {reason}. Connect once to download it, or pass "
            "the path of a local copy."
        ) from error
    except HUB_ERRORS as error:
        raise ArtifactError(
            f"{asked} {found}, and the download from {constants.ENDPOINT} failed: {_reason(error)} Try again."
        ) from error
    return Path(folder)


def _settled(folder: Path) -> Path:
    try:
        settle(folder)
    except OSError as error:
        raise ArtifactError(
            f"{folder} was being saved when the process ended, and {error}. Save it again."
        ) from error
    return folder


def is_folder(name: str | Path) -> bool:
    """Whether a name is that of a folder here; anything may be asked."""
    try:
        return bool(str(name)) and Path(name).is_dir()
    except (
        OSError,
        ValueError,
    ):  # a name too long for a path, a folder that may not be looked into
        return False


def read_config(folder: Path) -> RSRankConfig:
    """Read and validate ``config.json``; ArtifactError if it is missing, unreadable, invalid or of another version."""
    path = folder / CONFIG
    if not path.is_file():
        raise ArtifactError(
            f"{folder} holds no {CONFIG}, so it is no RSRank artifact. Give a folder made by save_pretrained."
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(
            f"{path} cannot be read as text ({error}). Download it again."
        ) from error
    return RSRankConfig.parse(text, source=str(path))


def read_projection(folder: Path, config: RSRankConfig) -> Projection:
    """Read B, and what else weighs a score, checked against the config.

    Raises ArtifactError: missing, truncated, of another shape, not finite, or written with another config.
    """
    path = folder / PROJECTION
    if not path.is_file():
        raise ArtifactError(
            f"{folder} holds no {PROJECTION}. The artifact is incomplete: download it again."
        )
    try:
        with safe_open(path, framework="pt") as file:
            written = (file.metadata() or {}).get("sha256")
            # Copies: what safetensors gives is the file itself, and changes with it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise ArtifactError(
            f"{path} is damaged or truncated ({error}). Download it again."
        ) from error
    shapes = {"weight": config.shape, "head_weight": config.shape[:2], "agreement": (3,)}
    if "weight" not in tensors or not tensors.keys() <= shapes.keys():
        raise ArtifactError(
            f"{path} holds {list(tensors) or 'nothing'} where 'weight' was expected, and at most 'head_weight' and "
            "'agreement' beside it. Give a folder made by save_pretrained."
        )
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name]:
            what = "B" if name == "weight" else name
            raise ArtifactError(
                f"{path} holds {what} of shape {tuple(tensor.shape)}, but {CONFIG} describes (layers, heads, P, "
                f"head_dim) = {config.shape}. The two files do not belong together."
            )
        if bad := int((~torch.isfinite(tensor)).sum()):
            raise ArtifactError(
                f"{path}: {bad} of {tensor.numel()} entries of B are NaN or infinite. Train it again."
            )
    if "agreement" in tensors and not config.fusion_layer:
        raise ArtifactError(
            f"{path} weighs agreement, but {CONFIG} has no fusion_layer at which it could be taken."
        )
    digests, expected = (
        _digests(written),
        content_digest((folder / CONFIG).read_text(encoding="utf-8")),
    )
    if digests.get("config") != expected:
        raise ArtifactError(
            f"{path} was written with another {CONFIG} (sha256 {digests.get('config', 'missing')}, found {expected}). "
            "Restore the original config.json, or save the artifact again with save_pretrained."
        )
    if digests != {
        "config": expected,
        **{name: _digest_of(tensor) for name, tensor in tensors.items()},
    }:
        raise ArtifactError(
            f"{path} is damaged: its numbers are not those that were written. Download it again."
        )
    return Projection(tensors.pop("weight"), config.layers, **tensors)


def _digest_of(weight: Tensor) -> str:
    return hashlib.sha256(weight.contiguous().numpy().tobytes()).hexdigest()


def _digests(written: str | None) -> dict[str, str]:
    """What the file says of the config and of B; empty if it says nothing that can be read."""
    try:
        found = json.loads(written or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_artifact(folder: Path, config: RSRankConfig, projection: Projection, card: str) -> None:
    """Write the three files of an artifact into a folder that is there."""
    (folder / CONFIG).write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    tensors = {
        name: weight.detach().cpu().contiguous() for name, weight in projection.named_parameters()
    }
    digests = {
        "config": config.digest,
        **{name: _digest_of(tensor) for name, tensor in tensors.items()},
    }
    # One entry only: safetensors writes several in random order, and the same B would give other bytes each time.
    # Not save_file: it makes files that only their owner can read.
    (folder / PROJECTION).write_bytes(save(tensors, metadata={"sha256": json.dumps(digests)}))
    (folder / CARD).write_text(card, encoding="utf-8")


def check_shareable(config: RSRankConfig, *, include_backbone: bool) -> None:
    """Refuse to publish what nobody else could load: an artifact of a language model in a folder of this machine."""
    source = config.backbone.name
    if not include_backbone and source != INSIDE and not is_hub_id(source):
        raise ArtifactError(
            f"The artifact's language model is the local folder {source!r}, which nobody else could load. Make "
            "the artifact with the model's Hub id, or pass include_backbone=True to upload the model with it."
        )


def contents(folder: Path, repo_id: str) -> dict[str, Path | bytes]:
    """What `push` publishes: names and files, and the card with the repository's name in it, made in memory."""
    card = (
        (folder / CARD).read_text(encoding="utf-8")
        if (folder / CARD).exists()
        else model_card(read_config(folder))
    )
    files = {
        str(path.relative_to(folder).as_posix()): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return {**files, CARD: card.replace(UNNAMED, repo_id).encode()}


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool,
    revision: str | None,
    token: str | bool | None,
    message: str,
) -> str:
    """Upload an artifact folder to the Hub, making the repository if need be; gives the commit's address.

    The folder stays as it is. ArtifactError says what the Hub refused.
    """
    api = HfApi(token=token)
    added = [
        CommitOperationAdd(name, content) for name, content in contents(folder, repo_id).items()
    ]
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.create_commit(repo_id, added, revision=revision, commit_message=message)
    except HUB_ERRORS as error:
        raise ArtifactError(
            f"Pushing to {repo_id!r} failed: {_reason(error)} Check the name (owner/name) and that you are logged in "
            "with write access ('hf auth login')."
        ) from error
    return str(commit.commit_url)


def _reason(error: BaseException) -> str:
    """What went wrong, with the cause where the client wraps it; time-outs carry no text of their own."""
    chain = [error] if error.__cause__ is None else [error, error.__cause__]
    return " ".join(
        f"{type(link).__name__}: {str(link).strip().rstrip('.') or 'no details'}." for link in chain
    )


def is_hub_id(name: str) -> bool:
    """Whether a name can be a Hub repository (``owner/name``)."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


USAGE = Path(__file__).with_name("usage.md")  # what every model card says
UNNAMED = "PATH_OR_HUB_ID"  # stands in its examples until the artifact is published

STAY = "- Documents run up to that layer only: it and those above see what enters it"

FUSION = (
    "- Queries see documents from layer {} on only; below it, each is run by itself. What both are there may "
    "count beside the shift (agreement). This is not part of the paper's method"
)


def model_card(config: RSRankConfig) -> str:
    """The README.md of an artifact, made from its config."""
    layers, heads, rows, dim = config.shape
    training = config.training
    front = [
        "---",
        "library_name: rsrank-rag",
        "pipeline_tag: text-ranking",
        "tags: [reranker, rag, rsrank]",
    ]
    if config.license:
        front.append(f"license: {config.license}")
    if is_hub_id(config.backbone.name):  # the Hub refuses a card that names anything else
        front.append(f"base_model: {config.backbone.name}")
    lines = [
        *front,
        USAGE.read_text(encoding="utf-8"),
        f"- Backbone: `{config.backbone.name}`, revision `{config.backbone.revision or 'not pinned'}` "
        f"({config.backbone.model_type}, {config.depth})",
        f"- B: layers {'-'.join(map(str, config.layers[:: max(1, layers - 1)]))} ({layers}), {heads} KV heads, "
        f"P = {rows}, D = {dim}: {layers * heads * rows * dim:,} numbers",
        *[FUSION.format(config.fusion_layer)] * bool(config.fusion_layer),
        *[STAY] * config.documents_stay,
        f"- Template: `{config.template.model_dump_json()}`",
        f"- Training data: {', '.join(training.data) or 'not recorded'}; seed {training.seed}",
    ]
    if training.settings:
        lines.append(
            "- Settings: "
            + ", ".join(f"{name} {value}" for name, value in training.settings.items())
        )
    if config.license:
        lines.append(f"- Licence of B: {config.license}")
    if training.notes:
        lines += ["", training.notes]
    if training.metrics:
        columns = sorted({key for row in training.metrics.values() for key in row})
        lines += [
            "",
            "| dataset | " + " | ".join(columns) + " |",
            "|---" * (len(columns) + 1) + "|",
        ]
        whole = ("queries", "unanswered")
        for dataset, row in training.metrics.items():
            cells = [
                f"{row[key]:.{0 if key in whole else 3}f}" if key in row else "" for key in columns
            ]
            lines.append(f"| {dataset} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
