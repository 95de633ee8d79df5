"""Makes all graphs of an encoder. The documents' graphs in int8 have fixed scales."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ...method.batches import Ids
from ...method.formula import Numbers
from .graph import Encoder, places_in
from .quantisation import fixed_parameters, ranges
from .session import LARGEST_WEIGHTS, WEIGHTS, Embeddings, Session


def make_graphs(
    folder: Path,
    config: dict[str, Any],
    calibration: Sequence[Ids],
    *,
    last_layer: int,
    fusion_layer: int,
    attention_window: int | None = None,
) -> dict[str, bytes]:
    """The files of an encoder's graphs, by name.

    Args:
        folder: Where the encoder's files are.
        config: Its config, from `read_encoder_config`.
        calibration: Texts that fix the scales of documents in int8.
        last_layer: The last layer whose value vectors are read.
        fusion_layer: The first layer in which queries see documents.
        attention_window: As in `LanguageModel`.
    """
    make = partial(Encoder, config, WEIGHTS, places_in(folder / WEIGHTS))
    sizes: Any = {"fusion": fusion_layer, "last": last_layer}
    window: Any = {"biased": attention_window is not None}
    texts = make().alone(**sizes, **window)
    graphs = {"texts.onnx": texts.content(), "queries.onnx": make().fused(**sizes).content()}
    # A run that shows what enters the linear maps.
    entering = list(texts.entering)
    texts.outputs = entering
    feeds = Embeddings(folder).feeds(calibration, attention_window)
    numbers = Session(texts.content(), folder).run(feeds)
    parameters: dict[str, tuple[Numbers, int]] = {}
    with safe_open(folder / WEIGHTS, framework="np") as file:
        for entered, (maps, after_gelu) in zip(numbers, texts.entering.values(), strict=True):
            weights = [file.get_tensor(f"{name}.weight").astype("float32") for name in maps]
            fixed = fixed_parameters(*ranges(entered, after_gelu=after_gelu), weights)
            parameters |= dict.fromkeys(maps, fixed)
    for largest in LARGEST_WEIGHTS:
        documents = make(parameters, largest).alone(**sizes, **window)
        graphs[f"documents_{largest}.onnx"] = documents.content()
    return graphs
