"""An artifact is a folder, here or on the Hugging Face Hub: config.json, projection.safetensors, README.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .config import RSRankConfig
from .errors import ArtifactError

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, PROJECTION, CARD = "config.json", "projection.safetensors", "README.md"
BUILTIN = Path(__file__).parent / "models"


def builtin_names() -> list[str]:
    """Models that ship inside the package."""
    return sorted(path.parent.name for path in BUILTIN.glob(f"*/{CONFIG}"))


def resolve(
    name: str | Path,
    *,
    revision: str | None = None,
    local_files_only: bool = False,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
) -> Path:
    """Find an artifact's folder: a built-in name, a local path or a Hub id, in this order.

    Raises:
        ArtifactError: Nothing there, or the Hub cannot be reached.
    """
    if str(name) in builtin_names():
        return BUILTIN / str(name)
    if Path(name).is_dir():
        return Path(name)
    asked = f"The artifact {str(name)!r}" + (f" at revision {revision!r}" if revision else "")
    found = f"is neither built in ({', '.join(builtin_names())}) nor a local folder"
    try:
        folder = snapshot_download(
            str(name),
            revision=revision,
            local_files_only=local_files_only,
            token=token,
            cache_dir=cache_dir,
            allow_patterns=[CONFIG, PROJECTION, CARD, "backbone/*"],
        )
    except HFValidationError:
        raise ArtifactError(f"{asked} {found}, and it cannot be a Hub id (owner/name).") from None
    except RevisionNotFoundError:
        raise ArtifactError(f"{asked} {found}; the Hub has this repository but not this revision.") from None
    except RepositoryNotFoundError:
        raise ArtifactError(
            f"{asked} {found}, and the Hub has no such repository, or it is private: log in with 'hf auth login' "
            "or pass token=..."
        ) from None
    except LocalEntryNotFoundError as error:
        where = "the local Hub cache" if local_files_only or constants.HF_HUB_OFFLINE else "the Hub"
        raise ArtifactError(
            f"{asked} {found}, and it could not be had from {where}: {error} Connect once to download it, "
            "or pass the path of a local copy."
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ArtifactError(f"{asked} {found}, and the download failed: {error}") from error
    return Path(folder)


def read_config(folder: Path) -> RSRankConfig:
    """Read and validate ``config.json``.

    Raises:
        ArtifactError: Missing, unreadable or of an unknown version.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ArtifactError(
            f"{folder} holds no {CONFIG}, so it is no RSRank artifact. Give a folder made by save_pretrained."
        )
    return RSRankConfig.parse(path.read_text(encoding="utf-8"), source=str(path))


def read_projection(folder: Path, config: RSRankConfig) -> Tensor:
    """Read B, checked against the config.

    Returns:
        (L, H, P, D), fp32.

    Raises:
        ArtifactError: Missing, truncated, of another shape, not finite, or written with another config.
    """
    import torch

    path = folder / PROJECTION
    if not path.is_file():
        raise ArtifactError(f"{folder} holds no {PROJECTION}. The artifact is incomplete: download it again.")
    try:
        with safe_open(path, framework="pt") as file:
            digest = (file.metadata() or {}).get("config_sha256")
            names = list(file.keys())
            weight = file.get_tensor("weight") if "weight" in names else None
    except (SafetensorError, OSError) as error:
        raise ArtifactError(f"{path} is damaged or truncated ({error}). Download it again.") from error
    if weight is None:
        raise ArtifactError(f"{path} holds {names or 'nothing'} where 'weight' was expected.")
    if tuple(weight.shape) != config.shape:
        raise ArtifactError(
            f"{path} holds B of shape {tuple(weight.shape)}, but {CONFIG} describes (layers, heads, P, head_dim) = "
            f"{config.shape}. The two files do not belong together."
        )
    if not bool(torch.isfinite(weight).all()):
        bad = int((~torch.isfinite(weight)).sum())
        raise ArtifactError(f"{path}: {bad} of {weight.numel()} entries of B are NaN or infinite. Train it again.")
    if digest != config.digest:
        raise ArtifactError(
            f"{path} was written with another {CONFIG} (sha256 {digest or 'missing'}, found {config.digest}). "
            "Restore the original config.json, or save the artifact again with save_pretrained."
        )
    return weight.float()


def write_artifact(folder: Path, config: RSRankConfig, weight: Tensor, card: str) -> None:
    """Write the three files of an artifact."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    tensors = {"weight": weight.detach().float().cpu().contiguous()}
    save_file(tensors, folder / PROJECTION, metadata={"format": "pt", "config_sha256": config.digest})
    (folder / CARD).write_text(card, encoding="utf-8")


def push(
    folder: Path, repo_id: str, *, private: bool, revision: str | None, token: str | bool | None, message: str
) -> str:
    """Upload an artifact folder to the Hub, making the repository if need be.

    Returns:
        Address of the commit.

    Raises:
        ArtifactError: The Hub refused.
    """
    api = HfApi(token=token)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.upload_folder(repo_id=repo_id, folder_path=folder, revision=revision, commit_message=message)
    except (HfHubHTTPError, EntryNotFoundError, OSError) as error:
        raise ArtifactError(
            f"Pushing to {repo_id!r} failed: {error} Check the name and that you are logged in with write access "
            "('hf auth login')."
        ) from error
    return str(commit.commit_url)


def model_card(config: RSRankConfig) -> str:
    """The README.md of an artifact, made from its config."""
    heads, dim = config.backbone.num_heads, config.backbone.head_dim
    front = ["---", "library_name: rsrank-rag", "pipeline_tag: text-ranking", "tags: [reranker, rag, rsrank]"]
    if config.license:
        front.append(f"license: {config.license}")
    if not config.backbone.name.startswith("."):
        front.append(f"base_model: {config.backbone.name}")
    lines = [
        *front,
        "---",
        "",
        "# RSRank projection",
        "",
        "Scores how a document shifts the value vectors of a query's tokens. Documents above 0 are relevant.",
        "",
        "```python",
        "from rsrank_rag import RSRank",
        "",
        'ranker = RSRank.from_pretrained("PATH_OR_HUB_ID")',
        'print(ranker.rank("your question", ["a document", "another document"]))',
        "```",
        "",
        f"- Backbone: `{config.backbone.name}`, revision `{config.backbone.revision or 'not pinned'}` "
        f"({config.backbone.model_type}, {config.backbone.num_layers} layers)",
        f"- B: layers {config.layers[0]}-{config.layers[-1]} ({len(config.layers)}), {heads} KV heads, "
        f"P = {config.projection_dim}, D = {dim}: {len(config.layers) * heads * config.projection_dim * dim:,} numbers",
        f"- Template: `{config.template.model_dump_json()}`",
        f"- Training data: {', '.join(config.training.data) or 'not recorded'}; seed {config.training.seed}",
    ]
    if config.training.notes:
        lines += ["", config.training.notes]
    if config.training.metrics:
        columns = sorted({key for row in config.training.metrics.values() for key in row})
        lines += ["", "| dataset | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for dataset, row in config.training.metrics.items():
            cells = [f"{row[key]:.3f}" if key in row else "" for key in columns]
            lines.append(f"| {dataset} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
