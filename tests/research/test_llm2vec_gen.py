"""LLM2Vec-Gen on a tiny random model made as in its training, against a slow reference."""

import json
import sys
from functools import cache

import peft
import pytest
import torch
import transformers
from conftest import DOCUMENTS, QUERY, byte_level_tokenizer, tiny_config
from transformers import AutoModel, AutoTokenizer

from research.systems.llm2vec_gen import LLM2VecGen
from rsrank_rag.backends.options import LoadOptions
from rsrank_rag.errors import BackboneError, InputError, MissingDependencyError

CPU = LoadOptions(device="cpu", dtype="float32", local_files_only=True)
SPECIAL = [f"<question{i}>" for i in range(1, 6)]
READ, WIDTH = 3, 24
ASK, SUMMARISE = (
    "Generate a passage that best answers this question: ",
    "Summarize the following passage: ",
)
TEXTS = [*DOCUMENTS, "", "Café naïve, 東京.", DOCUMENTS[1]]


@cache
def new_rows():
    """What training made of the special tokens' embeddings."""
    return torch.randn(len(SPECIAL), 64, generator=torch.Generator().manual_seed(3))


@cache
def maps():
    torch.manual_seed(4)
    return {
        "reconstruction_mlp": torch.nn.Linear(64, 64),
        "alignment_mlp": torch.nn.Linear(64, WIDTH),
    }


def save_map(path, layer, **config):
    """As the package's ProjectionModel.save does."""
    state = {f"projection.{name}": value for name, value in layer.state_dict().items()}
    common = {
        "input_dim": layer.in_features,
        "output_dim": layer.out_features,
        "dtype": "torch.float32",
    }
    torch.save(
        {"state_dict": state, "config": {**common, "size": 1, "pooling_mode": "linear", **config}},
        path,
    )


def save(folder, with_maps=True):
    """Base model and adapter folder as training leaves them; returns the adapter folder."""
    base, adapters = folder / "base", folder / "gen"
    tokenizer = byte_level_tokenizer()
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(tiny_config("qwen3", len(tokenizer) + 32)).save_pretrained(base)
    tokenizer.save_pretrained(base)
    tokenizer.add_tokens(SPECIAL, special_tokens=True)
    tokenizer.save_pretrained(adapters)
    ids = tokenizer.convert_tokens_to_ids(SPECIAL)
    encoder = AutoModel.from_pretrained(base, dtype=torch.float32)
    encoder.resize_token_embeddings(len(tokenizer))
    encoder = peft.get_peft_model(encoder, peft.TrainableTokensConfig(token_indices=ids))
    (rows,) = (
        value for name, value in encoder.named_parameters() if "trainable_tokens_delta" in name
    )
    rows.data.copy_(new_rows())
    encoder.save_pretrained(adapters / "encoder")
    for name, layer in maps().items() if with_maps else ():
        save_map(adapters / name, layer)
    (adapters / "run_config.yml").write_text(
        f"wandb_run_id: tiny\nmodel_name_or_path: {base}\ntorch_dtype: bfloat16\ntoken: None\n"
        f"special_tokens: {SPECIAL}\nencoding_mode: last_2_tokens\nlearning_rate: 0.001\n\n"
        "save_strategy: !!python/object/apply:transformers.trainer_utils.SaveStrategy\n- steps\n",
        encoding="utf-8",
    )
    (adapters / "encoder_decoder_config.json").write_text(
        json.dumps({"encoding_mode": f"last_{READ}_tokens", "save_decoder": False}),
        encoding="utf-8",
    )
    return adapters


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("llm2vec"))


@pytest.fixture(scope="module")
def reranker(folder):
    return LLM2VecGen(folder, options=CPU)


@torch.inference_mode()
def embedding(folder, text, max_length=512, with_maps=True):
    """One text without peft: trained rows are written into the base model's embedding matrix."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder.parent / "base", dtype=torch.float32).eval()
    special = tokenizer.convert_tokens_to_ids(SPECIAL)
    model.get_input_embeddings().weight[special] = new_rows()
    ids = tokenizer(
        text + "".join(SPECIAL), truncation=True, max_length=max_length, return_tensors="pt"
    ).input_ids
    ids[0, -len(special) :] = torch.tensor(special)  # where truncation took them away
    vectors = []
    for hidden in model(ids).last_hidden_state[0, -READ:]:
        for name in ("reconstruction_mlp", "alignment_mlp") if with_maps else ():
            hidden = maps()[name].weight @ hidden + maps()[name].bias
        vectors.append(hidden)
    return sum(vectors) / READ


def cosines(folder, query, texts, **options):
    target = embedding(folder, ASK + query, **options)
    return [
        torch.cosine_similarity(
            target, embedding(folder, SUMMARISE + text, **options), dim=0
        ).item()
        for text in texts
    ]


def test_scores_are_the_cosines_of_the_recipe_one_text_at_a_time(folder, reranker):
    expected = cosines(folder, QUERY, TEXTS)
    assert max(expected) - min(expected) > 0.01
    assert reranker.score(QUERY, TEXTS) == pytest.approx(expected, abs=1e-5)


def test_without_trained_maps_the_hidden_states_are_averaged(tmp_path):
    folder = save(tmp_path, with_maps=False)
    expected = cosines(folder, QUERY, DOCUMENTS, with_maps=False)
    assert LLM2VecGen(folder, options=CPU).score(QUERY, DOCUMENTS) == pytest.approx(
        expected, abs=1e-5
    )


def test_a_long_text_is_cut_and_keeps_its_special_tokens(folder):
    short = LLM2VecGen(folder, options=CPU, max_length=64)
    result = short.rank("Why?", [DOCUMENTS[2], DOCUMENTS[3]], threshold=None)
    found = {document.index: (document.score, document.truncated) for document in result.kept}
    expected = cosines(folder, "Why?", [DOCUMENTS[2], DOCUMENTS[3]], max_length=64)
    assert found == {
        0: (pytest.approx(expected[0], abs=1e-5), False),
        1: (pytest.approx(expected[1], abs=1e-5), True),
    }


def test_instructions_can_be_chosen(folder):
    chosen = LLM2VecGen(folder, options=CPU, query_instruction="Reply: ", document_instruction="")
    target, other = embedding(folder, "Reply: " + QUERY), embedding(folder, DOCUMENTS[0])
    expected = torch.cosine_similarity(target, other, dim=0).item()
    assert chosen.score(QUERY, DOCUMENTS[:1]) == pytest.approx([expected], abs=1e-5)


def test_scores_do_not_depend_on_batching_or_order(folder, reranker):
    expected = reranker.score(QUERY, TEXTS)
    for budget in (1, 300, 100_000):
        other = LLM2VecGen(folder, options=CPU)
        other.token_budget = budget
        assert other.score(QUERY, TEXTS) == pytest.approx(expected, abs=1e-5)
        assert other.score(QUERY, TEXTS[::-1])[::-1] == pytest.approx(expected, abs=1e-5)


def test_what_scores_above_zero_is_kept(reranker):
    assert (reranker.threshold, reranker.rank(QUERY, DOCUMENTS).threshold) == (0.0, 0.0)
    assert reranker.score(QUERY, []) == []


def encoding(mode):
    return lambda folder: (folder / "encoder_decoder_config.json").write_text(
        json.dumps({"encoding_mode": mode})
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "run_config.yml").unlink(), "is no LLM2Vec-Gen model"),
        (
            lambda folder: (folder / "run_config.yml").write_text("a: 1"),
            "must name model_name_or_path",
        ),
        (lambda folder: (folder / "run_config.yml").write_text("{"), "is no LLM2Vec-Gen model"),
        (
            lambda folder: (folder / "encoder/adapter_model.safetensors").unlink(),
            "adapter in .* could not be loaded",
        ),
        (
            lambda folder: (folder / "alignment_mlp").write_bytes(b"nothing"),
            "could not be read as a linear map",
        ),
        (
            lambda folder: save_map(folder / "alignment_mlp", maps()["alignment_mlp"], size=3),
            "not a single linear map",
        ),
        (encoding("mean"), "last_N_tokens"),
        (encoding("last_9_tokens"), "at most the 5 special tokens"),
        (
            lambda folder: byte_level_tokenizer().save_pretrained(folder),
            "lacks the special token '<question1>'",
        ),
    ],
)
def test_a_folder_that_is_not_what_it_should_be_is_one_clear_error(tmp_path, change, message):
    folder = save(tmp_path)
    change(folder)
    with pytest.raises(BackboneError, match=message):
        LLM2VecGen(folder, options=CPU)


def test_a_map_that_would_run_code_is_not_read(tmp_path):
    folder = save(tmp_path)
    torch.save({"config": {}, "state_dict": print}, folder / "alignment_mlp")
    with pytest.raises(BackboneError, match="could not be read as a linear map"):
        LLM2VecGen(folder, options=CPU)


def test_a_model_that_is_not_there_is_a_clear_error():
    with pytest.raises(BackboneError, match="no local folder and could not be downloaded"):
        LLM2VecGen("nobody/nothing", options=CPU)


def test_arguments_that_cannot_be_used_are_refused(folder, reranker):
    with pytest.raises(InputError, match="leaves no room"):
        LLM2VecGen(folder, options=CPU, max_length=5)
    with pytest.raises(InputError, match="Document 1 must be a string, got NoneType"):
        reranker.score(QUERY, ["a", None])


def test_without_peft_the_error_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[eval\]"):
        LLM2VecGen(folder, options=CPU)
