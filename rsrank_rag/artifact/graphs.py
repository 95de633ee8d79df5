"""The graphs of an artifact's encoder, as files for ONNX Runtime."""

from collections.abc import Mapping
from pathlib import Path

from ..errors import ArtifactError
from ..method.template import PromptTokenizer
from ..partial_files import digest_of
from .config import RSRankConfig

GRAPHS = "graphs"


def encoder_graphs(
    backbone: Path, prompts: PromptTokenizer, config: RSRankConfig
) -> dict[str, bytes]:
    """Make the graphs of an encoder.

    Args:
        backbone: The folder of the encoder's files.
        prompts: Its tokenizer with the artifact's template.
        config: The artifact's config.

    Raises:
        MissingDependencyError: onnx is not installed.
        BackboneError: ONNX Runtime cannot run this encoder.
    """
    from ..backends.onnx.making import make_graphs

    return make_graphs(
        backbone,
        prompts,
        last_layer=config.layers[-1],
        fusion_layer=config.fusion_layer,
        attention_window=config.attention_window,
    )


def write_graphs(folder: Path, graphs: Mapping[str, bytes], config: RSRankConfig) -> RSRankConfig:
    """Write graphs into an artifact, and return the config with their hashes."""
    place = folder / GRAPHS
    digests = {}
    for name, content in sorted(graphs.items()):
        place.mkdir(exist_ok=True)
        (place / name).write_bytes(content)
        digests[name] = digest_of(place / name)
    return config.model_copy(update={"graphs": digests})


def read_graphs(folder: Path, config: RSRankConfig) -> dict[str, bytes]:
    """The files of an artifact's graphs, by name; empty for an artifact without graphs.

    Raises:
        ArtifactError: A file is missing or changed.
    """
    graphs = {}
    for name, digest in config.graphs.items():
        path = folder / GRAPHS / name
        if not path.is_file() or digest_of(path) != digest:
            raise ArtifactError(
                f"{path} is missing or changed since this artifact was made (by sha256). Download "
                "the artifact again."
            )
        graphs[name] = path.read_bytes()
    return graphs
