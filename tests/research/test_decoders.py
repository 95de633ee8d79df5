"""research.decoders: features in stages, B, the artifact, ablations, on a tiny random Qwen2."""

import json
import random
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from conftest import DOCUMENTS, LAYERS, QUERIES

from research.decoders import ablations, figures, measure, tables, train
from research.decoders.extract import SignalReader, extract
from research.decoders.plan import FIRST_DOCUMENTS, Plan, first_places, in_order, with_typo
from research.decoders.store import Store
from rsrank_rag import RSRank
from rsrank_rag.artifact import hub
from rsrank_rag.artifact.opening import open_model
from rsrank_rag.backends.options import LoadOptions
from rsrank_rag.backends.torch.projection import Projection
from rsrank_rag.evaluation.metrics import ScoredQuery
from rsrank_rag.evaluation.statistics import folds
from rsrank_rag.method.batches import Row
from rsrank_rag.method.scoring import ShiftReader
from rsrank_rag.method.template import Template
from rsrank_rag.training.feature_scores import scored
from rsrank_rag.training.features import FeatureExtractor
from rsrank_rag.training.fit import FitOptions
from rsrank_rag.training.recipe import FeaturePart

CPU = LoadOptions(device="cpu", dtype="float32", local_files_only=True)


def write_set(path, count, seed):
    """A labelled file: queries with 12 documents, of which three are relevant."""
    generator = random.Random(seed)
    lines = []
    for number in range(count):
        documents = []
        for place in range(12):
            text = f"{generator.choice(DOCUMENTS)} {generator.randint(0, 99)}"
            documents.append({"id": f"d{place}", "text": text, "relevant": place in (1, 5, 11)})
        query = f"{generator.choice(QUERIES)} {number}"
        lines.append({"id": f"{seed}-{number}", "query": query, "documents": documents})
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with two labelled sets and a plan."""
    root = tmp_path_factory.mktemp("decoders")
    write_set(root / "train" / "2wiki.sentence.jsonl", 8, "train")
    write_set(root / "dev" / "2wiki.sentence.jsonl", 3, "dev")
    training, dev = (root / split / "2wiki.sentence.jsonl" for split in ("train", "dev"))
    (root / "plan.toml").write_text(
        f"""
        [model]
        name = "lab/tiny-qwen"
        dtype = "float32"
        device = "cpu"

        [[stages]]
        sets = [
            {{ file = "{training}", queries = 8, first_only = true, signals = true }},
            {{ file = "{dev}", queries = 3, signals = true }},
        ]

        [[stages]]
        sets = [{{ file = "{training}", queries = 4 }}]
        """
    )
    (root / "recipe.toml").write_text(
        f"""
        name = "tiny"
        plan = "{root / "plan.toml"}"
        sets = ["2wiki.sentence"]
        fit = {{ epochs = 2, projection_dim = 4 }}
        """
    )
    return root


def run(command, *arguments):
    result = CliRunner().invoke(command, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def features(folder, tiny_folder):
    """The features of the plan."""
    output = folder / "features"
    run(extract, folder / "plan.toml", output, "--model", tiny_folder("qwen2"))
    return output


@pytest.fixture(scope="module")
def opened(tiny_folder):
    return open_model(str(tiny_folder("qwen2")), None, CPU, last_layer=None, template=Template())


@pytest.fixture(scope="module")
def artifact(folder, features, tiny_folder):
    """The artifact of B trained on the features."""
    output = folder / "trained"
    model = tiny_folder("qwen2")
    run(train.main, folder / "recipe.toml", features, output, "--model", model)
    return output / "artifact"


def test_after_any_share_of_a_stage_each_set_has_this_share(folder):
    stage = Plan.load(str(folder / "plan.toml")).stages[0]
    splits = [query.id.partition("-")[0] for _, query in in_order(stage)]
    assert sorted(splits) == ["dev"] * 3 + ["train"] * 8
    for count in range(len(splits)):
        share = count / len(splits)
        assert abs(splits[:count].count("dev") - 3 * share) <= 1


def test_a_longer_draw_begins_with_a_shorter_one(folder):
    part = Plan.load(str(folder / "plan.toml")).files("train")["2wiki.sentence"]
    shorter = part.model_copy(update={"queries": 3})
    assert part.drawn()[:3] == shorter.drawn()


def test_the_first_documents_are_of_both_classes(folder):
    for query in Plan.load(str(folder / "plan.toml")).files("train")["2wiki.sentence"].drawn():
        places = first_places(query)
        assert len(places) == FIRST_DOCUMENTS
        assert {1, 5, 11} <= set(places)
        assert places == first_places(query)


def test_a_typo_changes_the_longest_word_only():
    text = "how long is the warranty"
    changed = with_typo(text)
    assert changed == with_typo(text) != text
    assert changed.split()[:4] == text.split()[:4]
    assert with_typo("a bee") == "a bee"


def test_stored_features_are_those_of_a_query_read_at_once(folder, features, opened):
    core, prompts = opened
    reader = ShiftReader(core, prompts, range(1, LAYERS))
    part = Plan.load(str(folder / "plan.toml")).files("dev")["2wiki.sentence"]
    read = Store(features).read(part.name, part.drawn())
    for query in part.drawn():
        whole = FeatureExtractor(reader, FeaturePart()).extract(query)
        stored = read[query.id]
        assert stored.relevant == whole.relevant
        assert stored.oracle
        assert stored.tokens == whole.tokens
        torch.testing.assert_close(stored.shifts, whole.shifts, rtol=0.001, atol=1e-4)


def test_queries_are_whole_if_both_parts_are_there(folder, features):
    part = Plan.load(str(folder / "plan.toml")).files("train")["2wiki.sentence"]
    store = Store(features)
    assert len(store.read(part.name, part.drawn(), whole=True)) == 4
    partly = store.read(part.name, part.drawn(), whole=False)
    assert sorted(len(query.relevant) for query in partly.values()) == [10] * 4 + [12] * 4


def test_features_that_are_there_are_not_read_again(folder, features, tiny_folder):
    plan, model = folder / "plan.toml", tiny_folder("qwen2")
    assert run(extract, plan, features, "--model", model) == ""
    [file, *_] = sorted(features.glob("*/*.rest.pt"))
    file.unlink()
    assert "2 documents" in run(extract, plan, features, "--model", model)
    assert file.exists()


def test_other_signals_are_those_of_a_plain_run(opened):
    core, prompts = opened
    query = prompts.query(QUERIES[0])
    documents = [prompt.ids for prompt in prompts.documents(DOCUMENTS[:2], len(query.ids))]
    shown = {}
    reader = SignalReader(core, prompts, range(1, LAYERS))
    with torch.no_grad():
        reader.read([Row(document, query) for document in documents], shown.__setitem__)
        states = {}
        for name, prefix in (("document", documents[0]), ("nothing", prompts.null_prefix)):
            ids = torch.tensor([[*prefix, *query.ids]])
            hidden = core.model(input_ids=ids, output_hidden_states=True).hidden_states
            states[name] = [layer[0, len(prefix) :] for layer in hidden]
    dim = core.head_dim
    for layer in range(1, LAYERS):
        module = core.model.layers[layer]
        document, nothing = states["document"][layer], states["nothing"][layer]

        def heads(projection, hidden, module=module):
            vectors = getattr(module.self_attn, projection)(module.input_layernorm(hidden))
            return vectors.unflatten(1, (core.num_heads, dim)).transpose(0, 1)

        values, keys = (heads(name, document) for name in ("v_proj", "k_proj"))
        values_alone, keys_alone = (heads(name, nothing) for name in ("v_proj", "k_proj"))
        hidden = (document - nothing).unflatten(1, (core.num_heads, -1)).transpose(0, 1)
        expected = [values - values_alone, values, keys - keys_alone, hidden]
        torch.testing.assert_close(shown[layer][0], torch.cat(expected, -1), rtol=1e-4, atol=1e-4)


def test_the_artifact_gives_the_scores_of_stored_features(folder, features, artifact, tiny_folder):
    ranker = RSRank.from_pretrained(
        artifact, backbone=tiny_folder("qwen2"), device="cpu", dtype="float32"
    )
    spec = ranker.config.backbone
    assert (spec.name, spec.bits, spec.files) == ("lab/tiny-qwen", 4, {})
    output = folder / "scores.json"
    model = f"tiny={artifact}"
    arguments = (folder / "plan.toml", features, output, "--model", model, "--least", 3)
    run(measure.main, *arguments)
    scores = measure.Figures.model_validate_json(output.read_text()).scores
    queries = Plan.load(str(folder / "plan.toml")).files("dev")["2wiki.sentence"].drawn()
    for query, stored in zip(queries, scores.scored("tiny", "2wiki.sentence"), strict=True):
        texts = [document.content() for document in query.documents]
        assert ranker.score(query.query, texts) == pytest.approx(stored.scores, abs=0.02)
    assert scores.systems["tiny"].rule == ranker.native_rule
    run(measure.main, *arguments[:3], "--model", f"{model}={features}", "--least", 3)
    again = measure.Figures.model_validate_json(output.read_text()).scores
    assert again == scores


def test_the_rule_is_the_best_one_where_each_set_counts_the_same():
    high = [ScoredQuery([5.0, 4.0], [True, False])] * 9
    low = [ScoredQuery([-5.0, -6.0], [True, False])]
    rule = train.rule_for({"high": high, "low": low})
    assert [rule.select(query.scores) for query in (high[0], low[0])] == [[0], [0]]


def test_each_ablation_is_computed_once(folder, features):
    output = folder / "ablations.json"
    arguments = (folder / "plan.toml", features, output, "--epochs", 1)
    printed = run(ablations.main, *arguments)
    rows = ablations.read_ablations(output).rows
    by_name = {(row.group, row.name): row for row in rows}
    assert by_name["signal", "hidden states"].parameters == 3 * 1 * 64 * 64
    assert by_name["layers", "the first 2"].layers == 2
    assert by_name["method", "similarity to the oracle shift"].parameters == 0
    assert by_name["method", "RSRank"].training_queries == 7
    assert "queries, 50: too few training queries" in printed
    assert "nDCG" not in run(ablations.main, *arguments)


def test_b_learns_from_the_sets_that_a_recipe_names(folder, features):
    recipe = train.DecoderRecipe.load(str(folder / "recipe.toml"))
    sets = train.read_sets(recipe, Store(features))
    assert {name: len(queries) for name, queries in sets.items()} == {"2wiki.sentence": 8}
    assert train.changed(FitOptions(epochs=2)) == {"epochs": 2}
    shorter = train.read_sets(recipe.model_copy(update={"last_layer": 2}), Store(features))
    (queries,), (of_shorter,) = sets.values(), shorter.values()
    assert {len(query.shifts) for query in of_shorter} == {2}
    assert torch.equal(of_shorter[0].shifts, queries[0].shifts[:2])


def test_folds_score_each_query_by_a_b_that_has_not_learned_from_it(folder, features):
    recipe = train.DecoderRecipe.load(str(folder / "recipe.toml"))
    recipe = recipe.model_copy(update={"fit": recipe.fit.model_copy(update={"epochs": 2})})
    (name, queries), *_ = train.read_sets(recipe, Store(features)).items()
    places = [place for fold in folds(len(queries), 3) for place in fold]
    before = train.fold_scores(recipe, {name: queries}, 3)[name]
    relevant = tuple(not label for label in queries[2].relevant)
    queries[2] = replace(queries[2], relevant=relevant)
    after = train.fold_scores(recipe, {name: queries}, 3)[name]
    assert len(before) == len(queries)
    changed = set()
    for place, first, second in zip(places, before, after, strict=True):
        if first.scores != second.scores:
            changed.add(place)
    assert 2 not in changed
    assert len(changed) >= len(queries) - 3


def test_tables_show_the_measures_of_the_scores():
    labels = ((True, False, False), (False, False))
    scores = {"ours": {"threshold": 0.0, "scores": {"everyday.passage": [[1, 2, -1], [0.5, -1]]}}}
    content = {"scores": {"labels": {"everyday.passage": labels}, "systems": scores}}
    # nDCG@5 is that of the answerable query: its relevant passage is second.
    row = "| everyday questions (2) | ours | 63.1 | 0.75 | zero | 0% | 1.5 | 33.3 | 100% |"
    assert row in tables.typed(content)
    assert "| everyday questions (2) | 63.1 | 33.3 | 33.3 |" in tables.overview(content)
    content["scores"]["systems"]["mini"] = scores["ours"]
    assert "| `mini` | 28M | no torch | 63.1 / 33.3 |" in tables.ladder(content)
    del content["scores"]["systems"]["mini"]
    content["scores"]["labels"] = {"fiqa": labels[:1]}
    content["scores"]["systems"]["ours"]["scores"] = {"fiqa": [[1, 2, -1]]}
    assert "| ours | 63.1 | 63.1 |" in tables.papers_sets(content)
    assert "| Qwen3-8B, the paper | 97.5 | 97.5 |" in tables.papers_sets(content)
    assert "| ours | FiQA | 1 | 66.7 | 66.7 | 0.0 |  |  |" in tables.gaps(content)
    assert "| ours | 0.333 | 0.000 | 0.0000 | 0.333 |" in tables.thresholds(content)


def test_the_directions_after_b_add_up_to_the_score(folder, features, artifact):
    queries = Plan.load(str(folder / "plan.toml")).files("dev")["2wiki.sentence"].drawn()
    query = Store(features).read("2wiki.sentence", queries)[queries[0].id]
    config = hub.read_config(artifact)
    weights = dict(Projection.of(hub.read_weights(artifact, config)).named_parameters())
    after = figures.directions(query, weights["weight"].detach())
    (expected,) = scored([query], weights)
    rows = config.projection_dim
    assert (after.sum(1) / rows**0.5).tolist() == pytest.approx(expected.scores, abs=1e-3)
    assert figures.directions(query, None).shape[0] == len(query.relevant)


def test_the_figures_of_the_scores_are_drawn(tmp_path):
    labels = {"fiqa": [[True, False, False], [False, True]]}
    scores = {"fiqa": [[3.0, 1.0, -1.0], [0.5, 1.5]]}
    systems = {name: {"threshold": 0.0, "scores": scores} for name in ("ours", "theirs")}
    file = tmp_path / "figures.json"
    file.write_text(json.dumps({"scores": {"labels": labels, "systems": systems}}))
    run(figures.main, file, "--output", tmp_path)
    for name in ("decoders-f1-gap", "decoders-score-range"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
