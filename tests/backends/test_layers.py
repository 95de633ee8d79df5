"""B over the first layers only: the other layers are not loaded, and scores stay the same."""

import hashlib
import json
import logging
import shutil

import pytest
import torch
import transformers
from click.testing import CliRunner
from conftest import (
    CHAT,
    DOCUMENTS,
    ENCODER,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    PROJECTION_DIM,
    QUERIES,
    QUERY,
    WINDOW,
    byte_level_tokenizer,
    random_projection,
    score_many,
    tiny_config,
    unkept,
)
from safetensors.torch import load_file, save_file

from rsrank_rag import RSRank
from rsrank_rag.artifact.identity import describe
from rsrank_rag.backends.options import LoadOptions, ModelSource
from rsrank_rag.backends.torch.check import open_backbone
from rsrank_rag.backends.torch.loading import load_model, shortened
from rsrank_rag.cli import app
from rsrank_rag.errors import ArtifactError, BackboneError, InputError
from rsrank_rag.method.template import PromptTokenizer
from rsrank_rag.training.recipe import Recipe

READ = (1, 2)
LOADED = 3
KINDS = ["qwen3", "llama", "gemma3", "bert"]
OPTIONS = LoadOptions(device="cpu", dtype="float32", local_files_only=True)


def truncated(folder, kind, options=OPTIONS):
    template = ENCODER if kind == "bert" else CHAT
    return unkept(
        RSRank.from_backbone(
            folder, random_projection(kind, READ), template=template, options=options
        )
    )


def full(folder, like, options=OPTIONS):
    """The same artifact with all layers in memory."""
    model, tokenizer, _ = load_model(folder, revision=None, options=options)
    core = open_backbone(model, like.config.layers[-1])
    prompts = PromptTokenizer(
        tokenizer, like.config.template, max_length=core.max_length, shared_positions=core.causal
    )
    return unkept(RSRank(core, prompts, like.projection, like.config))


def parameters(model):
    return {name: weight.numel() for name, weight in model.named_parameters()}


def layer_of(name):
    """Number of the layer that a weight belongs to, or -1."""
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


def contents(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", [*KINDS, "mistral", "olmo2", "smollm3", "qwen3_moe"])
def test_scores_without_the_later_layers_are_those_with_them(kind, tiny_folder):
    before = contents(tiny_folder(kind))
    part = truncated(tiny_folder(kind), kind)
    whole = full(tiny_folder(kind), part)
    assert score_many(part, QUERIES, [DOCUMENTS] * 3) == score_many(whole, QUERIES, [DOCUMENTS] * 3)
    assert part.backbone.sample == whole.backbone.sample
    expected = {
        name: count
        for name, count in parameters(whole.backbone.model).items()
        if layer_of(name) < LOADED
    }
    assert parameters(part.backbone.model) == expected
    assert sum(expected.values()) < sum(parameters(whole.backbone.model).values())
    assert contents(tiny_folder(kind)) == before


def test_gemmas_documents_here_are_longer_than_its_window(tiny_folder):
    ranker = truncated(tiny_folder("gemma3"), "gemma3")
    assert max(len(prompt.ids) for prompt in ranker.prompts.documents(DOCUMENTS, 0)) > WINDOW


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_8bit_scores_without_the_later_layers_are_those_with_them(kind, tiny_folder):
    pytest.importorskip("bitsandbytes")
    options = LoadOptions(device="cpu", dtype="int8", local_files_only=True)
    part = truncated(tiny_folder(kind), kind, options)
    assert len(part.backbone.model.layers) == LOADED
    assert part.backbone.model.layers[LOADED - 1].self_attn.v_proj.weight.dtype == torch.int8
    assert part.backbone.bits == 8
    assert part.score(QUERY, DOCUMENTS) == full(tiny_folder(kind), part, options).score(
        QUERY, DOCUMENTS
    )


def test_8bit_products_log_nothing_and_the_logger_stays_as_it_was(tiny_folder, caplog):
    pytest.importorskip("bitsandbytes")
    options = LoadOptions(device="cpu", dtype="int8", local_files_only=True)
    ranker = truncated(tiny_folder("qwen3"), "qwen3", options)
    caplog.clear()
    ranker.score(QUERY, DOCUMENTS)
    assert not [record for record in caplog.records if record.name.startswith("bitsandbytes")]
    assert not logging.getLogger("bitsandbytes.autograd._functions").filters


def test_the_later_layers_weights_are_never_looked_at(tiny_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("qwen3"), folder)
    weights = load_file(folder / "model.safetensors")
    unread = [name for name in weights if layer_of(name) >= LOADED]
    assert unread
    for name in unread:
        del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    expected = truncated(tiny_folder("qwen3"), "qwen3").score(QUERY, DOCUMENTS)
    assert truncated(folder, "qwen3").score(QUERY, DOCUMENTS) == expected


def test_an_artifact_describes_the_whole_checkpoint_and_loads_the_part_it_reads(
    tiny_folder, tmp_path
):
    made = truncated(tiny_folder("qwen3"), "qwen3")
    made.save_pretrained(tmp_path)
    spec = json.loads((tmp_path / "config.json").read_text())["backbone"]
    assert (spec["num_layers"], spec["name"]) == (LAYERS, str(tiny_folder("qwen3")))
    loaded = unkept(RSRank.from_pretrained(tmp_path, device="cpu", dtype="float32"))
    assert (loaded.backbone.num_layers, loaded.backbone.loaded_layers) == (LAYERS, LOADED)
    assert len(loaded.backbone.model.layers) == LOADED
    assert loaded.score(QUERY, DOCUMENTS) == made.score(QUERY, DOCUMENTS)
    with pytest.raises(ArtifactError, match="value vectors differ by"):
        RSRank.from_pretrained(tmp_path, backbone=tiny_folder("llama"), device="cpu")


def test_a_backbone_saved_with_its_artifact_is_the_part_that_is_read(tiny_folder, tmp_path):
    made = truncated(tiny_folder("gemma3"), "gemma3")
    for folder in (tmp_path / "once", tmp_path / "twice"):
        made.save_pretrained(folder, include_backbone=True)
        inside = json.loads((folder / "backbone" / "config.json").read_text())
        assert (inside["num_hidden_layers"], len(inside["layer_types"])) == (LOADED, LOADED)
        assert (
            max(map(layer_of, load_file(folder / "backbone" / "model.safetensors"))) == LOADED - 1
        )
        assert json.loads((folder / "config.json").read_text())["backbone"]["num_layers"] == LOADED
        loaded = unkept(RSRank.from_pretrained(folder, device="cpu", dtype="float32"))
        assert loaded.score(QUERY, DOCUMENTS) == made.score(QUERY, DOCUMENTS)
        made = loaded


def test_one_folder_of_prefixes_serves_both_ways_of_loading(tiny_folder, tmp_path):
    part = truncated(tiny_folder("qwen3"), "qwen3")
    expected = part.score(QUERY, DOCUMENTS)
    part.save_pretrained(tmp_path / "artifact")
    whole = full(tiny_folder("qwen3"), part)
    kept = [
        RSRank.from_pretrained(
            tmp_path / "artifact", device="cpu", dtype="float32", cache_folder=tmp_path / "kept"
        ),
        RSRank(
            whole.backbone,
            whole.prompts,
            whole.projection,
            whole.config,
            ModelSource(cache_folder=tmp_path / "kept"),
        ),
    ]
    for ranker in kept * 2:
        assert ranker.score(QUERY, DOCUMENTS) == pytest.approx(
            expected, abs=0.05
        )  # prefixes on disk are int8


def test_a_config_is_shortened_with_its_lists_of_one_entry_a_layer():
    config = tiny_config("smollm3")
    short = shortened(config, LOADED)
    assert short.num_hidden_layers == len(short.layer_types) == len(short.no_rope_layers) == LOADED
    assert short.layer_types == config.layer_types[:LOADED]
    assert config.num_hidden_layers == len(config.layer_types) == LAYERS
    assert shortened(config, LAYERS) is shortened(config, LAYERS + 1) is config
    assert shortened(tiny_config("gpt2"), LOADED).n_layer == LOADED


def test_the_text_part_of_a_vision_language_model_is_shortened(tmp_path):
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 16,
    }
    config = transformers.Gemma3Config(
        text_config=tiny_config("gemma3").to_dict(), vision_config=vision, mm_tokens_per_image=4
    )
    torch.manual_seed(0)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    byte_level_tokenizer().save_pretrained(tmp_path)
    loaded = load_model(tmp_path, revision=None, options=OPTIONS, last_layer=READ[-1])
    assert (loaded.num_layers, len(loaded.model.layers)) == (LAYERS, LOADED)
    whole = load_model(tmp_path, revision=None, options=OPTIONS).model
    assert open_backbone(loaded.model, READ[-1]).sample == open_backbone(whole, READ[-1]).sample


def test_a_model_without_one_of_its_weights_is_refused(tiny_folder, tmp_path):
    shutil.copytree(tiny_folder("qwen3"), tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights["layers.1.self_attn.v_proj.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BackboneError, match=r"lacks 1 weights, such as layers\.1\.self_attn\.v"):
        truncated(tmp_path / "model", "qwen3")


def test_a_whole_backbone_still_describes_itself(ranker):
    assert ranker.backbone.loaded_layers == ranker.backbone.num_layers == LAYERS
    spec = describe(ranker.backbone, ranker.prompts, "name", None, {})
    assert (spec.num_layers, spec.num_heads, spec.head_dim) == (LAYERS, KV_HEADS, HEAD_DIM)


# Recipes and commands


def labelled(path, count):
    rows = [
        {
            "id": str(number),
            "query": f"{QUERIES[number % 3]} {number}",
            "documents": [
                {"id": str(i), "text": f"{text} {number}", "relevant": i in (number % 3, 5)}
                for i, text in enumerate(DOCUMENTS)
            ],
        }
        for number in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.fixture
def recipe_file(tiny_folder, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(
        f"""
name = "tiny"
[model]
name = "{tiny_folder("qwen3")}"
device = "cpu"
dtype = "float32"
[template]
instruction = "<s>Document: "
[fit]
projection_dim = {PROJECTION_DIM}
epochs = 2
[[data]]
file = "{labelled(tmp_path / "train.jsonl", 8)}"
"""
    )
    return path


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output + str(result.exception)
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("features.last_layer=0", "features.last_layer: Input should be greater than 0"),
        ("features.last_layer=first", "features.last_layer: Input should be a valid integer"),
        ("features.layers=[1]", "features.layers: there is no such entry"),
    ],
)
def test_a_wrong_choice_of_layers_is_one_clear_error(recipe_file, tmp_path, setting, message):
    output = run(
        *("train", "--config", recipe_file, "--output", tmp_path / "run"),
        *("--set", setting),
        code=2,
    )
    assert message in output
    with pytest.raises(InputError):
        Recipe.load(str(recipe_file), [setting])


def test_training_on_the_first_layers_makes_an_artifact_that_loads_no_others(recipe_file, tmp_path):
    out = tmp_path / "run"
    run("train", "--config", recipe_file, "--set", "features.last_layer=2", "--output", out)
    ranker = RSRank.from_pretrained(out / "artifact", device="cpu", dtype="float32")
    assert (ranker.config.layers, ranker.config.backbone.num_layers) == (READ, LAYERS)
    assert ranker.projection.weight.shape[0] == len(READ)
    assert len(ranker.backbone.model.layers) == LOADED
    assert len(ranker.score(QUERY, DOCUMENTS)) == len(DOCUMENTS)
    settings = ("--set", "features.last_layer=1")
    message = run("train", "--config", recipe_file, *settings, "--output", out, code=1)
    assert "holds features of something else (layers: [1, 2] there, [1] wanted)" in message


def test_layers_that_the_model_does_not_have_are_refused(recipe_file, tmp_path):
    message = run(
        *("train", "--config", recipe_file, "--output", tmp_path / "run"),
        *("--set", "features.last_layer=9"),
        code=1,
    )
    assert "Layer 9 was asked for" in message
    assert f"has 1..{LAYERS - 1}" in message
