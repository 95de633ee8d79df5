"""Write an artifact into a folder, or publish it on the Hugging Face Hub."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypedDict

from ..errors import ArtifactError, BackboneError
from ..partial_files import replacing
from . import hub
from .card import UNNAMED, is_hub_id, model_card
from .config import INSIDE, RSRankConfig
from .graphs import encoder_graphs, write_graphs
from .identity import folder_of, hashes
from .opening import Parts


def save_artifact(folder: Path, parts: Parts, include_backbone: bool) -> None:
    """Write an artifact completely or not at all; see `RSRank.save_pretrained`."""
    config = parts.config
    with replacing(folder) as new:
        if include_backbone or config.backbone.name == INSIDE:
            parts.backbone.save(new / INSIDE, parts.prompts.tokenizer)
            update = {
                "name": INSIDE,
                "revision": None,
                "num_layers": parts.backbone.loaded_layers,
                "files": hashes(new / INSIDE),
            }
            backbone = config.backbone.model_copy(update=update)
            config = config.model_copy(update={"backbone": backbone})
        config = write_graphs(new, _graphs(parts, config, new), config)
        hub.write_artifact(new, config, parts.projection, model_card(config))


def _graphs(parts: Parts, config: RSRankConfig, folder: Path) -> Mapping[str, bytes]:
    """The graphs of an encoder; empty if only torch can run the language model."""
    if parts.backbone.graphs:
        return parts.backbone.graphs
    spec = config.backbone
    place = folder / INSIDE if spec.name == INSIDE else folder_of(spec.name, spec.revision)
    if spec.model_type != "bert" or place is None:
        return {}
    try:
        return encoder_graphs(place, parts.prompts, config)
    except BackboneError:
        return {}


class PushOptions(TypedDict, total=False):
    """Optional arguments of `RSRank.push_to_hub`."""

    private: bool
    """Whether a new repository is private."""
    revision: str | None
    """A branch, which is made if it does not exist."""
    token: str | bool | None
    """Access token; None for that of ``hf auth login``."""
    commit_message: str
    """Subject of the commit."""


def push_artifact(parts: Parts, repo_id: str, include_backbone: bool, options: PushOptions) -> str:
    """Publish an artifact; see `RSRank.push_to_hub`."""
    from huggingface_hub import HfApi

    from ..backends.hub_errors import HUB_ERRORS

    source = parts.config.backbone.name
    if not include_backbone and source != INSIDE and not is_hub_id(source):
        raise ArtifactError(
            f"The artifact's language model is the local folder {source!r}, which nobody else "
            "could load. Make the artifact with the model's Hub id, or pass "
            "include_backbone=True to upload the model with it."
        )
    api = HfApi(token=options.get("token"))
    with TemporaryDirectory() as folder:
        save_artifact(Path(folder), parts, include_backbone)
        card = Path(folder, hub.CARD)
        named = card.read_text(encoding="utf-8").replace(UNNAMED, repo_id)
        card.write_text(named, encoding="utf-8")
        try:
            api.create_repo(repo_id, private=options.get("private", False), exist_ok=True)
            revision = options.get("revision")
            if revision is not None:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                commit_message=options.get("commit_message", "Upload RSRank projection"),
            )
        except HUB_ERRORS as error:
            raise ArtifactError(
                f"Pushing to {repo_id!r} failed: {hub.reason(error)} Check the name "
                "(owner/name) and that you are logged in with write access ('hf auth login')."
            ) from error
    return str(commit.commit_url)
