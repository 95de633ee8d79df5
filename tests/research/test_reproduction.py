"""research.reproduce: configuration, resuming, and a whole run on tiny random models."""

import random
import re
import statistics

import pytest
from click.testing import CliRunner
from conftest import DOCUMENTS, QUERIES

from research.comparison import Comparison, Measured, compare
from research.recipe import ResearchRecipe, SetPart
from research.reproduce import reproduce as reproduce_command
from research.reproduction.config import SHIPPED, Reproduction, plan
from research.reproduction.run import reproduce
from research.reproduction.tables import page
from research.reproduction.thresholds import own_best, set_best
from rsrank_rag.backends.options import LoadOptions
from rsrank_rag.errors import InputError
from rsrank_rag.evaluation.datasets import LabelledQuery, read_labelled
from rsrank_rag.evaluation.evaluate import score_dataset, summarise
from rsrank_rag.evaluation.metrics import ScoredQuery
from rsrank_rag.ranking.rule import Rule
from rsrank_rag.training.fit import FitOptions
from rsrank_rag.training.recipe import shipped

CPU = LoadOptions(device="cpu", dtype="float32", local_files_only=True)


def made_up(count, seed):
    rng = random.Random(seed)
    queries = []
    for number in range(count):
        query = {"id": f"{seed}-{number}", "query": rng.choice(QUERIES)}
        documents = []
        for i, text in enumerate(rng.sample(DOCUMENTS, 4)):
            document = {"id": f"d{i}", "text": f"{text} {rng.randint(0, 9)}"}
            documents.append({**document, "relevant": i == 0 or rng.random() < 0.3})
        queries.append(LabelledQuery.model_validate({**query, "documents": documents}))
    return queries


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, count, seed in (("one", 6, 1), ("two", 5, 2)):
        lines = "".join(query.model_dump_json() + "\n" for query in made_up(count, seed))
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def artifact(ranker, tiny_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("artifact")
    ranker.save_pretrained(folder)
    return folder


def written(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


# The configuration


def test_the_papers_configuration_is_its_protocol():
    configuration = Reproduction.load("paper", artifact="mini")
    assert [(part.title, part.queries, part.granularity) for part in configuration.sets] == [
        ("2wiki", 500, "sentence"),
        ("hotpotqa", 500, "sentence"),
        ("musique", 500, None),
        ("fiqa", 500, None),
        ("fever", 500, None),
        ("nfcorpus", 500, None),
    ]
    assert [part.name for part in configuration.systems] == [
        "monot5:base",
        "monot5:3b",
        "qwen3-reranker:8b",
        "mini",
    ]
    assert {part.split for part in configuration.sets} == {"test"}
    text = plan(configuration)
    assert "15 random negatives" in text
    hard = Reproduction.load("paper", artifact="mini", negatives="bm25")
    assert "15 bm25 negatives" in plan(hard)
    hard = Reproduction.load("paper", artifact="mini", negatives="dense:./encoder")
    dense = hard.sets[0].negatives
    assert (dense.kind, dense.encoder, dense.count) == ("dense", "./encoder", 15)


@pytest.mark.parametrize("name", shipped(SHIPPED))
def test_every_shipped_configuration_is_valid(name, data):
    assert Reproduction.load(name, data=[data], artifact="mini").sets


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "x"\nsystems = []', "names no systems"),
        ('name = "x"\nsystems = [{name = "bm25"}]', "names no sets. Pass --data"),
        ('name = "x"\nfoo = 1\nsystems = [{name = "bm25"}]', "foo: there is no such entry"),
        ('name = "x"\nsystems = [{name = "bm52"}]\nsets = [{name = "fiqa"}]', "no system 'bm52'"),
        (
            'name = "x"\nsystems = [{name = "artifact"}]\nsets = [{name = "fiqa"}]',
            "Pass --model ARTIFACT",
        ),
        (
            'name = "x"\nsystems = [{name = "bm25"}, {name = "bm25"}]\nsets = [{name = "fiqa"}]',
            "two systems called",
        ),
        (
            'name = "x"\nsystems = [{name = "bm25"}]\nsets = [{name = "fiqa"}, {name = "fiqa"}]',
            "two sets called",
        ),
        ('name = "x"\nsystems = [{name = "bm25"}]\nsets = [{}]', "either file or dataset"),
        (
            (
                'name = "x"\nsystems = [{name = "bm25"}]\nsets = [{name = "fiqa", negatives = '
                '{kind = "x"}}]'
            ),
            "negatives.kind",
        ),
        ("name = ", "not valid TOML"),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_place(tmp_path, text, message):
    with pytest.raises(InputError, match=re.escape(message)):
        Reproduction.load(written(tmp_path, text))


def test_a_configuration_or_a_folder_without_data_is_named(tmp_path):
    with pytest.raises(InputError, match="neither one of local, paper nor a TOML file"):
        Reproduction.load("papers")
    with pytest.raises(InputError, match="holds no"):
        Reproduction.load("local", data=[tmp_path])


def test_the_artifact_stands_inside_other_names_too(tmp_path):
    text = (
        'name = "x"\nsets = [{name = "fiqa"}]\n'
        'systems = [{name = "cross-encoder:artifact"}, {name = "artifact"}]'
    )
    configuration = Reproduction.load(written(tmp_path, text), artifact="mini", systems=["bm25"])
    assert [part.name for part in configuration.systems] == ["cross-encoder:mini", "mini", "bm25"]


# Runs


def small(data, **changes):
    return Reproduction.load(
        "local", data=[data], artifact=changes.pop("artifact", "mini"), **changes
    )


def test_a_run_goes_on_where_it_was_interrupted_and_scores_nothing_twice(
    data, tmp_path, monkeypatch
):
    config = small(data)
    only = config.model_copy(update={"systems": config.systems[1:]})
    watched = []

    def stops(queries, what):
        watched.append(what)
        if what.endswith("two"):
            raise KeyboardInterrupt
        return queries

    with pytest.raises(KeyboardInterrupt):
        reproduce(only, tmp_path, options=CPU, watch=stops)

    def goes_on(queries, what):
        watched.append(what)
        return queries

    first = reproduce(only, tmp_path, options=CPU, watch=goes_on)
    assert watched == ["bm25, one", "bm25, two", "bm25, two"]
    again = reproduce(only, tmp_path, options=CPU, watch=goes_on)
    assert len(watched) == 3
    assert again.comparison == first.comparison
    # Other data under the same name are other scores.
    changed = tmp_path / "other"
    changed.mkdir()
    for path in data.iterdir():
        text = path.read_text().replace("bridge", "tunnel")
        (changed / path.name).write_text(text, encoding="utf-8")
    other = small(changed).model_copy(update={"systems": only.systems})
    reproduce(other, tmp_path, options=CPU, watch=goes_on)
    assert watched[3:] == ["bm25, one", "bm25, two"]


def test_what_cannot_be_loaded_is_named_and_the_others_still_run(data, tmp_path):
    lines = []
    config = small(data)
    missing = config.sets[0].model_copy(update={"file": str(tmp_path / "gone.jsonl")})
    names = {"name": "bi-encoder:./no-such-model", "label": "broken"}
    broken = config.systems[0].model_copy(update=names)
    parts = {"sets": (missing, config.sets[1]), "systems": (broken, config.systems[1])}
    config = config.model_copy(update=parts)
    outcome = reproduce(config, tmp_path / "out", options=CPU, say=lines.append)
    assert set(outcome.failures) == {"gone", "broken"}
    assert all(line.startswith("failed: ") for line in lines)
    assert [system.name for system in outcome.measured] == ["bm25"]
    text = outcome.tables.read_text(encoding="utf-8")
    assert "## What failed" in text
    assert "no-such-model" in text
    with pytest.raises(InputError, match="None of the sets"):
        reproduce(config.model_copy(update={"sets": (missing,)}), tmp_path / "none", options=CPU)


@pytest.mark.slow
def test_a_whole_run_gives_tables_and_figures_of_the_scores(artifact, ranker, data, tmp_path):
    text = f"""
        name = "tiny"
        sets = [{{file = "{data / "one.jsonl"}"}}, {{file = "{data / "two.jsonl"}", queries = 3}}]
        systems = [{{name = "artifact", label = "tiny"}}, {{name = "bm25"}}]
    """
    config = Reproduction.load(written(tmp_path, text), artifact=str(artifact))
    outcome = reproduce(config, tmp_path / "out", options=CPU)
    assert outcome.failures == {}
    one, two = (outcome.comparison.labels[name] for name in ("one", "two"))
    assert (len(one), len(two)) == (6, 3)
    expected = score_dataset(ranker, read_labelled(data / "one.jsonl"))
    assert [q.scores for q in outcome.measured[0].scored["one"]] == [
        pytest.approx(q.scores, abs=1e-4) for q in expected
    ]
    page = outcome.tables.read_text(encoding="utf-8")
    for title in ("Ranking", "Intervals", "Thresholds", "F1 gap", "Headroom"):
        assert f"## {title}" in page
    value = summarise(expected, Rule(0.0))["ndcg@5"]
    assert re.search(rf"\| tiny \| (\*\*)?{100 * value:.1f}(\*\*)? \|", page)
    figures = {path.stem for path in (tmp_path / "out").rglob("*.png")}
    assert {"f1-gap", "score-range-0"} <= figures
    saved = (tmp_path / "out" / "comparison.json").read_text("utf-8")
    assert Comparison.model_validate_json(saved) == outcome.comparison


def test_the_command_prints_its_plan_and_refuses_what_is_wrong(data):
    arguments = ["--config", "local", "--data", str(data), "--dry-run"]
    done = CliRunner().invoke(reproduce_command, arguments)
    assert done.exit_code == 0
    assert "one" in done.output
    assert "bm25" in done.output
    wrong = CliRunner().invoke(reproduce_command, ["--data", str(data), "--negatives", "hard"])
    assert wrong.exit_code == 2


# Tables


def test_the_best_of_a_column_and_its_ties_are_bold_and_a_missing_set_has_no_average():
    first = [ScoredQuery([1.0, -1.0], [True, False])]
    second = [ScoredQuery([1.0, 2.0], [True, False])]
    whole = Measured("x", Rule(0.0), "native", {"a": first, "b": second})
    systems = [whole, Measured("y", Rule(0.0), "native", {"a": first})]
    text = page("tiny", ["a", "b"], systems, None)
    f1 = text.split("**F1@τ**")[1]
    assert "| x | **100.0** | **66.7** | **83.3** |" in f1
    assert "| y | **100.0** | – | – |" in f1


def test_the_gap_table_holds_the_papers_columns():
    sets = {"a": made_up(4, 3)}
    rng = random.Random(0)
    scored = [
        ScoredQuery([rng.random() for _ in q.documents], [d.relevant for d in q.documents])
        for q in sets["a"]
    ]
    comparison = compare([Measured("x", Rule(0.5), "given", {"a": scored})], sets)
    result = comparison.systems[0].sets["a"]
    queries = comparison.scored("a", result)
    own = 100 * statistics.fmean(own_best(queries))
    best = 100 * statistics.fmean(set_best(queries))
    assert f"| a | 4 | {own:.1f} | {best:.1f} |" in page("tiny", ["a"], [], comparison)


def test_differences_are_those_of_the_means_and_bold_where_zero_is_outside_of_the_interval():
    sets = {"a": made_up(12, 3)}
    labels = [[d.relevant for d in q.documents] for q in sets["a"]]
    right = [ScoredQuery([1.0 if label else -1.0 for label in row], row) for row in labels]
    wrong = [ScoredQuery([-1.0 if label else 1.0 for label in row], row) for row in labels]
    systems = []
    for name, rows in (("x", right), ("y", wrong), ("z", wrong)):
        systems.append(Measured(name, Rule(0.0), "native", {"a": rows}))
    text = page("tiny", ["a"], systems, compare(systems, sets))
    assert "| x | 100.0 [100.0, 100.0] |" in text
    better, same = (text.split(f"**{pair}**")[1] for pair in ("x minus y", "y minus z"))
    expected = [summarise(rows, Rule(0.0))["ndcg@5"] for rows in (right, wrong)]
    assert f"| a | **{100 * (expected[0] - expected[1]):+.1f} [" in better
    assert "| mean | +0.0 [+0.0, +0.0] | +0.0 [+0.0, +0.0] | +0.0 [+0.0, +0.0] |" in same


# Recipes


def test_the_recipes_for_qwen3_are_valid_and_keep_fever_out_of_training():
    assert shipped(ResearchRecipe.folder) == ["qwen3-0.6b", "qwen3-8b"]
    for name in ("qwen3-0.6b", "qwen3-8b"):
        recipe = ResearchRecipe.load(name)
        training = {part.dataset for part in recipe.data}
        assert training == {"2wiki", "hotpotqa", "musique", "fiqa", "nfcorpus"}
        assert {part.dataset for part in recipe.evaluation} - training == {"fever"}
        assert recipe.fit == FitOptions()
    paper = ResearchRecipe.load("qwen3-8b")
    assert sum(part.queries for part in paper.data) - paper.validation == 2000
    assert paper.model.name == "Qwen/Qwen3-8B"


def test_a_set_is_a_file_or_a_name_and_not_both(data):
    part = SetPart(file=str(data / "one.jsonl"), negatives={"kind": "bm25", "count": 1})
    for query in part.load(0):
        assert sum(not document.relevant for document in query.documents) <= 1
    with pytest.raises(ValueError, match="either file or dataset"):
        SetPart(file="x.jsonl", dataset="fiqa")
