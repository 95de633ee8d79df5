"""Makes the graphs of a BERT-like encoder, which ONNX Runtime runs. Needs the ``onnx`` package.

A graph is a file of a few kilobytes. It names the encoder's weights by their places in
``model.safetensors``, which stays the one set of weights. ONNX Runtime computes what depends on
weights alone, such as their rounding to int8, once when a session opens.

Axes: N rows, Q queries, S tokens of a text, T query tokens, H heads, D head dimension, C hidden
size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import Self

from ...errors import needs
from ...method.formula import Numbers

with needs("Making the graphs of an encoder needs {}.", "lm", "onnx"):
    from onnx import ModelProto, TensorProto, helper, numpy_helper

IR_VERSION = 10
OPSET = 20

# ONNX Runtime's own operators (docs/ContribOperators.md in its repository).
CONTRIB = "com.microsoft"
OWN = ("MatMulIntegerToFloat", "MultiHeadAttention")

# An end that is past that of any axis.
END = 1 << 40

# Types of safetensors.
STORED = {"F32": TensorProto.FLOAT, "F16": TensorProto.FLOAT16}

Parameters = Mapping[str, tuple[Numbers, int]]
"""Scale and zero point of what enters a linear map, by the map's name."""


class Place(NamedTuple):
    """Where a weight lies in its file, in bytes."""

    dtype: str
    shape: Sequence[int]
    start: int
    length: int


def places_in(file: Path) -> dict[str, Place]:
    """The place of each tensor of a safetensors file."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    places = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        places[name] = Place(entry["dtype"], entry["shape"], 8 + size + start, stop - start)
    return places


class Graph:
    """A graph of operators.

    Args:
        file: Name of the file of weights.
        places: The places of its weights.
    """

    def __init__(self, file: str = "", places: Mapping[str, Place] | None = None) -> None:
        self.file = file
        self.places = places or {}
        self.outputs: list[str] = []
        self._nodes: list[Any] = []
        self._inputs: list[Any] = []
        self._constants: list[Any] = []

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add an operator with one output; the output's name. An empty input is left out."""
        name = f"t{len(self._nodes)}"
        domain = CONTRIB if kind in OWN else ""
        self._nodes.append(helper.make_node(kind, inputs, [name], domain=domain, **attributes))
        return name

    def input(self, name: str, kind: int = TensorProto.FLOAT) -> str:
        """Add an input of any shape; its name."""
        self._inputs.append(helper.make_tensor_value_info(name, kind, None))
        return name

    def constant(self, value: Any) -> str:
        """Add an array, a number or whole numbers; its name. Floating point becomes float32."""
        array = np.asarray(value)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        return self._added(numpy_helper.from_array(array))

    def _added(self, tensor: Any) -> str:
        tensor.name = f"c{len(self._constants)}"
        self._constants.append(tensor)
        return str(tensor.name)

    def weight(self, name: str) -> str:
        """A weight of the file in float32; its name."""
        place = self.places[name]
        tensor = TensorProto(data_type=STORED[place.dtype], dims=place.shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, text in (
            ("location", self.file),
            ("offset", str(place.start)),
            ("length", str(place.length)),
        ):
            tensor.external_data.add(key=key, value=text)
        return self.add("Cast", self._added(tensor), to=TensorProto.FLOAT)

    def content(self) -> bytes:
        """The file of the graph."""
        outputs = []
        for name in self.outputs:
            outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
        graph = helper.make_graph(
            self._nodes, "encoder", self._inputs, outputs, initializer=self._constants
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        model: ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        return bytes(model.SerializeToString(deterministic=True))


class Encoder(Graph):
    """A graph of an encoder's layers.

    Args:
        config: The encoder's ``config.json``.
        file: Name of the file of weights.
        places: The places of its weights.
        parameters: Of linear maps in int8; None for float32.
        largest: The largest whole number of an int8 weight.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        file: str,
        places: Mapping[str, Place],
        parameters: Parameters | None = None,
        largest: int = 127,
    ) -> None:
        super().__init__(file, places)
        self.parameters = parameters or {}
        self.largest = largest
        self.epsilon = float(config["layer_norm_eps"])
        self.heads = int(config["num_attention_heads"])
        self.width = int(config["hidden_size"])
        self.head_dim = self.width // self.heads
        # What enters linear maps: the maps, and whether it is the output of GELU.
        self.entering: dict[str, tuple[Sequence[str], bool]] = {}

    def norm(self, numbers: str, name: str) -> str:
        """Layer normalisation."""
        parts = [self.weight(f"{name}.{part}") for part in ("weight", "bias")]
        return self.add("LayerNormalization", numbers, *parts, axis=-1, epsilon=self.epsilon)

    def linear(self, numbers: str, names: Sequence[str], *, after_gelu: bool = False) -> list[str]:
        """Linear maps of the same numbers, (N, S, C) to (N, S, outputs) each."""
        self.entering[numbers] = (names, after_gelu)
        if names[0] in self.parameters:
            return self._linear_in_int8(numbers, names)
        outputs = []
        for name in names:
            matrix = self.add("Transpose", self.weight(f"{name}.weight"), perm=[1, 0])
            product = self.add("MatMul", numbers, matrix)
            outputs.append(self.add("Add", product, self.weight(f"{name}.bias")))
        return outputs

    def _linear_in_int8(self, numbers: str, names: Sequence[str]) -> list[str]:
        parameter, zero = self.parameters[names[0]]
        zero_point = self.constant(np.uint8(zero))
        scale = self.constant(parameter)
        one = self.constant(1.0)
        step = scale
        if parameter.ndim:
            numbers = self.add("Mul", numbers, self.add("Div", one, scale))
            step = one
        numbers = self.add("QuantizeLinear", numbers, step, zero_point)
        outputs = []
        for name in names:
            codes, scales = self.rounded(f"{name}.weight", scale)
            inputs = (numbers, codes, one, scales, zero_point, "", self.weight(f"{name}.bias"))
            outputs.append(self.add("MatMulIntegerToFloat", *inputs))
        return outputs

    def rounded(self, name: str, scale: str) -> tuple[str, str]:
        """A weight (out, in) times a scale, as whole numbers (in, out), and a scale for each row.

        These numbers depend on weights alone.
        """
        add = self.add
        weight = add("Mul", self.weight(name), scale)
        largest = add("ReduceMax", add("Abs", weight), self.constant([1]), keepdims=1)
        steps = add("Div", largest, self.constant(float(self.largest)))
        steps = add("Max", steps, self.constant(1e-12))
        codes = add("Cast", add("Round", add("Div", weight, steps)), to=TensorProto.INT8)
        scales = add("Squeeze", steps, self.constant([1]))
        return add("Transpose", codes, perm=[1, 0]), scales

    def split(self, numbers: str) -> str:
        """(N, S, C) to (N, H, S, D)."""
        shape = self.constant([0, 0, self.heads, self.head_dim])
        return self.add("Transpose", self.add("Reshape", numbers, shape), perm=[0, 2, 1, 3])

    def attend(self, query: str, key: str, value: str, bias: str) -> str:
        """Attention of texts that see themselves, (N, S, C); the input ``lengths`` ends each."""
        inputs = (query, key, value, "", "lengths", bias)
        return self.add("MultiHeadAttention", *inputs, num_heads=self.heads)

    def attend_prefix(self, prefix: Sequence[str], query: str, key: str, value: str) -> str:
        """Attention of queries (N, T, C) that see a prefix, then themselves; the input ``mask``.

        The prefix's keys and values (N, H, S, D) are not copied, which would take most of the time.
        """
        add = self.add
        constant = self.constant
        scaled = add("Mul", self.split(query), constant(self.head_dim**-0.5))
        value = self.split(value)
        parts = []
        for keys in (prefix[0], self.split(key)):
            parts.append(add("MatMul", scaled, add("Transpose", keys, perm=[0, 1, 3, 2])))
        scores = add("Add", add("Concat", *parts, axis=3), "mask")
        seen = add("Softmax", scores, axis=3)
        size = add("Shape", prefix[0], start=2, end=3)
        axis = constant([3])
        of_prefix = add("Slice", seen, constant([0]), size, axis)
        of_query = add("Slice", seen, size, constant([END]), axis)
        values = add("Add", add("MatMul", of_prefix, prefix[1]), add("MatMul", of_query, value))
        shape = constant([0, 0, self.width])
        return add("Reshape", add("Transpose", values, perm=[0, 2, 1, 3]), shape)

    def finish(self, numbers: str, attended: str, layer: int) -> str:
        """The rest of a layer after its attention."""
        add = self.add
        place = f"encoder.layer.{layer}"
        name = f"{place}.attention.output"
        output = self.linear(attended, [f"{name}.dense"])[0]
        numbers = self.norm(add("Add", numbers, output), f"{name}.LayerNorm")
        inner = add("Gelu", self.linear(numbers, [f"{place}.intermediate.dense"])[0])
        inner = self.linear(inner, [f"{place}.output.dense"], after_gelu=True)[0]
        return self.norm(add("Add", numbers, inner), f"{place}.output.LayerNorm")

    def attention_maps(self, numbers: str, layers: Sequence[int], first: int = 0) -> list[str]:
        """Query, key and value (N, S, C) of layers; keys and values alone with ``first=1``."""
        names = []
        for layer in layers:
            for part in ("query", "key", "value")[first:]:
                names.append(f"encoder.layer.{layer}.attention.self.{part}")
        return self.linear(numbers, names)

    def alone(self, fusion: int, last: int, *, biased: bool = False) -> Self:
        """Make this the graph of texts that see themselves only.

        Inputs: ``embedded`` tokens (N, S, C), ``lengths`` (N,), and with ``biased`` the ``bias``
        that is added to attention (1, 1, S, S). Outputs: what enters the fusion layer (N, S, C);
        then keys and values (N, H, S, D) of each layer from there to the one before ``last``.
        """
        self.input("lengths", TensorProto.INT32)
        bias = self.input("bias") if biased else ""
        entering = numbers = self.norm(self.input("embedded"), "embeddings.LayerNorm")
        states: list[str] = []
        for layer in range(fusion or last):
            query, key, value = self.attention_maps(numbers, [layer])
            if not fusion:
                states += [key, value]
            # Without a fusion layer, the last of these layers is run for its keys and values.
            if fusion or layer < last - 1:
                numbers = self.finish(numbers, self.attend(query, key, value, bias), layer)
        if fusion:
            entering = numbers
            states = self.attention_maps(entering, range(fusion, last), first=1)
        self.outputs = [entering, *map(self.split, states)]
        return self

    def fused(self, fusion: int, last: int) -> Self:
        """Make this the graph of queries after prefixes.

        Inputs: ``entering`` the fusion layer (Q, T, C), each row's ``query`` (N,), ``mask`` that is
        added to attention (N, 1, 1, S + T), and keys and values ``k6``, ``v6``, ... (N, H, S, D) of
        the layers from ``fusion`` to the one before ``last``. Outputs: the queries' values
        (N, H, T, D) of the layers from ``fusion`` to ``last``.
        """
        numbers = self.input("entering")
        query = self.input("query", TensorProto.INT64)
        self.input("mask")
        for layer in range(fusion, last):
            mapped = self.attention_maps(numbers, [layer])
            if layer == fusion:
                # The fusion layer's maps run once for each query.
                numbers, *mapped = (self.add("Gather", part, query) for part in (numbers, *mapped))
            self.outputs.append(self.split(mapped[2]))
            prefix = [self.input(f"{part}{layer}") for part in "kv"]
            numbers = self.finish(numbers, self.attend_prefix(prefix, *mapped), layer)
        self.outputs.append(self.split(self.attention_maps(numbers, [last], first=2)[0]))
        return self
