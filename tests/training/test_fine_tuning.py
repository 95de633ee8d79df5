"""Regularised fine-tuning: what moves, what stays, what is written."""

import copy
import json
import math
import random
import statistics
from dataclasses import replace

import pytest
import torch
from conftest import DOCUMENTS, QUERIES, copy_with, on_torch
from measures import f1_at
from scipy.optimize import minimize
from training_helpers import labelled, run, scorings, written

from rsrank_rag import RSRank
from rsrank_rag.artifact import hub
from rsrank_rag.backends.torch.projection import Projection
from rsrank_rag.errors import InputError
from rsrank_rag.evaluation.metrics import ScoredQuery
from rsrank_rag.evaluation.statistics import folds
from rsrank_rag.method.scoring import ShiftReader
from rsrank_rag.ranking.rule import Fallback
from rsrank_rag.training import fine_tuning
from rsrank_rag.training import run as run_module
from rsrank_rag.training.feature_scores import scored as scored_by_weights
from rsrank_rag.training.features import FeatureExtractor
from rsrank_rag.training.fine_tuning import FineTuned, FineTuningOptions, fine_tune
from rsrank_rag.training.recipe import FeaturePart, Recipe
from rsrank_rag.training.store import QueryFeatures
from rsrank_rag.training.verdict import judge


def scored(features, projection, device="cpu"):
    return scored_by_weights(features, dict(projection.state_dict()), device=device)


def separable_features(count=12, *, margin=0.6, seed=0):
    """Relevant documents agree with their query by more than a margin; shifts say little."""
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    made = []
    for _ in range(count):
        relevant = tuple(i % 4 == 0 for i in range(8))
        means = [margin + (0.15 if label else -0.15) for label in relevant]
        pairs = [[mean + rng.gauss(0, 0.08), mean + rng.gauss(0, 0.08)] for mean in means]
        similarity = torch.tensor(pairs)[:, None]
        shifts = torch.randn(2, 2, 8 * 3, 8, generator=generator)
        made.append(QueryFeatures(shifts.half(), relevant, 3, oracle=False, similarity=similarity))
    return made


@pytest.fixture
def base():
    plain = Projection.random([2, 3], 2, 4, 8)
    return Projection(
        plain.weight.detach(),
        [2, 3],
        head_weight=torch.full((2, 2), 0.2),
        agreement=torch.tensor([2.0, 2.0, -1.0]),
    )


def differences(first, second):
    return [
        (a - b).abs().max().item()
        for a, b in zip(first.parameters(), second.parameters(), strict=True)
    ]


# Features


@pytest.mark.parametrize("window", [None, 8])
def test_stored_features_score_like_the_artifact_agreement_and_weighed_heads_included(
    window, fused, tmp_path
):
    if window is not None:
        fused = copy_with(fused, tmp_path / "artifact", similarity_window=window)
    ranker = on_torch(fused)
    reader = ShiftReader(ranker.backbone, ranker.prompts, ranker.config.layers)
    extractor = FeatureExtractor(reader, FeaturePart())
    query = labelled(1)[0]
    # In batches of one document, and beside a query with other windows.
    extractor.token_budget = 1
    short = query.model_copy(update={"documents": query.documents[:1]})
    features = [extractor.extract(query), extractor.extract(short)]
    actual = scored(features, ranker.projection, device="cpu")[0].scores
    expected = ranker.score(query.query, [document.content() for document in query.documents])
    assert actual == pytest.approx(expected, abs=0.01)  # shifts are kept in 16 bits


# What moves


def plain_loss(weights, features):
    """Loss of each query, document by document."""
    total = 0.0
    for query in features:
        scores = []
        for place, agreement in enumerate(query.similarity[:, 0].double()):
            g, w, b = weights["agreement"]
            score = g * agreement[0] + w * agreement[1] + b
            for layer in range(2):
                for head in range(2):
                    for token in range(query.tokens):
                        z = (
                            weights["weight"][layer, head]
                            @ query.shifts[layer, head, place * 3 + token].double()
                        )
                        score += (
                            weights["head_weight"][layer, head]
                            * z.sum()
                            / (z.norm() * 2)
                            / query.tokens
                        )
            scores.append(score)
        rivals = (
            sum(math.exp(s) for s, label in zip(scores, query.relevant, strict=True) if not label)
            + 1.0
        )
        order = [
            math.log(1 + rivals / math.exp(s))
            for s, label in zip(scores, query.relevant, strict=True)
            if label
        ]
        weights_of = [2.0 if label else 1.0 for label in query.relevant]
        zero = [
            math.log(1 + math.exp(-s if label else s))
            for s, label in zip(scores, query.relevant, strict=True)
        ]
        total += statistics.fmean(order) + 2 * sum(
            w * z for w, z in zip(weights_of, zero, strict=True)
        ) / sum(weights_of)
    return total


@pytest.mark.parametrize("projection_from", [0, 300])
def test_the_weights_are_those_of_the_least_loss_and_squared_change(base, projection_from):
    features = separable_features(3)
    options = FineTuningOptions(penalty=2.0, projection_from=projection_from)
    near = fine_tuning._Tuner(base, options, len(features), torch.device("cpu"))
    units = near.units(features)
    actual = near.train(features)
    start = {name: weight.detach().double() for name, weight in base.named_parameters()}
    trained = {name: actual.get(name, weight).detach().double() for name, weight in start.items()}

    def objective(moved):
        change = torch.tensor(moved) * units["agreement"].double()
        penalty = sum(
            (((trained[n] - start[n]) / units[n]) ** 2).sum().item()
            for n in units
            if n != "agreement"
        )
        weights = {**trained, "agreement": start["agreement"] + change}
        return plain_loss(weights, features) + 2.0 / 2 * (penalty + sum(x * x for x in moved))

    best = minimize(
        objective,
        [0.0] * 3,
        method="Nelder-Mead",
        options={"xatol": 1e-4, "fatol": 1e-7, "maxiter": 5000},
    )
    expected = start["agreement"] + torch.tensor(best.x) * units["agreement"]
    assert trained["agreement"].tolist() == pytest.approx(expected.tolist(), abs=0.01)


def test_few_queries_move_the_weights_less_than_many(base):
    features = separable_features(40)
    near = fine_tuning._Tuner(base, FineTuningOptions(penalty=10.0), 40, torch.device("cpu"))
    few, many = (near.train(features[:count]) for count in (4, 40))
    # So few queries say nothing of B.
    assert torch.equal(many["weight"], base.weight)
    assert not torch.equal(many["head_weight"], base.head_weight)
    moved = [(weights["agreement"] - base.agreement).abs().max() for weights in (few, many)]
    assert 0 < moved[0] < moved[1]


def test_queries_that_are_left_out_do_not_change_the_weights(base):
    """A query's fine-tuned score is that of weights from the queries of the other folds."""
    features = separable_features(12)
    actual = fine_tune(features, base, FineTuningOptions(iterations=3), device="cpu")
    left_out, *_ = folds(12, 5)
    rest = [features[number] for number in range(12) if number not in left_out]
    tuner = fine_tuning._Tuner(base, FineTuningOptions(iterations=3), 12, "cpu")
    own = [features[number] for number in left_out]
    expected = scored_by_weights(own, tuner.train(rest))
    assert [query.scores for query in actual.after[: len(own)]] == [row.scores for row in expected]


def test_training_finds_the_zero_of_a_domain_and_says_so(base):
    features, unseen = separable_features(20), separable_features(20, seed=7)
    actual = fine_tune(features, base, FineTuningOptions(), device="cpu")
    before, after = (scored(unseen, weights, device="cpu") for weights in (base, actual.projection))
    assert (
        statistics.fmean(f1_at(q, 0.0) for q in after)
        > statistics.fmean(f1_at(q, 0.0) for q in before) + 0.2
    )
    assert judge(actual.before, actual.after).outcome == "better"
    in_turn = [features[number] for held in folds(20, 5) for number in held]
    assert [row.relevant for row in actual.before] == [query.relevant for query in in_turn]
    expected = [score for row in scored(in_turn, base, device="cpu") for score in row.scores]
    assert [score for row in actual.before for score in row.scores] == pytest.approx(
        expected, abs=1e-5
    )


@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_labels_at_random_bring_no_gain_over_the_base_at_its_threshold(base, threshold):
    rng = random.Random(3)
    features = [
        replace(
            query,
            similarity=torch.tensor([[[rng.random(), rng.random()]] for _ in query.relevant]),
        )
        for query in separable_features(12, seed=5)
    ]
    fitting = copy.deepcopy(base)
    # What best can be said of them: one in four is relevant.
    fitting.agreement.data = torch.tensor([0.0, 0.0, threshold - 1.1])
    fitting.head_weight.data.zero_()
    options = FineTuningOptions(penalty=0.001)
    actual = fine_tune(features, fitting, options, threshold=threshold, device="cpu")
    assert judge(actual.before, actual.after).problem
    assert max(score for query in actual.before for score in query.scores) < 0
    # What is measured is what fine-tuning would have done, not the base once more.
    assert all(a.scores != b.scores for a, b in zip(actual.before, actual.after, strict=True))


def test_every_query_is_left_out_once():
    held = folds(40, 5)
    assert len(held) == 5
    assert sorted(number for fold in held for number in fold) == list(range(40))
    assert sorted(map(len, folds(3, 5))) == [1, 1, 1]
    with pytest.raises(InputError, match="1 labelled queries cannot be"):
        folds(1, 5)


# What is written


SETTINGS = ("--set", "model.device=cpu", "--set", "model.dtype=float32")


@pytest.fixture
def train(fused, monkeypatch, tmp_path):
    """Function: scores before and after on queries held out -> what the command says.

    The fine-tuned weights differ from the artifact's by 1 in each similarity weight.
    """
    data = written(tmp_path / "own.jsonl", labelled(4))

    def run_with(before, after, *options):
        def tuned(features, projection, options, **settings):
            moved = copy.deepcopy(projection)
            moved.agreement.data += 1
            return FineTuned(moved, before, after)

        monkeypatch.setattr(run_module, "fine_tune", tuned)
        arguments = ("train", "--base", fused, "--data", data, "--output", tmp_path / "run")
        return run(*arguments, *SETTINGS, *options)

    return run_with


def moved_by(fused, tmp_path):
    """How far the written similarity weights are from the base's."""
    artifact = tmp_path / "run" / "artifact"
    base = Projection.of(hub.read_weights(fused, hub.read_config(fused)))
    tuned = Projection.of(hub.read_weights(artifact, hub.read_config(artifact)))
    return differences(tuned, base)[2]


def test_a_loss_of_recall_alone_is_named_and_the_base_is_written(train, fused, tmp_path):
    # Every list keeps its only relevant document and one other; then in every fourth list the
    # relevant one falls below zero, and the other one as well: F1 does not change beyond chance.
    labels = [True, False]
    before = [ScoredQuery([1.0, 0.5], labels)] * 40
    after = [ScoredQuery([1.0, -1.0], labels)] * 28 + [ScoredQuery([-0.5, -1.0], labels)] * 12
    verdict = judge(before, after)
    assert verdict.outcome == "worse"
    assert "recall" in verdict.losses
    assert "lost" in verdict.losses
    assert "f1" not in verdict.losses
    message = train(before, after)
    assert "recall changes by -0.300" in message
    assert "the share of answers lost changes by 0.300" in message
    assert (
        f"written: the weights of {fused}, unchanged: the result on 40 queries held out is worse"
        in message
    )
    assert moved_by(fused, tmp_path) == 0.0
    card = (tmp_path / "run" / "artifact" / "README.md").read_text()
    assert "unchanged" in card
    # A card is read where there is no command to repeat.
    assert "--force" not in card


def test_fine_tuned_weights_that_lose_something_are_written_by_force_and_named(
    train, fused, tmp_path
):
    before, after = scorings(help=-0.8)
    assert "written: the weights of" in train(before, after)
    message = train(before, after, "--force")
    assert "written: fine-tuned weights, worse:" in message
    assert moved_by(fused, tmp_path) == 1.0


def test_the_base_is_written_where_few_queries_cannot_rule_out_a_loss(train, fused, tmp_path):
    # One of 20 answers is lost, which may be chance; everything else is gained.
    labels = [True, False]
    before = [ScoredQuery([1.0, 0.5], labels)] * 20
    after = [ScoredQuery([1.0, -1.0], labels)] * 19 + [ScoredQuery([-0.5, -1.0], labels)]
    message = train(before, after)
    assert "verdict on the fine-tuned weights: better: " in message
    assert f"written: the weights of {fused}, unchanged: 20 queries held out (fewer than" in message
    assert "--force writes the fine-tuned weights." in message
    assert moved_by(fused, tmp_path) == 0.0
    message = train(before, after, "--force")
    assert "written: fine-tuned weights, better: " in message
    assert "; forced: 20 queries held out (fewer than 100) cannot rule out a loss" in message
    assert "--force" not in message
    card = (tmp_path / "run" / "artifact" / "README.md").read_text()
    assert "; forced: 20 queries held out (fewer than 100) cannot rule out a loss" in card
    assert moved_by(fused, tmp_path) == 1.0


def test_fine_tuned_weights_that_gain_are_written(train, fused, tmp_path):
    message = train(*scorings(100, help=0.8))
    assert "verdict on the fine-tuned weights: better: " in message
    assert "force" not in message
    assert "written: fine-tuned weights, better: " in message
    assert moved_by(fused, tmp_path) == 1.0


def test_a_base_that_nothing_improves_is_said_to_be_written(train, fused, tmp_path):
    before, _ = scorings(100)
    message = train(before, before)
    assert "verdict on the fine-tuned weights: no difference beyond chance" in message
    problem = "the result on 100 queries held out is no difference beyond chance"
    assert f"written: the weights of {fused}, unchanged: {problem}" in message
    assert moved_by(fused, tmp_path) == 0.0
    settings = hub.read_config(tmp_path / "run" / "artifact").training.settings
    assert settings == hub.read_config(fused).training.settings
    assert "--force writes the fine-tuned weights." in message
    # Force writes them here, too.
    message = train(before, before, "--force")
    assert "written: fine-tuned weights, " in message
    assert f"; forced: {problem}" in message
    assert moved_by(fused, tmp_path) == 1.0


def test_what_was_known_of_the_base_is_known_of_its_copy(train, fused, tmp_path):
    config = hub.read_config(fused)
    known = config.training.model_copy(update={"data": ("tides",), "notes": "By hand."})
    config = config.model_copy(update={"int8": True, "training": known})
    base = tmp_path / "base"
    projection = hub.read_weights(fused, config)
    hub.write_derived(base, config, projection, fused)
    (base / hub.LIMITS).write_text("English only.")
    before, _ = scorings()
    train(before, before, "--base", base)
    kept = hub.read_config(tmp_path / "run" / "artifact")
    train(*scorings(100, help=0.8), "--base", base)
    tuned = hub.read_config(tmp_path / "run" / "artifact")
    assert kept.model_copy(update={"training": known}) == config
    assert kept.training.data == ("tides",)
    assert kept.training.notes.startswith("By hand. Made by rsrank train: the weights of ")
    assert (tuned.int8, tuned.training.data) == (True, ("tides", "own"))
    assert (tmp_path / "run" / "artifact" / hub.LIMITS).read_text() == "English only."
    # Without limits and with the same set again.
    (base / hub.LIMITS).unlink()
    again = config.model_copy(update={"training": tuned.training})
    hub.write_derived(base, again, projection, fused)
    train(*scorings(100, help=0.8), "--base", base)
    assert not (tmp_path / "run" / "artifact" / hub.LIMITS).exists()
    assert hub.read_config(tmp_path / "run" / "artifact").training.data == ("tides", "own")


def test_fine_tuned_weights_of_a_tuned_base_say_that_their_threshold_is_zero(
    train, fused, tmp_path
):
    config = hub.read_config(fused).model_copy(update={"threshold": 0.25})
    hub.write_derived(tmp_path / "base", config, hub.read_weights(fused, config), fused)
    message = train(*scorings(100, help=0.8), "--base", tmp_path / "base", "--force")
    assert "; threshold 0, no longer 0.25" in message
    assert hub.read_config(tmp_path / "run" / "artifact").threshold == 0


def test_the_verdict_is_by_the_rule_of_the_artifact(train, fused, tmp_path):
    fallback = Fallback(max_gap=1.0, max_depth=2.0)
    config = hub.read_config(fused).model_copy(update={"fallback": fallback})
    hub.write_derived(tmp_path / "base", config, hub.read_weights(fused, config), fused)
    before = [ScoredQuery([-0.5, -1.8], [True, False])] * 100
    after = [ScoredQuery([-1.8, -0.5], [True, False])] * 100
    assert "the share of answers lost changes by 1.000" in train(
        before, after, "--base", tmp_path / "base"
    )


def test_labels_that_trained_the_base_or_chose_its_threshold_are_named(
    train, fused, tmp_path, caplog
):
    before, after = scorings(100, help=0.8)
    config = hub.read_config(fused)
    for names, is_named in ((("tides",), False), (("tides", "own"), True)):
        known = config.training.model_copy(update={"data": names})
        other = config.model_copy(update={"training": known})
        projection = hub.read_weights(fused, config)
        hub.write_derived(tmp_path / "base", other, projection, fused)
        train(before, after, "--base", tmp_path / "base")
        assert ("own has the name of a labelled set" in caplog.text) is is_named


def test_an_artifact_is_fine_tuned_and_says_how(fused, tmp_path):
    data = written(tmp_path / "own.jsonl", labelled(6))
    settings = ("--set", "fine_tuning.iterations=3", "--set", "fine_tuning.folds=2")
    arguments = ("train", "--base", fused, "--data", data, "--output", tmp_path / "run")
    message = run(*arguments, *SETTINGS, *settings, "--force")
    assert "Measured on queries that were left out: 6" in message
    assert "verdict on the fine-tuned weights: " in message
    for word in ("nDCG@5", "precision", "recall", "F1", "answers lost", "written: "):
        assert word in message
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert set(verdict["difference"]) >= {"ndcg@5", "recall", "f1", "lost"}
    ranker = RSRank.from_pretrained(tmp_path / "run" / "artifact", device="cpu", dtype="float32")
    assert ranker.config.training.settings["method"] == "fine-tuning"
    assert (ranker.config.fusion_layer, ranker.config.backbone.name) == (1, "./backbone")
    assert len(ranker.score(QUERIES[0], DOCUMENTS)) == len(DOCUMENTS)


def test_features_are_read_in_the_precision_in_which_the_artifact_will_run(fused, tmp_path):
    data = written(tmp_path / "own.jsonl", labelled(2))
    for settings, dtype in (([], "torch.float32"), (["model.dtype=bfloat16"], "torch.bfloat16")):
        recipe = Recipe.load("mini", ["model.device=cpu", *settings], [data], str(fused))
        output = tmp_path / dtype
        run_module.TrainingRun(recipe, output).extract()
        described = json.loads((output / "features" / "store.json").read_text())
        assert described["compute_dtype"] == dtype


def test_what_an_artifact_decides_cannot_be_set(fused):
    for setting in ("fit.epochs=3", "fit.seed=7", "features.last_layer=2", "template.suffix=x"):
        with pytest.raises(InputError, match="cannot be set: fine-tuning an artifact"):
            Recipe.load("your-data", [setting], base=str(fused))
