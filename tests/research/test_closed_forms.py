"""B in closed form, against its definition."""

import pytest
import torch
from training_helpers import toy

from research.reproduction.closed_forms import closed_form
from rsrank_rag.errors import TrainingError
from rsrank_rag.training.store import QueryFeatures

# Closed forms


def test_the_oracle_form_maps_the_mean_oracle_shift_to_ones():
    queries = toy(5)
    weight = closed_form(queries, [1, 2], "oracle", projection_dim=3).weight
    mean = torch.stack([query.shifts[:, :, -3:].double().mean(2) for query in queries]).mean(0)
    assert torch.allclose(
        torch.einsum("lhpd,lhd->lhp", weight.double(), mean),
        torch.ones(2, 2, 3, dtype=torch.double),
        atol=1e-4,
    )
    assert torch.allclose(
        weight[0, 0, 0].double(), mean[0, 0] / mean[0, 0].square().sum(), atol=1e-5
    )


def test_separation_is_ridge_regression():
    queries = toy(5)
    weight = closed_form(queries, [1, 2], "separation", projection_dim=3, ridge=0.01).weight
    rows = torch.cat([query.shifts[1, 0, :12] for query in queries]).double()
    labels = torch.tensor([1.0, 0, 0, 1], dtype=torch.double).repeat_interleave(3).repeat(5)
    penalty = 0.01 * (rows.T @ rows).diagonal().mean()
    expected = torch.linalg.lstsq(
        torch.cat([rows, penalty.sqrt() * torch.eye(8, dtype=torch.double)]),
        torch.cat([labels, torch.zeros(8, dtype=torch.double)])[:, None],
    ).solution[:, 0]
    for p in range(3):
        assert torch.allclose(weight[1, 0, p].double(), expected, atol=1e-5)


def test_the_combined_form_meets_its_constraint_with_less_response_to_irrelevant_shifts():
    queries = toy(5)
    combined, oracle = (
        closed_form(queries, [1, 2], name, projection_dim=1).weight[:, :, 0].double()
        for name in ("combined", "oracle")
    )
    mean = torch.stack([query.shifts[:, :, -3:].double().mean(2) for query in queries]).mean(0)
    assert torch.allclose(
        (combined * mean).sum(-1), torch.ones(2, 2, dtype=torch.double), atol=1e-4
    )
    irrelevant = torch.cat([query.shifts[:, :, 3:9] for query in queries], dim=2).double()
    response = [
        torch.einsum("lhmd,lhd->lhm", irrelevant, w).square().sum() for w in (combined, oracle)
    ]
    assert response[0] < response[1]


def test_closed_forms_name_what_they_lack():
    without = [
        QueryFeatures(query.shifts[:, :, :12], query.relevant, 3, oracle=False) for query in toy(2)
    ]
    with pytest.raises(TrainingError, match="no oracle shift"):
        closed_form(without, [1, 2], "oracle")
