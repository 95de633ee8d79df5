"""The artifact folder: its files, equal scores after loading, and an error for every damage."""

import itertools
import json
import math
import os
import pickle
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import (
    CHAT,
    DOCUMENTS,
    LAYERS,
    QUERY,
    SPECIAL,
    VOCABULARY,
    load_ranker,
    random_projection,
    tiny_config,
)
from huggingface_hub import ModelCard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file, safe_open, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import rsrank_rag
from rsrank_rag import RSRank, RSRankError
from rsrank_rag.artifact import hub
from rsrank_rag.artifact.card import model_card
from rsrank_rag.artifact.config import BackboneSpec, RSRankConfig, TrainingRecord
from rsrank_rag.artifact.identity import check_files, hashes
from rsrank_rag.backends.options import (
    QUANTISED_ARGUMENTS,
    LoadArguments,
    LoadOptions,
    ModelSource,
)
from rsrank_rag.backends.torch.projection import Projection
from rsrank_rag.errors import ArtifactError, BackboneError, InputError, MissingDependencyError
from rsrank_rag.method.formula import Weights
from rsrank_rag.method.template import Template


def load(folder, **options):
    return RSRank.from_pretrained(
        folder, **{"device": "cpu", "dtype": "float32", "local_files_only": True, **options}
    )


def names_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def refusal(action, *arguments, kind=ArtifactError, **options):
    """The message of the one error that an action ends with."""
    with pytest.raises(RSRankError) as caught:
        action(*arguments, **options)
    assert type(caught.value) is kind
    return str(caught.value)


def edit_config(folder, **changes):
    """Change config.json by hand; a key such as backbone__num_layers goes one level down."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    for key, value in changes.items():
        *parents, last = key.split("__")
        place = content
        for parent in parents:
            place = place[parent]
        place[last] = value
    path.write_text(json.dumps(content))


def edit_projection(folder, change, *, keep_digest=True, name="weight"):
    path = folder / "projection.safetensors"
    with safe_open(path, framework="pt") as file:
        digest = file.metadata()
    save_file(
        {name: change(load_file(path)["weight"])}, path, metadata=digest if keep_digest else None
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory, ranker):
    """An artifact; tests copy it before they change it."""
    folder = tmp_path_factory.mktemp("saved")
    ranker.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "artifact")


@pytest.fixture(scope="module")
def scores(ranker):
    return ranker.score(QUERY, DOCUMENTS)


# Writing and reading


def test_a_loaded_artifact_gives_exactly_the_scores_of_the_saved_one(saved, scores):
    assert len(set(scores)) == len(DOCUMENTS)
    assert load(saved).score(QUERY, DOCUMENTS) == scores


def test_an_artifact_is_three_files(saved):
    assert names_in(saved) == ["README.md", "config.json", "projection.safetensors"]


def test_saving_what_was_loaded_gives_the_same_bytes(saved, tmp_path):
    load(saved).save_pretrained(tmp_path / "again")
    for name in names_in(saved):
        assert (tmp_path / "again" / name).read_bytes() == (saved / name).read_bytes()


def test_a_save_makes_missing_parent_folders_and_replaces_an_older_artifact(
    ranker, tiny_folder, tmp_path, scores
):
    target = tmp_path / "a" / "b"
    other = RSRank(
        ranker.backbone, ranker.prompts, random_projection("qwen3", seed=5), ranker.config
    )
    other.save_pretrained(target)
    assert load(target).score(QUERY, DOCUMENTS) != scores
    ranker.save_pretrained(target)
    assert load(target).score(QUERY, DOCUMENTS) == scores


def test_an_artifact_with_its_backbone_needs_nothing_else_and_may_be_moved(
    tiny_folder, tmp_path, scores
):
    original = shutil.copytree(tiny_folder("qwen3"), tmp_path / "model")
    load_ranker(original, "qwen3").save_pretrained(tmp_path / "first", include_backbone=True)
    shutil.rmtree(original)
    moved = (tmp_path / "first").rename(tmp_path / "moved")

    assert {name.split("/")[0] for name in names_in(moved)} == {
        "README.md",
        "backbone",
        "config.json",
        "projection.safetensors",
    }
    assert {"backbone/config.json", "backbone/model.safetensors", "backbone/tokenizer.json"} < set(
        names_in(moved)
    )
    assert (
        str(tmp_path) not in (moved / "config.json").read_text() + (moved / "README.md").read_text()
    )
    assert load(moved).score(QUERY, DOCUMENTS) == scores


def test_an_artifact_that_came_with_its_backbone_is_saved_with_it(ranker, tmp_path, scores):
    ranker.save_pretrained(tmp_path / "first", include_backbone=True)
    load(tmp_path / "first").save_pretrained(tmp_path / "second")
    shutil.rmtree(tmp_path / "first")
    assert load(tmp_path / "second").score(QUERY, DOCUMENTS) == scores


def test_including_the_backbone_leaves_the_ranker_as_it_was(ranker, tmp_path):
    before = ranker.config.model_dump()
    ranker.save_pretrained(tmp_path, include_backbone=True)
    assert ranker.config.model_dump() == before


def test_another_copy_of_the_backbone_can_be_named(saved, tiny_folder, tmp_path, scores):
    copy = shutil.copytree(tiny_folder("qwen3"), tmp_path / "copy")
    assert load(saved, backbone=copy).score(QUERY, DOCUMENTS) == scores
    assert load(saved, backbone=str(copy)).score(QUERY, DOCUMENTS) == scores


@pytest.mark.parametrize(
    ("saved_as", "loaded_as"), [("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_the_identity_check_allows_for_the_rounding_of_another_dtype(
    saved_as, loaded_as, tiny_folder, tmp_path
):
    load_ranker(tiny_folder("qwen3"), "qwen3", dtype=saved_as).save_pretrained(tmp_path)
    loaded = load(tmp_path, dtype=loaded_as)
    assert loaded.backbone.dtype == getattr(torch, loaded_as)
    assert loaded.projection.weight.dtype == torch.float32
    assert all(abs(score) > 0 for score in loaded.score(QUERY, DOCUMENTS))


def with_rounded_weights(source, folder):
    """A copy of a language model whose weights have 15 values in each row, as 4 bits have."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "proj" in name:
            step = weight.abs().amax(1, keepdim=True) / 7
            weights[name] = (weight / step).round() * step
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_artifact_of_rounded_weights_takes_the_exact_ones(tiny_folder, tmp_path):
    rounded = with_rounded_weights(tiny_folder("qwen3"), tmp_path / "rounded")
    made = load_ranker(rounded, "qwen3", dtype="float32")
    exact = tiny_folder("qwen3")
    for bits, name in ((16, "strict"), (4, "tolerant")):
        spec = made.config.backbone.model_copy(update={"bits": bits, "files": {}})
        made.config = made.config.model_copy(update={"backbone": spec})
        made.save_pretrained(tmp_path / name)
    assert "value vectors differ" in refusal(load, tmp_path / "strict", backbone=exact)
    loaded = load(tmp_path / "tolerant", backbone=exact)
    differences = np.subtract(loaded.score(QUERY, DOCUMENTS), made.score(QUERY, DOCUMENTS))
    assert 0 < np.abs(differences).max() < 1
    assert "model.safetensors" in loaded.backbone.identity["files"]


def test_template_limit_and_training_record_survive(tiny_folder, tmp_path):
    record = TrainingRecord(
        data=("made up",), seed=3, metrics={"made up": {"f1": 0.5}}, notes="A note."
    )
    ranker = RSRank.from_backbone(
        tiny_folder("qwen3"),
        random_projection("qwen3"),
        template=CHAT,
        options=LoadOptions(device="cpu", dtype="float32", local_files_only=True),
        training=record,
    )
    ranker.config = ranker.config.model_copy(update={"max_length": 100, "license": "apache-2.0"})
    ranker.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.config == ranker.config
    assert (loaded.config.training, loaded.config.template, loaded.prompts.max_length) == (
        record,
        CHAT,
        100,
    )


def test_b_is_kept_in_fp32_under_the_sha256_of_the_config(saved, ranker):
    with safe_open(saved / "projection.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["sha256"])["config"] == ranker.config.digest
        assert file.get_tensor("weight").dtype == torch.float32
        assert torch.equal(file.get_tensor("weight"), ranker.projection.weight)


def test_b_is_stored_in_fp16_where_this_changes_no_entry(ranker, tmp_path):
    exact = Weights(ranker.projection.weight.half().float(), ranker.projection.layers)
    RSRank(ranker.backbone, ranker.prompts, exact, ranker.config).save_pretrained(tmp_path)
    with safe_open(tmp_path / "projection.safetensors", framework="pt") as file:
        assert file.get_tensor("weight").dtype == torch.float16
    loaded = load(tmp_path)
    assert loaded.projection.weight.dtype == torch.float32
    assert torch.equal(loaded.projection.weight, exact.weight)


# Every byte that decides a score


def zero_a_block(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-8192:-4096] = bytes(4096)
    path.write_bytes(content)


def swap_two_words(folder):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    one, two = list(words)[-2:]
    words[one], words[two] = words[two], words[one]
    path.write_text(json.dumps(content))


def another_base(folder):
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["rms_norm_eps"] = 1e-3
    path.write_text(json.dumps(content))


HARMS = {
    "model.safetensors": zero_a_block,
    "tokenizer.json": swap_two_words,
    "config.json": another_base,
}


@pytest.mark.parametrize("file", HARMS)
@pytest.mark.parametrize("inside", [True, False])
def test_a_language_model_that_is_not_as_it_was_to_the_byte_is_refused(
    file, inside, tiny_folder, tmp_path
):
    model = shutil.copytree(tiny_folder("qwen3"), tmp_path / "model")
    load_ranker(model, "qwen3").save_pretrained(tmp_path / "artifact", include_backbone=inside)
    HARMS[file](tmp_path / "artifact" / "backbone" if inside else model)
    message = refusal(load, tmp_path / "artifact")
    assert f"{file} changed since this artifact was made" in message
    assert "backbone=" in message


def test_weights_in_other_files_than_were_recorded_are_refused_and_writing_shows_no_bar(
    ranker, tmp_path, capfd
):
    ranker.save_pretrained(tmp_path, include_backbone=True)
    assert "Writing" not in "".join(capfd.readouterr())
    backbone = tmp_path / "backbone"
    ranker.backbone.model.save_pretrained(backbone, max_shard_size="100KB")
    (backbone / "model.safetensors").unlink(missing_ok=True)
    assert "model-00001-of-" in refusal(load, tmp_path)


def test_a_model_that_somebody_chose_is_used_as_it_is_and_the_log_says_how_it_differs(
    saved, tiny_folder, tmp_path, caplog
):
    other = shutil.copytree(tiny_folder("qwen3"), tmp_path / "copy")
    another_base(other)
    load(saved, backbone=other)
    assert "config.json changed since this artifact was made" in caplog.text


def test_a_file_that_can_change_a_score_is_refused_if_it_was_added_or_removed(
    tiny_folder, tmp_path
):
    model = shutil.copytree(tiny_folder("qwen3"), tmp_path / "model")
    load_ranker(model, "qwen3").save_pretrained(tmp_path / "artifact")
    for name in ("added_tokens.json", "helper.py", "vocab.txt", "other.safetensors"):
        (model / name).write_text("{}")
        assert f"{name} changed since this artifact was made" in refusal(
            load, tmp_path / "artifact"
        )
        (model / name).unlink()
    for name in ("README.md", "generation_config.json"):
        (model / name).write_text("{}")
    load(tmp_path / "artifact")
    (model / "tokenizer_config.json").unlink()
    message = refusal(load, tmp_path / "artifact")
    assert "tokenizer_config.json changed since this artifact was made" in message


def test_a_language_model_with_an_adapter_is_refused(saved, tiny_folder, tmp_path):
    model = shutil.copytree(tiny_folder("qwen3"), tmp_path / "model")
    adapter = {"base_model_name_or_path": "somebody/else", "peft_type": "LORA"}
    (model / "adapter_config.json").write_text(json.dumps(adapter))
    message = refusal(load, saved, backbone=model, kind=BackboneError)
    assert "adapter_config.json" in message
    assert "merge_and_unload" in message


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation"])
def test_a_foreign_config_names_no_attention_kernel(field, saved, tiny_folder, tmp_path, scores):
    model = shutil.copytree(tiny_folder("qwen3"), tmp_path / "model")
    edit_config(model, **{field: "kernels-community/flash-attn2"})
    assert load(saved, backbone=model).score(QUERY, DOCUMENTS) == scores


# Saved whole or not at all


def test_saving_removes_what_a_save_that_was_killed_a_day_ago_left_behind(tiny_folder, tmp_path):
    ranker = load_ranker(tiny_folder("qwen3"), "qwen3")
    left = {name: tmp_path / f".new.{name}" for name in ("old", "recent")}
    for folder in left.values():
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    os.utime(left["old"], (0, 0))
    ranker.save_pretrained(tmp_path)
    assert [name for name, folder in left.items() if folder.exists()] == ["recent"]


WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate"}


def killed_at(number, action):
    """Run an action in a process that exits at its n-th write; True if the action finished."""
    process = os.fork()
    if process == 0:
        seen = 0

        def watch(event, arguments):
            nonlocal seen
            writes = event in WRITES or (
                event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
            seen += bool(writes)
            if writes and seen == number:
                os._exit(9)

        sys.addaudithook(watch)
        action()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_save_that_is_killed_at_any_write_leaves_an_artifact_that_is_whole_or_refused(
    tiny_folder, tmp_path
):
    rankers = []
    for number in range(2):
        loaded = load_ranker(tiny_folder("qwen3"), "qwen3")
        with torch.no_grad():
            next(loaded.backbone.model.parameters())[0] += number
        rankers.append(
            RSRank(
                loaded.backbone,
                loaded.prompts,
                random_projection("qwen3", seed=number),
                loaded.config,
            )
        )
    old, new = rankers
    first, folder, states = tmp_path / "old", tmp_path / "artifact", []
    old.save_pretrained(first, include_backbone=True)
    for number in itertools.count(1):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(first, folder)
        (folder / "LICENSE").write_text("own")
        through = killed_at(number, lambda: new.save_pretrained(folder, include_backbone=True))
        try:
            config = hub.read_config(hub.resolve(folder))
            check_files(config.backbone, folder / "backbone", in_cache=False, strict=True)
            weight = hub.read_weights(folder, config).weight
        except ArtifactError:
            states.append("refused")
            continue
        which = [np.array_equal(weight, ranker.projection.weight) for ranker in rankers]
        assert sum(which) == 1
        states.append(("old", "new")[which.index(True)])
        words = load_file(folder / "backbone" / "model.safetensors")["embed_tokens.weight"]
        assert torch.equal(
            words, rankers[which.index(True)].backbone.model.get_input_embeddings().weight
        )
        assert (folder / "LICENSE").read_text() == "own"
        if through:
            break
    assert number > 10
    # While new files are written, the old ones stay. Only the renames at the end can be cut short.
    assert {"old", "new"} <= set(states)
    assert states == sorted(states, key=["old", "refused", "new"].index)
    shutil.rmtree(folder)
    old.save_pretrained(folder, include_backbone=True)
    assert {path.name for path in folder.iterdir()} == {path.name for path in first.iterdir()}


# No pickle


def test_nothing_is_pickled(ranker, tmp_path):
    ranker.save_pretrained(tmp_path, include_backbone=True)
    for name in names_in(tmp_path):
        assert Path(name).suffix in {".json", ".md", ".safetensors", ".jinja"}
        assert not (tmp_path / name).read_bytes().startswith((b"\x80", b"PK"))
    package = Path(rsrank_rag.__file__).parent
    sources = [path.read_text(encoding="utf-8") for path in package.rglob("*.py")]
    assert not [
        text
        for text in sources
        if re.search(r"\bpickle\.|import pickle\b|torch\.load\((?!.*weights_only=True)", text)
    ]


class Burglar:
    """Unpickling one writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "I was here")


def test_pickled_weights_are_refused_unread(saved, tiny_folder, tmp_path):
    backbone = shutil.copytree(tiny_folder("qwen3"), tmp_path / "model")
    (backbone / "model.safetensors").unlink()
    (backbone / "pytorch_model.bin").write_bytes(pickle.dumps(Burglar(tmp_path / "trace")))
    message = refusal(load, saved, backbone=backbone, kind=BackboneError)
    assert str(backbone) in message
    assert not (tmp_path / "trace").exists()


def test_a_tokenizer_that_would_fill_the_memory_is_refused_unread(saved, monkeypatch):
    monkeypatch.setattr("rsrank_rag.artifact.identity.LARGEST_FILE", 100)
    assert "it has more than 100 bytes" in refusal(load, saved)


def rebuilt(folder, change):
    """A copy of `mini` with a changed encoder, whose config and hashes belong to the change."""
    shutil.copytree(hub.BUILTIN / "mini", folder)
    change(folder / "backbone")
    config = hub.read_config(folder)
    update = {"files": hashes(folder / "backbone")}
    config = config.model_copy(update={"backbone": config.backbone.model_copy(update=update)})
    hub.write_artifact(folder, config, hub.read_weights(folder, config), "")
    return folder


def edited(name, change):
    def edit(folder):
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        change(content)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")

    return edit


def with_id(number):
    return lambda content: content["model"]["vocab"].update(bees=number)


def without_word_pieces(content):
    content["model"]["vocab"] = {}


def negated(folder):
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith("self.value.weight"):
            weights[name] = -weights[name]
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (negated, "value vectors differ by"),
        (
            edited("tokenizer.json", lambda content: content["normalizer"].update(lowercase=False)),
            "splits text differently",
        ),
        (
            edited("tokenizer.json", with_id(4 * 10**9)),
            "the token id 4000000000, which would fill the memory",
        ),
        (
            edited("tokenizer.json", with_id(50_000)),
            "ids for which there are no embeddings",
        ),
        (edited("tokenizer.json", without_word_pieces), "cannot be loaded"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "is no tokenizer"),
        (lambda folder: (folder / "config.json").write_text("{"), "JSONDecodeError"),
        (edited("config.json", lambda content: content.pop("hidden_size")), "KeyError"),
        (
            edited("config.json", lambda content: content.update(hidden_size=10**9)),
            "do not have the sizes",
        ),
        (
            edited("config.json", lambda content: content.update(max_position_embeddings=10**9)),
            "do not have the sizes",
        ),
    ],
)
def test_a_rebuilt_artifact_that_is_not_what_it_records_is_refused_on_onnx_runtime(
    change, message, tmp_path
):
    assert message in refusal(load, rebuilt(tmp_path / "made", change))


def test_on_torch_a_rebuilt_artifact_ends_no_process(tmp_path):
    for number, change in enumerate(
        (
            edited("tokenizer.json", with_id(4 * 10**9)),
            edited("tokenizer.json", without_word_pieces),
            edited("config.json", lambda content: content.update(layer_norm_eps="small")),
        )
    ):
        assert refusal(load, rebuilt(tmp_path / str(number), change), dtype="bfloat16")


def test_the_recorded_value_vectors_of_mini_are_those_of_its_encoder():
    made = load("mini")
    recorded = made.config.backbone.values
    assert made.backbone.sample == pytest.approx(recorded, abs=0.01 * max(map(abs, recorded)))


def test_a_pickle_named_as_the_projection_is_refused_unread(folder, tmp_path):
    (folder / "projection.safetensors").write_bytes(pickle.dumps(Burglar(tmp_path / "trace")))
    assert "missing or damaged" in refusal(load, folder)
    assert not (tmp_path / "trace").exists()


# The model card


def config_with(name="lab/tiny", **changes):
    spec = BackboneSpec(
        name=name,
        revision="4f1c",
        model_type="qwen3",
        num_layers=4,
        num_heads=2,
        head_dim=16,
        tokenizer="0123456789abcdef",
        values=(0.25, -0.5),
    )
    return RSRankConfig(**{"backbone": spec, "layers": (1, 2, 3), "projection_dim": 8, **changes})


def test_the_model_card_tells_the_hub_and_the_reader_what_it_is():
    metrics = {"tide tables": {"f1": 0.81234, "ndcg@10": 0.5}, "bread": {"f1": 0.4}}
    training = TrainingRecord(
        data=("harbour logs", "recipes"), seed=17, metrics=metrics, notes="Two epochs."
    )
    text = model_card(config_with(license="apache-2.0", training=training))

    front = ModelCard(text).data
    assert (front.library_name, front.pipeline_tag, front.license) == (
        "rsrank-rag",
        "text-ranking",
        "apache-2.0",
    )
    assert front.base_model == "lab/tiny"
    assert {"reranker", "rag"} <= set(front.tags)
    for part in (
        "`lab/tiny`",
        "`4f1c`",
        "768 numbers",
        "layers 1-3 (3)",
        "harbour logs, recipes",
        "seed 17",
    ):
        assert part in text
    assert "Two epochs." in text
    assert "It keeps documents that score above zero." in text
    moved = model_card(config_with(threshold=-0.25, max_gap=2.0))
    assert "above threshold -0.25 and within 2 of the best." in moved
    assert "are loaded" not in text
    assert "4 layers, the first 3 are loaded)" in model_card(config_with(layers=(1, 2)))
    assert (
        "| dataset | f1 | ndcg@10 |\n|---|---|---|\n| tide tables | 0.812 | 0.5 |\n"
        "| bread | 0.4 |  |\n" in text
    )


@pytest.mark.parametrize(
    "name", ["./backbone", "/models/tiny", "../tiny", "a/b/c", "C:\\models\\tiny"]
)
def test_the_model_card_names_no_base_model_that_the_hub_cannot_know(name):
    assert ModelCard(model_card(config_with(name))).data.base_model is None


def test_the_saved_card_is_the_card_of_the_saved_config(saved):
    config = RSRankConfig.parse((saved / "config.json").read_text(), source="test")
    assert (saved / "README.md").read_text() == model_card(config)


# Damage


CONFIG, PROJECTION = "config.json", "projection.safetensors"


def cut(file, size):
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:size])


def write(file, content):
    return lambda folder: (folder / file).write_bytes(content)


def remove(file):
    return lambda folder: (folder / file).unlink()


def edit(**changes):
    return lambda folder: edit_config(folder, **changes)


def change_b(change=lambda weight: weight, **options):
    return lambda folder: edit_projection(folder, change, **options)


def poison(value):
    def change(weight):
        weight[1, 0, 3, 2] = value
        return weight

    return change_b(change)


def flip_a_bit(folder):
    path = folder / PROJECTION
    content = bytearray(path.read_bytes())
    content[-6] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "config missing": (remove(CONFIG), ["config.json cannot be read", "save_pretrained"]),
    "config cut": (cut(CONFIG, 100), ["config.json is not a valid", "Download it again"]),
    "config empty": (write(CONFIG, b""), ["config.json is not a valid", "Download it again"]),
    "config not text": (
        write(CONFIG, b'{"a": "\xff"}'),
        ["config.json cannot be read", "download it again"],
    ),
    "config a list": (
        write(CONFIG, b"[1]"),
        ["config.json is not a valid RSRank config", "save_pretrained"],
    ),
    "config without version": (
        write(CONFIG, b"{}"),
        ["backbone: Field required", "language model"],
    ),
    "config of the future": (
        edit(format_version=2),
        ["format_version: Input should be 1", "upgrade this package"],
    ),
    "config of a format that never was": (
        edit(signal="values"),
        ["config.json is not a valid", "signal: there is no such entry"],
    ),
    "config with an extra key": (
        edit(colour="blue"),
        ["config.json is not a valid", "colour: there is no such entry"],
    ),
    "config with an extra key below": (
        edit(template__tone="warm"),
        ["not a valid", "template.tone: there is no such"],
    ),
    "config of wrong type": (
        edit(projection_dim="eight"),
        ["not a valid", "projection_dim: ", "integer"],
    ),
    "config with empty backbone": (
        edit(backbone={}),
        ["not a valid", "backbone.name: Field required"],
    ),
    "layer 0": (edit(layers=[0, 1, 2]), ["layers must lie in 1..3", "got 0..2"]),
    "layer too high": (edit(layers=[1, 2, 4]), ["layers must lie in 1..3", "got 1..4"]),
    "layers twice": (edit(layers=[1, 1, 2]), ["layers must ascend without repeats", "(1, 1, 2)"]),
    "layers backwards": (
        edit(layers=[3, 2, 1]),
        ["layers must ascend without repeats", "(3, 2, 1)"],
    ),
    "no layers": (edit(layers=[]), ["not a valid", "layers: ", "at least 1 item"]),
    "config edited": (
        edit(max_length=100),
        [PROJECTION, "written with another config.json", "save_pretrained"],
    ),
    "template edited": (
        edit(template__suffix="!"),
        ["written with another config.json", "Restore the original"],
    ),
    "config nested": (
        write(CONFIG, b"[" * 10_000),
        ["config.json is not a valid", "Download it again"],
    ),
    "config with a nested field": (
        write(CONFIG, b'{"format_version": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"),
        ["config.json is not a valid", "Download it again"],
    ),
    "config with a number of 5,000 digits": (
        write(CONFIG, b'{"format_version": 1' + b"0" * 5000 + b"}"),
        ["config.json is not a valid", "Download it again"],
    ),
    "config with a number of 4,000 digits": (
        edit(projection_dim=10**4000),
        ["do not belong together", "Download the artifact again"],
    ),
    "config with a long name": (edit(**{"x" * 10**6: 1}), ["not a valid RSRank config"]),
    "config with lines in a name": (edit(**{"a\nb": 1}), ["a b: there is no such entry"]),
    "projection missing": (
        remove(PROJECTION),
        [f"{PROJECTION} is missing", "Download the artifact again"],
    ),
    "projection cut": (
        cut(PROJECTION, -100),
        [f"{PROJECTION} is missing or damaged", "Download the artifact again"],
    ),
    "projection cut in its header": (
        cut(PROJECTION, 20),
        ["is missing or damaged", "Download the artifact again"],
    ),
    "projection empty": (
        write(PROJECTION, b""),
        ["is missing or damaged", "Download the artifact again"],
    ),
    "projection a web page": (
        write(PROJECTION, b"<html>" * 99),
        ["is missing or damaged", "Download the artifact again"],
    ),
    "B of another P": (
        change_b(lambda weight: weight[:, :, :4].contiguous()),
        [
            "'weight' of shape (3, 2, 4, 16)",
            "'weight': (3, 2, 8, 16)",
            "do not belong together",
        ],
    ),
    "B flat": (change_b(torch.flatten), ["shape (768,)", "do not belong together"]),
    "NaN in B": (
        poison(float("nan")),
        [PROJECTION, "1 of 768 entries of weight are NaN or infinite", "Train it again"],
    ),
    "infinity in B": (
        poison(float("inf")),
        ["1 of 768 entries of weight are NaN or infinite", "Train it again"],
    ),
    "B without digest": (
        change_b(keep_digest=False),
        ["written with another config.json", "save_pretrained"],
    ),
    "a flipped bit in B": (
        flip_a_bit,
        [PROJECTION, "one of the two was changed", "download the artifact again"],
    ),
    "B in float64": (
        change_b(lambda weight: weight.double()),
        ["in float64", "floats of 2 or 4 bytes"],
    ),
    "a header of many empty tensors": (
        lambda folder: save_file(
            {f"empty{number}": torch.zeros(0) for number in range(1000)}, folder / PROJECTION
        ),
        ["empty0", "do not belong together", "Download the artifact again"],
    ),
    "a header of a megabyte": (
        lambda folder: save_file(
            {f"empty{number}": torch.zeros(0) for number in range(20_000)}, folder / PROJECTION
        ),
        ["its header has", "Download the artifact again"],
    ),
    "B by another name": (
        change_b(name="B"),
        ["holds 'B' of shape", "do not belong together"],
    ),
}
"""Damage -> how it is done, and what the message must say."""


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_artifact_is_one_error_that_names_the_folder_the_fault_and_the_remedy(
    name, folder
):
    harm, phrases = DAMAGES[name]
    harm(folder)
    message = refusal(load, folder)
    assert str(folder) in message
    assert "\n" not in message
    assert len(message) < 2000
    for phrase in phrases:
        assert phrase in message


LARGE = [10**4000, 1e308, math.inf, math.nan, "x" * 10**5]
ABSURD = [*LARGE, None, True, -1, 0, "", "\x00", "\ud800", [], [[[]]], {}, {"": {}}]


def leaves(value, path=()):
    """The paths of all entries of a JSON document."""
    if path:
        yield path
    for key, below in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield from leaves(below, (*path, key))


@pytest.mark.slow
def test_absurd_entries_are_one_error_of_one_line_wherever_they_stand(folder):
    path = folder / CONFIG
    content = json.loads(path.read_text())
    for place in leaves(content):
        if place[:2] == ("backbone", "values") and place[2:] not in ((), (0,)):
            continue  # like the first one
        for value in ABSURD:
            changed = json.loads(json.dumps(content))
            here = changed
            for key in place[:-1]:
                here = here[key]
            here[place[-1]] = value
            path.write_text(json.dumps(changed))
            if changed != content:
                message = refusal(lambda: hub.read_weights(folder, hub.read_config(folder)))
                assert "\n" not in message
                assert len(message) < 2000


def test_the_folder_of_a_language_model_is_not_taken_for_an_artifact(tiny_folder):
    message = refusal(load, tiny_folder("qwen3"))
    assert str(tiny_folder("qwen3")) in message
    assert "Is this the folder of a language model" in message
    assert "projection.safetensors, made by RSRank.save_pretrained" in message


@pytest.mark.parametrize("name", ["nonsense-name", "nobody/nothing"])
def test_an_unknown_name_is_refused_with_the_names_that_exist(name):
    message = refusal(load, name)
    assert repr(name) in message
    assert "neither built in" in message
    assert "nor a local folder" in message
    assert "pass the path of a local copy" in message


def test_a_path_to_nothing_is_refused_as_a_path(tmp_path):
    message = refusal(load, tmp_path / "typo")
    assert "typo" in message
    assert "nor a local folder" in message
    assert "Check the name (owner/name)" in message
    assert f"adapters and commands take it as cross-encoder:{tmp_path / 'typo'}" in message


@pytest.mark.parametrize("name", ["cross-encoder:me/mine", "runs/bm25.json"])
def test_the_name_of_another_reranker_is_refused_as_no_artifact(name):
    assert "other rerankers, and files of `rsrank tune`, are no artifacts" in refusal(load, name)


# Foreign backbones


def with_another_tokenizer(model_folder):
    """The same model with a tokenizer of the same size that learnt from other words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = (
        "zebra quagga zorse zonkey quixotic buzzard jazz fizzing whizzing quizzing puzzle dazzle "
        "embezzle muzzle "
    )
    tokenizer.train_from_iterator([words * 3], trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="[UNK]"
    )
    fast.save_pretrained(model_folder)


def foreign(name, base, target):
    """A folder with a language model that the artifact was not made for."""
    shutil.copytree(base, target)
    changes = {
        "other weights": {},
        "fine-tuned values": {},
        "other architecture": {},
        "more layers": {"num_hidden_layers": LAYERS + 1},
        "other heads": {"num_key_value_heads": 4},
        "other head size": {"head_dim": 8},
    }
    if name == "other tokenizer":
        with_another_tokenizer(target)
        return target
    if name == "fine-tuned values":  # everything else, the embeddings too, stays as it was
        model = transformers.AutoModel.from_pretrained(target)
        torch.manual_seed(99)
        for layer in model.layers:
            weight = layer.self_attn.v_proj.weight
            weight.data += 0.3 * weight.std() * torch.randn_like(weight)
        model.save_pretrained(target)
        return target
    config = (
        tiny_config("llama" if name == "other architecture" else "qwen3").to_dict() | changes[name]
    )
    config.pop("layer_types", None)
    torch.manual_seed(99)
    model_type = config.pop("model_type")
    model = transformers.AutoModel.from_config(
        transformers.AutoConfig.for_model(model_type, **config)
    )
    model.save_pretrained(target)
    return target


@pytest.mark.parametrize(
    ("name", "phrases"),
    [
        ("other weights", ["weights of", "are not those of", "that this artifact was made with"]),
        ("fine-tuned values", ["weights of", "are not those of", "value vectors differ by"]),
        ("other architecture", ["weights of", "value vectors differ by"]),
        ("more layers", ["weights of", "value vectors differ by"]),
        ("other heads", ["weights of", "value vectors differ by"]),
        ("other head size", ["weights of", "value vectors differ by"]),
        ("other tokenizer", ["tokenizer of", "splits text differently", "fingerprint"]),
    ],
)
def test_a_foreign_backbone_is_one_error_that_names_both_and_the_remedy(
    name, phrases, saved, tiny_folder, tmp_path
):
    backbone = foreign(name, tiny_folder("qwen3"), tmp_path / "foreign")
    message = refusal(load, saved, backbone=backbone)
    assert str(backbone) in message
    assert "Load the backbone the artifact names" in message
    for phrase in phrases:
        assert phrase in message


def test_a_backbone_with_too_few_layers_is_refused(saved, tiny_folder, tmp_path):
    model = transformers.AutoModel.from_pretrained(tiny_folder("qwen3"))
    config = model.config.to_dict() | {"num_hidden_layers": LAYERS - 1}
    config.pop("layer_types", None)
    shutil.copytree(tiny_folder("qwen3"), tmp_path / "model")
    transformers.AutoModel.from_config(type(model.config)(**config)).save_pretrained(
        tmp_path / "model"
    )
    message = refusal(load, saved, backbone=tmp_path / "model", kind=BackboneError)
    assert f"Layer {LAYERS - 1} was asked for" in message


def test_a_backbone_that_is_gone_is_named(tiny_folder, tmp_path):
    original = shutil.copytree(tiny_folder("qwen3"), tmp_path / "model")
    load_ranker(original, "qwen3").save_pretrained(tmp_path / "artifact")
    shutil.rmtree(original)
    assert str(original) in refusal(load, tmp_path / "artifact", kind=BackboneError)


def test_a_backbone_whose_weights_are_cut_is_named(saved, tiny_folder, tmp_path):
    backbone = shutil.copytree(tiny_folder("qwen3"), tmp_path / "model")
    weights = backbone / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert str(backbone) in refusal(load, saved, backbone=backbone, kind=BackboneError)


def test_a_projection_for_another_shape_cannot_be_joined_to_a_backbone(tiny_folder):
    message = refusal(
        RSRank.from_backbone,
        tiny_folder("qwen3"),
        Projection.random((1, 2), 4, 8, 16),
        options=LoadOptions(device="cpu", local_files_only=True),
    )
    assert "B has shape (2, 4, 8, 16)" in message
    assert "needs (L, H, P, D) = (2, 2, 8, 16)" in message


# The config by itself

numbers = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(max_size=20)


@st.composite
def configs(draw):
    layers = draw(st.integers(2, 40))
    return RSRankConfig(
        backbone=BackboneSpec(
            name=draw(texts),
            revision=draw(st.none() | texts),
            model_type=draw(texts),
            num_layers=layers,
            num_heads=draw(st.integers(1, 64)),
            head_dim=draw(st.integers(1, 512)),
            tokenizer=draw(texts),
            values=tuple(draw(st.lists(numbers, max_size=5))),
        ),
        layers=tuple(sorted(draw(st.sets(st.integers(1, layers - 1), min_size=1)))),
        projection_dim=draw(st.integers(1, 512)),
        template=Template(
            instruction=draw(st.text(min_size=1, max_size=20)),
            separator=draw(texts),
            suffix=draw(texts),
            positions=draw(st.sampled_from(["query", "suffix", "query+suffix"])),
        ),
        max_length=draw(st.none() | st.integers(1, 2**31)),
        license=draw(st.none() | texts),
        training=TrainingRecord(
            data=tuple(draw(st.lists(texts, max_size=3))),
            seed=draw(st.none() | st.integers()),
            metrics=draw(
                st.dictionaries(texts, st.dictionaries(texts, numbers, max_size=3), max_size=3)
            ),
            notes=draw(texts),
        ),
    )


def shuffled(value, random):
    if isinstance(value, list):
        return [shuffled(item, random) for item in value]
    if not isinstance(value, dict):
        return value
    keys = list(value)
    random.shuffle(keys)
    return {key: shuffled(value[key], random) for key in keys}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configs(), st.randoms(use_true_random=False), st.sampled_from([None, 0, 4]), st.booleans())
def test_a_config_survives_json_in_any_layout_with_the_same_digest(config, random, indent, escape):
    written = config.model_dump_json(indent=2)
    assert RSRankConfig.parse(written, source="test") == config
    other = json.dumps(shuffled(json.loads(written), random), indent=indent, ensure_ascii=escape)
    read = RSRankConfig.parse(other, source="test")
    assert read == config
    assert read.digest == config.digest


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": (1, 2)},
        {"projection_dim": 9},
        {"max_length": 7},
        {"license": "mit"},
        {"template": Template(suffix=" ")},
        {"training": TrainingRecord(seed=1)},
        {"name": "lab/tiny2"},
    ],
)
def test_every_part_of_a_config_is_in_its_digest(changes):
    assert config_with(**changes).digest != config_with().digest


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_that_json_cannot_hold_is_refused_when_it_is_recorded(value):
    with pytest.raises(ValidationError, match="finite"):
        TrainingRecord(metrics={"bread": {"f1": value}})


def test_reordering_config_json_by_hand_leaves_the_artifact_loadable(folder, scores):
    path = folder / "config.json"
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items()))))
    assert load(folder).score(QUERY, DOCUMENTS) == scores


def test_a_field_that_a_later_version_adds_does_not_change_the_digest_of_a_file(
    folder, monkeypatch
):
    class Later(RSRankConfig):
        added: str = "default"

    monkeypatch.setattr("rsrank_rag.artifact.hub.RSRankConfig", Later)
    assert load(folder).config.added == "default"


def test_a_revision_of_a_local_folder_is_refused(folder):
    assert "only artifacts on the Hub have revisions" in refusal(load, folder, revision="v1")


def test_a_name_too_long_for_a_path_is_refused_like_any_other():
    assert "neither built in" in refusal(RSRank.from_pretrained, "x" * 300)


def test_an_artifact_can_be_read_by_other_users(saved):
    assert (saved / "projection.safetensors").stat().st_mode == (
        saved / "config.json"
    ).stat().st_mode


@pytest.mark.parametrize("layers", [(0, 1), (2, 1)])
def test_a_projection_of_layers_that_cannot_be_read_is_an_error_of_ours(tiny_folder, layers):
    with pytest.raises(ArtifactError, match=r"B does not fit .*: layers must "):
        RSRank.from_backbone(
            tiny_folder("qwen3"),
            Projection.random(layers, 2, 8, 16),
            options=LoadOptions(device="cpu", local_files_only=True),
        )


def test_the_error_of_a_missing_package_gives_the_pip_command():
    error = MissingDependencyError("It needs that.", "eval")
    assert str(error) == ("It needs that. Install with: pip install '.[eval]' (in a clone).")


def test_a_length_of_zero_is_an_error_and_not_the_default():
    with pytest.raises(InputError, match=r"max_length: .* greater than or equal to 1"):
        RSRank.from_pretrained("mini", max_length=0)


def test_loading_in_8_or_4_bits_is_a_dtype_and_not_a_second_one():
    assert ModelSource(name="mini", load_in_8bit=True, load_in_4bit=False).dtype == "int8"
    assert ModelSource(name="mini", load_in_4bit=True) == ModelSource(name="mini", dtype="nf4")
    with pytest.raises(InputError, match="load_in_4bit means dtype='nf4', and dtype is 'int8'"):
        ModelSource(name="mini", load_in_4bit=True, dtype="int8")


def test_a_misspelt_argument_of_loading_is_named_with_the_one_that_was_meant():
    with pytest.raises(TypeError, match=r"no argument 'cache_sise'\. Did you mean 'cache_size'"):
        RSRank.from_pretrained("mini", cache_sise=0)
    names = ModelSource.model_fields.keys() | QUANTISED_ARGUMENTS.keys()
    assert LoadArguments.__annotations__.keys() | {"name"} == names


def test_an_artifact_that_records_fewer_values_belongs_to_no_model(folder):
    config = hub.read_config(folder)
    projection = hub.read_weights(folder, config)
    spec = config.backbone.model_copy(update={"values": config.backbone.values[:3]})
    hub.write_artifact(folder, config.model_copy(update={"backbone": spec}), projection, "")
    assert "value vectors differ" in refusal(load, folder)
