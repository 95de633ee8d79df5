"""What waits for the model: limits, turns, copies, sections; without a model and without time."""

from collections import Counter

import pytest

from rsrank_rag.reading.parts import Reading
from rsrank_rag.reranker import Pair, Scored
from rsrank_rag.service.messages import Outcome, ServiceError
from rsrank_rag.service.work_queue import WorkQueue

WINDOWS = Reading(long_documents="windows")
SENTENCES = Reading(extract="sentences")


def queue(tokens=100_000, batch_tokens=100):
    return WorkQueue(tokens, batch_tokens)


def pairs(*texts, query="q", **options):
    return [Pair(query, text, **options) for text in texts]


def cut(waiting, cost=10, parts=1):
    """Cut all that waits; each section has parts of this cost."""
    for request in waiting.requests:
        batch = [item for item in request.items if item.task.work == "cut"]
        for item in batch:
            request.items.remove(item)
        waiting.finish(batch, [parts_of(item, cost, parts) for item in batch])


def parts_of(item, cost, count=1):
    start, _ = item.task.section
    return [((start + number, start + number + 1), cost) for number in range(count)]


def scored(waiting, batch, score=1.0):
    waiting.finish(batch, [Outcome(Scored(score))] * len(batch))


def costs(batch):
    total = Counter()
    for item in batch:
        total[item.request.client] += item.cost
    return total


async def test_clients_that_wait_get_equal_shares():
    waiting = queue()
    for client in ("large", "small"):
        waiting.add(client, pairs(*map(str, range(900 if client == "large" else 300))), 512)
    cut(waiting)
    shares = Counter()
    for _ in range(20):
        batch = waiting.next_batch()
        assert sum(item.cost for item in batch) == 100
        shares += costs(batch)
    assert abs(shares["large"] - shares["small"]) <= 20


async def test_a_client_that_had_little_lately_comes_before_one_that_had_much():
    waiting = queue()
    waiting.add("greedy", pairs(*map(str, range(900))), 512)
    cut(waiting)
    for _ in range(10):
        waiting.next_batch()
    for client in ("first", "second"):
        waiting.add(client, pairs(*map(str, range(6))), 512)
    cut(waiting)
    # The items of clients that had little share a batch, which is not filled up for the greedy one.
    assert costs(waiting.next_batch()) == {"first": 50, "second": 50}
    assert costs(waiting.next_batch()) == {"first": 10, "second": 10}
    assert costs(waiting.next_batch()) == {"greedy": 100}


async def test_what_a_client_had_long_ago_does_not_count():
    waiting = queue()
    waiting.add("once", pairs(*map(str, range(100))), 512)
    cut(waiting)
    # Its items are done after ten batches.
    for _ in range(400):
        waiting.next_batch()
    for client in ("once", "new"):
        waiting.add(client, pairs(*map(str, range(100, 200))), 512)
    cut(waiting)
    assert costs(waiting.next_batch()) == {"once": 50, "new": 50}


async def test_a_client_with_large_items_gets_no_more_than_one_with_small_items():
    waiting = queue()
    waiting.add("large", pairs(*map(str, range(100))), 512)
    cut(waiting, 100)
    waiting.add("small", pairs(*map(str, range(900))), 512)
    cut(waiting, 10)
    shares = Counter()
    for _ in range(40):
        shares += costs(waiting.next_batch())
    assert abs(shares["large"] - shares["small"]) <= 100
    assert shares.total() > 3500


async def test_an_item_larger_than_a_batch_runs_alone_and_others_take_turns_with_it():
    waiting = queue()
    for client in ("large", "other"):
        waiting.add(client, pairs(*map(str, range(60))), 512)
        cut(waiting, 500 if client == "large" else 10)
    batches = [costs(waiting.next_batch()) for _ in range(7)]
    assert batches[0] == batches[6] == {"large": 500}
    assert batches[1:6] == [{"other": 100}] * 5


async def test_copies_are_scored_once():
    waiting = queue()
    request = waiting.add("client", pairs("a", "b", "a", "a"), 512)
    cut(waiting)
    batch = waiting.next_batch()
    assert [item.task.pair.document for item in batch] == ["a", "b"]
    scored(waiting, batch)
    assert request.answer.done()
    assert request.tokens == 2


async def test_a_client_may_have_half_of_the_tokens_and_all_clients_all():
    waiting = queue(tokens=1000)
    documents = pairs("x" * 1500)
    waiting.add("greedy", documents, 512)
    with pytest.raises(ServiceError, match="Too many tokens") as refused:
        waiting.add("greedy", documents, 512)
    assert (refused.value.status_code, refused.value.headers) == (429, {"Retry-After": "1"})
    second = waiting.add("modest", documents, 512)
    with pytest.raises(ServiceError) as refused:
        waiting.add("third", documents, 512)
    assert refused.value.status_code == 429
    waiting.remove(second)
    waiting.add("third", documents, 512)


async def test_a_request_beyond_half_of_the_tokens_never_fits():
    waiting = queue(tokens=1000)
    with pytest.raises(ServiceError, match="it may need 500") as refused:
        waiting.add("client", pairs("x" * 2000), 512)
    assert refused.value.status_code == 413
    # Of a document that is read whole, the model reads at most so many tokens.
    waiting.add("client", pairs("x" * 2000), 100)


async def test_the_query_is_charged_with_each_document():
    waiting = queue()
    for query in ("q", "q" * 4000):
        waiting.add(query, pairs(*map(str, range(10)), query=query), 512)
    short, long = (request.tokens for request in waiting.requests)
    assert long - short == 10 * 1000


async def test_long_documents_wait_as_sections_whose_parts_come_before_other_items():
    waiting = queue(batch_tokens=2000)
    text = "x " * 25_000
    request = waiting.add("client", pairs(text, "other", reading=WINDOWS), 512)
    batch = waiting.next_batch()
    *sections, other = [item.task.section for item in batch]
    assert other == (0, 5)
    assert (sections[0][0], sections[-1][1]) == (0, len(text))
    assert max(stop - start for start, stop in sections) <= 20_000
    waiting.finish(batch, [parts_of(item, 1, 2) for item in batch])
    parts = waiting.next_batch()
    starts = [item.task.section[0] for item in parts]
    assert starts == [n for start, _ in [*sections, other] for n in (start, start + 1)]
    outcomes = [Outcome(Scored(float(place))) for place in range(len(parts))]
    # Whatever the order of the batches, parts stay in the order of the document.
    waiting.finish(parts[3:], outcomes[3:])
    waiting.finish(parts[:3], outcomes[:3])
    first = request.outcome(next(iter(request.outcomes))).scored
    assert first.score == 2 * len(sections) - 1
    assert (first.window.start, first.window.count) == (starts[-3], 2 * len(sections))


async def test_the_error_of_a_part_is_the_outcome_of_its_document():
    waiting = queue()
    request = waiting.add("client", pairs("a", "b", reading=SENTENCES), 512)
    cut(waiting, parts=3)
    fine, bad = Outcome(Scored(1.0)), Outcome(error="bad")
    waiting.finish(waiting.next_batch(), [fine, bad, fine, fine, fine, fine])
    assert request.answer.done()
    assert [request.outcome(pair).error for pair in request.outcomes] == ["bad", ""]


async def test_items_on_which_the_process_died_run_alone_and_fail_the_second_time():
    waiting = queue()
    request = waiting.add("client", pairs("a", "b", "c"), 512)
    cut(waiting)
    waiting.put_back(waiting.next_batch())
    for text in "abc":
        (item,) = waiting.next_batch()
        assert item.task.pair.document == text
        if text == "b":
            waiting.put_back([item])
        else:
            scored(waiting, [item])
    errors = [request.outcome(pair).error for pair in request.outcomes]
    assert errors == ["", "lost the model's process, or failed in it, twice.", ""]


async def test_a_request_that_is_removed_leaves_nothing_and_late_results_are_ignored():
    waiting = queue()
    request = waiting.add("client", pairs("a", "b"), 512)
    batch = waiting.next_batch()
    waiting.remove(request)
    assert waiting.requests == []
    waiting.put_back(batch)
    scored(waiting, batch)
    assert waiting.next_batch() == []
