"""Early decisions: a document leaves the run when the layers read so far have decided, and no decision changes."""

import json
import math

import pytest
import torch
from conftest import DOCUMENTS, QUERIES, QUERY
from transformers import AutoModel

from rsrank_rag import RSRank
from rsrank_rag.artifact.config import Calibration
from rsrank_rag.errors import BackboneError, InputError
from rsrank_rag.evaluation.datasets import LabelledDocument, LabelledQuery
from rsrank_rag.method.backbone import Backbone
from rsrank_rag.method.early import Undecided, bounds_for, calibrate, check_layers, exact_bounds
from rsrank_rag.method.early_calibration import calibrated, layer_parts
from rsrank_rag.reranker import Reranker, Scored

KINDS = ["qwen3", "llama", "gemma3", "mistral", "gpt2", "bert"]
CPU = torch.device("cpu")


def eager(ranker, mode="exact", *, keep=False, bounds=None):
    """The same ranker with early decisions, with bounds of our own if given."""
    made = RSRank(
        ranker.backbone,
        ranker.prompts,
        ranker.projection,
        ranker.config,
        prefix_cache=keep,
        early_decisions=mode,
        token_budget=ranker.token_budget,
    )
    made._bounds = made._bounds if bounds is None else bounds
    return made


def by_index(result):
    return {document.index: document for document in (*result.kept, *result.dropped)}


def test_exact_bounds_count_the_terms_that_are_left():
    assert exact_bounds([1, 2, 3, 5], 8) == pytest.approx({1: 24, 2: 16, 3: 8}, abs=1e-3)
    assert exact_bounds(range(1, 36), 8)[30] == pytest.approx(40, abs=1e-2)
    assert max(check_layers(range(1, 36))) < 35
    assert check_layers([4]) == ()


def test_a_document_leaves_when_it_can_no_longer_pass_and_its_score_is_the_bound():
    sums = Undecided(3, CPU, {1: 2.0, 2: 1.0}, threshold=0.5)
    assert sums.add(1, torch.tensor([1.0, -1.5, -1.4])).tolist() == [0, 2]  # -1.5 + 2 is not above 0.5
    assert sums.add(2, torch.tensor([0.2, 1.0])) is None
    assert sums.add(3, torch.tensor([0.2, 0.0])) is None
    assert sums.scores.tolist() == pytest.approx([1.4, 0.5, -0.4])
    assert sums.left() == [False, True, False]


def test_without_bounds_every_document_stays():
    sums = Undecided(2, CPU, {}, threshold=math.inf)
    assert sums.add(1, torch.tensor([-100.0, 1.0])) is None
    assert sums.left() == [False, False]


@pytest.mark.parametrize("keep", [False, True], ids=["nothing kept", "kept"])
@pytest.mark.parametrize("kind", KINDS)
def test_those_that_stay_score_as_in_a_full_run_and_those_that_left_carry_a_bound(kind, keep, tiny_ranker):
    full = tiny_ranker(kind)
    scores = full.score(QUERY, DOCUMENTS)
    parts = layer_parts(full, QUERY, DOCUMENTS)
    assert parts.sum(1).tolist() == pytest.approx(scores, abs=1e-4)
    rest = parts.sum(1, keepdim=True) - parts.cumsum(1)
    # As tight as bounds can be: what the later layers added at most. Half of the documents cannot pass the median.
    bounds = {layer: float(rest[:, row].max()) + 1e-3 for row, layer in enumerate(full.projection.layers)}
    cutoff = sum(sorted(scores)[2:4]) / 2
    for _ in range(2):
        result = eager(full, keep=keep, bounds=bounds).rank(QUERY, DOCUMENTS, threshold=cutoff)
        found = by_index(result)
        assert sum(document.is_bound for document in found.values()) >= 2
        assert {d.index for d in result.kept} == {i for i, score in enumerate(scores) if score > cutoff}
        for index, score in enumerate(scores):
            if found[index].is_bound:
                assert score - 1e-4 <= found[index].score <= cutoff
            else:
                assert found[index].score == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "bert"])
def test_exact_mode_decides_as_a_full_run_at_any_threshold(kind, tiny_ranker):
    full = tiny_ranker(kind)
    quick = eager(full)
    for query in QUERIES:
        scores = full.score(query, DOCUMENTS)
        for threshold in (-3.0, 0.0, sum(sorted(scores)[2:4]) / 2, 2.0, 4.0):
            kept = {document.index for document in quick.rank(query, DOCUMENTS, threshold=threshold).kept}
            assert kept == {index for index, score in enumerate(scores) if score > threshold}
    assert any(d.is_bound for d in quick.rank(QUERY, DOCUMENTS, threshold=4.0).dropped)


def test_a_document_that_left_costs_no_further_layer(ranker):
    rows = []
    layers = ranker.backbone.model.layers
    hooks = [layer.register_forward_hook(lambda m, i, out: rows.append(len(out))) for layer in layers]
    try:
        eager(ranker, bounds={1: 0.0, 2: 0.0}).rank(QUERY, DOCUMENTS, threshold=1e6)
    finally:
        for hook in hooks:
            hook.remove()
    # The query alone ran 2 layers of its template and 3 of its tokens; the documents one, for in the next all left.
    assert rows[:5] == [1] * 5
    assert sum(rows[5:]) == len(DOCUMENTS)


def test_scores_and_rankings_without_a_threshold_are_complete(ranker):
    quick = eager(ranker, bounds={1: -1e6})
    assert quick.score(QUERY, DOCUMENTS) == pytest.approx(ranker.score(QUERY, DOCUMENTS), abs=1e-4)
    for limits in ({"threshold": None}, {"min_docs": 2}):
        assert not any(document.is_bound for document in by_index(quick.rank(QUERY, DOCUMENTS, **limits)).values())
    assert all(document.is_bound for document in quick.rank(QUERY, DOCUMENTS).dropped)


def test_a_bound_is_shown_as_one(ranker):
    result = eager(ranker, bounds={1: -1e6}).rank(QUERY, DOCUMENTS)
    assert all(line.startswith("-<") for line in str(result).splitlines()[1:])


def test_other_rankers_on_the_same_model_are_not_touched(ranker):
    expected = ranker.score(QUERY, DOCUMENTS)
    eager(ranker, bounds={1: -1e6}).rank(QUERY, DOCUMENTS)
    assert ranker.score(QUERY, DOCUMENTS) == expected


def test_a_reranker_may_give_bounds_of_its_own():
    class Fake(Reranker):
        def score(self, query, documents):
            return [1.0] * len(documents)

        def _scored(self, query, documents, *, cutoff, show_progress):
            return [Scored(1.0), Scored(-1.0, is_bound=cutoff is not None)]

    assert [d.is_bound for d in Fake().rank("q", ["a", "b"]).dropped] == [True]
    assert [d.is_bound for d in Fake().rank("q", ["a", "b"], threshold=None).kept] == [False, False]


def test_a_calibration_is_the_corrected_quantile_of_what_later_layers_added():
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(500, 3, generator=generator)
    found = calibrate(parts, [1, 2, 3], miss_rate=0.1, queries=25)
    kept = [row for row in parts.tolist() if sum(row) > 0]
    for position, layer in enumerate((1, 2)):
        rest = sorted(sum(row[position + 1 :]) for row in kept)
        rank = math.ceil((len(kept) + 1) * (1 - 0.1 / 2))
        assert found.bounds[layer] == pytest.approx(rest[rank - 1], abs=1e-5)
    assert (found.queries, found.documents, found.kept) == (25, 500, len(kept))


def test_a_calibration_keeps_its_promise_on_new_documents():
    generator = torch.Generator().manual_seed(1)
    missed = total = 0
    for _ in range(20):
        bounds = calibrate(torch.randn(2000, 5, generator=generator), range(1, 6), miss_rate=0.05, queries=1).bounds
        fresh = torch.randn(2000, 5, generator=generator)
        running = fresh.cumsum(1)
        kept = running[:, -1] > 0
        lost = torch.stack([running[:, row] + bounds[row + 1] <= 0 for row in range(4)]).any(0)
        missed += int((lost & kept).sum())
        total += int(kept.sum())
    assert 0 < missed / total <= 0.05


@pytest.mark.parametrize(("miss_rate", "message"), [(0.0, "between 0 and 1"), (1.0, "between"), (0.001, "at least")])
def test_a_calibration_that_cannot_be_is_refused(miss_rate, message):
    with pytest.raises(InputError, match=message):
        calibrate(torch.ones(100, 3), [1, 2, 3], miss_rate=miss_rate, queries=5)


def labelled(count):
    documents = [LabelledDocument(id=str(i), text=text, relevant=False) for i, text in enumerate(DOCUMENTS)]
    return [LabelledQuery(id=str(i), query=f"{QUERY} {i}", documents=tuple(documents)) for i in range(count)]


def test_a_calibrated_artifact_is_saved_and_used(ranker, tmp_path):
    made = calibrated(ranker, labelled(10), miss_rate=0.4)
    assert made.config.calibration.documents == 10 * len(DOCUMENTS)
    made.save_pretrained(tmp_path, include_backbone=True)
    again = RSRank.from_pretrained(tmp_path, device="cpu", dtype="float32", early_decisions="calibrated")
    assert again._bounds == made.config.calibration.bounds == bounds_for("calibrated", again.config)
    assert json.loads((tmp_path / "config.json").read_text())["calibration"]["miss_rate"] == 0.4


def test_what_cannot_be_decided_early_is_refused(ranker):
    with pytest.raises(InputError, match="rsrank calibrate"):
        eager(ranker, "calibrated")
    with pytest.raises(InputError, match="not a mode"):
        eager(ranker, "early")
    with pytest.raises(InputError, match="matched"):
        bounds_for("exact", ranker.config.model_copy(update={"null_prefix": "matched"}))
    wrong = Calibration(miss_rate=0.1, bounds={9: 1.0}, queries=1, documents=1, kept=1)
    with pytest.raises(ValueError, match="calibration names layers"):
        type(ranker.config).model_validate({**ranker.config.model_dump(), "calibration": wrong.model_dump()})


def test_a_model_whose_layers_cannot_drop_rows_is_refused(tiny_folder, monkeypatch):
    backbone = Backbone(AutoModel.from_pretrained(tiny_folder("llama")))
    monkeypatch.setattr("rsrank_rag.method.backbone.ModuleList", tuple)  # finds no layers
    with pytest.raises(BackboneError, match="without early_decisions"):
        backbone.let_rows_leave()


@pytest.mark.parametrize("fault", ["other values", "an error"])
def test_a_model_that_is_refused_is_left_without_hooks(tiny_folder, fault):
    model = AutoModel.from_pretrained(tiny_folder("llama"))
    backbone = Backbone(model)

    def minds_the_number_of_rows(layer, inputs, output):
        if fault == "an error" and len(output) == 2:
            raise RuntimeError("three rows or nothing")
        return output * len(output)

    model.layers[1].register_forward_hook(minds_the_number_of_rows)
    for _ in range(2):
        with pytest.raises(BackboneError, match="without early_decisions"):
            backbone.let_rows_leave()
        assert not any(layer._forward_pre_hooks for layer in model.layers)


def test_a_calibration_is_not_used_above_zero_where_it_promises_nothing(ranker):
    made = calibrated(ranker, labelled(10), miss_rate=0.4)
    quick = eager(made, "calibrated", bounds={1: -1e6})
    assert all(document.is_bound for document in quick.rank(QUERY, DOCUMENTS).dropped)
    assert not any(document.is_bound for document in quick.rank(QUERY, DOCUMENTS, threshold=0.5).dropped)


def test_what_left_is_never_kept_not_even_where_its_bound_is_the_threshold():
    class Fake(Reranker):
        def score(self, query, documents):
            return [1.0]

        def _scored(self, query, documents, *, cutoff, show_progress):
            return [Scored(cutoff + 1e-9, is_bound=True)]

    assert Fake().rank("q", ["a"], threshold=0.1).kept == ()


def test_a_b_of_one_layer_has_nothing_to_calibrate():
    with pytest.raises(InputError, match="one layer"):
        calibrate(torch.ones(500, 1), [3], miss_rate=0.05, queries=3)
