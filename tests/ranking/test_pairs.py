"""Pairs of several queries in one batch: what they score is what each query's own call gives."""

import math

import pytest
import torch
from conftest import (
    CHAT,
    DOCUMENTS,
    QUERIES,
    QUERY,
    load_ranker,
    random_projection,
    score_many,
    unkept,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from rsrank_rag import Reranker, RSRank, Template
from rsrank_rag.backends.options import LoadOptions, ModelSource
from rsrank_rag.errors import InputError, ScoringError
from rsrank_rag.reranker import BLANK_SCORE, Pair, Scored
from rsrank_rag.rsrank import ATTENDED_PER_TOKEN

EXACT = 1e-4  # fp32: rounding alone
# Shorter than a sliding window: a document outside the window shifts nothing.
LONG = "How long is it, and what holds it?"
ALL = [Pair(query, document) for query in (*QUERIES, LONG) for document in DOCUMENTS]
MIXED = [pair for number in range(len(DOCUMENTS)) for pair in ALL[number :: len(DOCUMENTS)]]


def one_by_one(ranker, pairs):
    return [ranker.score(pair.query, [pair.document])[0] for pair in pairs]


def together(ranker, pairs):
    return [actual.score for actual in ranker.score_pairs(pairs)]


@pytest.mark.parametrize(
    "kind",
    [
        "qwen3",
        "llama",
        "gemma2",
        "gemma3",
        "mistral",
        "falcon",
        "phi3",
        "gpt_neox",
        "bert",
        "roberta",
    ],
)
def test_pairs_of_several_queries_score_as_alone_in_any_architecture(kind, tiny_ranker):
    own = [
        Pair(query, f"{number} {text}")
        for number, (query, text) in enumerate((p.query, p.document) for p in MIXED)
    ]
    ranker = tiny_ranker(kind)
    assert together(ranker, own) == pytest.approx(one_by_one(ranker, own), abs=EXACT)


def test_documents_that_several_queries_share_score_as_alone(ranker):
    assert together(ranker, MIXED) == pytest.approx(one_by_one(ranker, MIXED), abs=EXACT)


@pytest.mark.parametrize("positions", ["query", "suffix", "query+suffix"])
def test_any_scored_positions_are_found_in_every_row(positions, tiny_folder):
    template = CHAT.model_copy(update={"suffix": "<|im_end|>\nRelevant: ", "positions": positions})
    options = LoadOptions(device="cpu", dtype="float32", local_files_only=True)
    ranker = unkept(
        RSRank.from_backbone(
            tiny_folder("qwen3"), random_projection("qwen3"), template=template, options=options
        )
    )
    pairs = [Pair(QUERIES[i % 3], f"{i} {text}") for i, text in enumerate(DOCUMENTS)]
    assert together(ranker, pairs) == pytest.approx(one_by_one(ranker, pairs), abs=EXACT)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from(range(4)), st.sampled_from(range(6))), max_size=12),
    st.sampled_from([1, 150, 100_000]),
)
def test_any_pairs_in_any_batches_score_as_alone(ranker, chosen, budget):
    parts = (ranker.backbone, ranker.prompts, ranker.projection, ranker.config)
    budgeted = RSRank(*parts, ModelSource(token_budget=budget, cache_size=0))
    pairs = [Pair((*QUERIES, LONG)[query], DOCUMENTS[document]) for query, document in chosen]
    assert together(budgeted, pairs) == pytest.approx(one_by_one(ranker, pairs), abs=EXACT)


def test_kept_documents_score_as_new_ones(tiny_folder):
    ranker = load_ranker(tiny_folder("qwen3"), "qwen3")
    parts = (ranker.backbone, ranker.prompts, ranker.projection, ranker.config)
    keeping = RSRank(*parts, ModelSource(cache_size="64MB"))
    pairs = [Pair(QUERIES[i % 3], f"{i} {text}") for i, text in enumerate(DOCUMENTS)]
    cold = together(keeping, pairs)
    warm = together(keeping, pairs)
    assert keeping.stats()["device_hits"] == len(pairs)
    assert cold == pytest.approx(one_by_one(ranker, pairs), abs=EXACT)
    assert warm == pytest.approx(cold, abs=EXACT)


@pytest.fixture
def runs(ranker, monkeypatch):
    """Numbers of queries and of prefixes of every run."""
    counts, query_values = [], ranker.backbone.query_values

    def counted(lines, prefixes, *arguments):
        counts.append((len(lines), len(prefixes)))
        return query_values(lines, prefixes, *arguments)

    monkeypatch.setattr(ranker.backbone, "query_values", counted)
    return counts


def test_queries_of_like_length_share_one_run_with_a_row_without_a_document_for_each(ranker, runs):
    pairs = [
        Pair(query, f"{i} {DOCUMENTS[1]}")
        for query in ("When was it opened?", "What holds it?")
        for i in range(3)
    ]
    ranker.score_pairs(
        [*pairs, Pair(LONG * 4, DOCUMENTS[1])]
    )  # the long query does not widen the others' rows
    assert sorted(runs) == [(1, 1 + 1), (2, 6 + 2)]


def test_a_pair_costs_its_tokens_and_the_attention_of_its_query(ranker):
    pairs = [Pair(QUERY, "Bees see blue."), Pair("Who? " * 40, "A text. " * 300)]
    costs = ranker.token_costs(pairs)
    counted = ranker.score_pairs(pairs)
    for pair, cost, one in zip(pairs, costs, counted, strict=True):
        query = len(ranker.prompts.query(pair.query).ids)
        assert cost == one.tokens + query * one.tokens // ATTENDED_PER_TOKEN
    for one, other in zip(counted, ranker.score_pairs(pairs), strict=True):
        assert one.score == pytest.approx(other.score, abs=1e-5)


def test_copies_of_a_pair_are_not_run(ranker, runs):
    ranker.score_pairs([Pair(QUERY, DOCUMENTS[0])] * 50)
    assert runs == [(1, 1 + 1)]


def test_a_cached_document_costs_the_query_and_its_attention():
    ranker = RSRank.from_pretrained("mini", device="cpu", cache_size="64MB")
    pairs = [Pair(QUERY, "A text."), Pair(QUERY, "A text. " * 30)]
    before = ranker.token_costs(pairs)
    tokens = [one.tokens for one in ranker.score_pairs(pairs)]
    query = len(ranker.prompts.query(QUERY).ids)
    for full, cached, length in zip(before, ranker.token_costs(pairs), tokens, strict=True):
        assert cached == full - (length - query)


def test_results_say_what_was_read(ranker):
    query, prompts = ranker.prompts.query(QUERY), ranker.prompts
    limit = prompts.document_limit(len(query.ids))
    texts = [DOCUMENTS[0], "bridge " * (limit + 9), "", " \n"]
    whole, cut, empty, blank = ranker.score_pairs([Pair(QUERY, text) for text in texts])
    own = len(prompts.documents([DOCUMENTS[0]], 0)[0].ids)
    assert (whole.truncated, whole.tokens) == (False, own + len(query.ids))
    assert (cut.truncated, cut.tokens) == (True, prompts.overhead + limit + len(query.ids))
    assert empty == Scored(BLANK_SCORE, tokens=prompts.overhead + len(query.ids))
    assert blank.score == BLANK_SCORE
    assert (
        ranker.score(QUERY, texts)[2:]
        == score_many(ranker, [QUERY], [texts])[0][2:]
        == [BLANK_SCORE] * 2
    )
    assert ranker.score(QUERY, texts)[2:] == [BLANK_SCORE] * 2
    explanation = ranker.explain(QUERY, texts[3])
    assert explanation.score == BLANK_SCORE
    assert not any(map(any, explanation.parts))
    assert str(BLANK_SCORE).rstrip("0") in str(explanation)


def test_a_pair_that_cannot_be_scored_is_named_by_its_place(tiny_folder):
    ranker = load_ranker(tiny_folder("llama"), "llama")
    with torch.no_grad():
        ranker.backbone.model.get_input_embeddings().weight[ranker.prompts.query("~").ids[0]] = (
            math.inf
        )
    pairs = [
        Pair(QUERIES[0], "Frost."),
        Pair(QUERIES[1], "Ice."),
        Pair(QUERIES[0], "Sun."),
        Pair(QUERIES[1], "a ~ b"),
    ]
    with pytest.raises(ScoringError, match="Document 3 scored nan") as caught:
        ranker.score_pairs(pairs)
    assert caught.value.index == 3
    assert len(ranker.score_pairs(pairs[:3])) == 3


def test_no_pairs_give_no_results(ranker):
    assert ranker.score_pairs([]) == []


def test_a_pair_without_a_question_is_refused(ranker):
    with pytest.raises(InputError, match="has no tokens"):
        ranker.score_pairs([Pair(QUERY, "text"), Pair("", "text")])


class Lengths(Reranker):
    """Scores a document by its length, and fails where it holds an x."""

    def score(self, query, documents):
        for index, text in enumerate(documents):
            if "x" in text:
                raise ScoringError("holds an x.", index)
        return [float(len(query) * 100 + len(text)) for text in documents]


def test_any_reranker_scores_pairs_query_by_query_in_their_order():
    pairs = [Pair("ab", "c"), Pair("a", "ccc"), Pair("ab", "cc")]
    assert Lengths().score_pairs(pairs) == [Scored(201.0), Scored(103.0), Scored(202.0)]


def test_a_reranker_may_say_how_it_read_each_document():
    class Short(Lengths):
        def score_documents(self, query, documents):
            scores = self.score(query, documents)
            return [Scored(score, truncated=score > 201) for score in scores]

    pairs = [Pair("ab", "c"), Pair("a", "ccc"), Pair("ab", "cc")]
    assert [one.truncated for one in Short().score_pairs(pairs)] == [False, False, True]


def test_any_rerankers_error_names_the_pair():
    with pytest.raises(ScoringError) as caught:
        Lengths().score_pairs([Pair("a", "b"), Pair("c", "b"), Pair("c", "x")])
    assert caught.value.index == 2


def test_the_default_template_can_be_scored_in_pairs(tiny_folder):
    options = LoadOptions(device="cpu", dtype="float32", local_files_only=True)
    ranker = unkept(
        RSRank.from_backbone(
            tiny_folder("qwen3"), random_projection("qwen3"), template=Template(), options=options
        )
    )
    pairs = [Pair(QUERIES[i % 3], f"{i} {text}") for i, text in enumerate(DOCUMENTS)]
    assert together(ranker, pairs) == pytest.approx(one_by_one(ranker, pairs), abs=EXACT)
