"""The model's side: an error on one pair fails that pair alone."""

import asyncio

import pytest

from rsrank_rag import Reranker
from rsrank_rag.errors import InputError, ScoringError
from rsrank_rag.ranking.explanation import Explanation
from rsrank_rag.reading.parts import Reading
from rsrank_rag.reranker import Pair, Scored
from rsrank_rag.service.engine import Engine, ProcessLostError
from rsrank_rag.service.messages import Task


class Panic(BaseException):
    """What a panic in Rust is in Python: no Exception."""


class Odd(float):
    def __reduce__(self):
        raise ZeroDivisionError


RAISED = {
    "no score": lambda: ScoringError("has no score.", 0),
    "broken": ZeroDivisionError,
    "panic": lambda: Panic("secret"),
    "cancelled": asyncio.CancelledError,
    "exit": lambda: SystemExit(3),
    "lost": lambda: RuntimeError("CUDA error: device-side assert triggered\nSearch for it."),
    "full": lambda: RuntimeError("CUDA error: out of memory"),
    "elsewhere": lambda: ScoringError("has no score.", 1000),
}


class Numbers(Reranker):
    """Scores "3.5" as 3.5, and raises what a document names; reads ten words."""

    def __init__(self):
        self.batches = []

    def score_pairs(self, pairs):
        self.batches.append({pair.query for pair in pairs})
        scored = []
        for pair in pairs:
            if pair.query == "refused" or len(pair.query) > 20:
                raise InputError("The query is refused.")
            if pair.document in RAISED:
                raise RAISED[pair.document]()
            if pair.document != "too few":
                score = None if pair.document == "none" else Odd(pair.document.split()[0])
                scored.append(Scored(score, truncated=lambda: 0, tokens=Odd(1)))
        return scored

    def score(self, query, documents):
        raise AssertionError("The engine scores pairs.")

    def fit_query(self, query):
        return query[:20]

    def token_ends(self, document):
        return [stop + 1 for stop, letter in enumerate(document) if letter == " "], 10


class Explaining(Numbers):
    def explain(self, query, document):
        (scored,) = self.score_pairs([Pair(query, document)])
        return Explanation(query, document, float(scored.score), False, (), (), (), ())


def tasks(*texts, query="q", **options):
    return [Task(Pair(query, str(text), **options)) for text in texts]


def scores(outcomes):
    return [outcome.scored and outcome.scored.score for outcome in outcomes]


@pytest.mark.parametrize("bad", [*sorted(set(RAISED) - {"lost"}), "nan", "inf", "none", "too few"])
@pytest.mark.parametrize("work", ["score", "explain"])
def test_whatever_the_model_does_on_one_document_the_others_get_their_scores(bad, work):
    given = [*tasks(1, 2, bad, 3), *tasks(4, query="other")]
    engine = Engine(Explaining())
    actual = engine.run([Task(task.pair, work) for task in given])
    assert scores(actual) == [1, 2, None, 3, 4]
    assert actual[2].error
    assert "secret" not in actual[2].error
    assert type(actual[0].scored.score) is float


def test_a_lost_device_and_ctrl_c_concern_all():
    with pytest.raises(ProcessLostError, match="device-side assert triggered"):
        Engine(Numbers()).run(tasks(1, "lost"))


def test_a_refused_query_concerns_no_other_pairs():
    given = [task for n in range(20) for q in ("refused", "a", "b") for task in tasks(n, query=q)]
    actual = Engine(Numbers()).run(given)
    refused = [task.pair.query == "refused" for task in given]
    assert [score is None for score in scores(actual)] == refused
    assert actual[0].error == "The query is refused."


@pytest.mark.parametrize("count", [0, 1, 3, 40])
def test_many_documents_without_scores_are_found_in_few_runs(count):
    reranker = Numbers()
    actual = Engine(reranker).run(tasks(*["no score"] * count, *range(40)))
    assert scores(actual) == [*[None] * count, *range(40)]
    assert len(reranker.batches) <= 2 * count + 10


@pytest.mark.parametrize("work", ["score", "explain"])
def test_a_long_query_is_cut_once_for_all_its_pairs(work, monkeypatch):
    fitted, fit = [], Numbers.fit_query

    def fit_query(self, query):
        fitted.append(query)
        return fit(self, query)

    monkeypatch.setattr(Numbers, "fit_query", fit_query)
    long = "a query that is too long"
    engine = Engine(Explaining())
    for number in range(3):
        actual = engine.run([Task(Pair(long, str(number)), work), *tasks(1)])
        assert scores(actual) == [number, 1]
        assert [outcome.query_truncated for outcome in actual] == [work == "score", False]
    assert fitted.count(long) == 1


def test_a_section_is_cut_into_parts_with_their_costs():
    text = "One two. Three four five.\n" * 3
    pair = Pair("a query that is too long", text, reading=Reading(extract="sentences"))
    (actual,) = Engine(Numbers()).run([Task(pair, "cut", (0, len(text)))])
    texts = [text[start:stop] for (start, stop), _ in actual]
    assert texts == ["One two.", "Three four five."] * 3
    assert [cost for _, cost in actual] == [(20 + 8) // 4 + 1, (20 + 16) // 4 + 1] * 3


def test_a_model_without_explanations_says_so():
    engine = Engine(Numbers())
    (result,) = engine.run([Task(Pair("q", "1"), "explain")])
    assert not result.model_failed
    assert "cannot take its scores apart" in result.error


def test_a_real_model_explains_its_score(ranker):
    pair = Pair("When?", "In 1932.")
    (scored,) = Engine(ranker).run([Task(pair)])
    (explained,) = Engine(ranker).run([Task(pair, "explain")])
    assert explained.explanation.score == pytest.approx(scored.scored.score, abs=1e-4)
    assert scored.scored.tokens > 3
