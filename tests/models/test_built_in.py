"""The built-in artifacts: B alone for decoders, which fits any copy, and the graphs of `mini`."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from rsrank_rag import RSRank
from rsrank_rag.artifact import hub
from rsrank_rag.artifact.graphs import encoder_graphs

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


def split(content):
    """The constants of a graph, and the graph without the numbers of float32."""
    model = onnx.load_from_string(content)
    numbers = []
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and tensor.raw_data:
            numbers.append(numpy_helper.to_array(tensor))
            tensor.raw_data = b""
    return numbers, model


def test_the_graphs_of_mini_are_those_that_the_function_makes():
    mini = RSRank.from_pretrained("mini", cache_size=0)
    made = encoder_graphs(hub.BUILTIN / "mini" / "backbone", mini.prompts, mini.config)
    assert made.keys() == mini.backbone.graphs.keys()
    for name, content in mini.backbone.graphs.items():
        numbers, model = split(content)
        expected, other = split(made[name])
        assert model == other
        for one, two in zip(numbers, expected, strict=True):
            # The calibration run is rounded differently on other processors.
            np.testing.assert_allclose(one, two, rtol=1e-3)
