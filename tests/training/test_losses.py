"""Every term of the training objective: by hand, over empty classes, and its gradient."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from rsrank_rag.backends.torch.projection import Projection
from rsrank_rag.training.losses import (
    alignment_loss,
    calibration_loss,
    frobenius_loss,
    margin_loss,
    orthogonality_loss,
)

SCORES = torch.tensor([2.0, -0.25, 0.3, -3.0, 1.0], dtype=torch.float64)
RELEVANT = torch.tensor([True, True, False, False, False])


def calibration(scores, relevant, **options):
    return calibration_loss(scores, relevant, ~relevant, **options)


def margin(scores, relevant, **options):
    return margin_loss(scores, relevant, ~relevant, **options)


def test_calibration_loss_by_hand():
    # relevant: (0 + 0.25) / 2; irrelevant: (0.3 + 0 + 1) / 3
    assert calibration(SCORES, RELEVANT).item() == pytest.approx(0.125 + 1.3 / 3)


def test_calibration_loss_is_zero_when_all_are_on_their_side():
    assert calibration(torch.tensor([1e-3, -1e-3]), torch.tensor([True, False])).item() == 0.0


def test_calibration_loss_weighs_both_classes_alike_whatever_their_sizes():
    few = calibration(torch.tensor([-1.0, 1.0]), torch.tensor([True, False]))
    many = calibration(torch.tensor([-1.0] + [1.0] * 9), torch.tensor([True] + [False] * 9))
    assert few.item() == many.item() == 2.0


def test_margin_loss_by_hand():
    # relevant: (0 + 0.75) / 2; irrelevant: (0.8 + 0 + 1.5) / 3; worst pair: 0.5 - (-0.25 - 1)
    assert margin(SCORES, RELEVANT).item() == pytest.approx(0.375 + 2.3 / 3 + 1.75)


def test_margin_loss_with_another_margin_by_hand():
    # relevant: (0 + 1.25) / 2; irrelevant: (1.3 + 0 + 2) / 3; worst pair: 1 - (-0.25 - 1)
    assert margin(SCORES, RELEVANT, margin=1.0).item() == pytest.approx(0.625 + 1.1 + 2.25)


def test_irrelevant_documents_count_as_often_as_their_weight_says():
    calibrated = calibration(SCORES, RELEVANT, irrelevant_weight=2.0)
    assert calibrated.item() == pytest.approx(0.125 + 2 * 1.3 / 3)
    beyond = margin(SCORES, RELEVANT, irrelevant_weight=2.0)
    assert beyond.item() == pytest.approx(0.375 + 2 * 2.3 / 3 + 1.75)


def test_margin_loss_is_zero_beyond_the_margin_and_positive_within_it():
    relevant = torch.tensor([True, False])
    assert margin(torch.tensor([0.5, -0.5]), relevant).item() == 0.0
    assert margin(torch.tensor([0.4, -0.5]), relevant).item() == pytest.approx(0.1)


@pytest.mark.parametrize("loss", [calibration, margin])
@pytest.mark.parametrize("label", [True, False])
def test_empty_class_gives_a_finite_loss_and_gradient(loss, label):
    values = torch.tensor([1.0, -2.0], requires_grad=True)
    actual = loss(values, torch.tensor([label, label]))
    actual.backward()
    assert actual.isfinite()
    assert values.grad.isfinite().all()


def test_a_query_of_one_class_only_still_pulls_its_documents():
    assert calibration(torch.tensor([-1.0, -3.0]), torch.tensor([True, True])).item() == 2.0
    assert margin(torch.tensor([0.5]), torch.tensor([False])).item() == 1.0


def test_orthogonality_loss_by_hand():
    # rows (1, 1) and (0, 2): B B^T - I = [[1, 2], [2, 3]], squares sum to 18, over P^2 = 4
    weight = torch.tensor([[[[1.0, 1.0], [0.0, 2.0]]]])
    assert orthogonality_loss(weight).item() == pytest.approx(4.5)
    both = torch.cat([weight, torch.eye(2)[None, None]], dim=1)  # averaged with a perfect head
    assert orthogonality_loss(both).item() == pytest.approx(2.25)


def test_orthogonality_loss_of_orthonormal_rows_is_zero():
    weight = Projection.random(range(1, 4), 2, 5, 8).weight
    assert orthogonality_loss(weight).item() == pytest.approx(0.0, abs=1e-10)


def test_alignment_loss_by_hand():
    assert alignment_loss(torch.tensor([[0.5, -1.0], [1.0, 0.25]])).item() == pytest.approx(
        1 - 0.75 / 4
    )
    assert alignment_loss(torch.ones(2, 3, 4)).item() == 0.0


def test_frobenius_loss_by_hand():
    # ||B|| = 3 * sqrt(24), bound = sqrt(24) / 2
    assert frobenius_loss(torch.full((1, 2, 3, 4), 3.0)).item() == pytest.approx(
        2.5 * math.sqrt(24), rel=1e-6
    )


def test_frobenius_loss_is_zero_up_to_its_bound():
    assert frobenius_loss(torch.full((1, 2, 3, 4), 0.5)).item() == pytest.approx(0.0, abs=1e-6)
    assert frobenius_loss(torch.full((1, 2, 3, 4), 0.1)).item() == 0.0


def test_gradients_equal_finite_differences():
    torch.manual_seed(5)
    scores = SCORES.clone().requires_grad_()
    weight = torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    cosines = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: calibration(x, RELEVANT), scores)
    assert gradcheck(lambda x: margin(x, RELEVANT), scores)
    assert gradcheck(orthogonality_loss, weight)
    assert gradcheck(frobenius_loss, weight)
    assert gradcheck(alignment_loss, cosines)


@pytest.mark.parametrize("loss", [calibration, margin])
def test_a_step_against_the_gradient_moves_wrong_documents_to_their_side(loss):
    scores = torch.tensor([-0.1, 0.2], requires_grad=True)
    loss(scores, torch.tensor([True, False])).backward()
    assert scores.grad[0] < 0 < scores.grad[1]
