"""Similarity windows and the attention window: what they do to scores and explanations of `mini`.

`mini` has windows of 24 positions, and attention to the 32 nearest positions on each side.
"""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import copy_with, on_torch
from pydantic import ValidationError

from rsrank_rag import RSRank
from rsrank_rag.artifact import hub
from rsrank_rag.method.formula import pooled, similarity_windows, to_numpy

ROOT = Path(__file__).parents[2]
PASSAGES = (ROOT / "examples" / "passages.txt").read_text(encoding="utf-8").splitlines()
QUERY = "How do honeybees tell each other where the flowers are?"
# The passage that answers the query is the fourth of eight.
JOINED = " ".join([*PASSAGES[4:7], PASSAGES[0], *PASSAGES[7:], PASSAGES[3]])


@pytest.fixture(scope="module", params=["torch", "onnx"])
def in_windows(request):
    if request.param == "torch":
        return on_torch()
    return RSRank.from_pretrained(device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "mini"
    fields = {"similarity_window": None, "attention_window": None}
    return on_torch(copy_with(hub.resolve("mini"), folder, **fields))


@pytest.mark.parametrize(
    ("length", "parts"),
    [
        (3, []),
        (24, []),
        (25, [(0, 24), (12, 25)]),
        (36, [(0, 24), (12, 36)]),
        (37, [(0, 24), (12, 36), (24, 37)]),
    ],
)
def test_each_part_of_a_document_has_a_position_that_the_part_before_it_lacks(length, parts):
    assert similarity_windows(length, 24) == [(0, length), *parts]
    assert similarity_windows(length, None) == [(0, length)]


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("size", [8, None])
def test_pooled_states_point_where_the_mean_of_each_window_does(kind, size):
    lengths = [7, 8, 9, 12, 13, 50]
    states = np.random.default_rng(0).standard_normal((6, 50, 6)).astype(np.float32)
    for row, length in enumerate(lengths):
        states[row, length:] = np.nan
    for row, actual in enumerate(pooled(kind(states), lengths, size)):
        windows = similarity_windows(lengths[row], size)
        means = np.array([states[row, start:stop].mean(0) for start, stop in windows])
        assert to_numpy(actual).dtype == np.float32
        np.testing.assert_allclose(actual[0], means[0], rtol=0, atol=1e-6)
        one, other = (v / np.linalg.norm(v, axis=1)[:, None] for v in (to_numpy(actual), means))
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_scores_by_the_best_window_equal_plain_transformers_code(in_windows, monkeypatch):
    plain_torch = on_torch()
    monkeypatch.syspath_prepend(ROOT)
    workload = importlib.import_module("benchmarks.workload")
    plain = workload.Plain(plain_torch, workload.by_hooks(plain_torch), rows=4)
    documents = [*PASSAGES, JOINED, "Bees"]
    expected = plain.score(QUERY, documents)
    for _ in ("cold", "warm"):
        assert in_windows.score(QUERY, documents) == pytest.approx(expected, abs=1e-4)


def test_passages_joined_with_the_answer_take_less_from_its_score(in_windows, whole):
    alone = in_windows.score(QUERY, PASSAGES[:1])[0]
    assert alone - in_windows.score(QUERY, [JOINED])[0] < 0.3 * (
        whole.score(QUERY, PASSAGES[:1])[0] - whole.score(QUERY, [JOINED])[0]
    )


def test_a_document_that_fits_into_a_window_has_the_score_of_the_whole(in_windows, whole):
    short = [" ".join(passage.split()[:12]) for passage in PASSAGES]
    assert in_windows.score(QUERY, short) == pytest.approx(whole.score(QUERY, short), abs=1e-4)
    assert in_windows.explain(QUERY, short[0]).similarity_window is None


def test_an_explanation_has_the_terms_of_the_best_window_and_says_where_it_is(in_windows):
    explanation = in_windows.explain(QUERY, JOINED)
    assert explanation.score == pytest.approx(in_windows.score(QUERY, [JOINED])[0], abs=1e-5)
    assert explanation.score == pytest.approx(
        np.sum(explanation.parts) + explanation.similarity, abs=1e-6
    )
    start, end = explanation.similarity_window
    ends, _ = in_windows.token_ends(JOINED)
    # The window begins at its first token and ends with its last one; it is not at an end here.
    assert ends.index(end) - ends.index(start - 1) == 24
    best = JOINED[start:end]
    assert "honeybee that has found flowers tells the others" in best
    assert str(explanation).splitlines()[-1] == (
        f"match and whole are of characters {start} to {end}: {best}"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"similarity_window": 7}, "multiple of 2"),
        ({"similarity_window": 0}, "greater than 0"),
        ({"fusion_layer": 0}, "similarity_window needs a fusion_layer"),
        ({"attention_window": 63}, "multiple of 2"),
        (
            {"fusion_layer": 0, "similarity_window": None, "attention_window": 64},
            "attention_window needs a fusion_layer",
        ),
    ],
)
def test_a_window_that_cannot_be_is_refused(in_windows, change, message):
    config = in_windows.config
    with pytest.raises(ValidationError, match=message):
        type(config)(**dict(config) | change)
