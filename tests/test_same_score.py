"""The same query and document get the same score, whatever else a call scores."""

import os
import random
import subprocess
import sys

import pytest
import torch
from conftest import on_torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rsrank_rag import RSRank
from rsrank_rag.backends.options import has_fast_bfloat16
from rsrank_rag.reranker import Pair
from rsrank_rag.service.engine import Engine
from rsrank_rag.service.messages import Task

WORDS = [
    "bridge",
    "river",
    "opened",
    "harbour",
    "steel",
    "cable",
    "engineer",
    "1937",
    "traffic",
    "span",
    "tower",
    "the",
    "of",
    "a",
    "and",
    "in",
    "was",
    "by",
    "near",
    "milk",
    "harvest",
    "telescope",
    "glacier",
    "parliament",
    "violin",
    "algorithm",
]
QUERIES = ("When did the bridge open?", "Who built the longest steel cable bridge over the river")
# float32 and int8 are computed by ONNX Runtime.
LIMITS = {"float32": 2e-7, "bfloat16": 0.03, "int8": 2e-7, "float32 on torch": 1e-4}

# How many examples are drawn; more where the test of other instructions asks for them.
EXAMPLES = int(os.environ.get("SAME_SCORE_EXAMPLES", "5"))

lengths = st.lists(st.integers(1, 510), min_size=1, max_size=8)
asks = st.integers(1, 60)
example = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def text(words, seed):
    choose = random.Random(seed)
    return " ".join(choose.choice(WORDS) for _ in range(words))


@pytest.fixture(scope="module", params=LIMITS)
def dtype(request):
    if request.param == "bfloat16" and not has_fast_bfloat16(torch.device("cpu")):
        pytest.skip("this processor does not multiply bfloat16")
    return request.param


@pytest.fixture(scope="module")
def load(dtype):
    def load(**options):
        name, _, runtime = dtype.partition(" on ")
        if runtime == "torch":
            return on_torch(dtype=name, **options)
        return RSRank.from_pretrained(device="cpu", dtype=name, **options)

    return load


@pytest.fixture(scope="module")
def deterministic(load):
    return load(cache_size=0, deterministic=True)


@pytest.fixture(scope="module")
def default(load):
    return load(cache_size=0)


@example
@given(words=st.integers(1, 510), asks=asks, others=lengths, seed=st.integers(0, 999))
def test_in_deterministic_mode_neighbours_and_order_change_no_bit(
    deterministic, words, asks, others, seed
):
    document = text(words, seed)
    neighbours = [text(count, seed + place + 1) for place, count in enumerate(others)]
    query = text(asks, seed)
    alone = deterministic.score(query, [document])[0]
    assert deterministic.score(query, [document, *neighbours])[0] == alone
    assert deterministic.score(query, [*neighbours, document])[-1] == alone
    pairs = [Pair(QUERIES[1], other) for other in neighbours]
    pairs += [Pair(query, document), Pair(QUERIES[1], document)]
    assert deterministic.score_pairs(pairs)[-2].score == alone
    tasks = [Task(pair) for pair in pairs]
    assert Engine(deterministic).run(tasks)[-2].scored.score == alone


@pytest.mark.parametrize("on_disk", [False, True])
def test_in_deterministic_mode_a_cached_prefix_changes_no_bit(
    deterministic, load, tmp_path, on_disk
):
    cache = {"cache_folder": tmp_path} if on_disk else {"cache_size": "64MB"}
    ranker = load(**cache, deterministic=True)
    documents = [text(words, words) for words in (3, 150, 175, 237, 420)]
    cold = [ranker.score(QUERIES[0], [document])[0] for document in documents]
    if not on_disk:
        assert deterministic.score(QUERIES[0], documents) == cold
    assert ranker.score(QUERIES[0], documents) == cold
    mixed = [text(200, 1), *documents, text(30, 2)]
    assert ranker.score(QUERIES[0], mixed)[1:-1] == cold
    ranker.cache.tiers.clear()
    assert ranker.score(QUERIES[0], documents[::-1]) == cold[::-1]
    if on_disk:
        again = load(**cache, deterministic=True)
        assert again.score(QUERIES[0], documents) == cold
        assert again.stats()["disk_hits"] == len(documents)


@example
@given(words=st.integers(1, 510), asks=asks, others=lengths, seed=st.integers(0, 999))
def test_by_default_neighbours_change_a_score_by_less_than_the_guide_says(
    default, dtype, words, asks, others, seed
):
    document = text(words, seed)
    neighbours = [text(count, seed + place + 1) for place, count in enumerate(others)]
    alone = default.score(text(asks, seed), [document])[0]
    among = default.score(text(asks, seed), [document, *neighbours])[0]
    assert among == pytest.approx(alone, abs=LIMITS[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("capability", [None, "avx2", "default"])
def test_the_same_holds_with_other_instructions_of_the_processor(capability):
    environment = {**os.environ, "SAME_SCORE_EXAMPLES": "8"}
    if capability is not None:
        environment["ATEN_CPU_CAPABILITY"] = capability
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
