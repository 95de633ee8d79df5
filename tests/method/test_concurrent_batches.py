"""Several batches concurrently on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import QUERIES, QUERY, load_ranker, score_many
from hypothesis import given
from hypothesis import strategies as st

from rsrank_rag import RSRank
from rsrank_rag.errors import ScoringError
from rsrank_rag.method.concurrent_batches import (
    TOKENS_PER_THREAD,
    Batches,
    concurrent_count,
    parts_of,
    run_concurrently,
    workers,
)
from rsrank_rag.method.scoring import Row
from rsrank_rag.method.template import TokenisedQuery


def ran(code: str, **variables: str) -> str:
    """What a fresh interpreter prints in which nothing is said about threads but ``variables``."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**own, **variables}, text=True, stdout=-1, check=True
    )
    return done.stdout.strip()


# Concurrent batches

WORDS = ("bridge", "lamp", "sun", "boat", "bee", "ferry", "dog", "hill")
LONG = [f"{word} " * (30 + 5 * number) for number, word in enumerate(WORDS)]


def made(folder: Path, kind: str, *, kept: bool = False, deterministic: bool = False) -> RSRank:
    """A tiny ranker; two of the same folder give the same scores."""
    ranker = load_ranker(folder, kind)
    parts = (ranker.backbone, ranker.prompts, ranker.projection, ranker.config)
    return RSRank(*parts, prefix_cache=kept, deterministic=deterministic)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Torch computes with two threads, as on two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def threads_seen(ranker: RSRank, together: int = 1) -> set[str]:
    """Names of the threads that run the model; so many wait for each other in their first run."""
    seen: set[str] = set()
    ready = threading.Barrier(together)

    def note(*_: object) -> None:
        name = threading.current_thread().name
        if name not in seen:
            seen.add(name)
            ready.wait(60)

    ranker.backbone.model.get_input_embeddings().register_forward_hook(note)
    return seen


@pytest.mark.parametrize(
    ("threads", "batches"),
    [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4), (6, 3), (7, 3), (8, 4), (11, 2), (64, 4)],
)
def test_at_most_four_batches_run_at_once_and_leave_at_most_one_thread_over(
    threads: int, batches: int
) -> None:
    assert concurrent_count(threads) == batches


def test_each_worker_computes_with_its_part_of_the_threads_and_callers_keep_theirs(
    two_threads: None,
) -> None:
    ready = threading.Barrier(2)
    found = list(
        workers(2, os.getpid()).map(
            lambda _: (ready.wait(60), torch.get_num_threads())[1], range(2)
        )
    )
    assert (found, torch.get_num_threads()) == ([1, 1], 2)
    there: list[int] = []
    new = threading.Thread(target=lambda: there.append(torch.get_num_threads()))
    new.start()
    new.join()
    assert there == [2]


@pytest.mark.parametrize("kept", [False, True])
def test_on_two_threads_a_call_runs_on_both_and_scores_what_it_does_on_one(
    tiny_folder: Callable[[str], Path], two_threads: None, kept: bool
) -> None:
    ranker = made(tiny_folder("bert"), "bert", kept=kept)
    seen = threads_seen(ranker, 2)
    many = ranker.score(QUERY, LONG)
    assert seen == {"rsrank-batch_0", "rsrank-batch_1"}
    again = ranker.score(QUERY, LONG)
    torch.set_num_threads(1)
    alone = made(tiny_folder("bert"), "bert").score(QUERY, LONG)
    assert many == pytest.approx(alone, abs=1e-4)
    assert again == pytest.approx(alone, abs=1e-4)


def test_a_document_that_queries_share_is_read_once_on_two_threads(
    tiny_folder: Callable[[str], Path], two_threads: None
) -> None:
    ranker = made(tiny_folder("llama"), "llama", kept=True)
    found = score_many(ranker, QUERIES, [LONG] * len(QUERIES))
    assert ranker.stats()["misses"] == len(LONG)
    alone = made(tiny_folder("llama"), "llama")
    for query, scores in zip(QUERIES, found, strict=True):
        assert scores == pytest.approx(
            [alone.score(query, [document])[0] for document in LONG], abs=1e-4
        )


def test_a_short_call_and_a_deterministic_one_stay_in_their_thread(
    tiny_folder: Callable[[str], Path], two_threads: None
) -> None:
    ranker = made(tiny_folder("llama"), "llama")
    seen = threads_seen(ranker)
    ranker.score(QUERY, ["A bridge."])
    assert seen == {threading.current_thread().name}
    ranker = made(tiny_folder("llama"), "llama", deterministic=True)
    seen = threads_seen(ranker)
    ranker.score(QUERY, LONG)
    assert seen == {threading.current_thread().name}


def test_a_document_that_fails_in_a_worker_is_named(
    tiny_folder: Callable[[str], Path], two_threads: None
) -> None:
    ranker = made(tiny_folder("llama"), "llama")

    def too_long(module: object, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].shape[0] * args[0].shape[1] > 300:
            raise MemoryError

    ranker.backbone.model.layers[1].mlp.register_forward_pre_hook(too_long)
    with pytest.raises(
        ScoringError, match=r"Document 8 \(\d+ tokens .* does not fit into memory"
    ) as caught:
        ranker.score(QUERY, [*LONG, "ferry " * 90])
    assert caught.value.index == 8


# Parts of rows, without a model

QUERY_IDS = [TokenisedQuery((7,) * length, 0, length) for length in (3, 5)]


def rows_of(*lengths: int) -> list[Row]:
    """For both queries, a document of each of these lengths."""
    return [
        Row((number, *[0] * (length - 1)), query)
        for query in QUERY_IDS
        for number, length in enumerate(lengths)
    ]


@given(
    lengths=st.lists(st.integers(1, 400), max_size=30),
    together=st.integers(1, 4),
    budget=st.sampled_from([64, 2048]),
)
def test_each_row_has_a_part_and_a_document_s_rows_have_the_same(
    lengths: list[int], together: int, budget: int
) -> None:
    documents = [row.document for row in rows_of(*lengths)]
    parts = parts_of(documents, 32, together, budget, TOKENS_PER_THREAD)
    assert len(parts) == len(documents)
    assert len(set(zip(documents, parts, strict=True))) == len(set(documents))
    if together == 1:
        assert set(parts) <= {0}


def test_parts_cost_about_the_same_and_are_as_many_for_each_thread() -> None:
    documents = [row.document for row in rows_of(*[100] * 40)]
    parts = Counter(parts_of(documents, 32, 2, 2048, TOKENS_PER_THREAD))
    # Two times three, because 10,560 tokens are more than two times two batches.
    assert len(parts) == 6
    assert max(parts.values()) - min(parts.values()) <= 2


@pytest.mark.parametrize("lengths", [(20,), (100, 2000), (20, 20)])
def test_little_work_and_one_long_document_are_one_part(lengths: tuple[int, ...]) -> None:
    documents = [row.document for row in rows_of(*lengths)]
    assert set(parts_of(documents, 8, 2, 2048, TOKENS_PER_THREAD)) == {0}


def two_batches() -> list[Batches[Row]]:
    """Of two rows each; a batch is one of them."""
    return [Batches(rows_of(length), 1) for length in (9, 8)]


def run_all(run, waiting) -> None:
    """As a call does: concurrently, then what is left."""
    run_concurrently(run, waiting)
    for batches in waiting:
        run(batches)


def test_a_call_during_another_with_concurrent_batches_runs_in_its_own_thread(
    two_threads: None,
) -> None:
    names: dict[str, set[str]] = {"first": set(), "second": set()}
    both, over = threading.Barrier(2), threading.Event()

    def first(batches: Batches[Row]) -> None:
        names["first"].add(threading.current_thread().name)
        if batches.waiting:
            both.wait(60)
            run_all(second, two_batches())
            over.wait(60)
            batches.waiting.clear()

    def second(batches: Batches[Row]) -> None:
        names["second"].add(threading.current_thread().name)
        if len(batches.waiting[0]) == 8:
            over.set()

    run_all(first, two_batches())
    assert names["first"] >= {"rsrank-batch_0", "rsrank-batch_1"}
    assert names["second"] == {
        "rsrank-batch_0",
        "rsrank-batch_1",
    }  # each the thread of its caller, one after another


def test_what_runs_out_of_memory_beside_others_runs_again_alone(two_threads: None) -> None:
    alone, seen = threading.current_thread(), list[Row]()

    def run(batches: Batches[Row]) -> None:
        for batch in batches:
            with batches.attempt():
                if threading.current_thread() is not alone and len(batch[0]) == 9:
                    raise MemoryError
                seen.extend(batch)

    run_all(run, two_batches())
    assert sorted(map(len, seen)) == [8, 8, 9, 9]


@pytest.mark.parametrize("length", [8, 9])
def test_an_error_comes_as_it_is_when_nothing_runs_any_more(two_threads: None, length: int) -> None:
    error, running = ValueError("a fault of the model"), set[int]()

    def run(batches: Batches[Row]) -> None:
        for batch in batches:
            with batches.attempt():
                running.add(threading.get_ident())
                if len(batch[0]) == length:
                    running.discard(threading.get_ident())
                    raise error
                time.sleep(0.2)
                running.discard(threading.get_ident())

    with pytest.raises(ValueError, match="a fault of the model") as caught:
        run_all(run, two_batches())
    assert caught.value is error
    assert not running
    done: list[Row] = []
    run_all(
        lambda batches: done.extend(batches.waiting), two_batches()
    )  # and the next call finds the threads free
    assert len(done) >= 4


@pytest.mark.parametrize("variable", ["OMP_PROC_BIND", "GOMP_CPU_AFFINITY"])
def test_threads_that_are_bound_to_cores_stay_in_one_batch(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "true")
    assert concurrent_count(8) == 1


LATE = """
import threading, time, torch
torch.set_num_threads(2)
from rsrank_rag import RSRank
ranker = RSRank.from_pretrained(prefix_cache=False)
texts = ["Bees dance. " * 50, "Trains run on rails. " * 50]
expected = ranker.score("How do bees talk?", texts)
def late():
    threading.main_thread().join()
    time.sleep(0.5)
    found = ranker.score("How do bees talk?", texts)
    difference = max(abs(x - y) for x, y in zip(found, expected))
    print("same" if difference < 1e-4 else "other", flush=True)
threading.Thread(target=late).start()
"""


@pytest.mark.slow
def test_a_thread_that_outlives_the_main_one_can_go_on_scoring() -> None:
    assert ran(LATE).split() == ["same"]
