"""Tiny random language models with real tokenizers, made on the spot: nothing is downloaded."""

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # workers and what they start share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rsrank_rag import Reranker, RSRank, Template
from rsrank_rag.artifact import hub
from rsrank_rag.artifact.opening import open_artifact
from rsrank_rag.backends.options import LoadOptions, ModelSource
from rsrank_rag.backends.torch.projection import Projection
from rsrank_rag.prefixes.cache import CachedPrefixes, PrefixTiers

# They run where torch is not installed.
collect_ignore = ["without_torch.py"]

SHARED = Path(__file__).parents[1].parent / "shared"
STORIES = SHARED / "models" / "stories260K"

VOCABULARY = 320
LAYERS, KV_HEADS, HEAD_DIM, PROJECTION_DIM = 4, 2, 16, 8
MAX_LENGTH = 512
WINDOW = 32

SPECIAL = [
    "<pad>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
]
CORPUS = [
    (
        "The lighthouse keeper climbed the stairs every evening and lit the lamp before the fog "
        "came in."
    ),
    (
        "Judge whether the document helps to answer the query. Document: Query: Who wrote it, and "
        "when?"
    ),
    (
        "Tomatoes need six hours of sun, warm soil and water at the root; they are planted after "
        "the last frost."
    ),
    "A sourdough starter is flour and water. Wild yeast makes it rise, and bacteria make it sour.",
    (
        "The bridge was opened in 1932. It is 503 metres long, and six million rivets hold it "
        "together."
    ),
    "Octopuses have three hearts, blue blood and nine brains, one of them in every arm.",
    "def area(radius): return 3.14159 * radius ** 2",
    (
        "Glaciers carve valleys slowly: the ice moves a few centimetres a day and grinds the rock "
        "under it."
    ),
]

DOCUMENTS = [
    (
        "The bridge was opened in 1932 after eight years of work, and it carries trains, cars and "
        "people on foot."
    ),
    "Octopuses have three hearts. Two pump blood through the gills.",
    "Frost",
    "A starter of flour and water rises when wild yeast feeds on it; keep it warm, feed it daily, "
    "and bake when it doubles. Cold slows it down, heat kills it, and salt keeps it in check.",
    "Tomatoes need six hours of sun.",
    (
        "The ice moves a few centimetres a day and grinds the rock under it, and so the valley "
        "gets its shape."
    ),
]
QUERY = "When was the bridge opened?"
QUERIES = [QUERY, "How many hearts has an octopus?", "What makes bread rise?"]

CHAT = Template(
    instruction="<s>Does the document answer the query?\nDocument: ",
    separator="<|im_end|>\nQuery: ",
    suffix="<|im_end|>",
    positions="query+suffix",
)
ENCODER = Template(instruction="[CLS] ", separator="[SEP]", suffix="[SEP]", positions="query")


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE that can spell any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="[UNK]",
    )


def word_piece_tokenizer() -> PreTrainedTokenizerFast:
    """BERT's WordPiece: lower case, ``[UNK]`` for unknown words. Ties are broken at random."""
    normalizer, splitter = (
        normalizers.BertNormalizer(lowercase=True),
        pre_tokenizers.BertPreTokenizer(),
    )
    words = [
        word
        for text in CORPUS
        for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))
    ]
    letters = sorted(set("".join(words)))
    pieces = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *words]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="<pad>",
        unk_token="[UNK]",
    )


def tiny_config(kind: str, vocabulary: int = VOCABULARY) -> transformers.PreTrainedConfig:
    """Config of a tiny model. With an initializer range of 0.3, documents change the scores."""
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    plain = {
        **ids,
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_LENGTH,
        "initializer_range": 0.3,
    }
    common = {**plain, "num_key_value_heads": KV_HEADS}
    short_factors, long_factors = [1.0] * (HEAD_DIM // 2), [4.0] * (HEAD_DIM // 2)
    makers = {
        "bert": lambda: transformers.BertConfig(**plain),
        "falcon": lambda: transformers.FalconConfig(**plain, alibi=False, multi_query=True),
        "gemma": lambda: transformers.GemmaConfig(**common, head_dim=HEAD_DIM),
        "gemma2": lambda: transformers.Gemma2Config(
            **common, head_dim=HEAD_DIM, sliding_window=WINDOW
        ),
        "gemma3": lambda: transformers.Gemma3TextConfig(
            **common,
            head_dim=HEAD_DIM,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        "gpt2": lambda: transformers.GPT2Config(
            **ids,
            vocab_size=vocabulary,
            n_embd=64,
            n_layer=LAYERS,
            n_head=4,
            n_positions=MAX_LENGTH,
            initializer_range=0.3,
        ),
        "gpt_neox": lambda: transformers.GPTNeoXConfig(**plain),
        "granite": lambda: transformers.GraniteConfig(**common),
        "llama": lambda: transformers.LlamaConfig(**common),
        "mistral": lambda: transformers.MistralConfig(**common, sliding_window=WINDOW),
        "olmo2": lambda: transformers.Olmo2Config(**common),
        "opt": lambda: transformers.OPTConfig(
            **ids,
            vocab_size=vocabulary,
            hidden_size=64,
            ffn_dim=128,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            max_position_embeddings=MAX_LENGTH,
            word_embed_proj_dim=64,
            init_std=0.3,
        ),
        "phi": lambda: transformers.PhiConfig(**common),
        "phi3": lambda: transformers.Phi3Config(**common),
        "phi3_longrope": lambda: transformers.Phi3Config(
            **common,
            original_max_position_embeddings=64,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": short_factors,
                "long_factor": long_factors,
                "original_max_position_embeddings": 64,
            },
        ),
        "qwen2": lambda: transformers.Qwen2Config(**common),
        "qwen3": lambda: transformers.Qwen3Config(**common, head_dim=HEAD_DIM),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **common,
            head_dim=HEAD_DIM,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
        ),
        "roberta": lambda: transformers.RobertaConfig(**plain),
        "smollm3": lambda: transformers.SmolLM3Config(**common),
    }
    return makers[kind]()


def kv_heads(kind: str) -> int:
    """KV heads of a tiny model: architectures without grouped queries have as many as heads."""
    if kind == "falcon":
        return 1
    return 4 if kind in {"bert", "roberta", "gpt2", "gpt_neox", "opt"} else KV_HEADS


def random_projection(
    kind: str, layers: range | tuple[int, ...] = range(1, LAYERS), seed: int = 1
) -> Projection:
    """Untrained B for a tiny model."""
    return Projection.random(tuple(layers), kv_heads(kind), PROJECTION_DIM, HEAD_DIM, seed=seed)


def load_ranker(folder: Path, kind: str, **options: object) -> RSRank:
    """A tiny ranker of its own, which a test may change."""
    selected = LoadOptions(
        **{"device": "cpu", "dtype": "float32", "local_files_only": True, **options}
    )
    template = ENCODER if kind == "bert" else CHAT
    return unkept(
        RSRank.from_backbone(folder, random_projection(kind), template=template, options=selected)
    )


def unkept(ranker: RSRank) -> RSRank:
    """The ranker without a prefix cache: tests are about what it computes."""
    core = ranker.backbone
    ranker.cache = CachedPrefixes({}, PrefixTiers(0, device=core.device, dtype=core.dtype))
    ranker.reader.cache = ranker.cache
    return ranker


def on_torch(name: str | Path = "mini", **options: object) -> RSRank:
    """An artifact on torch, on the CPU in float32, where ONNX Runtime could run it, too."""
    source = ModelSource(**{"name": name, "device": "cpu", "dtype": "float32", **options})
    return RSRank(*open_artifact(source, on_onnx=False), source)


def copy_with(artifact: Path, copy: Path, **fields: object) -> Path:
    """A copy of an artifact with other fields in its config."""
    shutil.copytree(artifact, copy)
    config = hub.read_config(copy)
    weights = hub.read_weights(copy, config)
    # Graphs are made again at load, because fields may change them.
    changed = config.model_copy(update={"graphs": {}, **fields})
    hub.write_artifact(copy, changed, weights, "")
    return copy


def score_many(
    ranker: Reranker, queries: Sequence[str], documents: Sequence[Sequence[str]]
) -> list[list[float]]:
    """Score each query's own documents in one call."""
    pairs = []
    for query, texts in zip(queries, documents, strict=True):
        pairs += [(query, text) for text in texts]
    scores = iter(ranker.score_pairs(pairs))
    return [[next(scores).score for _ in texts] for texts in documents]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Function: architecture -> folder with a tiny random model and its tokenizer, made once."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            path = tmp_path_factory.mktemp(kind)
            tokenizer = word_piece_tokenizer() if kind == "bert" else byte_level_tokenizer()
            torch.manual_seed(0)
            model = transformers.AutoModel.from_config(tiny_config(kind, len(tokenizer)))
            model.save_pretrained(path)
            tokenizer.save_pretrained(path)
            made[kind] = path
        return made[kind]

    return folder


@pytest.fixture(scope="session")
def tiny_ranker(tiny_folder):
    """Function: architecture -> a tiny float32 ranker. Tests share it and must not change it."""
    made: dict[str, RSRank] = {}

    def load(kind: str) -> RSRank:
        if kind not in made:
            made[kind] = load_ranker(tiny_folder(kind), kind)
        return made[kind]

    return load


@pytest.fixture(scope="session")
def ranker(tiny_ranker):
    """A tiny Qwen3 in fp32 with a random B, shared by all tests, which must not change it."""
    return tiny_ranker("qwen3")


@pytest.fixture(scope="session")
def stories():
    """The trained 260k-parameter Llama with a random B, in fp32."""
    if not STORIES.is_dir():
        pytest.skip("needs ../shared/models/stories260K")
    projection = Projection.random(range(1, 5), 4, 4, 8, seed=1)
    return unkept(
        RSRank.from_backbone(
            STORIES,
            projection,
            options=LoadOptions(device="cpu", dtype="float32", local_files_only=True),
        )
    )


@pytest.fixture(scope="session")
def running_service():
    """A service on a local port that breaks its contract on demand; ``address`` is its URL."""
    pytest.importorskip("uvicorn")
    from stub_service import Service, listening

    app = Service()
    with listening(app) as app.address:
        yield app


@pytest.fixture
def service(running_service, monkeypatch):
    """The stub service, which nobody has asked yet."""
    monkeypatch.delenv("RSRANK_API_KEY", raising=False)
    running_service.renew()
    yield running_service
    while (
        running_service.running
    ):  # what a test cancelled takes a moment to end, and would be counted in the next one
        time.sleep(0.005)


@pytest.fixture
def spans_of_langchain():
    """Function: the spans that OpenInference has exported of LangChain's runs."""
    instrumentation = pytest.importorskip("openinference.instrumentation.langchain")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor = instrumentation.LangChainInstrumentor()
    instrumentor.instrument(tracer_provider=provider)
    yield exporter.get_finished_spans
    instrumentor.uninstrument()


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory):
    """A local Ray cluster whose processes can import the modules of this folder and of examples."""
    ray = pytest.importorskip("ray")
    here = Path(__file__).parent
    folders = [here.parent, here, here / "bulk", here.parent / "examples"]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=8,  # most of them wait most of the time
        include_dashboard=False,
        object_store_memory=100_000_000,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def fused(tiny_folder, tmp_path_factory):
    """Folder of a tiny artifact with fusion layer 1, similarity terms and its language model."""
    folder = tmp_path_factory.mktemp("fused") / "artifact"
    projection = Projection(
        Projection.random([2, 3], 4, 4, 16).weight.detach(),
        [2, 3],
        head_weight=torch.full((2, 4), 0.3),
        agreement=torch.tensor([2.0, 1.0, -0.5]),
    )
    ranker = RSRank.from_backbone(
        tiny_folder("bert"),
        projection,
        template=ENCODER.model_copy(update={"query_start": "[CLS]"}),
        fusion_layer=1,
        options=LoadOptions(device="cpu", dtype="float32"),
    )
    ranker.save_pretrained(folder, include_backbone=True)
    return folder
