"""Makes all graphs of an encoder. The documents' graphs in int8 have fixed scales.

A run of random pieces of words fixes these scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from ...method.formula import Numbers
from ...method.template import PromptTokenizer
from .graph import Encoder, places_in
from .session import (
    LARGEST_WEIGHTS,
    QUERIES,
    TEXTS,
    WEIGHTS,
    Embeddings,
    Session,
    read_encoder_config,
)

# In the calibration run, the output of GELU reaches ten times as far for single tokens as for
# others. At this part of the largest number, few tokens are clipped and all others are finer
# (research/docs/speed.md).
GELU_RANGE = 0.7


def make_graphs(
    folder: Path,
    prompts: PromptTokenizer,
    *,
    last_layer: int,
    fusion_layer: int,
    attention_window: int | None = None,
) -> dict[str, bytes]:
    """The files of an encoder's graphs, by name.

    Args:
        folder: Where the encoder's files are.
        prompts: Its tokenizer with the artifact's template.
        last_layer: The last layer whose value vectors are read.
        fusion_layer: The first layer in which queries see documents.
        attention_window: As in `LanguageModel`.

    Raises:
        BackboneError: ONNX Runtime cannot run this encoder.
        ArtifactError: As `read_encoder_config`.
    """
    make = partial(Encoder, read_encoder_config(folder), WEIGHTS, places_in(folder / WEIGHTS))
    sizes: Any = {"fusion": fusion_layer, "last": last_layer}
    window: Any = {"biased": attention_window is not None}
    texts = make().alone(**sizes, **window)
    graphs = {TEXTS: texts.content(), QUERIES: make().fused(**sizes).content()}
    # A run that shows what enters the linear maps.
    entering = list(texts.entering)
    texts.outputs = entering
    feeds = Embeddings(folder).feeds(calibration_ids(prompts), attention_window)
    numbers = Session(texts.content(), folder).run(feeds)
    parameters: dict[str, tuple[Numbers, int]] = {}
    with safe_open(folder / WEIGHTS, framework="np") as file:
        for entered, (maps, after_gelu) in zip(numbers, texts.entering.values(), strict=True):
            weights = [file.get_tensor(f"{name}.weight").astype("float32") for name in maps]
            fixed = fixed_parameters(entered, weights, after_gelu=after_gelu)
            parameters |= dict.fromkeys(maps, fixed)
    for largest in LARGEST_WEIGHTS:
        documents = make(parameters, largest).alone(**sizes, **window)
        graphs[f"documents_{largest}.onnx"] = documents.content()
    return graphs


def calibration_ids(prompts: PromptTokenizer) -> list[tuple[int, ...]]:
    """Token ids of the calibration run: random pieces of words within the template.

    The ranges are as good as those of 300 passages (research/docs/speed.md). Without the template
    they would not be.
    """
    # The numbers that `torch.randint` draws of the same seed.
    numbers = np.random.RandomState(0).randint(0, 2**32, (32, 14), dtype=np.uint32)
    words = (numbers % prompts.vocabulary).tolist()
    return [(*prompts.instruction, *row, *prompts.separator) for row in words]


def fixed_parameters(
    numbers: Numbers, weights: Sequence[Numbers], *, after_gelu: bool
) -> tuple[Numbers, int]:
    """Scale and zero point of the numbers that enter linear maps.

    A number x becomes round(x / scale + zero_point), clipped to 0..255.

    Args:
        numbers: What entered the maps in the calibration run, (..., C).
        weights: The weights of all maps that take these numbers, each (outputs, C).
        after_gelu: Whether the numbers are the output of GELU. They have one scale for all
            channels, so that GELU and the rounding happen in one step.

    Returns:
        The scale, (C,) or (), and the zero point.
    """
    rows = numbers.reshape(-1, numbers.shape[-1]).astype(np.float32, copy=False)
    if after_gelu:
        lowest = rows.min()
        highest = np.float32(GELU_RANGE) * rows.max()
        balance = np.ones((), np.float32)
    else:
        lowest = rows.min(0)
        highest = rows.max(0)
        # Single channels are ten times larger than others. As in SmoothQuant, the weights take
        # over the square root of the difference.
        largest = np.maximum(np.maximum(-lowest, highest), 1e-4)
        largest_weights = np.abs(np.concatenate(list(weights))).max(0)
        balance = np.sqrt(largest / np.maximum(largest_weights, 1e-6))
    low = min(float((lowest / balance).min()), -1e-6)
    high = max(float((highest / balance).max()), 1e-6)
    scale = np.asarray(balance * (high - low) / 255, np.float32)
    return scale, round(-low * 255 / (high - low))
