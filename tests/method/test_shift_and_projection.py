"""The maths without a model: shift, cosine, score."""

import math

import pytest
import torch

from research.reproduction.oracle import oracle_scores
from rsrank_rag.backends.torch.projection import Projection
from rsrank_rag.method.formula import (
    EPSILON,
    combine,
    maxsim,
    representational_shift,
    shift_terms,
    similarity_terms,
)
from rsrank_rag.training.store import QueryFeatures

N, L, H, T, D, P = 3, 4, 2, 5, 6, 3


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(11)


@pytest.fixture
def shift(generator):
    return torch.randn(N, L, H, T, D, generator=generator)


def slow_score(weight, shift):
    """The score of one document in plain Python: (L, H, P, D) lists and (L, H, T, D) lists."""
    score = 0.0
    for layer_weight, layer_shift in zip(weight, shift, strict=True):
        for head_weight, head_shift in zip(layer_weight, layer_shift, strict=True):
            cosines = []
            for delta in head_shift:
                z = [sum(b * x for b, x in zip(row, delta, strict=True)) for row in head_weight]
                length = math.sqrt(sum(x * x for x in z))
                cosines.append(sum(z) / (length * math.sqrt(len(z))) if length > EPSILON else 0.0)
            score += sum(cosines) / len(cosines)
    return score


def test_shift_is_the_difference_to_the_query_alone_in_fp32():
    conditioned = torch.tensor([[[[1.5, 2.0]]], [[[0.0, -1.0]]]], dtype=torch.bfloat16)
    alone = torch.tensor([[[0.5, 4.0]]], dtype=torch.bfloat16)
    shift = representational_shift(conditioned, alone)
    assert shift.dtype == torch.float32
    assert shift.tolist() == [[[[1.0, -2.0]]], [[[-0.5, -5.0]]]]


def test_shift_is_taken_after_the_cast_so_that_nothing_is_rounded_away():
    # In bfloat16 itself 256 - 0.9961 would round to 255.
    conditioned, alone = (
        torch.tensor([[[[256.0]]]]).bfloat16(),
        torch.tensor([[[0.99609375]]]).bfloat16(),
    )
    assert representational_shift(conditioned, alone).item() == 256.0 - 0.99609375


def test_shift_takes_a_query_with_or_without_a_document_axis(generator):
    conditioned, alone = (
        torch.randn(N, H, T, D, generator=generator),
        torch.randn(H, T, D, generator=generator),
    )
    torch.testing.assert_close(
        representational_shift(conditioned, alone),
        representational_shift(conditioned, alone[None]),
        rtol=0,
        atol=0,
    )


def cosine_to_ones(projected):
    """The shift terms, (...), of vectors (..., P) that B leaves as they are."""
    width = projected.shape[-1]
    terms = shift_terms(projected.reshape(1, -1, width), torch.eye(width)[None])
    return terms.reshape(projected.shape[:-1])


def test_cosine_to_ones_by_hand():
    projected = torch.tensor([[3.0, 4.0], [-1.0, -1.0], [5.0, -5.0], [1.0, 0.0]])
    expected = torch.tensor([7 / (5 * math.sqrt(2)), -1.0, 0.0, 1 / math.sqrt(2)])
    torch.testing.assert_close(cosine_to_ones(projected), expected)


def test_cosine_of_a_zero_vector_is_exactly_zero_and_not_nan():
    assert cosine_to_ones(torch.zeros(2, 3, P)).tolist() == [[0.0] * 3] * 2


def test_cosine_has_a_finite_gradient_at_zero():
    projected = torch.zeros(P, requires_grad=True)
    cosine_to_ones(projected).backward()
    assert projected.grad.isfinite().all()


def test_cosine_agrees_with_torch_on_random_vectors(generator):
    projected = torch.randn(50, P, generator=generator)
    expected = torch.nn.functional.cosine_similarity(projected, torch.ones(P), dim=-1)
    torch.testing.assert_close(cosine_to_ones(projected), expected)


def score_of(projection, shifts):
    """The paper's scores, (N,), of shifts (N, L, H, T, D)."""
    terms = shift_terms(shifts, projection.weight, projection.head_weight)
    return combine(terms.mean(-1).sum((1, 2)), torch.zeros(len(shifts), 1), None)


def test_score_by_hand():
    # One layer, one head, two tokens; B swaps and doubles.
    projection = Projection(torch.tensor([[[[0.0, 2.0], [2.0, 0.0]]]]), [1])
    shift = torch.tensor([[[[[3.0, 4.0], [0.0, -2.0]]]]])
    expected = (14 / (10 * math.sqrt(2)) + -4 / (4 * math.sqrt(2))) / 2
    assert score_of(projection, shift).item() == pytest.approx(expected)


def test_score_equals_slow_loops_over_layers_heads_and_tokens(shift, generator):
    projection = Projection(torch.randn(L, H, P, D, generator=generator), range(1, L + 1))
    expected = [slow_score(projection.weight.tolist(), one) for one in shift.tolist()]
    assert score_of(projection, shift).tolist() == pytest.approx(expected, abs=1e-5)


def test_terms_summed_over_layers_and_heads_and_averaged_over_tokens_are_the_score(shift):
    layers = (1, 4, 5, 9)
    projection = Projection.random(layers, H, P, D, seed=2)
    terms = [shift_terms(shift[:, row], projection.weight[row]) for row in range(len(layers))]
    assert {term.shape for term in terms} == {(N, H, T)}
    total = sum(term.mean(-1).sum(-1) for term in terms)
    torch.testing.assert_close(score_of(projection, shift), total)


def test_zero_shift_scores_exactly_zero():
    assert score_of(
        Projection.random(range(1, L + 1), H, P, D), torch.zeros(1, L, H, T, D)
    ).tolist() == [0.0]


@pytest.mark.parametrize("scale", [1e-3, 0.5, 7.0, 1e4])
def test_length_of_a_shift_does_not_matter(shift, scale):
    projection = Projection.random(range(1, L + 1), H, P, D)
    torch.testing.assert_close(
        score_of(projection, scale * shift), score_of(projection, shift), rtol=1e-4, atol=1e-5
    )


def test_opposite_shift_scores_the_opposite(shift):
    projection = Projection.random(range(1, L + 1), H, P, D)
    torch.testing.assert_close(score_of(projection, -shift), -score_of(projection, shift))


def test_score_is_at_most_layers_times_heads_and_reaches_it():
    projection = Projection.random(range(1, L + 1), H, P, D, seed=3)
    # B's rows are orthonormal, so B.T @ ones is projected onto ones itself: every cosine is 1.
    best = projection.weight.sum(2)[:, :, None].expand(-1, -1, T, -1)[None]
    assert score_of(projection, best).item() == pytest.approx(L * H)
    assert score_of(projection, -best).item() == pytest.approx(-L * H)


def test_no_score_exceeds_layers_times_heads(generator):
    projection = Projection(100 * torch.randn(L, H, P, D, generator=generator), range(1, L + 1))
    scores = score_of(projection, 1e3 * torch.randn(200, L, H, T, D, generator=generator))
    assert scores.abs().max() <= L * H + 1e-4


def test_order_of_query_tokens_does_not_matter(shift):
    projection = Projection.random(range(1, L + 1), H, P, D)
    torch.testing.assert_close(score_of(projection, shift.flip(3)), score_of(projection, shift))


@pytest.mark.parametrize(("rows", "columns"), [(3, 6), (6, 6), (1, 4)])
def test_random_projection_has_orthonormal_rows(rows, columns):
    weight = Projection.random([1, 2], H, rows, columns).weight
    assert weight.shape == (2, H, rows, columns)
    gram = weight @ weight.mT
    torch.testing.assert_close(gram, torch.eye(rows).expand(2, H, rows, rows), atol=1e-5, rtol=0)


def test_random_projection_wider_than_the_head_has_orthonormal_columns():
    weight = Projection.random([1, 2], H, 8, D).weight
    assert weight.shape == (2, H, 8, D)
    torch.testing.assert_close(
        weight.mT @ weight, torch.eye(D).expand(2, H, D, D), atol=1e-5, rtol=0
    )


def test_random_projection_depends_on_its_seed_alone():
    first = Projection.random([1], H, P, D, seed=4).weight
    torch.manual_seed(99)
    assert torch.equal(first, Projection.random([1], H, P, D, seed=4).weight)
    assert not torch.equal(first, Projection.random([1], H, P, D, seed=5).weight)


def test_heads_and_layers_get_different_random_matrices():
    weight = Projection.random([1, 2], H, P, D).weight.flatten(0, 1)
    assert all(not torch.equal(weight[i], weight[j]) for i in range(len(weight)) for j in range(i))


def test_projection_is_always_fp32_and_trainable():
    projection = Projection(torch.ones(1, H, P, D, dtype=torch.float16), [1])
    assert projection.weight.dtype == torch.float32
    assert [name for name, _ in projection.named_parameters()] == ["weight"]
    assert projection.weight.requires_grad


def test_projection_knows_which_layers_it_reads():
    projection = Projection.random([2, 5], H, P, D)
    assert [layer for layer in range(7) if layer in projection.layers] == [2, 5]


@pytest.mark.parametrize("weight", [torch.ones(2, H, P), torch.ones(3, H, P, D)])
def test_projection_of_the_wrong_shape_is_refused(weight):
    with pytest.raises(ValueError, match=r"L=2 layers, got \("):
        Projection(weight, [1, 2])


def similarities(shift, oracle):
    """Cosine of one layer's shifts (N, H, T, D) to the oracle's: summed over H, averaged over T."""
    rows = torch.cat([shift, oracle[None]]).transpose(0, 1).flatten(1, 2)
    return oracle_scores(
        QueryFeatures(rows[None], (True,) * len(shift), shift.shape[2], oracle=True)
    )


def test_oracle_similarity_by_hand():
    shift = torch.tensor(
        [[[[3.0, 4.0], [0.0, 1.0]]], [[[-4.0, 3.0], [0.0, 0.0]]]]
    )  # (N=2, H=1, T=2, D=2)
    oracle = torch.tensor([[[3.0, 4.0], [1.0, 1.0]]])
    assert similarities(shift, oracle) == pytest.approx([(1.0 + 1 / math.sqrt(2)) / 2, 0.0])


def test_oracle_similarity_of_the_oracle_itself_is_one(generator):
    oracle = torch.randn(H, T, D, generator=generator)
    assert similarities(oracle[None], oracle) == pytest.approx([H])


def test_maxsim_of_zero_vectors_is_zero_and_has_a_finite_gradient():
    query = torch.randn(1, 2, 3, 4, requires_grad=True)
    document = torch.zeros(1, 2, 5, 4, requires_grad=True)
    best = maxsim(query, document, torch.ones(1, 5, dtype=torch.bool))
    best.sum().backward()
    assert best.tolist() == [[0.0, 0.0, 0.0]]
    assert query.grad.isfinite().all()
    assert document.grad.isfinite().all()


def test_similarity_terms_are_the_weighted_cosine_with_the_bias_and_the_weighted_maxsim():
    similarity = torch.tensor([[0.5, 0.25, 0.125], [-1.0, 0.0, 0.5]])
    weights = torch.tensor([4.0, 8.0, -1.0])
    terms = similarity_terms(similarity, weights)
    assert terms.tolist() == [[1.0, 2.0, 1.0], [-5.0, 0.0, 4.0]]
    windows = torch.stack([similarity, similarity.flip(0)], 1)
    assert combine(torch.tensor([0.5, -0.5]), windows, weights).tolist() == [4.5, 3.5]


def test_without_weights_similarity_adds_nothing():
    similarity = torch.ones(2, 3)
    assert similarity_terms(similarity, None).tolist() == torch.zeros(2, 3).tolist()
    assert combine(torch.tensor([0.5, -2.0]), similarity[:, None], None).tolist() == [0.5, -2.0]
