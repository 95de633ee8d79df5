"""A remote service over real sockets: local results, and clear errors for all its failures."""

import asyncio
import copy
import itertools
import json
import logging
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("uvicorn")

from stub_service import Overlap, Service, listening, talking

from rsrank_rag import Fallback, Reranker
from rsrank_rag.errors import InputError, RemoteError, RSRankError, ScoringError
from rsrank_rag.remote import client as client_module
from rsrank_rag.remote import connections
from rsrank_rag.remote.client import RemoteReranker
from rsrank_rag.reranker import Pair

QUERY = "when was the bridge opened"
DOCUMENTS = ["the bridge was opened in 1932", "frost", "when it was opened", "", "the bridge"]
EXPECTED = Overlap().rank(QUERY, DOCUMENTS)
SECRET = "sk-very-secret"
MISSING = "This service needs an API key."


@pytest.fixture
def address(service):
    return service.address


@contextmanager
def serving(reranker, **settings):
    """`rsrank serve` itself, around a fake; gives its address."""
    app = pytest.importorskip("rsrank_rag.service.app", exc_type=ImportError)
    from service_helpers import scheduler

    with listening(app.create_app(scheduler(reranker), app.Settings(**settings))) as address:
        yield address


class TwoWords(Overlap):
    """Reads two words of a query, and no longer one."""

    def fit_query(self, query):
        words = query.split()
        return query if len(words) <= 2 else f"{words[0]} {words[-1]}"

    def score(self, query, documents):
        if len(query.split()) > 2:
            raise InputError("The query is too long.")
        return super().score(query, documents)


def test_a_query_that_is_too_long_is_cut_by_the_service_which_says_so():
    with serving(TwoWords()) as address:
        remote = RemoteReranker(address)
        for options in ({}, {"extract": "sentences"}):
            result = remote.rank("when is it opened", DOCUMENTS, threshold=None, **options)
            assert (result.query, result.query_truncated) == ("when is it opened", True)
            assert result[0].text == "when it was opened"
        assert not remote.rank("when opened", DOCUMENTS).query_truncated


class InWindows(Overlap):
    """Reads eight words of a document, and long documents in windows by default."""

    long_documents = "windows"

    def token_ends(self, document):
        words = re.finditer(r"\S+", document)
        return [word.end() for word in words], 8

    def score(self, query, documents):
        return super().score(query, [" ".join(text.split()[:8]) for text in documents])


def test_long_documents_are_read_by_default_as_the_services_model_reads_them_at_home():
    long = f"{'It rained. ' * 20}The bridge was opened in 1932. {'It snowed. ' * 20}"
    documents = [long, "frost"]
    with serving(InWindows()) as address:
        for options in ({}, {"long_documents": "cut"}, {"long_documents": "windows"}):
            result = RemoteReranker(address).rank(QUERY, documents, **options)
            assert result == InWindows().rank(QUERY, documents, **options)
            assert len(result.kept) == (options.get("long_documents") != "cut")


@pytest.fixture(scope="module")
def served():
    with serving(Overlap()) as address:
        yield address


@pytest.fixture
def hurried(monkeypatch):
    """Short pauses between tries."""
    monkeypatch.setattr(client_module, "FIRST_PAUSE", 0.01)


async def rank(reranker, asynchronous, query=QUERY, documents=DOCUMENTS, **limits):
    if asynchronous:
        return await reranker.arank(query, documents, **limits)
    return await asyncio.to_thread(reranker.rank, query, documents, **limits)


both_ways = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


# Results

texts = st.text(alphabet=st.sampled_from("ab \ud800é\n"), max_size=6)
limits = st.fixed_dictionaries(
    {},
    optional={
        "threshold": st.none() | st.floats(-3, 3) | st.just("native"),
        "top_n": st.none() | st.integers(2, 5),
        "max_gap": st.none() | st.floats(0, 3) | st.just("native"),
    },
)


@pytest.mark.parametrize("kind", ["a stub", "rsrank serve"])
@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(query=texts, documents=st.lists(texts, max_size=6), limits=limits)
def test_a_remote_rank_is_the_local_one(running_service, served, kind, query, documents, limits):
    expected = Overlap().rank(query, documents, **limits)
    pairs = [Pair(query, text) for text in documents]
    reranker = RemoteReranker(running_service.address if kind == "a stub" else served)
    # A lone surrogate is no text that can be sent; the mark in its place is read as RSRank reads
    # it.
    if "\ud800" not in query + "".join(documents):
        assert reranker.rank(query, documents, **limits) == expected
        assert asyncio.run(reranker.arank(query, documents, **limits)) == expected
        assert reranker.score(query, documents) == [s.score for s in Overlap().score_pairs(pairs)]
    else:
        result = reranker.rank(query, documents, threshold=None)
        assert sorted(document.text for document in result.kept) == sorted(documents)


@both_ways
async def test_the_native_threshold_is_that_of_the_services_model(service, address, asynchronous):
    for threshold in (1.5, None):
        service.threshold = threshold
        result = await rank(RemoteReranker(address), asynchronous)
        assert result.threshold == threshold
        assert len(result.kept) == (2 if threshold else len(DOCUMENTS))
        nothing = await rank(RemoteReranker(address), asynchronous, documents=[])
        assert nothing.threshold == threshold
        assert RemoteReranker(address).threshold == threshold


def test_rows_are_read_by_their_number_and_say_what_was_cut(service, address):
    service.script += [lambda answer: {**answer, "results": answer["results"][::-1]}]
    documents = ["frost", "the bridge was opened...", "bridge"]
    result = RemoteReranker(address).rank(QUERY, documents, threshold=None)
    assert [(d.index, d.truncated) for d in result.kept] == [(1, True), (2, False), (0, False)]
    assert type(result.kept[0].score) is float


def test_pairs_of_several_queries_are_scored_as_at_home(address):
    pairs = [Pair("a b", "a b"), Pair("c", "c d"), Pair("a b", "x")]
    assert RemoteReranker(address).score_pairs(pairs) == Overlap().score_pairs(pairs)


@both_ways
async def test_all_scores_are_asked_for_raw_whatever_the_services_settings(
    service, address, asynchronous
):
    documents = ["a\ud83d\ude00", "b\ud800"]
    await rank(RemoteReranker(address), asynchronous, documents=documents, threshold=1.0, top_n=1)
    (body,) = service.seen
    assert (body["query"], body["documents"]) == (QUERY, ["a\ufffd\ufffd", "b\ufffd"])
    assert (body["threshold"], body["normalize"]) == (None, False)


@both_ways
async def test_a_model_can_be_asked_for_by_name_and_another_one_is_not_taken(
    service, address, asynchronous
):
    await rank(RemoteReranker(address, model="overlap"), asynchronous)
    assert service.seen[-1]["model"] == "overlap"
    for documents in ([], DOCUMENTS):
        with pytest.raises(RemoteError, match=r"'large' was requested, and .* holds 'overlap'"):
            await rank(RemoteReranker(address, model="large"), asynchronous, documents=documents)


@both_ways
@pytest.mark.parametrize(
    ("query", "documents", "limits", "message"),
    [
        (QUERY, "one text", {}, "documents must be a list"),
        (QUERY, ["a", None], {}, "Document 1 must be a string, got NoneType"),
        (3, ["a"], {}, "A query must be a string, got int"),
        (QUERY, ["a"], {"top_n": 0}, "top_n must be a whole number of at least 1"),
        (QUERY, ["a"], {"threshold": float("nan")}, "threshold must be a number"),
    ],
)
async def test_what_makes_no_sense_is_not_sent(
    service, address, asynchronous, query, documents, limits, message
):
    with pytest.raises(InputError, match=message):
        await rank(RemoteReranker(address), asynchronous, query, documents, **limits)
    assert service.seen == []


# Addresses and keys


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/", "/v1/rerank", "//"])
def test_the_address_may_end_as_other_clients_want_it(address, ending):
    assert RemoteReranker(address + ending).base_url == address
    assert RemoteReranker(address + ending).score("a", ["a"]) == [0.0]
    assert RemoteReranker("https://host/path" + ending).base_url == "https://host/path"


@pytest.mark.parametrize(
    "wrong",
    [
        None, "", "localhost:8000", "ftp://host", "http://", "http://host:port", "http://..",
        "http://user:pass@host", "http://host?key=pass", "http://host#pass",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_and_no_password_repeated(wrong):
    with pytest.raises(InputError, match="base_url must") as caught:
        RemoteReranker(wrong)
    assert "pass@" not in str(caught.value)
    assert "key=" not in str(caught.value)


@both_ways
@pytest.mark.parametrize("source", ["argument", "environment"])
async def test_the_key_is_sent_and_a_wrong_or_missing_one_is_explained(
    service, address, asynchronous, source, monkeypatch
):
    service.key = SECRET

    def keyed(key):
        if source == "argument":
            return RemoteReranker(address, api_key=key)
        monkeypatch.setenv("RSRANK_API_KEY", key)
        return RemoteReranker(address)

    assert len((await rank(keyed(SECRET + "\n"), asynchronous)).kept) > 0
    assert service.headers[-1]["authorization"] == f"Bearer {SECRET}"
    refused = rf"answered 401: {MISSING} Check base_url, and the key in api_key or RSRANK_API_KEY"
    with pytest.raises(InputError, match=refused):
        await rank(keyed("wrong"), asynchronous)
    monkeypatch.delenv("RSRANK_API_KEY", raising=False)
    with pytest.raises(InputError, match=refused):
        await rank(RemoteReranker(address), asynchronous)
    assert len(service.headers) == 3  # nothing is tried again


def test_the_keys_variable_is_read_at_each_call_and_of_several_keys_the_first_is_sent(
    service, address, monkeypatch
):
    reranker = RemoteReranker(address)
    for key, value in (("first", "first"), ("second", " second, third"), ("third", ",third")):
        monkeypatch.setenv("RSRANK_API_KEY", value)
        reranker.score("a", ["a"])
        assert service.headers[-1]["authorization"] == f"Bearer {key}"


def test_the_key_is_never_shown_pickled_or_logged(service, address, caplog, hurried):
    reranker = RemoteReranker(address, api_key=SECRET)
    service.script += [(503, {"message": "Busy."}), (500, {"message": "Broken."})]
    with caplog.at_level(logging.DEBUG), pytest.raises(RSRankError) as caught:
        reranker.rank(QUERY, DOCUMENTS)
    shown = f"{reranker} {vars(reranker)} {caught.value!r} {caught.value.args} {caplog.text}"
    assert len(caplog.messages) > 1
    assert SECRET not in shown
    assert "1932" not in shown
    assert SECRET.encode() not in pickle.dumps(reranker)
    for copied in (copy.copy(reranker), copy.deepcopy(reranker)):
        copied.score("a", ["a"])
        assert service.headers[-1]["authorization"] == f"Bearer {SECRET}"
    pickle.loads(pickle.dumps(reranker)).score("a", ["a"])
    assert "authorization" not in service.headers[-1]


@pytest.mark.parametrize("key", ["sk\nX-Other: 1", "schlüssel", "sk\x00"])
def test_a_key_that_cannot_be_sent_is_refused_without_being_shown(key, monkeypatch):
    with pytest.raises(InputError, match="api_key holds characters") as caught:
        RemoteReranker("http://localhost", api_key=key)
    assert key not in str(caught.value)
    if "\x00" not in key:
        monkeypatch.setenv("RSRANK_API_KEY", key)
        with pytest.raises(InputError, match="RSRANK_API_KEY holds characters"):
            RemoteReranker("http://localhost").score("a", ["a"])


@both_ways
async def test_redirects_are_not_followed(service, address, asynchronous):
    with talking() as (elsewhere, heard):
        service.script += [(307, {}, {"Location": f"{elsewhere}/v1/rerank"})]
        with pytest.raises(RemoteError, match=r"answered 307\. Check base_url"):
            await rank(RemoteReranker(address, api_key=SECRET), asynchronous)
        assert heard == []
    assert len(service.seen) == 1


# Failures that may pass


@both_ways
@pytest.mark.parametrize("status", [429, 502, 503])
async def test_a_busy_service_is_asked_again(service, address, asynchronous, status, hurried):
    service.script += [(status, {"message": "Busy."})] * 2
    assert await rank(RemoteReranker(address, max_retries=2), asynchronous) == EXPECTED
    assert len(service.seen) == 3
    assert service.seen[0] == service.seen[2]


@both_ways
async def test_after_the_last_try_the_services_own_words_are_the_error(
    service, address, asynchronous, hurried
):
    service.script += [(429, {"message": "40 documents are waiting."}, {"Retry-After": "0"})] * 3
    with pytest.raises(RemoteError, match=r"answered 429: 40 documents are waiting\.$") as caught:
        await rank(RemoteReranker(address, max_retries=2), asynchronous)
    assert (caught.value.status, caught.value.transient, caught.value.retry_after) == (429, True, 0)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), vars(again)) == (str(caught.value), vars(caught.value))
    assert len(service.seen) == 3


@both_ways
async def test_the_wait_that_the_service_asks_for_is_kept(service, address, asynchronous, hurried):
    service.script += [(503, {}, {"Retry-After": "1"})]
    started = time.monotonic()
    await rank(RemoteReranker(address), asynchronous)
    assert time.monotonic() - started > 0.99


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout": 0},
        {"timeout": "5"},
        {"timeout": None},
        {"max_retries": -1},
        {"max_retries": 1.5},
    ],
)
def test_a_wrong_time_or_number_of_retries_is_refused_before_a_call(wrong):
    (name,) = wrong
    with pytest.raises(InputError, match=f"{name} must be a"):
        RemoteReranker("http://localhost:8080", **wrong)


@both_ways
async def test_a_wait_beyond_the_timeout_is_not_begun(service, address, asynchronous):
    service.script += [(503, {"message": "Loading."}, {"Retry-After": "3600"})]
    with pytest.raises(RemoteError, match=r"503: Loading\.$") as caught:
        await rank(RemoteReranker(address, timeout=60), asynchronous)
    assert caught.value.retry_after == 3600
    assert len(service.seen) == 1


def test_pauses_grow_to_a_limit_and_differ(service, address, monkeypatch, caplog):
    caplog.set_level("INFO", "rsrank_rag.remote.client")
    monkeypatch.setattr(client_module, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(client_module, "LONGEST_PAUSE", 0.2)
    service.script += [(503, {"message": "busy"})] * 12
    for _ in range(2):
        with pytest.raises(RemoteError, match=r"503: busy\.$"):
            RemoteReranker(address, max_retries=5).rank(QUERY, DOCUMENTS)
    assert len(service.seen) == 12
    pauses = [record.args[0] for record in caplog.records]
    assert len(pauses) == 10 == len(set(pauses))
    for number, seconds in enumerate(pauses):
        least = min(0.05 * 2 ** (number % 5), 0.2)
        assert least <= seconds <= least + 0.05


@both_ways
@pytest.mark.parametrize("status", [408, 500, 501, 504])
async def test_other_failures_of_the_service_are_not_tried_again(
    service, address, asynchronous, status
):
    service.script += [(status, b"<html>proxy</html>")]
    with pytest.raises(RemoteError, match=f"answered {status}\\.") as caught:
        await rank(RemoteReranker(address), asynchronous)
    assert (caught.value.status, caught.value.transient, len(service.seen)) == (status, False, 1)


@both_ways
@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, {"message": "The body is not JSON."}, r"answered 400: The body is not JSON\.$"),
        (404, b"<html>", r"answered 404\. Check base_url"),
        (413, {"message": "1,001 documents, may have 1,000."}, r"answered 413: 1,001 documents,"),
        (422, {"message": "The query has no tokens"}, r"answered 422: The query has no tokens\.$"),
        (422, {"detail": [{"input": "1932"}]}, r"answered 422\.$"),
        (418, b"[" * 100_000, r"answered 418\.$"),
    ],
)
async def test_a_refused_request_is_an_input_error_in_the_services_words(
    service, address, asynchronous, status, body, message
):
    service.script += [(status, body)]
    with pytest.raises(InputError, match=message) as caught:
        await rank(RemoteReranker(address), asynchronous)
    assert "1932" not in str(caught.value)
    assert len(service.seen) == 1


@both_ways
async def test_what_takes_too_long_ends_with_the_timeout_and_is_not_asked_again(
    service, address, asynchronous
):
    service.script += [3600]
    with pytest.raises(RemoteError, match=r"did not answer in 0\.3 seconds\. Raise timeout"):
        await rank(RemoteReranker(address, timeout=0.3), asynchronous)
    # The service hears of it long before it would have answered.
    await until(lambda: service.left == 1)
    assert len(service.seen) == 1


@both_ways
async def test_an_answer_in_drops_ends_with_the_timeout(asynchronous):
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
    drops = itertools.chain([head], itertools.repeat(b" "))  # as long as anybody listens
    with talking(drops) as (elsewhere, _), pytest.raises(RemoteError, match="did not answer in 0"):
        await rank(RemoteReranker(elsewhere, timeout=0.3), asynchronous)


@both_ways
@pytest.mark.parametrize(
    "cut", [[], [b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"], [b"hello\r\n\r\n"]]
)
async def test_a_lost_connection_is_tried_again(asynchronous, cut, hurried):
    answer = json.dumps(Service().rows({"query": QUERY, "documents": DOCUMENTS})).encode()
    whole = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(answer)
    with talking(cut, [whole + answer]) as (elsewhere, heard):
        assert await rank(RemoteReranker(elsewhere), asynchronous) == EXPECTED
        assert len(heard) == 2
    with talking(*[cut] * 2) as (elsewhere, heard):
        with pytest.raises(RemoteError, match=r"could not be reached") as caught:
            await rank(RemoteReranker(elsewhere, max_retries=1), asynchronous)
        assert caught.value.transient
        assert len(heard) == 2


@both_ways
async def test_where_nobody_listens_the_error_says_so(asynchronous, hurried):
    with pytest.raises(RemoteError, match=r"http://127\.0\.0\.1:9 could not be reached ") as caught:
        await rank(RemoteReranker("http://127.0.0.1:9"), asynchronous)
    assert caught.value.status is None


# Answers that cannot be used


def without(name):
    return lambda answer: {key: value for key, value in answer.items() if key != name}


def with_rows(change):
    return lambda answer: {**answer, "results": change(answer["results"])}


def sentence(start, end):
    return {"start": start, "end": end, "score": 1.0, "text": ""}


def with_first(**fields):
    return with_rows(lambda rows: [{**rows[0], **fields}, *rows[1:]])


@both_ways
@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (with_rows(lambda rows: rows[1:]), "not give exactly one score for each"),
        (with_rows(lambda rows: [*rows, rows[0]]), "not give exactly one"),
        (with_rows(lambda rows: [*rows[1:], rows[1]]), "not give exactly one"),
        (with_first(index=5), "not give exactly one"),
        (with_rows(lambda rows: [*rows, {**rows[0], "index": -1}]), "not give exactly one"),
        (with_rows(lambda rows: [*rows, {**rows[0], "index": 5}]), "not give exactly one"),
        (with_first(relevance_score="0.5"), "did not answer as an rsrank service does"),
        (with_first(index=True), "did not answer as an rsrank service does"),
        (with_first(index=0.0), "did not answer as an rsrank service does"),
        (without("results"), r"results: Field required\)\. Is it one\?"),
        (with_first(window={"start": 0, "end": 1000, "count": 2}), "a place outside of a document"),
        (with_first(window={"start": -1, "end": 2, "count": 2}), "a place outside of a document"),
        (with_first(excerpts=[sentence(3, 3)]), "a place outside of a document"),
        (with_first(excerpts=[sentence(0, 1), sentence(2, 99)]), "a place outside of a document"),
        (lambda answer: b" " * 2_000_000, "answers with more than"),
        (lambda answer: b"{'results'", "Invalid JSON"),
        (lambda answer: b"", "did not answer as"),
        (lambda answer: [answer], "did not answer as"),
    ],
)
async def test_an_answer_that_cannot_be_trusted_is_an_error(
    service, address, asynchronous, break_it, message
):
    service.script += [break_it]
    with pytest.raises(RemoteError, match=message) as caught:
        await rank(RemoteReranker(address), asynchronous)
    assert not caught.value.transient
    assert len(str(caught.value)) < 300
    assert len(service.seen) == 1


@both_ways
@pytest.mark.parametrize("score", ["null", "NaN", "Infinity", "-Infinity", "1e999"])
async def test_a_document_without_a_finite_score_is_named(service, address, asynchronous, score):
    def spoil(answer):
        rows = ", ".join(
            f'{{"index": {i}, "relevance_score": {score if i == 2 else 1.0}}}'
            for i in range(len(DOCUMENTS))
        )
        return f'{{"model": "overlap", "threshold": 0.0, "results": [{rows}]}}'.encode()

    service.script += [spoil]
    with pytest.raises(
        ScoringError, match=r"Document 2 scored .* which can be neither kept"
    ) as caught:
        await rank(RemoteReranker(address), asynchronous, threshold=None)
    assert caught.value.index == 2


# Ready or not


def test_warming_up_waits_for_the_service_and_takes_the_key(service, address, hurried):
    service.key = SECRET
    service.threshold = 2.0
    reranker = RemoteReranker(address, api_key=SECRET)
    reranker.warm_up()
    service.script += [(503, {"message": "The model is being loaded."})]
    reranker.warm_up()
    assert reranker.threshold == 2.0
    with pytest.raises(InputError, match="the key in api_key"):
        RemoteReranker(address, api_key="wrong").warm_up()
    with pytest.raises(RemoteError, match="holds 'overlap'"):
        RemoteReranker(address, api_key=SECRET, model="large").warm_up()
    service.script += [(503, {"message": "The model is being loaded."})]
    with pytest.raises(RemoteError, match=r"503: The model is being loaded\."):
        RemoteReranker(address, api_key=SECRET, max_retries=0).warm_up()
    with pytest.raises(RemoteError, match="could not be reached"):
        RemoteReranker("http://127.0.0.1:9", max_retries=0).warm_up()


# With the service itself


class Numbers(Reranker):
    """A document's score is the number it starts with."""

    threshold = 1.0

    def score(self, query, documents):
        return [float(text.split()[0]) for text in documents]


@both_ways
async def test_a_service_that_drops_and_normalises_by_itself_still_gives_all_and_raw(asynchronous):
    documents = ["1.5 a", "-2", "1", " 7"]
    weak = {"threshold": 9, "fallback": Fallback(1, 9)}
    with serving(Numbers(), drop=True, normalize=True) as address:
        for limits in ({}, {"threshold": None}, {"threshold": -2.5, "top_n": 2}, weak):
            actual = await rank(RemoteReranker(address), asynchronous, "q", documents, **limits)
            assert actual == Numbers().rank("q", documents, **limits)


@both_ways
async def test_the_services_refusals_are_our_errors(asynchronous, monkeypatch):
    monkeypatch.delenv("RSRANK_API_KEY", raising=False)
    with serving(Numbers(), api_keys=(SECRET,), max_documents=3) as address:
        keyed = RemoteReranker(address, api_key=SECRET)
        keyed.warm_up()
        assert keyed.threshold == 1.0
        with pytest.raises(InputError, match=rf"answered 401: {MISSING}.* the key in api_key"):
            await rank(RemoteReranker(address), asynchronous)
        with pytest.raises(InputError, match=r"answered 413: The request has 4 documents; it may"):
            await rank(keyed, asynchronous, "q", ["1"] * 4)
        with pytest.raises(InputError, match=r"answered 400: .*query: String should have at most"):
            await rank(keyed, asynchronous, "q" * 10_001, ["1"])
        for documents in (["1", "nan", "2"], ["3", "inf"], ["3", "nan", "inf"]):
            with pytest.raises(ScoringError, match=r"^Document 1 scored (nan|inf)") as caught:
                await rank(keyed, asynchronous, "q", documents)
            assert caught.value.index == 1
        with pytest.raises(ScoringError, match=r"^Document 0 scored nan") as caught:
            await rank(keyed, asynchronous, "q", ["nan"])
        assert caught.value.index == 0
        with pytest.raises(RemoteError, match=r"answered 500: .*made the model fail") as caught:
            await rank(keyed, asynchronous, "q", ["no number"])
        assert "no number" not in str(caught.value)
        elsewhere = RemoteReranker(address + "/elsewhere", api_key=SECRET)
        with pytest.raises(InputError, match=r"answered 404: Not Found\. Check base_url"):
            await rank(elsewhere, asynchronous, "q", ["1"])


# Loops, threads, processes


async def until(done):
    for _ in range(3000):
        if done():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("It did not happen.")


async def test_a_cancelled_call_closes_its_request(service, address):
    service.script += [3600]
    reranker = RemoteReranker(address)
    call = asyncio.create_task(reranker.arank(QUERY, DOCUMENTS))
    await until(lambda: service.running == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: service.left == 1)
    assert service.left == 1
    assert await reranker.arank(QUERY, DOCUMENTS) == EXPECTED


async def test_64_calls_at_once_are_all_answered_beside_each_other_and_none_in_a_thread(
    service, address
):
    reranker = RemoteReranker(address)
    await reranker.arank(QUERY, DOCUMENTS)
    service.together = 64  # nobody is answered before all have asked
    threads, most = threading.active_count(), 0
    batches = [[f"{text} {number}" for text in DOCUMENTS] for number in range(64)]
    calls = []
    for number, texts in enumerate(batches):
        calls.append(asyncio.create_task(reranker.arank(f"{QUERY} {number}", texts)))
    while not all(call.done() for call in calls):
        most = max(most, threading.active_count())
        await asyncio.sleep(0.01)
    expected = [Overlap().rank(f"{QUERY} {i}", texts) for i, texts in enumerate(batches)]
    assert [call.result() for call in calls] == expected
    assert service.most == 64
    assert most == threads


async def test_the_event_loop_stays_free_while_a_service_thinks_and_between_two_tries(
    service, address
):
    reranker = RemoteReranker(address)
    await reranker.arank(QUERY, DOCUMENTS)
    thought = threading.Event()
    service.script += [(503, {}, {"Retry-After": "1"}), thought]
    seen = []  # how many requests had come at each beat

    async def heartbeat():
        while True:
            seen.append(len(service.seen))
            # The second try is there: it is answered because this loop goes on.
            if seen.count(3) > 5:
                thought.set()
            await asyncio.sleep(0.005)

    beating = asyncio.create_task(heartbeat())
    await reranker.arank(QUERY, DOCUMENTS)
    beating.cancel()
    assert seen.count(2) > 5  # the pause after the first is not one long wait


@pytest.fixture
def lasting(address, monkeypatch):
    """Connections that do not grow old while a busy machine does something else."""
    connections.client.cache_clear()
    lasting = connections.httpx.Limits(keepalive_expiry=None)
    monkeypatch.setattr(connections.httpx, "Limits", lambda **options: lasting)
    yield
    connections.client.cache_clear()


def test_connections_are_used_again_by_all_who_talk_to_an_address(service, address, lasting):
    for _ in range(3):
        RemoteReranker(address, timeout=5).score("a", ["a"])
    assert len(service.peers) == 1

    async def several():
        for _ in range(3):
            await RemoteReranker(address, timeout=5).arank("a", ["a"])

    asyncio.run(several())
    assert len(service.peers) == 1


def test_one_reranker_serves_loops_one_after_another(service, address, lasting):
    reranker = RemoteReranker(address)
    for _ in range(3):
        loop = asyncio.new_event_loop()  # which ends without a word to anybody
        assert loop.run_until_complete(reranker.arank(QUERY, DOCUMENTS)) == EXPECTED
        loop.close()
    assert len(service.peers) == 1


def test_one_reranker_serves_threads_and_loops_at_once(service, address):
    reranker = RemoteReranker(address)
    results = []

    def blocking():
        results.append(reranker.rank(QUERY, DOCUMENTS))

    def looping():
        async def several():
            calls = [reranker.arank(QUERY, DOCUMENTS) for _ in range(4)]
            results.extend(await asyncio.gather(*calls))

        asyncio.run(several())

    threads = [threading.Thread(target=target) for target in (blocking, looping) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == [EXPECTED] * 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_opens_its_own_connections(service, address):
    reranker = RemoteReranker(address)
    reranker.rank(QUERY, DOCUMENTS)
    before = set(service.peers)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def child():
        in_loop = asyncio.run(reranker.arank(QUERY, DOCUMENTS))
        answers.put((reranker.rank(QUERY, DOCUMENTS), in_loop))

    process = context.Process(target=child)
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert answers.get() == (EXPECTED, EXPECTED)
    assert service.peers - before  # the child's
    assert reranker.rank(QUERY, DOCUMENTS) == EXPECTED


# Without torch

FRESH = """
import asyncio, json, sys
sys.modules[sys.argv[2]] = None
from langchain_core.documents import Document
from rsrank_rag import RSRankCompressor
compressor = RSRankCompressor(base_url=sys.argv[1])
documents = [Document(text) for text in ("a b", "c", "a b c")]
compressor.warm_up()
found = compressor.compress_documents(documents, "a b c d")
assert asyncio.run(compressor.acompress_documents(documents, "a b c d")) == found
heavy = [name for name in ("torch", "transformers", "huggingface_hub") if name in sys.modules]
print(json.dumps([[document.page_content for document in found], heavy]))
"""


@pytest.mark.parametrize("missing", ["nothing", "httpx2"])
def test_a_fresh_interpreter_asks_a_service_without_torch_and_without_httpx2(address, missing):
    pytest.importorskip("langchain_core")
    done = subprocess.run(
        [sys.executable, "-c", FRESH, address, missing], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [["a b c", "a b"], []]
