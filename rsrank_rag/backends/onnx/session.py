"""An encoder on ONNX Runtime, without torch: what runs encoders on a CPU.

Axes: N rows, Q queries, S tokens of a document, T query tokens, K keys, H heads, D head dimension,
C hidden size.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from safetensors import safe_open

from ...errors import ArtifactError, BackboneError, MissingDependencyError, pip_install
from ...method.batches import Ids
from ...method.formula import Numbers, pooled
from ...method.prefix import Prefix, Prefixes, Show, attention_band
from ..base import LanguageModel, sample_of, trial_ids
from ..options import ENCODER_FILES
from .cores import usable_cores

# At most so many padded tokens of documents are in one run of the graph, unless a single document
# has more. In larger runs, the numbers of a layer take so much memory that glibc takes it from the
# system anew in each layer, which costs a quarter of the time.
RUN_TOKENS = 512

WEIGHTS = "model.safetensors"
WORDS = "embeddings.word_embeddings.weight"
PLACES = "embeddings.position_embeddings.weight"
TYPES = "embeddings.token_type_embeddings.weight"

# The graphs of texts that see themselves only, and of queries after documents.
TEXTS = "texts.onnx"
QUERIES = "queries.onnx"

# What is added to the attention of tokens that are seen, and of others.
ZERO = np.float32(0)
HIDDEN = np.float32(-1e9)

# The largest whole number that a weight in int8 is rounded to, with and without VNNI.
LARGEST_WEIGHTS = (127, 63)

ADVICE = f"Use torch for it: {pip_install('lm')}."


class Session:
    """A graph that ONNX Runtime runs.

    Args:
        graph: The file of the graph.
        weights: The folder of the weights that it names.
    """

    def __init__(self, graph: bytes, weights: Path = Path()) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = thread_count()
        options.inter_op_num_threads = 1
        # Their memory would grow with every new shape.
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False
        # Threads that wait would take cores from the host.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        place = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(place, str(weights))
        self._session = onnxruntime.InferenceSession(
            graph, options, providers=["CPUExecutionProvider"]
        )

    def run(self, feeds: Mapping[str, Numbers]) -> list[Numbers]:
        """Run the graph.

        Args:
            feeds: An array for each input, by name.

        Returns:
            An array for each output.

        Raises:
            MemoryError: The run does not fit into memory.
        """
        try:
            return list(self._session.run(None, feeds))
        except Exception as error:
            # The class of ONNX Runtime's error says less than its text.
            if "allocate memory" in str(error) or "bad_alloc" in str(error):
                raise MemoryError(str(error)) from error
            raise


def thread_count() -> int:
    """Threads of a session: ``OMP_NUM_THREADS`` if it is a positive number, else `usable_cores`."""
    number = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(number) if number.isdecimal() and int(number) else usable_cores()


@cache
def largest_weight() -> int:
    """The largest whole number that a weight is rounded to: 127 or 63.

    Without VNNI, the processor adds two products of a weight and 255 in 16 bits. The graph that
    shows this multiplies numbers (N, 64) with a weight of 127s (tests/backends/test_onnx.py).
    """
    products = Session(Path(__file__).with_name("products.onnx").read_bytes())
    sums = products.run({"codes": np.full((1, 64), 255, np.uint8)})[0]
    exact = bool((sums == 64 * 255 * 127).all())
    return LARGEST_WEIGHTS[0] if exact else LARGEST_WEIGHTS[1]


class Embeddings:
    """The tables of words and positions; ``folder`` holds the encoder's weights."""

    def __init__(self, folder: Path) -> None:
        with safe_open(folder / WEIGHTS, framework="np") as file:
            # The table stays in the dtype of its file: it is nearly half of the weights.
            self.words = file.get_tensor(WORDS)
            places, types = (file.get_tensor(name).astype(np.float32) for name in (PLACES, TYPES))
        self.places = places + types[0]

    def feeds(
        self, texts: Sequence[Ids], attention_window: int | None, *, banded: bool = True
    ) -> dict[str, Numbers]:
        """The inputs of `Encoder.alone`: embedded tokens with padding, lengths, and the bias.

        Args:
            texts: Token ids of N texts.
            attention_window: As in `LanguageModel`; without it, there is no bias.
            banded: Whether tokens attend to this window only, or to all of their text.
        """
        lengths = np.array(list(map(len, texts)), np.int32)
        longest = int(lengths.max())
        ids = np.zeros((len(texts), longest), np.int64)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = text
        embedded = self.words[ids].astype(np.float32) + self.places[:longest]
        feeds = {"embedded": embedded, "lengths": lengths}
        if attention_window is not None:
            seen = np.ones((longest, longest), bool)
            if banded:
                seen = attention_band(longest, longest, attention_window)
            feeds["bias"] = np.where(seen, ZERO, HIDDEN)[None, None]
        return feeds


class OnnxBackbone(LanguageModel):
    """A frozen BERT-like encoder in two phases.

    Args:
        folder: Where its files are.
        config: Its config, from `read_encoder_config`.
        graphs: The files of its graphs, from `make_graphs`.
        last_layer: The last layer whose value vectors are read.
        fusion_layer: The first layer in which queries see documents.
        similarity_window: As in `LanguageModel`.
        attention_window: As in `LanguageModel`.
        int8: Whether documents run in int8.
    """

    device = "cpu"
    dtype = np.dtype("float32")
    # Attention takes prefix and query apart.
    uses_query_slots = False

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        graphs: Mapping[str, bytes],
        *,
        last_layer: int,
        fusion_layer: int,
        similarity_window: int | None = None,
        attention_window: int | None = None,
        int8: bool = False,
    ) -> None:
        self.folder = folder
        self.graphs = graphs
        self.last_layer = last_layer
        self.fusion_layer = fusion_layer
        self.similarity_window = similarity_window
        self.attention_window = attention_window
        self.name = f"{config['model_type']} ({folder})"
        self.num_heads = config["num_attention_heads"]
        self.hidden_size = config["hidden_size"]
        self.loaded_layers = config["num_hidden_layers"]
        self.head_dim = self.hidden_size // self.num_heads
        self.max_length = config["max_position_embeddings"]
        self.documents_in_int8 = int8
        self._documents = f"documents_{largest_weight()}.onnx" if int8 else TEXTS
        digest = hashlib.sha256(graphs[self._documents]).hexdigest()
        self.identity = {"runtime": "onnx", "graph": digest}
        self._embeddings = Embeddings(folder)
        # The batches of one call have the same query.
        self._entering = lru_cache(1)(self._entering_of)
        self._sessions: dict[tuple[int, str], Session] = {}
        # Opened now and not at the first call, because weights are rounded when it opens.
        self.session(self._documents)
        self.sample = self._sample()

    def session(self, graph: str) -> Session:
        """A graph as a session. A forked process opens its own: threads do not survive a fork."""
        key = (os.getpid(), graph)
        if key not in self._sessions:
            self._sessions[key] = Session(self.graphs[graph], self.folder)
        return self._sessions[key]

    def _sample(self) -> tuple[float, ...]:
        """As `LanguageModel.sample`: the fixed tokens run as a query after a masked document."""
        masked = np.zeros((1, self.num_heads, 1, self.head_dim), np.float32)
        states = (masked,) * (self.last_layer - self.fusion_layer)
        nothing = Prefixes(states, states, (0,), 0, ())
        read: dict[int, Numbers] = {}
        ids = trial_ids(len(self._embeddings.words))
        self.query_values([ids], nothing, read.__setitem__)
        return sample_of(read[self.last_layer][0])

    def save(self, folder: Path, tokenizer: Any) -> None:
        """See `LanguageModel.save`. The files are copied."""
        folder.mkdir()
        for name in ENCODER_FILES:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, folder / name)

    def prefill(self, documents: Sequence[Ids]) -> list[Prefix]:
        """See `LanguageModel.prefill`. At most `RUN_TOKENS` run together."""
        count = max(1, RUN_TOKENS // max(map(len, documents)))
        prefixes: list[Prefix] = []
        for start in range(0, len(documents), count):
            prefixes += self._run_alone(self._documents, documents[start : start + count])
        return prefixes

    def _run_alone(self, graph: str, texts: Sequence[Ids]) -> list[Prefix]:
        feeds = self._embeddings.feeds(texts, self.attention_window)
        entering, *states = self.session(graph).run(feeds)
        lengths = feeds["lengths"].tolist()
        vectors = list(np.empty((len(texts), 0), np.float32))
        if self.fusion_layer:
            vectors = pooled(entering, lengths, self.similarity_window)
        return Prefix.of_run(states[::2], states[1::2], lengths, vectors)

    def _null_prefix(self, ids: Ids) -> Prefix:
        # In float32: its rounding would move all scores alike.
        return self._run_alone(TEXTS, [ids])[0]

    def query_values(
        self,
        queries: Sequence[Ids],
        prefixes: Prefixes,
        show: Show,
        query_of_row: Sequence[int] | None = None,
    ) -> Numbers:
        """See `LanguageModel.query_values`."""
        entering = self._entering(tuple(queries))
        rows = np.array(query_of_row or [0] * len(prefixes))
        lengths = list(map(len, queries))
        document = np.arange(prefixes.keys[0].shape[2]) < np.array(prefixes.lengths)[:, None]
        query = np.arange(entering.shape[1]) < np.array(lengths)[rows][:, None]
        seen = np.concatenate([document, query], axis=1)[:, None, None]
        feeds = {"entering": entering, "query": rows, "mask": np.where(seen, ZERO, HIDDEN)}
        for number, layer in enumerate(range(self.fusion_layer, self.last_layer)):
            feeds[f"k{layer}"] = prefixes.keys[number]
            feeds[f"v{layer}"] = prefixes.values[number]
        for number, values in enumerate(self.session(QUERIES).run(feeds)):
            show(self.fusion_layer + number, values)
        if not self.fusion_layer:
            return np.empty(0)
        return np.concatenate(pooled(entering, lengths))

    def _entering_of(self, queries: tuple[Ids, ...]) -> Numbers:
        """What enters the fusion layer of each query alone, (Q, T, C)."""
        feeds = self._embeddings.feeds(queries, self.attention_window, banded=False)
        return self.session(TEXTS).run(feeds)[0]


def read_encoder_config(folder: Path) -> dict[str, Any]:
    """The encoder's config, whose sizes are those of its files.

    Raises:
        BackboneError: The config does not describe an encoder with GELU, or its weights have other
            names.
        ArtifactError: The tables of words and positions do not have the config's sizes.
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("hidden_act") != "gelu" or config.get("is_decoder"):
        raise BackboneError(f"{folder} is no encoder with GELU. {ADVICE}")
    width = config["hidden_size"]
    with safe_open(folder / "model.safetensors", framework="np") as file:
        if not {WORDS, PLACES}.issubset(file.keys()):
            raise BackboneError(f"The weights in {folder} have other names than here. {ADVICE}")
        words, places = (file.get_slice(name).get_shape() for name in (WORDS, PLACES))
        dtype = file.get_slice(WORDS).get_dtype()
    if dtype not in ("F32", "F16"):
        raise BackboneError(f"The weights in {folder} are stored as {dtype}. {ADVICE}")
    if words != [config["vocab_size"], width] or places != [
        config["max_position_embeddings"],
        width,
    ]:
        raise ArtifactError(f"{folder}: the weights do not have the sizes that config.json names.")
    return config


def check_kind(model_type: str | None, name: str) -> None:
    """Refuse language models that only torch runs.

    Raises:
        MissingDependencyError: ``model_type`` is not "bert".
    """
    if model_type != "bert":
        raise MissingDependencyError(
            f"{name}: its language model is of the kind {model_type!r}. ONNX Runtime runs encoders "
            "of the kind 'bert' here, and torch all others.",
            "lm",
        )
