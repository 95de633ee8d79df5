"""The built-in artifacts for decoders: B alone, which fits any copy of the decoder."""

import pytest

from rsrank_rag.artifact import hub

DECODERS = [name for name in hub.builtin_names() if name != "mini"]


@pytest.mark.parametrize("name", DECODERS)
def test_a_built_in_artifact_is_small_and_names_a_decoder_of_the_hub(name):
    folder = hub.BUILTIN / name
    config = hub.read_config(folder)
    weights = hub.read_weights(folder, config)
    assert weights.weight.shape == config.shape
    assert config.backbone.name.startswith("Qwen/")
    # B was trained on rounded weights, so no file of the decoder is pinned.
    assert config.backbone.bits == 4
    assert config.backbone.files == {}
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1_000_000
