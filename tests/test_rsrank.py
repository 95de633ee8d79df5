"""The whole reranker on tiny models: scores, bad input, memory, threads, quantisation."""

import copy
import itertools
import json
import math
import os
import pickle
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import (
    CHAT,
    DOCUMENTS,
    HEAD_DIM,
    LAYERS,
    QUERIES,
    QUERY,
    load_ranker,
    random_projection,
    score_many,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModel

from rsrank_rag import Explanation, RSRank
from rsrank_rag.backends.options import LoadOptions, ModelSource
from rsrank_rag.backends.torch.projection import Projection
from rsrank_rag.errors import BackboneError, InputError, MissingDependencyError, ScoringError
from rsrank_rag.method.batches import TOKEN_BUDGET, Batches
from rsrank_rag.reranker import BLANK_SCORE, Pair

# `score_pairs` reads the clock from here.
CLOCK = "rsrank_rag.method.scoring.monotonic"

EXACT = 1e-4  # fp32: rounding alone

# Bounds for coarser arithmetic, about twice the largest difference measured (scores spread over
# 0.15 to 0.6 there).
BF16_TINY = 0.05  # measured 0.023
BF16_TINY_NEIGHBOURS = 0.015  # measured 0.007
# Measured 0.78: shifts of trained weights are 2 % of the values, near bfloat16's resolution.
BF16_STORIES = 1.6
BF16_STORIES_NEIGHBOURS = 0.4  # measured 0.17
INT8 = 0.09  # measured 0.042
NF4 = 0.02  # against fp32 with the same rounded weights

STORY = "Lily had a red ball. She threw it to her dog Max, and Max ran after it into the garden."
STORIES_DOCUMENTS = [
    STORY,
    "The sun was hot.",
    "Tom was sad. His boat was lost in the big lake.",
    STORY * 3,
]
STORIES_QUERIES = ["What did Lily throw to her dog?", "Why was Tom sad?"]


def budgeted(ranker, budget):
    """The same ranker with another token budget."""
    parts = (ranker.backbone, ranker.prompts, ranker.projection, ranker.config)
    return RSRank(*parts, ModelSource(token_budget=budget, cache_size=0))


def all_scores(ranker, queries=QUERIES, documents=DOCUMENTS):
    return torch.tensor([ranker.score(query, documents) for query in queries])


def scores_alone(ranker, queries=QUERIES, documents=DOCUMENTS):
    return torch.tensor(
        [[ranker.score(query, [document])[0] for document in documents] for query in queries]
    )


@pytest.fixture(scope="module")
def alone(ranker):
    """Each document's score without neighbours."""
    return [ranker.score(QUERY, [document])[0] for document in DOCUMENTS]


# What a score depends on


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_can_go_on_scoring():
    code = """
        import multiprocessing, torch
        from rsrank_rag import RSRank
        ranker = RSRank.from_pretrained(dtype="float32")
        # Long enough for both of the parent's threads.
        texts = ["Bees dance. " * 50, "Trains run on rails. " * 50]
        expected = ranker.score("How do bees talk?", texts)
        fork = multiprocessing.get_context("fork")
        answers = fork.SimpleQueue()
        child = fork.Process(
            target=lambda: answers.put(ranker.score("How do bees talk?", texts)))
        child.start()
        child.join(120)
        ended = child.exitcode == 0
        child.kill()
        same = ended and max(abs(x - y) for x, y in zip(answers.get(), expected)) < 1e-4
        print("ended", ended, "same", same)
    """
    run = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(
        run, env={**os.environ, "OMP_NUM_THREADS": "2"}, capture_output=True, text=True, timeout=400
    )
    assert done.stdout.split() == ["ended", "True", "same", "True"], done.stderr


def test_documents_differ_in_score(alone):
    assert len({round(score, 3) for score in alone}) == len(DOCUMENTS)


def test_a_score_does_not_depend_on_neighbours(ranker, alone):
    assert ranker.score(QUERY, DOCUMENTS) == pytest.approx(alone, abs=EXACT)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_score_does_not_depend_on_the_order(ranker, alone, seed):
    order = torch.randperm(len(DOCUMENTS), generator=torch.Generator().manual_seed(seed)).tolist()
    actual = ranker.score(QUERY, [DOCUMENTS[i] for i in order])
    assert actual == pytest.approx([alone[i] for i in order], abs=EXACT)


@pytest.mark.parametrize("budget", [1, 100, 250, 400, 100_000])
def test_a_score_does_not_depend_on_the_token_budget(ranker, alone, budget):
    assert budgeted(ranker, budget).score(QUERY, DOCUMENTS) == pytest.approx(alone, abs=EXACT)


def test_a_batch_holds_no_more_padded_tokens_than_the_budget(tiny_folder):
    ranker = budgeted(load_ranker(tiny_folder("llama"), "llama"), 250)
    ranker.score(QUERY, ["Sun"])  # the template without a document is run now
    shapes = []
    embedding = ranker.backbone.model.get_input_embeddings()
    embedding.register_forward_hook(
        lambda _module, inputs, _output: shapes.append(tuple(inputs[0].shape))
    )
    texts = [*DOCUMENTS * 2, "Frost", "Ice", "Sun"]
    ranker.score(QUERY, texts)
    documents = shapes[::2]  # each batch runs documents, then queries
    assert max(rows * tokens for rows, tokens in documents) <= 250
    assert len(documents) < len(set(texts))
    assert max(rows for rows, _ in documents) > 1


@pytest.mark.parametrize(
    "kind", ["llama", "gemma3", "mistral", "phi3", "gpt_neox", "bert", "roberta"]
)
def test_neighbours_do_not_matter_in_any_architecture(kind, tiny_ranker):
    ranker = tiny_ranker(kind)
    torch.testing.assert_close(all_scores(ranker), scores_alone(ranker), rtol=0, atol=EXACT)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    documents=st.lists(st.text(max_size=40) | st.sampled_from(DOCUMENTS), min_size=1, max_size=6),
    budget=st.integers(1, 600),
)
def test_any_documents_in_any_batch_score_as_alone(ranker, documents, budget):
    expected = [ranker.score(QUERY, [document])[0] for document in documents]
    assert budgeted(ranker, budget).score(QUERY, documents) == pytest.approx(expected, abs=EXACT)


def test_duplicates_get_equal_scores(ranker):
    scores = budgeted(ranker, 150).score(QUERY, [DOCUMENTS[0], *DOCUMENTS, DOCUMENTS[0]])
    assert scores[0] == scores[1] == scores[-1]


def test_a_duplicate_is_read_only_once(tiny_folder):
    ranker = load_ranker(tiny_folder("llama"), "llama")
    rows = []
    embedding = ranker.backbone.model.get_input_embeddings()
    embedding.register_forward_hook(lambda _module, inputs, _output: rows.append(len(inputs[0])))
    ranker.score(QUERY, DOCUMENTS[:1] * 50)
    assert rows == [1, 1, 2]  # the template without a document, the document, the query behind both


def test_scores_repeat_exactly(ranker):
    assert ranker.score(QUERY, DOCUMENTS) == ranker.score(QUERY, DOCUMENTS)


def test_rank_sorts_the_scores_and_splits_at_zero(ranker, alone):
    result = ranker.rank(QUERY, DOCUMENTS)
    ranked = [*result.kept, *result.dropped]
    assert [doc.index for doc in ranked] == sorted(range(len(alone)), key=lambda i: -alone[i])
    assert all(doc.score > 0 for doc in result.kept)
    assert all(doc.score <= 0 for doc in result.dropped)


# Many queries


def test_many_queries_give_the_scores_of_each_query(ranker):
    documents = [DOCUMENTS[:4], DOCUMENTS[2:], [DOCUMENTS[5], DOCUMENTS[0], DOCUMENTS[0]]]
    actual = score_many(budgeted(ranker, 300), QUERIES, documents)
    expected = [ranker.score(query, own) for query, own in zip(QUERIES, documents, strict=True)]
    assert [len(row) for row in actual] == [4, 4, 3]
    for row, wanted in zip(actual, expected, strict=True):
        assert row == pytest.approx(wanted, abs=EXACT)


def test_many_queries_may_have_no_documents_or_not_be_there(ranker):
    assert score_many(ranker, [], []) == []
    assert score_many(ranker, QUERIES[:2], [[], DOCUMENTS[:1]]) == [
        [],
        ranker.score(QUERIES[1], DOCUMENTS[:1]),
    ]


# Input


def test_no_documents_give_no_scores(ranker):
    assert ranker.score(QUERY, []) == []
    assert ranker.rank(QUERY, []).kept == ()


def test_a_document_without_tokens_scores_lowest_and_is_dropped(ranker, tiny_ranker):
    scores = ranker.score(QUERY, [DOCUMENTS[0], "", DOCUMENTS[1]])
    assert scores[1] == BLANK_SCORE < min(scores[0], scores[2])
    assert "" not in ranker.rank(QUERY, [DOCUMENTS[0], ""]).texts
    assert (
        tiny_ranker("bert").score(QUERY, [" \n\t ", "frost"])[0] == BLANK_SCORE
    )  # a WordPiece drops white space


@pytest.mark.parametrize(
    "document",
    [
        " ",
        "\n\n\t",
        "😀👩‍🚀🇫🇷",
        "a\ud800b",
        "\udfff",
        "\x00",
        "e\u0301",
        "الثلج",
        "<s><|im_end|>",
        "\ufeffx",
        "🎈" * 300,
    ],
)
def test_odd_documents_get_finite_scores(ranker, document):
    [score] = ranker.score(QUERY, [document])
    assert math.isfinite(score)
    assert score != 0.0


def test_lone_surrogates_in_the_query_are_no_error(ranker):
    assert ranker.score("why\ud800", DOCUMENTS) == ranker.score("why\ufffd", DOCUMENTS)


def test_a_hundred_thousand_characters_are_cut_and_reported(ranker):
    long = "The bridge is long. " * 5000
    result = ranker.rank(QUERY, ["short", long], threshold=None, long_documents="cut")
    assert {doc.index: doc.truncated for doc in result.kept} == {0: False, 1: True}
    assert ranker.score(QUERY, [long]) == ranker.score(QUERY, [long + " and more"])
    assert result.kept[0].text in ("short", long)  # the text itself is handed back whole


def test_a_document_that_is_no_string_is_named(ranker):
    with pytest.raises(InputError, match="Document 1 must be a string, got NoneType"):
        ranker.score(QUERY, ["a", None])
    with pytest.raises(InputError, match="Document 0 must be a string, got int"):
        ranker.rank(QUERY, [3])


@pytest.mark.parametrize("query", [None, 3, b"bytes", ["list"]])
@pytest.mark.parametrize("documents", [[], ["a"]])
def test_a_query_that_is_no_string_is_refused_by_type(query, documents, ranker):
    with pytest.raises(InputError, match=f"query must be a string, got {type(query).__name__}"):
        ranker.score(query, documents)


@pytest.mark.parametrize("documents", ["one text", b"bytes"])
def test_one_string_instead_of_a_list_is_refused(ranker, documents):
    for call in (ranker.score, ranker.rank):
        with pytest.raises(InputError, match="list of strings"):
            call(QUERY, documents)


@pytest.mark.parametrize("query", ["", None, 3])
def test_a_query_without_text_is_refused(ranker, query):
    with pytest.raises(InputError, match="query"):
        ranker.score(query, DOCUMENTS)


def test_a_query_without_text_is_refused_even_without_documents(ranker):
    with pytest.raises(InputError, match="query"):
        ranker.score("", [])


def test_a_query_that_is_too_long_is_refused(ranker):
    with pytest.raises(InputError, match="Shorten the query"):
        ranker.score("bridge " * 1000, DOCUMENTS)


def test_rank_reads_the_ends_of_a_query_that_is_too_long_and_says_so(ranker):
    query = "When was the bridge opened? " + "noise " * 1000 + "Was it in 1932?"
    result = ranker.rank(query, DOCUMENTS)
    assert (result.query, result.query_truncated) == (query, True)
    assert "query truncated" in str(result)
    read = ranker.fit_query(query)
    assert read.startswith("When was the bridge opened?")
    assert read.endswith("Was it in 1932?")
    kept = [(document.index, document.score) for document in result]
    assert kept == [(document.index, document.score) for document in ranker.rank(read, DOCUMENTS)]
    assert not ranker.rank(QUERY, DOCUMENTS).query_truncated
    with pytest.raises(InputError, match="Shorten the query"):
        ranker.score(query, DOCUMENTS)


def test_documents_and_their_list_are_not_changed(ranker):
    documents = list(DOCUMENTS)
    ranker.score(QUERY, documents)
    assert documents == DOCUMENTS


@pytest.mark.parametrize("budget", [0, -5])
def test_a_token_budget_below_one_is_refused(ranker, budget):
    with pytest.raises(InputError, match=r"token_budget: .* greater than or equal to 1"):
        budgeted(ranker, budget)


def test_the_token_budget_follows_the_device(ranker):
    assert budgeted(ranker, None).token_budget == TOKEN_BUDGET["cpu"]
    assert budgeted(ranker, 7).token_budget == 7


# Explanations


def test_an_explanations_parts_add_up_to_the_score(ranker, alone):
    for document, score in zip(DOCUMENTS, alone, strict=True):
        actual = ranker.explain(QUERY, document)
        assert actual.score == pytest.approx(score, abs=EXACT)
        assert math.fsum(map(math.fsum, actual.parts)) == pytest.approx(actual.score, abs=1e-6)
        heads = [[math.fsum(layer) for layer in token] for token in actual.head_parts]
        for row, parts in zip(heads, actual.parts, strict=True):
            assert row == pytest.approx(parts, abs=1e-6)


def test_an_explanation_has_one_part_a_token_layer_and_head(ranker):
    actual = ranker.explain(QUERY, DOCUMENTS[0])
    layers, heads, _, _ = ranker.projection.weight.shape
    assert "".join(actual.tokens) == QUERY + CHAT.suffix
    assert actual.layers == ranker.projection.layers == tuple(range(1, LAYERS))
    shape = torch.tensor(actual.head_parts).shape
    assert shape == (len(actual.tokens), layers, heads)
    assert {len(row) for row in actual.parts} == {len(actual.layers)}


def test_an_explanations_parts_are_the_cosines_of_single_heads(ranker):
    """Each head part, found anew by a B that is zero in every other head and layer."""
    actual = ranker.explain(QUERY, DOCUMENTS[0])
    for row, layer in enumerate(ranker.projection.layers):
        for head in range(ranker.projection.weight.shape[1]):
            weight = torch.zeros_like(ranker.projection.weight)
            weight[row, head] = ranker.projection.weight[row, head]
            single = RSRank(
                ranker.backbone,
                ranker.prompts,
                Projection(weight, ranker.projection.layers),
                ranker.config,
            )
            expected = math.fsum(token[row][head] for token in actual.head_parts)
            assert single.score(QUERY, DOCUMENTS[:1]) == pytest.approx([expected], abs=EXACT), (
                layer,
                head,
            )


def test_an_empty_document_has_an_explanation_of_zeros(ranker):
    actual = ranker.explain(QUERY, "")
    assert actual.score == BLANK_SCORE
    assert not torch.tensor(actual.head_parts).any()


def test_a_printed_explanation_shows_tokens_layers_and_score(ranker):
    actual = ranker.explain(QUERY, DOCUMENTS[0])
    lines = str(actual).splitlines()
    assert lines[0].split()[:3] == ["token", "total", "L1"]
    assert len(lines) == len(actual.tokens) + 2
    assert lines[-1].split()[:2] == ["score", f"{actual.score:+.3f}"]


def test_explain_refuses_what_score_refuses(ranker):
    with pytest.raises(InputError, match="must be a string"):
        ranker.explain(QUERY, None)
    with pytest.raises(InputError, match="query"):
        ranker.explain("", "text")


# Threads


@pytest.mark.parametrize("kind", ["qwen3", "bert"])
def test_sixteen_threads_sharing_one_ranker_get_the_sequential_scores(kind, tiny_ranker):
    ranker = budgeted(tiny_ranker(kind), 300)
    jobs = [(QUERIES[i % 3], [*DOCUMENTS[i % 5 :], f"Note {i}"]) for i in range(48)]
    expected = [ranker.score(*job) for job in jobs]
    with ThreadPoolExecutor(16) as pool:
        actual = list(pool.map(lambda job: ranker.score(*job), jobs))
    for row, wanted in zip(actual, expected, strict=True):
        assert row == pytest.approx(wanted, abs=EXACT)


# Failures


def poisoned(folder, text):
    """A ranker whose embedding of the first token of a text is infinite."""
    ranker = load_ranker(folder, "llama")
    token = ranker.prompts.query(text).ids[0]
    with torch.no_grad():
        ranker.backbone.model.get_input_embeddings().weight[token] = math.inf
    return ranker


def test_a_score_that_is_not_finite_names_its_document(tiny_folder):
    ranker = poisoned(tiny_folder("llama"), "~")
    documents = [*DOCUMENTS, "tilde ~ here", "Frost."]
    with pytest.raises(ScoringError, match="Document 6 scored nan") as caught:
        ranker.rank(QUERY, documents)
    assert caught.value.index == 6
    with pytest.raises(ScoringError, match="Document 0 scored nan"):
        ranker.explain(QUERY, documents[6])
    assert len(ranker.score(QUERY, documents[:6])) == 6  # the others can still be scored


def test_a_score_that_is_not_finite_names_the_position_of_its_pair(tiny_folder):
    ranker = poisoned(tiny_folder("llama"), "~")
    pairs = [(QUERY, "Frost."), (QUERIES[1], "~")]
    with pytest.raises(ScoringError, match="Document 1 scored nan") as caught:
        ranker.score_pairs(pairs)
    assert caught.value.index == 1


class SmallMemory(torch.nn.Module):
    """A layer that runs out of memory when a batch has more than so many tokens."""

    def __init__(self, inner, limit, error):
        super().__init__()
        self.inner, self.limit, self.error = inner, limit, error

    def forward(self, hidden):
        if hidden.shape[0] * hidden.shape[1] > self.limit:
            raise self.error
        return self.inner(hidden)


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 999 "
        "bytes."
    ),
    MemoryError(),
]


def small_memory(folder, limit, error, budget=100_000):
    ranker = budgeted(load_ranker(folder, "llama"), budget)
    layer = ranker.backbone.model.layers[1]
    layer.mlp = SmallMemory(layer.mlp, limit, error)
    return ranker


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_a_model_that_runs_out_of_memory_gets_half_as_many_documents(
    error, tiny_folder, tiny_ranker, caplog
):
    ranker = small_memory(tiny_folder("llama"), 460, error)  # three times the longest document
    expected = tiny_ranker("llama").score(QUERY, DOCUMENTS)
    assert ranker.score(QUERY, DOCUMENTS) == pytest.approx(expected, abs=EXACT)
    assert "Out of memory with 6 documents at once; going on with 3" in caplog.text
    assert ranker.token_budget == 100_000


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_a_document_that_does_not_fit_by_itself_is_named(error, tiny_folder):
    ranker = small_memory(tiny_folder("llama"), 120, error)
    with pytest.raises(
        ScoringError, match=r"Document 3 \(\d+ tokens .* does not fit into memory"
    ) as caught:
        ranker.score(QUERY, DOCUMENTS)
    assert caught.value.index == 3


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ZeroDivisionError("x")]
)
def test_other_errors_of_the_model_come_through_unchanged(error, tiny_folder):
    ranker = small_memory(tiny_folder("llama"), 120, error)
    with pytest.raises(type(error)) as caught:
        ranker.score(QUERY, DOCUMENTS)
    assert caught.value is error


LIMITED = """
    import json, logging, resource, sys
    import torch
    from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast
    from rsrank_rag import RSRank, Template
    from rsrank_rag.backends.torch.projection import Projection
    from rsrank_rag.errors import ScoringError
    from rsrank_rag.backends.options import LoadOptions

    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    folder = sys.argv[1]
    torch.manual_seed(0)
    # A wide MLP, so that its hidden layer (64 kB a token) is what needs the memory.
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=16384,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.3,
    )
    LlamaModel(config).save_pretrained(folder)
    options = LoadOptions(device="cpu", dtype="float32", local_files_only=True)
    ranker = RSRank.from_backbone(folder, Projection.random([1, 2], 2, 8, 16), options=options)
    ranker.cache.tiers.is_on = False
    ranker.cache.tiers.limit = 0
    documents = ["lamp " * (20 + i) for i in range(8)]
    expected = ranker.score("bridge?", documents)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

    def limit(megabytes):
        resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * 2**20, resource.RLIM_INFINITY))

    ranker.token_budget = 10**9
    limit(5)  # before the other: what was given back to the allocator would be free to use
    try:
        ranker.score("bridge?", ["lamp", "lamp " * 5000])
        failure = None
    except ScoringError as error:
        failure = error.index
    limit(110)
    halved = ranker.score("bridge?", documents)
    limit(4096)
    print(json.dumps({"expected": expected, "halved": halved, "failure": failure}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on the address space")
@pytest.mark.slow
def test_real_memory_limits_halve_the_batch_and_name_the_document_that_never_fits(
    tiny_folder, tmp_path
):
    for file in tiny_folder("llama").glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    actual = json.loads(done.stdout.splitlines()[-1])
    assert "Out of memory with 8 documents at once" in done.stderr
    assert actual["halved"] == pytest.approx(actual["expected"], abs=EXACT)
    assert actual["failure"] == 1


# Loading


def test_the_dtype_may_be_a_name_or_a_torch_dtype(tiny_folder):
    for dtype in ("bfloat16", torch.bfloat16):
        ranker = load_ranker(tiny_folder("llama"), "llama", dtype=dtype)
        assert {weight.dtype for weight in ranker.backbone.model.parameters()} == {torch.bfloat16}
        assert ranker.projection.weight.dtype == torch.float32


def test_the_device_may_be_a_name_or_a_torch_device(tiny_folder):
    for device in ("cpu", torch.device("cpu")):
        assert load_ranker(
            tiny_folder("llama"), "llama", device=device
        ).backbone.device == torch.device("cpu")


@pytest.mark.parametrize("dtype", ["int7", "fp99", "nn", torch.int32])
def test_a_dtype_that_models_cannot_have_is_refused(dtype, tiny_folder):
    with pytest.raises(InputError, match="is not a dtype"):
        load_ranker(tiny_folder("llama"), "llama", dtype=dtype)


def test_a_device_that_does_not_exist_is_an_error_of_the_package(tiny_folder):
    with pytest.raises(InputError, match="device"):
        load_ranker(tiny_folder("llama"), "llama", device="nonsense")


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(BackboneError, match="could not be loaded"):
        load_ranker(tmp_path, "llama")


def test_code_from_a_models_folder_never_runs(tiny_folder, tmp_path):
    for file in tiny_folder("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    ran = tmp_path / "ran"
    (tmp_path / "custom.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "model_type": "custom",
        "auto_map": {"AutoConfig": "custom.Config", "AutoModel": "custom.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BackboneError):
        load_ranker(tmp_path, "llama")
    assert not ran.exists()


def test_weights_in_a_pickle_are_refused(tiny_folder, tmp_path):
    for file in tiny_folder("llama").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    model = AutoModel.from_pretrained(tiny_folder("llama"))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(BackboneError, match="could not be loaded"):
        load_ranker(tmp_path, "llama")


# Coarser arithmetic


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3"])
def test_bfloat16_scores_are_close_to_fp32_ones(kind, tiny_folder, tiny_ranker):
    ranker = load_ranker(tiny_folder(kind), kind, dtype="bfloat16")
    scores = all_scores(ranker)
    torch.testing.assert_close(scores, all_scores(tiny_ranker(kind)), rtol=0, atol=BF16_TINY)
    torch.testing.assert_close(scores, scores_alone(ranker), rtol=0, atol=BF16_TINY_NEIGHBOURS)


@pytest.mark.shared
def test_bfloat16_scores_of_trained_weights_are_close_to_fp32_ones(stories):
    options = LoadOptions(device="cpu", dtype="bfloat16", local_files_only=True)
    ranker = RSRank.from_backbone(stories.config.backbone.name, stories.projection, options=options)
    scores = all_scores(ranker, STORIES_QUERIES, STORIES_DOCUMENTS)
    expected = all_scores(stories, STORIES_QUERIES, STORIES_DOCUMENTS)
    neighbours = scores_alone(ranker, STORIES_QUERIES, STORIES_DOCUMENTS)
    torch.testing.assert_close(scores, expected, rtol=0, atol=BF16_STORIES)
    torch.testing.assert_close(scores, neighbours, rtol=0, atol=BF16_STORIES_NEIGHBOURS)


@pytest.mark.shared
def test_neighbours_do_not_matter_with_trained_weights(stories):
    together = all_scores(stories, STORIES_QUERIES, STORIES_DOCUMENTS)
    torch.testing.assert_close(
        together, scores_alone(stories, STORIES_QUERIES, STORIES_DOCUMENTS), rtol=0, atol=EXACT
    )


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_8bit_scores_are_close_to_fp32_ones_and_do_not_depend_on_neighbours(
    kind, tiny_folder, tiny_ranker
):
    pytest.importorskip("bitsandbytes")
    ranker = load_ranker(tiny_folder(kind), kind, dtype="int8")
    assert ranker.backbone.model.layers[0].self_attn.v_proj.weight.dtype == torch.int8
    scores = all_scores(ranker)
    torch.testing.assert_close(scores, all_scores(tiny_ranker(kind)), rtol=0, atol=INT8)
    torch.testing.assert_close(scores, scores_alone(ranker), rtol=0, atol=2e-3)


def test_8bit_scores_do_not_depend_on_neighbours_even_with_outlier_activations(tiny_folder):
    """bitsandbytes would treat activations above 6 apart, in columns that depend on the batch."""
    pytest.importorskip("bitsandbytes")
    ranker = load_ranker(tiny_folder("llama"), "llama", dtype="int8")
    with torch.no_grad():
        for layer in ranker.backbone.model.layers:
            layer.input_layernorm.weight.mul_(8)
    torch.testing.assert_close(all_scores(ranker), scores_alone(ranker), rtol=0, atol=5e-3)


def test_4bit_scores_are_those_of_fp32_with_the_rounded_weights(tiny_folder):
    functional = pytest.importorskip("bitsandbytes.functional")
    exact = all_scores(load_ranker(tiny_folder("qwen3"), "qwen3"))
    rounded = load_ranker(tiny_folder("qwen3"), "qwen3")
    for module in rounded.backbone.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            packed, state = functional.quantize_4bit(
                module.weight.data, blocksize=64, quant_type="nf4"
            )
            module.weight.data = functional.dequantize_4bit(packed, state)
    expected = all_scores(rounded)
    assert (expected - exact).abs().max() > 5 * NF4  # rounding to 16 levels matters here
    ranker = load_ranker(tiny_folder("qwen3"), "qwen3", dtype="nf4")
    assert ranker.backbone.model.layers[0].self_attn.v_proj.weight.dtype == torch.uint8
    torch.testing.assert_close(all_scores(ranker), expected, rtol=0, atol=NF4)
    torch.testing.assert_close(all_scores(ranker), scores_alone(ranker), rtol=0, atol=NF4)


@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tiny_folder, monkeypatch, dtype
):
    monkeypatch.setattr("rsrank_rag.backends.torch.loading.find_spec", lambda name: None)
    message = r"need bitsandbytes.*pip install .*\[8bit\]"
    with pytest.raises(MissingDependencyError, match=message) as caught:
        load_ranker(tiny_folder("llama"), "llama", dtype=dtype)
    assert isinstance(caught.value, ImportError)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "bert"])
def test_scores_on_cuda_equal_those_on_the_cpu(kind, tiny_folder, tiny_ranker):
    ranker = load_ranker(tiny_folder(kind), kind, device="cuda")
    assert ranker.projection.weight.device.type == "cuda"
    torch.testing.assert_close(all_scores(ranker), all_scores(tiny_ranker(kind)), rtol=0, atol=5e-3)
    torch.testing.assert_close(all_scores(ranker), scores_alone(ranker), rtol=0, atol=5e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_8bit_scores_on_cuda_do_not_depend_on_neighbours(tiny_folder):
    pytest.importorskip("bitsandbytes")
    ranker = load_ranker(tiny_folder("llama"), "llama", device="cuda", dtype="int8")
    torch.testing.assert_close(all_scores(ranker), scores_alone(ranker), rtol=0, atol=5e-3)


def test_a_projection_for_other_heads_is_refused(tiny_folder):
    options = LoadOptions(device="cpu", dtype="float32", local_files_only=True)
    wrong = Projection.random(range(1, LAYERS), 3, 8, HEAD_DIM)
    with pytest.raises(Exception, match=r"B has shape \(3, 3, 8, 16\)"):
        RSRank.from_backbone(tiny_folder("llama"), wrong, options=options)


def test_a_ranker_that_reads_some_layers_only_leaves_the_others_out(tiny_folder, ranker):
    options = LoadOptions(device="cpu", dtype="float32", local_files_only=True)
    projection = random_projection("qwen3")
    selected = Projection(projection.weight.detach()[[0, 2]], [1, 3])
    sparse = RSRank.from_backbone(tiny_folder("qwen3"), selected, template=CHAT, options=options)
    for document in DOCUMENTS[:3]:
        actual = ranker.explain(QUERY, document)
        sums = [math.fsum(column) for column in zip(*actual.parts, strict=True)]
        parts = dict(zip(actual.layers, sums, strict=True))
        assert sparse.score(QUERY, [document]) == pytest.approx([parts[1] + parts[3]], abs=EXACT)


@pytest.mark.parametrize(
    "iterable", [iter, tuple, lambda texts: (text for text in texts)], ids=["iter", "tuple", "gen"]
)
def test_documents_may_come_from_any_iterable(ranker, iterable):
    expected = ranker.score(QUERY, DOCUMENTS)
    assert ranker.score(QUERY, iterable(DOCUMENTS)) == expected
    result = ranker.rank(QUERY, iterable(DOCUMENTS))
    assert sorted(document.index for document in (*result.kept, *result.dropped)) == list(
        range(len(DOCUMENTS))
    )


@pytest.mark.parametrize("nothing", [None, 3])
def test_what_is_no_list_of_documents_is_refused(ranker, nothing):
    with pytest.raises(InputError, match="documents must be a list of strings"):
        ranker.score(QUERY, nothing)
    with pytest.raises(InputError, match="documents must be a list of strings"):
        ranker.rank(QUERY, nothing)


def test_a_document_that_several_queries_share_is_read_once(ranker, monkeypatch):
    read, rows = [], []
    prefill, query_values = ranker.backbone.prefill, ranker.backbone.query_values

    def counted(documents, *rest, **options):
        read.extend(documents)
        return prefill(documents, *rest, **options)

    def watched(lines, prefixes, *rest):
        rows.append((len(lines), len(prefixes)))
        return query_values(lines, prefixes, *rest)

    expected = [ranker.score(query, DOCUMENTS) for query in QUERIES]
    monkeypatch.setattr(ranker.backbone, "prefill", counted)
    monkeypatch.setattr(ranker.backbone, "query_values", watched)
    fresh = budgeted(ranker, 100_000)
    fresh.backbone.null_prefix(fresh.prompts.null_prefix)
    read.clear()
    torch.testing.assert_close(
        score_many(fresh, QUERIES, [DOCUMENTS] * 3), expected, rtol=0, atol=EXACT
    )
    assert len(read) == len(set(read)) == len(DOCUMENTS)
    assert rows == [
        (3, 3 * len(DOCUMENTS) + 3)
    ]  # one batch: a row a pair, and one for each query alone


def test_the_callers_projection_stays_trainable(tiny_folder):
    projection = random_projection("llama")
    options = LoadOptions(device="cpu", dtype="float32", local_files_only=True)
    RSRank.from_backbone(tiny_folder("llama"), projection, options=options)
    assert projection.weight.requires_grad


def test_a_device_that_is_not_there_is_one_clear_error(tiny_folder):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(BackboneError, match="could not be loaded"):
        RSRank.from_backbone(
            tiny_folder("llama"), random_projection("llama"), options=LoadOptions(device="cuda")
        )


def test_so_it_is_for_quantised_weights(tiny_folder):
    pytest.importorskip("bitsandbytes")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(BackboneError, match="could not be loaded: "):
        load_ranker(tiny_folder("llama"), "llama", device="cuda", dtype="int8")


def test_an_explanation_of_many_layers_fits_a_terminal():
    parts = tuple(tuple(0.01 * (token + layer) for layer in range(35)) for token in range(2))
    explanation = Explanation("q", "d", 1.0, False, ("a", "b"), tuple(range(1, 36)), parts, ())
    labels, rows = explanation.columns()
    assert labels == ["L1-5", "L6-10", "L11-15", "L16-20", "L21-25", "L26-30", "L31-35"]
    assert [sum(row) for row in rows] == pytest.approx([sum(row) for row in parts])
    assert max(map(len, str(explanation).splitlines())) <= 80


def test_a_line_break_among_the_tokens_breaks_no_row_of_an_explanation():
    explanation = Explanation("q", "d", 2.0, False, ("é", "\n"), (1,), ((1.0,), (1.0,)), ())
    _, first, second, last = str(explanation).splitlines()
    assert [line.split()[0] for line in (first, second, last)] == ["é", r"\n", "score"]


def batches_of(lengths, budget):
    actual, batches = [], Batches([tuple(range(length)) for length in lengths], budget)
    for batch in batches:
        with batches.attempt():
            actual.append([len(ids) for ids in batch])
    return actual


def test_sequences_of_like_length_share_a_batch_and_short_ones_wait_for_their_own():
    assert batches_of([10, 90, 100, 11, 80], budget=1000) == [[80, 90, 100], [10, 11]]


def test_a_batch_keeps_to_its_budget_of_padded_tokens():
    assert batches_of([100, 100, 100, 90, 90], budget=250) == [[100, 100], [90, 100], [90]]


def test_a_small_batch_takes_short_sequences_too():
    assert batches_of([1, 2, 4], budget=100) == [[1, 2, 4]]


def test_a_ranker_names_its_model_its_device_its_dtype_and_its_rule(ranker, tmp_path):
    ranker.save_pretrained(tmp_path / "made", include_backbone=True)
    loaded = RSRank.from_pretrained(tmp_path / "made", device="cpu", dtype="float32")
    assert (
        repr(loaded)
        == f"RSRank({str(tmp_path / 'made')!r}, device='cpu', dtype=torch.float32, rule='zero')"
    )
    assert repr(ranker.config.backbone.name) in repr(ranker)


def test_pairs_of_plain_tuples_score_as_pairs_do(ranker):
    pairs = [(QUERY, text) for text in DOCUMENTS]
    assert ranker.score_pairs(pairs) == ranker.score_pairs([Pair(*pair) for pair in pairs])


def test_a_call_that_takes_long_says_once_how_far_it_is(ranker, monkeypatch, caplog):
    texts = [f"{number} {text}" for number, text in enumerate(DOCUMENTS)]
    slow = budgeted(ranker, 1)
    slow.rank(QUERY, texts)
    assert not caplog.records
    # Each look at the clock comes six seconds after the one before.
    monkeypatch.setattr(CLOCK, itertools.count(0, 6).__next__)
    slow.rank(QUERY, texts)
    (record,) = caplog.records
    assert f"1 of {len(texts)} texts are scored after 10 seconds" in record.message
    assert "max_characters" in record.message


def test_a_rule_that_is_set_is_saved_and_its_threshold_must_be_a_number(tiny_folder, tmp_path):
    own = load_ranker(tiny_folder("qwen3"), "qwen3")
    own.threshold = 1
    own.max_gap = 2.5
    own.save_pretrained(tmp_path)
    again = RSRank.from_pretrained(tmp_path, device="cpu", dtype="float32")
    assert (again.threshold, again.max_gap) == (1.0, 2.5)
    for value in (None, "native", math.nan, math.inf):
        own.threshold = value
        with pytest.raises(InputError, match="threshold"):
            own.save_pretrained(tmp_path)


def test_copies_share_the_model_and_pickling_names_what_to_pickle_instead(ranker):
    for made in (copy.copy(ranker), copy.deepcopy(ranker)):
        assert made is not ranker
        assert made.backbone is ranker.backbone
        assert made.score(QUERY, DOCUMENTS) == pytest.approx(
            ranker.score(QUERY, DOCUMENTS), abs=EXACT
        )
    with pytest.raises(TypeError, match=r"Pickle a function that loads it, such as .*partial"):
        pickle.dumps(ranker)
