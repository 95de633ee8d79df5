"""Training near a base: what moves, what stays, whether it helped; and thresholds tuned on labelled queries."""

import copy
import json
import math
import random
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from conftest import DOCUMENTS, ENCODER, QUERIES
from scipy.optimize import minimize
from test_training import labelled, run, written

from rsrank_rag import Projection, RSRank
from rsrank_rag.artifact import hub
from rsrank_rag.artifact.config import RSRankConfig
from rsrank_rag.errors import InputError, TrainingError
from rsrank_rag.evaluation.metrics import ScoredQuery, best_threshold, selection
from rsrank_rag.language_model.options import LoadOptions
from rsrank_rag.method.scoring import ShiftReader
from rsrank_rag.training import domain
from rsrank_rag.training import run as run_module
from rsrank_rag.training.batches import scored
from rsrank_rag.training.domain import WORSE, DomainOptions, by_query, judge, parts, train_near
from rsrank_rag.training.features import FeatureExtractor
from rsrank_rag.training.recipe import Recipe
from rsrank_rag.training.store import QueryFeatures
from rsrank_rag.training.tune import Curves, Goal, cross_tuned, find_threshold


def domain_features(count=12, *, border=0.6, seed=0):
    """Relevant documents agree with their query by more than a border; shifts say little."""
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    made = []
    for _ in range(count):
        relevant = tuple(i % 4 == 0 for i in range(8))
        means = [border + (0.15 if label else -0.15) for label in relevant]
        agreement = tuple((mean + rng.gauss(0, 0.08), mean + rng.gauss(0, 0.08)) for mean in means)
        shifts = torch.randn(2, 2, 8 * 3, 8, generator=generator)
        made.append(QueryFeatures(shifts.half(), relevant, 3, oracle=False, agreement=agreement))
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


@pytest.fixture(scope="module")
def fused(tiny_folder, tmp_path_factory):
    """Folder of a tiny artifact in which queries see documents from layer 1 on, and agreement counts."""
    folder = tmp_path_factory.mktemp("fused") / "artifact"
    weight = Projection.random([2, 3], 4, 4, 16).weight.detach()
    projection = Projection(
        weight,
        [2, 3],
        head_weight=torch.full((2, 4), 0.3),
        agreement=torch.tensor([2.0, 1.0, -0.5]),
    )
    made = RSRank.from_backbone(
        tiny_folder("bert"),
        projection,
        template=ENCODER.model_copy(update={"query_start": "[CLS]"}),
        fusion_layer=1,
        options=LoadOptions("cpu", "float32"),
    )
    made.save_pretrained(folder, include_backbone=True)
    return folder


def differences(first, second):
    return [
        (a - b).abs().max().item()
        for a, b in zip(first.parameters(), second.parameters(), strict=True)
    ]


# Features


def test_stored_features_score_like_the_artifact_agreement_and_weighed_heads_included(fused):
    ranker = RSRank.from_pretrained(fused, device="cpu", dtype="float32")
    extractor = FeatureExtractor(ShiftReader(ranker.backbone, ranker.prompts, ranker.config.layers))
    query = labelled(1)[0]
    found = scored([extractor.extract(query)], ranker.projection, device="cpu")[0].scores
    expected = ranker.score(query.query, [document.content() for document in query.documents])
    assert found == pytest.approx(expected, abs=0.01)  # shifts are kept in 16 bits


# What moves


def plain_loss(weights, features):
    """Loss of each query, document by document."""
    total = 0.0
    for query in features:
        scores = []
        for place, agreement in enumerate(query.agreement):
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
    features = domain_features(3)
    near = domain._Near(
        features, base, DomainOptions(projection_from=projection_from), torch.device("cpu")
    )
    *_, found = near.path(range(3), (math.inf, 2.0))
    start = {name: weight.detach().double() for name, weight in base.named_parameters()}
    trained = {name: weight.detach().double() for name, weight in found.named_parameters()}

    def objective(moved):
        change = torch.tensor(moved) * near.units["agreement"].double()
        penalty = sum(
            (((trained[n] - start[n]) / near.units[n]) ** 2).sum().item()
            for n in near.units
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
    expected = start["agreement"] + torch.tensor(best.x) * near.units["agreement"]
    assert trained["agreement"].tolist() == pytest.approx(expected.tolist(), abs=0.01)


def test_few_queries_move_the_weights_less_than_many_and_an_endless_strength_not_at_all(base):
    features = domain_features(40)
    near = domain._Near(features, base, DomainOptions(), torch.device("cpu"))
    (same, few), (_, many) = (list(near.path(range(count), (math.inf, 10.0))) for count in (4, 40))
    assert differences(same, base) == [0.0, 0.0, 0.0]
    assert differences(many, base)[0] == 0  # B, of which so few queries say nothing
    assert 0 < differences(few, base)[2] < differences(many, base)[2]


def test_training_finds_the_border_of_a_domain_and_says_so(base):
    features, unseen = domain_features(20), domain_features(20, seed=7)
    found = train_near(features, base, DomainOptions(), device="cpu")
    before, after = (scored(unseen, weights, device="cpu") for weights in (base, found.projection))
    assert statistics.fmean(by_query(after)["f1"]) > statistics.fmean(by_query(before)["f1"]) + 0.2
    assert judge(found.base, found.trained).outcome == "better"
    assert math.isfinite(found.strength)
    assert found.values[found.strength] == max(found.values.values())
    in_turn = [features[number] for held in parts(20, 5) for number in held]
    assert [row.relevant for row in found.base] == [list(query.relevant) for query in in_turn]
    expected = [score for row in scored(in_turn, base, device="cpu") for score in row.scores]
    assert [score for row in found.base for score in row.scores] == pytest.approx(
        expected, abs=1e-5
    )


def test_labels_at_random_leave_the_base_as_it_is(base):
    rng = random.Random(3)
    features = [
        replace(query, agreement=tuple((rng.random(), rng.random()) for _ in query.agreement))
        for query in domain_features(12, seed=5)
    ]
    fitting = copy.deepcopy(base)
    fitting.agreement.data = torch.tensor(
        [0.0, 0.0, -1.1]
    )  # what best can be said of them: one in four is relevant
    fitting.head_weight.data.zero_()
    found = train_near(features, fitting, DomainOptions(strengths=(0.001,)), device="cpu")
    assert found.strength == math.inf
    assert differences(found.projection, fitting) == [0.0, 0.0, 0.0]


def test_forty_queries_are_all_measured_on_and_many_only_in_part():
    held = parts(40, 5)
    assert len(held) == 5
    assert sorted(number for fold in held for number in fold) == list(range(40))
    assert [len(fold) for fold in parts(600, 5)] == [60, 60]
    assert sorted(map(len, parts(3, 5))) == [1, 1, 1]
    with pytest.raises(TrainingError, match="1 labelled query cannot be"):
        parts(1, 5)


# The verdict


def scorings(count=30, help=0.0, seed=0):
    """A base's scores and another's, which helps relevant documents by so much."""
    rng = random.Random(seed)
    base, other = [], []
    for _ in range(count):
        labels = [i < 2 for i in range(6)]
        scores = [rng.gauss(0.3 if label else -0.3, 1) for label in labels]
        base.append(ScoredQuery(scores, labels))
        moved = [
            s + (help if label else -help) + rng.gauss(0, 0.05)
            for s, label in zip(scores, labels, strict=True)
        ]
        other.append(ScoredQuery(moved, labels))
    return base, other


@pytest.mark.parametrize(
    ("help", "outcome"), [(0.8, "better"), (0.0, "no difference that can be told"), (-0.8, WORSE)]
)
def test_the_verdict_is_that_of_a_plain_paired_bootstrap(help, outcome):
    base, other = scorings(help=help)
    verdict = judge(base, other)
    assert verdict.outcome == outcome
    for metric in ("precision", "recall", "f1"):
        differences = []
        for first, second in zip(base, other, strict=True):
            values = []
            for query in (first, second):
                kept = [
                    label
                    for score, label in zip(query.scores, query.relevant, strict=True)
                    if score > 0
                ]
                precision, recall = sum(kept) / len(kept) if kept else 0.0, sum(kept) / 2
                f1 = 2 * precision * recall / (precision + recall) if sum(kept) else 0.0
                values.append({"precision": precision, "recall": recall, "f1": f1}[metric])
            differences.append(values[1] - values[0])
        rng = random.Random(1)
        means = sorted(statistics.fmean(rng.choices(differences, k=30)) for _ in range(2000))
        found = verdict.difference[metric]
        assert found.mean == pytest.approx(statistics.fmean(differences))
        # Two bootstraps of 2,000 samples differ by their own noise: some hundredths of the interval's width.
        near = pytest.approx((means[50], means[1949]), abs=0.15 * (means[1949] - means[50]) + 1e-9)
        assert (found.low, found.high) == near


@pytest.fixture
def harmful(monkeypatch):
    """Training whose weights do worse on queries left out."""
    base, other = scorings(help=-0.8)

    def train(features, projection, options, **given):
        moved = copy.deepcopy(projection)
        moved.agreement.data += 1
        return domain.Trained(moved, 1.0, {math.inf: 1.0, 1.0: 0.9}, base, other)

    monkeypatch.setattr(run_module, "train_near", train)


SETTINGS = ("--set", "model.device=cpu", "--set", "model.dtype=float32")


def test_where_training_hurts_the_base_is_written_unless_it_is_accepted(fused, harmful, tmp_path):
    data = written(tmp_path / "own.jsonl", labelled(4))
    given = ("train", "--base", fused, "--data", data, "--output", tmp_path / "run", *SETTINGS)
    assert "verdict: worse: the base is kept" in run(*given)
    before = hub.read_projection(fused, hub.read_config(fused))
    artifact = tmp_path / "run" / "artifact"
    assert differences(hub.read_projection(artifact, hub.read_config(artifact)), before) == [
        0.0,
        0.0,
        0.0,
    ]
    assert "verdict: worse: taken all the same" in run(*given, "--accept")
    assert differences(hub.read_projection(artifact, hub.read_config(artifact)), before)[2] == 1.0


def test_a_base_is_trained_near_and_the_artifact_says_how(fused, tmp_path):
    data = written(tmp_path / "own.jsonl", labelled(6))
    settings = (*SETTINGS, "--set", "domain.iterations=3", "--set", "domain.folds=2")
    said = run("train", "--base", fused, "--data", data, "--output", tmp_path / "run", *settings)
    assert "Both on queries left out of training: 6" in said
    for word in ("ndcg@5", "precision", "recall", "f1", "verdict: "):
        assert word in said
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    ranker = RSRank.from_pretrained(tmp_path / "run" / "artifact", device="cpu", dtype="float32")
    settings = ranker.config.training.settings
    assert (settings["method"], settings["outcome"]) == ("near a base", verdict["outcome"])
    assert (ranker.config.fusion_layer, ranker.config.backbone.name) == (1, "./backbone")
    assert len(ranker.score(QUERIES[0], DOCUMENTS)) == len(DOCUMENTS)
    assert (
        "queries left out of training" in (tmp_path / "run" / "artifact" / "README.md").read_text()
    )


def test_what_a_base_decides_cannot_be_set(fused):
    for setting in ("fit.epochs=3", "features.layers=[2]", "method=combined"):
        with pytest.raises(
            InputError, match="cannot be set: training that begins with an artifact"
        ):
            Recipe.load("your-data", [setting], base=str(fused))


# Thresholds


def plain_means(queries, threshold):
    """Precision, recall and F1 in the mean."""
    rows = []
    for query in queries:
        kept = [
            label
            for score, label in zip(query.scores, query.relevant, strict=True)
            if score > threshold
        ]
        hits, wanted = sum(kept), sum(query.relevant)
        precision = hits / len(kept) if kept else float(not wanted)
        recall = hits / wanted if wanted else float(not kept)
        rows.append((precision, recall, 2 * hits / (len(kept) + wanted) if kept or wanted else 1.0))
    return [statistics.fmean(column) for column in zip(*rows, strict=True)]


def tuning(count=12):
    _, queries = scorings(count, help=0.6, seed=4)
    return [*queries, ScoredQuery([0.4, -2.0], [False, False])]


def test_a_threshold_is_the_lowest_of_a_precision_the_highest_of_a_recall_and_one_of_the_best_f1():
    queries = tuning()
    scores = sorted({score for query in queries for score in query.scores})
    tried = [scores[0] - 1, *(statistics.fmean(pair) for pair in pairwise(scores)), scores[-1]]
    measured = {threshold: plain_means(queries, threshold) for threshold in tried}
    precise, _ = find_threshold(queries, Goal("precision", 0.7))
    assert precise == pytest.approx(min(t for t in tried if measured[t][0] >= 0.7))
    complete, _ = find_threshold(queries, Goal("recall", 0.7))
    assert complete == pytest.approx(max(t for t in tried if measured[t][1] >= 0.7))
    best, (low, high) = find_threshold(queries, Goal())
    assert best == pytest.approx(best_threshold(queries)[0])
    assert low <= best <= high
    curves = Curves(queries)
    place = curves.thresholds.tolist().index(best)
    found = [
        float(curves.by_metric[name][:, place].mean()) for name in ("precision", "recall", "f1")
    ]
    assert found == pytest.approx(plain_means(queries, best))
    with pytest.raises(
        TrainingError, match=r"No threshold gives a precision of 1 .* the highest is 0\.\d+\. Ask"
    ):
        find_threshold([*queries, ScoredQuery([9.0], [False])], Goal("precision", 1.0))


def test_draws_in_which_no_threshold_reaches_the_goal_are_left_out_without_a_word(recwarn):
    good, bad = ScoredQuery([1.0, -1.0], [True, False]), ScoredQuery([1.0, -1.0], [False, True])
    threshold, interval = find_threshold(
        [good, good, good, bad], Goal("precision", 0.6), resamples=1
    )  # mostly bad
    assert interval == (threshold, threshold)
    assert not recwarn.list


def test_an_interval_holds_what_other_draws_of_queries_give():
    queries = tuning(20)
    _, (low, high) = find_threshold(queries, Goal())
    rng = random.Random(2)
    drawn = sorted(best_threshold(rng.choices(queries, k=len(queries)))[0] for _ in range(200))
    assert sum(low <= threshold <= high for threshold in drawn) >= 180


def test_tuned_thresholds_are_judged_on_queries_that_they_were_not_tuned_on():
    queries, _ = scorings(20)
    shifted = [
        ScoredQuery([score + 5 for score in query.scores], query.relevant) for query in queries
    ]
    assert cross_tuned(shifted, Goal(), 0.0).outcome == "better"
    assert cross_tuned(shifted, Goal(), 5.0).queries == 20


def test_a_goal_that_some_parts_of_the_queries_cannot_reach_is_judged_with_what_comes_nearest():
    good, bad = ScoredQuery([1.0, -1.0], [True, False]), ScoredQuery([1.0, -1.0], [False, True])
    queries, goal = [good, bad, good, bad, good], Goal("precision", 0.6)
    find_threshold(queries, goal)  # all together reach it
    with pytest.raises(TrainingError):
        find_threshold(queries[1:], goal)
    assert cross_tuned(queries, goal, 0.0).queries == 5


def test_a_query_without_documents_counts_nothing_as_in_every_other_figure():
    queries = [ScoredQuery([1.0, -1.0], [True, False]), ScoredQuery([], [])]
    curves = Curves(queries)
    for place, threshold in enumerate(curves.thresholds):
        found = [
            float(curves.by_metric[name][:, place].mean()) for name in ("precision", "recall", "f1")
        ]
        rows = [selection(query, threshold)[:3] for query in queries]
        assert found == pytest.approx(
            [statistics.fmean(column) for column in zip(*rows, strict=True)]
        )


def test_a_tuned_artifact_keeps_what_scores_above_its_threshold_unless_told_otherwise(
    fused, tmp_path
):
    data = written(tmp_path / "own.jsonl", labelled(6))
    said = run(
        "tune", "--model", fused, "--data", data, "--output", tmp_path / "tuned", "--recall", 1.0
    )
    assert "for recall 1 (95% of resamples" in said
    ranker = RSRank.from_pretrained(tmp_path / "tuned", device="cpu", dtype="float32")
    before = RSRank.from_pretrained(fused, device="cpu", dtype="float32")
    threshold = hub.read_config(tmp_path / "tuned").threshold
    assert (ranker.threshold, before.threshold) == (threshold, 0.0)
    assert ranker.score(QUERIES[0], DOCUMENTS) == before.score(QUERIES[0], DOCUMENTS)
    assert ranker.rank(QUERIES[0], DOCUMENTS).threshold == threshold
    assert ranker.rank(QUERIES[0], DOCUMENTS, threshold=1.5).threshold == 1.5
    given = (
        "tune",
        "--model",
        fused,
        "--data",
        data,
        "--output",
        tmp_path / "x",
        "--recall",
        1,
        "--precision",
        1,
    )
    assert "not both" in run(*given, code=2)


def test_the_threshold_is_zero_unless_the_config_gives_another(fused):
    config = hub.read_config(fused)
    assert config.threshold == 0.0
    moved = config.model_copy(update={"threshold": -0.5})
    assert RSRankConfig.parse(moved.model_dump_json(), source="x").threshold == -0.5
