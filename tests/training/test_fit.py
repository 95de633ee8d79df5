"""Training B from nothing by gradient."""

import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch
from training_helpers import toy

from rsrank_rag.backends.torch.projection import Projection
from rsrank_rag.errors import InputError
from rsrank_rag.method.formula import shift_terms
from rsrank_rag.training import fit as fit_module
from rsrank_rag.training.feature_scores import batch_scores, make_batch, scored, split
from rsrank_rag.training.fit import FitOptions, fit
from rsrank_rag.training.losses import (
    alignment_loss,
    calibration_loss,
    frobenius_loss,
    margin_loss,
    orthogonality_loss,
)
from rsrank_rag.training.store import QueryFeatures, read_features, write_features

CPU = torch.device("cpu")


# Training


def slow_scores(weight, query):
    """The paper's score, document by document and token by token."""
    actual = []
    for document in range(len(query.relevant)):
        total = 0.0
        for layer in range(weight.shape[0]):
            for head in range(weight.shape[1]):
                for token in range(query.tokens):
                    shift = query.shifts[layer, head, document * query.tokens + token].double()
                    z = weight[layer, head].double() @ shift
                    total += float(z.sum() / (z.norm() * math.sqrt(len(z)))) / query.tokens
        actual.append(total)
    return actual


def test_scores_of_a_batch_are_the_papers_whatever_else_is_in_it():
    queries = [*toy(2), *toy(1, tokens=5, seed=4)]
    queries[1] = QueryFeatures(queries[1].shifts[:, :, :6], (True, False), 3, oracle=False)
    weight = torch.randn(2, 2, 4, 8, generator=torch.Generator().manual_seed(1))
    scores, oracle = batch_scores({"weight": weight}, make_batch(queries, CPU))
    for row, query in enumerate(queries):
        assert scores[row, : len(query.relevant)].tolist() == pytest.approx(
            slow_scores(weight, query), abs=1e-4
        )
    # Each oracle's own mean over layers, heads and tokens: a long query counts no more than a short
    # one.
    rows = [queries[0].shifts[:, :, -3:], queries[2].shifts[:, :, -5:]]
    expected = [shift_terms(shifts.float(), weight).mean().item() for shifts in rows]
    assert oracle.tolist() == pytest.approx(expected, abs=1e-5)


def test_losses_of_a_padded_batch_are_the_mean_of_each_querys_own():
    scores = torch.tensor([[1.0, -2.0, 0.3], [0.2, 0.1, 9.0], [-0.4, 9.0, 9.0]])
    relevant = torch.tensor([[True, False, False], [True, True, True], [False, True, True]])
    valid = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    for loss in (calibration_loss, margin_loss):
        each = [
            loss(row[mask], labels[mask], ~labels[mask])
            for row, labels, mask in zip(scores, relevant, valid, strict=True)
        ]
        actual = loss(scores, relevant & valid, ~relevant & valid)
        assert actual.item() == pytest.approx(sum(each).item() / 3)


def test_a_separable_set_reaches_f1_one_at_zero():
    fitted = fit(
        toy(), toy(4, seed=7), [1, 2], FitOptions(projection_dim=4, epochs=10), device="cpu"
    )
    assert fitted.best.validation_f1 == 1.0
    assert fitted.history[0].loss > fitted.history[-1].loss
    unseen = scored(toy(5, seed=11), dict(fitted.projection.named_parameters()), device="cpu")
    assert all(
        (score > 0) == label
        for row in unseen
        for score, label in zip(row.scores, row.relevant, strict=True)
    )


def test_queries_of_one_class_are_trained_on_too():
    queries = toy(4)
    only = [
        QueryFeatures(q.shifts[:, :, :3], (label,), 3, oracle=False)
        for q, label in zip(queries, (True, False) * 2, strict=True)
    ]
    fitted = fit(only, queries, [1, 2], FitOptions(projection_dim=4, epochs=2), device="cpu")
    assert all(math.isfinite(row.loss) for row in fitted.history)
    assert math.isfinite(fitted.history[0].terms["margin"])
    assert fitted.history[0].terms["alignment"] == 0.0


def test_training_from_files_equals_training_in_memory(tmp_path):
    memory = toy(6)
    files = []
    for number, query in enumerate(memory):
        path = tmp_path / f"{number}.pt"
        write_features(path, query)
        files.append(read_features(path))
    options = FitOptions(projection_dim=4, epochs=3, batch_queries=2)
    first = fit(memory[:4], memory[4:], [1, 2], options, device="cpu")
    second = fit(files[:4], files[4:], [1, 2], options, device="cpu")
    assert torch.equal(first.projection.weight, second.projection.weight)
    assert first.history == second.history


def test_every_epoch_is_a_line_of_the_log(tmp_path):
    fitted = fit(
        toy(4),
        toy(2),
        [1, 2],
        FitOptions(projection_dim=4, epochs=3),
        output=tmp_path,
        device="cpu",
    )
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in log] == [1, 2, 3]
    assert log[0]["validation_f1"] == fitted.history[0].validation_f1


def test_without_validation_queries_the_last_epoch_is_taken():
    fitted = fit(toy(4), [], [1, 2], FitOptions(projection_dim=4, epochs=3, patience=1))
    assert [epoch.epoch for epoch in fitted.history] == [1, 2, 3]
    assert fitted.best is fitted.history[-1]
    assert fitted.best.validation_f1 is None


def test_training_stops_when_validation_no_longer_improves():
    fitted = fit(
        toy(),
        toy(4, seed=7),
        [1, 2],
        FitOptions(projection_dim=4, epochs=50, patience=3),
        device="cpu",
    )
    assert len(fitted.history) == fitted.best.epoch + 3 < 50


def plainly_trained(queries, weights, epochs, rate):
    """B after full batches of AdamW on the paper's objective, written down query by query."""
    weight = Projection.random([1, 2], 2, 3, 2).weight.detach().clone().requires_grad_()
    optimizer = torch.optim.AdamW([weight], weight_decay=1e-3)
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = (
            0.001 + (rate - 0.001) * (1 + math.cos(math.pi * epoch / epochs)) / 2
        )
        each, oracles = [], []
        for query in queries:
            cosines = shift_terms(query.shifts.float(), weight).sum((0, 1))
            scores = cosines.view(-1, query.tokens).mean(1)
            labels = torch.tensor(query.relevant)
            each.append(
                torch.stack(
                    [loss(scores[:-1], labels, ~labels) for loss in (calibration_loss, margin_loss)]
                )
            )
            oracles.append(scores[-1] / 4)
        calibration, margin = torch.stack(each).mean(0)
        terms = {
            "calibration": calibration,
            "margin": margin,
            "orthogonality": orthogonality_loss(weight),
            "alignment": alignment_loss(torch.stack(oracles)),
            "frobenius": frobenius_loss(weight),
        }
        optimizer.zero_grad()
        sum(weights[name] * term for name, term in terms.items()).backward()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize(
    "removed", [None, "calibration", "margin", "orthogonality", "alignment", "frobenius"]
)
def test_b_moves_as_the_paper_says_with_all_terms_and_without_each(removed, monkeypatch):
    # With P = 3 and D = 2 rows cannot be orthonormal and B lies beyond its bound: all five terms
    # pull.
    queries = toy(4, width=2)
    wrong = [
        QueryFeatures(-query.shifts, query.relevant, query.tokens, query.oracle)
        for query in queries[:1]
    ]
    weights = {
        "calibration": 0.8,
        "margin": 1.0,
        "orthogonality": 0.05,
        "alignment": 0.5,
        "frobenius": 0.1,
    }
    if removed is not None:
        weights[removed] = 0.0
    given = {f"{name}_weight": value for name, value in weights.items()}
    options = FitOptions(projection_dim=3, epochs=3, learning_rate=0.01, **given)
    # Each epoch is the best so far.
    f1 = itertools.count(0.1, 0.1)
    monkeypatch.setattr(fit_module, "apply_rule", lambda *_: SimpleNamespace(f1=next(f1)))
    fitted = fit([*queries, *wrong], queries, [1, 2], options, device="cpu").projection.weight
    expected = plainly_trained([*queries, *wrong], weights, 3, 0.01)
    # Three steps of at most 0.01 each; fp32 sums in another order move one by a thousandth of it.
    assert (fitted - expected).abs().max() <= 3 * 0.01 * 1e-3


def test_the_defaults_are_the_papers():
    options = FitOptions()
    assert (options.projection_dim, options.margin, options.epochs, options.patience) == (
        64,
        0.5,
        120,
        35,
    )
    assert (options.calibration_weight, options.orthogonality_weight) == (0.8, 0.05)
    assert (options.alignment_weight, options.frobenius_weight, options.margin_weight) == (
        0.5,
        0.1,
        1.0,
    )
    assert (options.learning_rate, options.final_learning_rate, options.weight_decay) == (
        0.05,
        0.001,
        1e-3,
    )


def test_nothing_to_learn_from_is_refused():
    only = [QueryFeatures(query.shifts[:, :, :3], (True,), 3, oracle=False) for query in toy(3)]
    with pytest.raises(InputError, match=r"All documents have the same label\. Add some"):
        fit(only, toy(1), [1, 2], FitOptions())


@pytest.mark.parametrize("count", [2, 3, 10, 100])
def test_a_split_covers_every_query_once(count):
    train, held = split(count, 0.1)
    assert sorted([*train, *held]) == list(range(count))
    assert train
    assert held
