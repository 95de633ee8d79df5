"""Systems of the evaluation: native thresholds, names, encoders, oracle similarity, command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner
from conftest import CHAT, DOCUMENTS, LAYERS, QUERY, byte_level_tokenizer, tiny_config
from hub_server import HubServer, connected, files_of
from reference import reference_values
from test_generative import save_qwen, save_t5
from tokenizers import processors
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import research.systems  # noqa: F401 - makes the systems of the paper known by name
from research.reproduction.oracle import oracle_scores
from rsrank_rag import Reranker
from rsrank_rag.adapters.kinds import KINDS, forms, load, parse
from rsrank_rag.backends.options import LoadOptions
from rsrank_rag.cli import app
from rsrank_rag.errors import BackboneError, InputError, MissingDependencyError
from rsrank_rag.evaluation.datasets import LabelledDocument, LabelledQuery
from rsrank_rag.evaluation.systems.bm25 import BM25
from rsrank_rag.evaluation.systems.sentence_transformers import BGEReranker, BiEncoder, CrossEncoder
from rsrank_rag.training.features import FeatureExtractor
from rsrank_rag.training.recipe import FeaturePart
from rsrank_rag.training.store import QueryFeatures

CPU = LoadOptions(device="cpu", dtype="float32", local_files_only=True)


def load_system(text, options):
    return load(options.source(text))


TEXTS = [*DOCUMENTS, DOCUMENTS[1], "Café naïve, 東京."]


def labelled(relevant, documents=DOCUMENTS):
    return LabelledQuery(
        id=str(relevant),
        query=QUERY,
        documents=[
            LabelledDocument(id=str(i), text=text, title=f"Note {i}", relevant=i in relevant)
            for i, text in enumerate(documents)
        ],
    )


# Native thresholds


class Constant(Reranker):
    def score(self, query, documents):
        return [0.3, 0.6, -0.1][: len(documents)]


@pytest.mark.parametrize(("native", "indices"), [(0.0, [1, 0]), (0.5, [1]), (None, [1, 0, 2])])
def test_ranking_uses_the_rerankers_own_threshold_unless_another_is_given(native, indices):
    reranker = type("Own", (Constant,), {"threshold": native})()
    result = reranker.rank("q", ["a", "b", "c"])
    assert ([document.index for document in result.kept], result.threshold) == (indices, native)
    assert len(reranker.rank("q", ["a", "b", "c"], threshold=None).kept) == 3


def test_rerankers_without_one_have_zero_and_a_cosine_or_bm25_has_none():
    assert Constant().threshold == 0.0
    assert (BM25.threshold, BiEncoder.threshold) == (None, None)
    assert len(BM25().rank("bridge", ["a bridge", "frost"]).kept) == 2


# Encoders


def save_cross_encoder(folder, labels=1, **changes):
    """A tiny XLM-R with a classification head, the architecture of BGE-reranker-v2-m3."""
    tokenizer = byte_level_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 1)
    )
    tokenizer.model_max_length, tokenizer.sep_token, tokenizer.cls_token = 128, "</s>", "<s>"
    plain = tiny_config("roberta", len(tokenizer)).to_dict()
    plain |= {"model_type": "xlm-roberta", "num_labels": labels, "max_position_embeddings": 160}
    torch.manual_seed(5)
    model = transformers.XLMRobertaForSequenceClassification(transformers.XLMRobertaConfig(**plain))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if changes:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes), encoding="utf-8")
    return folder


@torch.inference_mode()
def cross_encoder_reference(folder, query, document):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    return model(
        **tokenizer(query, document, truncation=True, max_length=128, return_tensors="pt")
    ).logits.item()


def test_a_cross_encoder_scores_as_one_pair_at_a_time(tmp_path):
    folder = save_cross_encoder(tmp_path)
    reranker = BGEReranker(str(folder), options=CPU)
    expected = [cross_encoder_reference(folder, QUERY, text) for text in TEXTS]
    assert max(expected) - min(expected) > 0.01
    assert reranker.score(QUERY, TEXTS) == pytest.approx(expected, abs=1e-5)
    assert reranker.score(QUERY, TEXTS[::-1])[::-1] == pytest.approx(expected, abs=1e-5)
    assert reranker.score(QUERY, []) == []


def test_a_logit_of_zero_is_a_probability_of_one_half(tmp_path):
    folder = save_cross_encoder(tmp_path)
    calibrated = load_system(f"bge-reranker-v2-m3:{folder}", options=CPU)
    probabilities = torch.tensor(calibrated.score(QUERY, TEXTS)).sigmoid()
    indices = sorted(document.index for document in calibrated.rank(QUERY, TEXTS).kept)
    assert calibrated.threshold == 0.0
    assert indices == (probabilities > 0.5).nonzero()[:, 0].tolist()
    assert CrossEncoder(str(folder), options=CPU).threshold is None


def test_a_classifier_with_several_labels_is_no_reranker(tmp_path):
    with pytest.raises(BackboneError, match="gives 3 numbers a pair"):
        CrossEncoder(str(save_cross_encoder(tmp_path, labels=3)), options=CPU)


@pytest.mark.parametrize("make", [CrossEncoder, BiEncoder])
def test_encoders_honour_the_options(make, tmp_path):
    folder = str(save_cross_encoder(tmp_path))
    half = make(folder, options=LoadOptions(device="cpu", dtype="bfloat16", local_files_only=True))
    assert {parameter.dtype for parameter in half._model.parameters()} == {torch.bfloat16}
    plain = make(folder, options=LoadOptions(device="cpu"))
    assert {parameter.dtype for parameter in plain._model.parameters()} == {torch.float32}
    with pytest.raises(BackboneError, match="could not be loaded"):
        make("nobody/nothing", options=CPU)
    for dtype in ("int8", "nf4"):
        with pytest.raises(InputError, match="--dtype bfloat16"):
            make(folder, options=LoadOptions(device="cpu", dtype=dtype))


def test_a_bi_encoder_gives_queries_and_documents_their_prompts(tmp_path):
    from sentence_transformers import SentenceTransformer

    made = SentenceTransformer(str(save_cross_encoder(tmp_path / "base")), device="cpu")
    made.prompts = {"query": "search: ", "document": "passage: "}
    made.save(str(tmp_path / "made"))
    plain = SentenceTransformer(str(tmp_path / "base"), device="cpu")
    query = torch.tensor(plain.encode(f"search: {QUERY}"))
    documents = torch.tensor(plain.encode([f"passage: {text}" for text in DOCUMENTS]))
    expected = torch.cosine_similarity(query[None], documents).tolist()
    scores = BiEncoder(str(tmp_path / "made"), options=CPU).score(QUERY, DOCUMENTS)
    assert scores == pytest.approx(expected, abs=1e-5)


OWN_CODE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.xlm_roberta.modeling_xlm_roberta import create_position_ids_from_input_ids


class OwnConfig(PreTrainedConfig):
    model_type = "xlm-roberta"


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.weights = torch.nn.Embedding(400, 1)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        kwargs.setdefault("torch_dtype", "auto")
        return super().from_pretrained(*args, **kwargs)

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, return_dict=None):
        positions = create_position_ids_from_input_ids(input_ids, padding_idx=0)
        found = (self.weights(input_ids)[..., 0] * positions * attention_mask).sum(1, keepdim=True)
        return SequenceClassifierOutput(logits=found)
"""


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """A cross-encoder like Jina's: own code, XLM-R's name, an import that transformers 5 moved."""
    monkeypatch.setattr(
        transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForSequenceClassification": "own.OwnModel"}
    folder = save_cross_encoder(tmp_path / "model", auto_map=names)
    (folder / "own.py").write_text(OWN_CODE, encoding="utf-8")
    weights = torch.randn(400, 1, generator=torch.Generator().manual_seed(6)) / 50
    from safetensors.torch import save_file

    save_file({"weights.weight": weights}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, weights


def test_a_models_own_code_is_never_run_by_itself_and_never_replaced_silently(own_code):
    folder, _ = own_code
    with pytest.raises(
        BackboneError, match=r"its own model code \(own\.OwnModel\), which is not run"
    ):
        load_system(f"cross-encoder:{folder}", options=CPU)
    assert not [name for name in sys.modules if name.endswith(".own")]


def test_a_models_own_code_runs_where_it_is_allowed(own_code):
    folder, weights = own_code
    jina = load_system(f"jina-reranker-v2:{folder}", options=CPU)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = []
    for text in DOCUMENTS:
        ids = tokenizer(QUERY, text, truncation=True, max_length=128).input_ids
        expected.append(
            sum(place * weights[token].item() for place, token in enumerate(ids, start=1))
        )
    assert jina.score(QUERY, DOCUMENTS) == pytest.approx(expected, abs=1e-4)
    assert jina.threshold == 0.0


# Oracle similarity


@pytest.mark.parametrize("relevant", [(0, 3), (1,)])
def test_oracle_similarity_equals_a_slow_computation_from_the_definition(
    ranker, tiny_folder, relevant
):
    model = transformers.AutoModel.from_pretrained(
        tiny_folder("qwen3"), attn_implementation="eager"
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder("qwen3"))

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False)

    question = ids(QUERY) + ids(CHAT.suffix)

    @torch.no_grad()
    def values(*documents):
        joined = [
            token for i, text in enumerate(documents) for token in ids("\n") * (i > 0) + ids(text)
        ]
        return reference_values(
            model, ids(CHAT.instruction) + joined + ids(CHAT.separator), question
        )[1:]

    alone = values()
    oracle = values(*(DOCUMENTS[i] for i in relevant)) - alone
    expected = []
    for text in DOCUMENTS:
        shift = values(text) - alone
        score = 0.0
        for layer in range(LAYERS - 1):
            for head in range(shift.shape[1]):
                pairs = zip(shift[layer, head], oracle[layer, head], strict=True)
                score += sum(float(a @ b / (a.norm() * b.norm())) for a, b in pairs) / len(question)
        expected.append(score)
    query = labelled(relevant)
    bare = [document.model_copy(update={"title": None}) for document in query.documents]
    query = query.model_copy(update={"documents": tuple(bare)})
    options = FeaturePart(dtype="bfloat16")
    scores = oracle_scores(FeatureExtractor(ranker.reader, options).extract(query))
    assert scores == pytest.approx(expected, abs=5e-3)  # shifts are kept in bfloat16
    if len(relevant) == 1:
        assert scores[relevant[0]] == max(scores)


def test_oracle_scores_of_features_by_hand():
    # one layer, one head, one token: two documents and the oracle shift
    shifts = torch.tensor([[[[3.0, 4.0], [0.0, 2.0], [1.0, 0.0]]]]).half()
    one_relevant = QueryFeatures(shifts, (True, False), 1, oracle=True)
    assert oracle_scores(one_relevant) == pytest.approx([0.6, 0.0])
    none = QueryFeatures(shifts[:, :, :2], (False, False), 1, oracle=False)
    assert oracle_scores(none) == [0.0, 0.0]


# Names


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("mini", None, "mini"),
        ("me/my-ranker", None, "me/my-ranker"),
        ("qwen3-reranker:8b", "qwen3-reranker", "8b"),
        ("qwen3-reranker:/models/mine", "qwen3-reranker", "/models/mine"),
        ("monot5:castorini/monot5-3b-msmarco-10k", "monot5", "castorini/monot5-3b-msmarco-10k"),
        ("bge-reranker-v2-m3", "bge-reranker-v2-m3", "BAAI/bge-reranker-v2-m3"),
        ("jina-reranker-v2", "jina-reranker-v2", "jinaai/jina-reranker-v2-base-multilingual"),
        ("cross-encoder:a/b", "cross-encoder", "a/b"),
        ("bi-encoder:a/b", "bi-encoder", "a/b"),
        ("bm25", "bm25", ""),
    ],
)
def test_a_name_says_the_kind_and_what_to_load(text, kind, name):
    assert parse(text) == (KINDS.get(kind), name)


@pytest.mark.parametrize("text", ["qwen-reranker:8b", "monot5-base", "magic", "no such model", ""])
def test_an_unknown_name_is_answered_with_all_names(text):
    with pytest.raises(InputError) as caught:
        parse(text)
    assert forms() in str(caught.value)
    assert all(name in forms() for name in KINDS)


@pytest.mark.parametrize("text", ["monot5", "monot5:", "bi-encoder", "bm25:okapi", "bm25:"])
def test_a_name_written_the_wrong_way_is_answered_with_the_right_one(text):
    with pytest.raises(InputError, match=r"is not how that system is written\. Write "):
        parse(text)


def test_names_are_listed_without_loading_torch():
    code = (
        "import sys, rsrank_rag.adapters.kinds as systems; systems.forms(); "
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules), 'loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_hub_ids_of_every_kind_are_loaded_from_the_hub(tmp_path, own_code):
    """The real client and loaders, and a local Hub with tiny models under the real names."""
    published = {
        "Qwen/Qwen3-Reranker-0.6B": files_of(save_qwen(tmp_path / "qwen")),
        "castorini/monot5-base-msmarco": files_of(save_t5(tmp_path / "t5")),
        "BAAI/bge-reranker-v2-m3": files_of(save_cross_encoder(tmp_path / "bge")),
        "jinaai/jina-reranker-v2-base-multilingual": files_of(own_code[0]),
    }
    with HubServer() as hub, connected(hub, tmp_path / "home"):
        for name, files in published.items():
            hub.commit(name, files)
        options = LoadOptions(device="cpu", dtype="float32", cache_dir=tmp_path / "cache")
        names = ("qwen3-reranker:0.6b", "monot5:base", "bge-reranker-v2-m3", "jina-reranker-v2")
        systems = [load_system(name, options=options) for name in names]
    assert [system.threshold for system in systems] == [0.5, 0.5, 0.0, 0.0]
    for system in systems:
        assert len(set(system.score(QUERY, DOCUMENTS))) > 1


# The command

runner = CliRunner()


def evaluate(*arguments, code=0):
    result = runner.invoke(app, ["evaluate", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return " ".join((result.stdout if code == 0 else result.stderr).split())


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text(
        "\n".join(labelled(relevant).model_dump_json() for relevant in ((0,), (1, 2))),
        encoding="utf-8",
    )
    return path


def test_evaluate_measures_at_the_native_threshold(tmp_path, data):
    folder = save_qwen(tmp_path / "qwen")
    arguments = ("--data", data, "-m", f"qwen3-reranker:{folder}", "--dtype", "float32")
    native = evaluate(*arguments, "--json")
    assert json.loads(native)[0]["rule"]["threshold"] == 0.5
    (other,) = json.loads(evaluate(*arguments, "--threshold", "0.1", "--json"))
    assert other["rule"]["threshold"] == 0.1


def test_the_help_lists_every_system():
    # In a process of its own: the help is written when the command is imported.
    output = subprocess.run(
        [sys.executable, "-m", "research.evaluate", "--help"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
        encoding="utf-8",
    ).stdout
    # Lines may end after a hyphen.
    output_text = "".join(output.split())
    assert [name for name in KINDS if name not in output_text] == []


def test_without_sentence_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[systems\]"):
        CrossEncoder("a/b")
