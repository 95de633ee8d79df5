"""Graphs of a BERT-like encoder for ONNX Runtime, made at load from its config and weights.

Weights are handed over beside the graph, so that a graph is a few kilobytes, and the artifact's
safetensors are the one set of weights.

Axes: N rows, Q queries, S tokens of a text, T query tokens, H heads, D head dimension, C hidden
size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from typing_extensions import Self

from ...method.arrays import Numbers
from .quantisation import rounded_weight

# Numbers of fields of ONNX's protocol buffers, and of its types: onnx/onnx.proto.
TYPES = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7}
IR_VERSION = 10
OPSET = 20
EXTERNAL = 1

# Constants of so many bytes are written into the graph, where shapes are read from them.
SMALL = 64

# ONNX Runtime's own operators (docs/ContribOperators.md in its repository).
CONTRIB = "com.microsoft"
OWN = ("MatMulIntegerToFloat", "MultiHeadAttention")

# An end that is past that of any axis.
END = 1 << 40

# What is added to the attention of tokens that are seen, and of others.
ZERO = np.float32(0)
HIDDEN = np.float32(-1e9)


def field_of(number: int, value: Any) -> bytes:
    """One field of a protocol buffer: an int, a float, bytes, a text, or several of these."""
    if isinstance(value, list):
        return b"".join(field_of(number, entry) for entry in value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    if isinstance(value, float):
        return _varint(number << 3 | 5) + np.float32(value).tobytes()
    content = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    value %= 1 << 64
    content = bytearray()
    while value > 127:
        content.append(value & 127 | 128)
        value >>= 7
    return bytes([*content, value])


def _attribute(name: str, value: int | float | list[int]) -> bytes:
    """An attribute of a node; its type is FLOAT (1), INT (2) or INTS (7)."""
    place, kind = (2, 1) if isinstance(value, float) else (3, 2)
    if isinstance(value, list):
        place, kind = 8, 7
    return field_of(1, name) + field_of(place, value) + field_of(20, kind)


def _value(name: str, dtype: str = "float32") -> bytes:
    """The name and type of an input or output, which may have any shape."""
    return field_of(1, name) + field_of(2, field_of(1, field_of(1, TYPES[dtype])))


class Graph:
    """A graph of operators.

    Attributes:
        arrays: The arrays that the graph needs beside it.
        outputs: Names of the outputs of every run.
        more: Names of outputs that a run gives only on request.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, Numbers] = {}
        self.outputs: list[str] = []
        self.more: list[str] = []
        self._nodes: list[bytes] = []
        self._inputs: list[bytes] = []
        self._constants: list[bytes] = []

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add an operator with one output; the output's name. An empty input is left out."""
        name = f"t{len(self._nodes)}"
        node = field_of(1, list(inputs)) + field_of(2, name) + field_of(4, kind)
        node += field_of(5, [_attribute(*pair) for pair in attributes.items()])
        self._nodes.append(node + field_of(7, CONTRIB if kind in OWN else ""))
        return name

    def input(self, name: str, dtype: str = "float32") -> str:
        """Add an input; its name."""
        self._inputs.append(_value(name, dtype))
        return name

    def constant(self, value: Any) -> str:
        """Add an array, a number or whole numbers; its name. Floating point becomes float32."""
        array = np.asarray(value, order="C")
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        name = f"c{len(self._constants)}"
        kind = TYPES[array.dtype.name]
        content = field_of(1, list(array.shape)) + field_of(2, kind) + field_of(8, name)
        if array.nbytes <= SMALL:
            content += field_of(9, array.tobytes())
        else:
            self.arrays[name] = array
            place = {"location": "weights", "offset": "0", "length": str(array.nbytes)}
            pairs = [field_of(1, key) + field_of(2, text) for key, text in place.items()]
            content += field_of(13, pairs) + field_of(14, EXTERNAL)
        self._constants.append(content)
        return name

    def content(self) -> bytes:
        """The model as ONNX writes it."""
        graph = field_of(1, self._nodes) + field_of(2, "encoder") + field_of(5, self._constants)
        outputs = list(map(_value, self.outputs + self.more))
        graph += field_of(11, self._inputs) + field_of(12, outputs)
        opsets = [field_of(1, "") + field_of(2, OPSET), field_of(1, CONTRIB) + field_of(2, 1)]
        return field_of(1, IR_VERSION) + field_of(8, opsets) + field_of(7, graph)


Parameters = dict[str, tuple[Numbers, int]]
"""Scale and zero point of what enters a linear map, by the map's name."""


class Encoder(Graph):
    """A graph of an encoder's layers.

    Args:
        config: The encoder's ``config.json``.
        weights: Its weights, by name.
        parameters: Of linear maps in int8; None for float32.
        largest: The largest whole number of an int8 weight.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Numbers],
        parameters: Parameters | None = None,
        largest: int = 127,
    ) -> None:
        super().__init__()
        self.weights = weights
        self.parameters = parameters or {}
        self.largest = largest
        self.epsilon = float(config["layer_norm_eps"])
        self.heads = int(config["num_attention_heads"])
        self.width = int(config["hidden_size"])
        self.head_dim = self.width // self.heads
        # What enters linear maps: the maps, and whether it is the output of GELU.
        self.entering: dict[str, tuple[Sequence[str], bool]] = {}

    def array(self, name: str) -> Numbers:
        """A weight in float32."""
        return self.weights[name].astype(np.float32, copy=False)

    def norm(self, numbers: str, name: str) -> str:
        """Layer normalisation."""
        parts = [self.constant(self.array(f"{name}.{part}")) for part in ("weight", "bias")]
        return self.add("LayerNormalization", numbers, *parts, axis=-1, epsilon=self.epsilon)

    def linear(self, numbers: str, names: Sequence[str], *, after_gelu: bool = False) -> list[str]:
        """Linear maps of the same numbers, (N, S, C) to (N, S, outputs) each."""
        self.entering[numbers] = (names, after_gelu)
        if names[0] in self.parameters:
            return self._linear_in_int8(numbers, names)
        outputs = []
        for name in names:
            product = self.add("MatMul", numbers, self.constant(self.array(f"{name}.weight").T))
            outputs.append(self.add("Add", product, self.constant(self.array(f"{name}.bias"))))
        return outputs

    def _linear_in_int8(self, numbers: str, names: Sequence[str]) -> list[str]:
        scale, zero = self.parameters[names[0]]
        zero_point = self.constant(np.uint8(zero))
        step = scale
        if scale.ndim:
            numbers = self.add("Mul", numbers, self.constant(1 / scale))
            step = np.ones((), np.float32)
        numbers = self.add("QuantizeLinear", numbers, self.constant(step), zero_point)
        outputs = []
        for name in names:
            codes, scales = rounded_weight(self.array(f"{name}.weight") * scale, self.largest)
            factors = (self.constant(1.0), self.constant(scales))
            bias = self.constant(self.array(f"{name}.bias"))
            inputs = (numbers, self.constant(codes.T), *factors, zero_point, "", bias)
            outputs.append(self.add("MatMulIntegerToFloat", *inputs))
        return outputs

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
        then keys and values (N, H, S, D) of each layer from there to the one before ``last``. What
        enters linear maps can be asked for by name, for the calibration run.
        """
        self.input("lengths", "int32")
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
        self.more = [name for name in self.entering if name != entering]
        return self

    def fused(self, fusion: int, last: int) -> Self:
        """Make this the graph of queries after prefixes.

        Inputs: ``entering`` the fusion layer (Q, T, C), each row's ``query`` (N,), ``mask`` that is
        added to attention (N, 1, 1, S + T), and keys and values ``k6``, ``v6``, ... (N, H, S, D) of
        the layers from ``fusion`` to the one before ``last``. Outputs: the queries' values
        (N, H, T, D) of the layers from ``fusion`` to ``last``.
        """
        numbers = self.input("entering")
        query = self.input("query", "int64")
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
