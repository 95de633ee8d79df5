"""Cached prefixes: reused, bounded, shared by threads and processes, never foreign or damaged."""

import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from conftest import DOCUMENTS, QUERIES, QUERY, random_projection, score_many, unkept

from rsrank_rag import RSRank
from rsrank_rag.backends.options import CacheSettings, ModelSource, as_bytes
from rsrank_rag.cli import app
from rsrank_rag.errors import InputError, ScoringError
from rsrank_rag.method.batches import Row
from rsrank_rag.method.prefix import Prefix
from rsrank_rag.method.template import TokenisedQuery
from rsrank_rag.partial_files import A_DAY
from rsrank_rag.prefixes.cache import CachedPrefixes, PackedPrefix, PrefixTiers, memory_share
from rsrank_rag.prefixes.disk import Disk

LAYERS, HEADS, WIDTH = 3, 2, 8
CPU = torch.device("cpu")


def made_up(ids):
    """What a model would leave behind: numbers that depend on the ids alone."""
    generator = torch.Generator().manual_seed(hash(ids) % 2**31)
    return [torch.randn(LAYERS, HEADS, len(ids), WIDTH, generator=generator) for _ in range(2)]


class Model:
    """Runs documents and counts them."""

    def __init__(self):
        self.ran = []

    def prefill(self, documents):
        self.ran += documents
        return [Prefix(torch.stack(made_up(ids)), torch.empty(0)) for ids in documents]


def prefill(cache, documents, model):
    query = TokenisedQuery((1,), 0, 1)
    return cache.prefill(model, [Row(ids, query, cache.key(ids)) for ids in documents])


@pytest.mark.parametrize("device", [0, 10_000_000])
def test_rows_without_a_key_get_their_own_documents(device):
    cache = store(device=device)
    query = TokenisedQuery((1,), 0, 1)
    for documents in ([(1, 2), (3, 4)], [(3, 4), (5, 6)]):
        rows = [Row(ids, query) for ids in documents]
        actual = cache.prefill(Model(), rows)
        for prefix, ids in zip(actual, documents, strict=True):
            assert torch.equal(prefix.states, torch.stack(made_up(ids)))


def rounded(states, dtype):
    """Keys and values in 8 bits and back."""
    return PackedPrefix.of(Prefix(states, torch.empty(0))).unpack(CPU, dtype).states


def store(device=0, folder=None, disk=10**10, dtype=torch.float32):
    files = None if folder is None else Disk(Path(folder), disk)
    tiers = PrefixTiers(device, files, device=CPU, dtype=dtype)
    return CachedPrefixes({"model": "m"}, tiers)


def stats(cache):
    cache = cache.cache if isinstance(cache, RSRank) else cache
    return cache.tiers.stats()


def identity_of(cache):
    return cache._hash.hexdigest()


def check(prefixes, documents, error=0.0):
    for prefix, ids in zip(prefixes, documents, strict=True):
        assert (prefix.states - torch.stack(made_up(ids))).abs().max() <= error


DOCS = [(1, 2, 3), (4, 5), (6, 7, 8, 9, 10)]
BYTES = 2 * LAYERS * HEADS * WIDTH * 4  # of a token


def test_what_was_run_once_is_not_run_again():
    kept, model = store(device=1 << 20), Model()
    check(prefill(kept, DOCS, model), DOCS)
    check(prefill(kept, DOCS[::-1], model), DOCS[::-1])
    assert model.ran == DOCS
    actual = stats(kept)
    assert (actual["device_hits"], actual["misses"], actual["device_bytes"]) == (3, 3, 10 * BYTES)


def test_one_call_may_mix_hits_and_misses():
    kept, model = store(device=1 << 20), Model()
    prefill(kept, DOCS[:1], model)
    mixed = [DOCS[1], DOCS[0], DOCS[2]]
    check(prefill(kept, mixed, model), mixed)
    assert model.ran == [DOCS[0], DOCS[1], DOCS[2]]


def test_a_new_prefix_replaces_those_that_were_not_used_for_longest():
    kept, model = store(device=8 * BYTES), Model()
    prefill(kept, [DOCS[0]], model)
    prefill(kept, [DOCS[1]], model)
    prefill(kept, [DOCS[0]], model)  # now the second is the older one
    new = (11, 12, 13, 14)
    prefill(kept, [new], model)
    assert stats(kept)["evictions"] == 1
    assert stats(kept)["device_bytes"] == 7 * BYTES
    model.ran.clear()
    prefill(kept, [DOCS[0], new], model)
    assert model.ran == []
    prefill(kept, [DOCS[1]], model)
    assert model.ran == [DOCS[1]]


def test_where_all_fit_nothing_is_said(caplog):
    kept, model = store(device=10 * BYTES), Model()
    for number in range(400):
        prefill(kept, [(number % 10,)], model)
    assert stats(kept)["misses"] == 10
    assert not caplog.text


def test_documents_that_are_asked_for_no_more_make_room_for_new_ones():
    kept, model = store(device=10 * BYTES), Model()
    for start in (0, 100, 200):
        for _ in range(12):
            prefill(kept, [(start + number,) for number in range(8)], model)
        model.ran.clear()
        prefill(kept, [(start + number,) for number in range(8)], model)
        assert model.ran == []


@pytest.mark.parametrize(
    ("files", "share"),
    [
        ({"memory.max": "10000000000\n"}, 500_000_000),
        ({"memory/memory.limit_in_bytes": "6000000000\n"}, 300_000_000),
        ({"memory.max": "1000000\n"}, 128_000_000),
        ({"memory.max": "max\n"}, 2_000_000_000),
        ({}, 2_000_000_000),
    ],
)
def test_a_twentieth_of_the_memory_is_used_within_bounds(tmp_path, monkeypatch, files, share):
    monkeypatch.setattr("os.sysconf", lambda name: 10**6)  # pages of 1 MB, a million of them
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_share(tmp_path) == share


def test_a_document_larger_than_a_tier_is_run_each_time():
    kept, model = store(device=2 * BYTES), Model()
    for _ in range(2):
        check(prefill(kept, [DOCS[2]], model), [DOCS[2]])
    assert model.ran == [DOCS[2], DOCS[2]]
    assert stats(kept)["device_bytes"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_first_call_gives_what_every_later_one_gives_wherever_it_is_found(tmp_path, dtype):
    def prefixes(kept, model):
        return prefill(kept, [DOCS[2]], model)[0].states

    class Rounded(Model):
        def prefill(self, documents):
            run = super().prefill(documents)
            return [replace(prefix, states=prefix.states.to(dtype)) for prefix in run]

    model = Rounded()
    both = store(1 << 20, tmp_path, dtype=dtype)
    first = prefixes(both, model)
    assert torch.equal(prefixes(both, model), first)  # on the device
    both.tiers.clear()
    assert torch.equal(prefixes(both, model), first)  # on disk
    assert torch.equal(prefixes(store(0, tmp_path, dtype=dtype), model), first)
    assert stats(both)["disk_hits"] == stats(both)["device_hits"] == 1


def test_the_same_document_may_stand_in_several_rows():
    kept, model = store(device=1 << 20), Model()
    rows = [DOCS[1], DOCS[0], DOCS[1]]
    check(prefill(kept, rows, model), rows)
    assert model.ran == [DOCS[1], DOCS[0]]
    check(prefill(kept, rows, model), rows)


def test_the_disk_keeps_what_the_process_forgets(tmp_path):
    model = Model()
    prefill(store(folder=tmp_path), DOCS, model)
    again = store(folder=tmp_path, device=1 << 20)
    check(prefill(again, DOCS, model), DOCS, error=0.02)
    check(prefill(again, DOCS, model), DOCS, error=0.02)
    assert model.ran == DOCS
    actual = stats(again)
    assert (actual["disk_hits"], actual["device_hits"], actual["misses"]) == (3, 3, 0)
    assert actual["disk_bytes"] == sum(path.stat().st_size for path in tmp_path.glob("*/*"))


def test_8_bits_err_by_half_a_scale_at_most_and_a_sink_token_costs_no_other():
    keys, values = made_up(tuple(range(20)))
    keys[:, :, 0] *= 1000
    prefix = torch.stack([keys, values])
    back = rounded(prefix, torch.float32)
    bound = prefix.abs().amax(-1, keepdim=True) / 127 * 0.51
    assert ((back - prefix).abs() <= bound).all()


def test_extreme_and_zero_values_survive_8_bits():
    prefix = torch.stack([torch.zeros(1, 1, 2, 4), torch.full((1, 1, 2, 4), 1e5)])
    back = rounded(prefix, torch.float32)
    assert back[0].abs().max() == 0
    assert torch.allclose(back[1], prefix[1], rtol=0.01)


@pytest.mark.parametrize("change", ["identity", "dtype", "salt"])
def test_a_foreign_prefix_is_never_found(tmp_path, change):
    model = Model()
    prefill(store(folder=tmp_path), DOCS, model)
    dtype = torch.bfloat16 if change == "dtype" else torch.float32
    tiers = store(0, tmp_path, dtype=dtype).tiers
    identity = {"model": "other" if change == "identity" else "m"}
    other = CachedPrefixes(identity, tiers)
    if change == "salt":
        other = other.with_salt("tenant")
    assert not tiers.cached([other.key(ids) for ids in DOCS])
    prefill(other, DOCS, model)
    assert model.ran == DOCS * 2


def test_ids_that_run_together_are_different_documents():
    kept = store()
    assert len({kept.key(ids) for ids in ((1, 23), (12, 3), (123,), (1, 2, 3))}) == 4


@pytest.mark.parametrize(
    "damage", ["cut", "flipped", "codes' dtype", "scales' dtype", "renamed", "empty", "text"]
)
def test_a_damaged_file_is_computed_again_and_counted(tmp_path, damage, caplog):
    model = Model()
    prefill(store(folder=tmp_path), DOCS[:2], model)
    first, second = (store(folder=tmp_path).tiers.disk.path(store().key(ids)) for ids in DOCS[:2])
    content = first.read_bytes()
    flipped = content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]
    assert content.count(b'"I8"') == content.count(b'"F16"') == 1
    broken = {
        "cut": content[:-9],
        "flipped": flipped,
        "codes' dtype": content.replace(b'"I8"', b'"U8"'),
        "scales' dtype": content.replace(b'"F16"', b'"BF16"'),
        "renamed": second.read_bytes(),
        "empty": b"",
        "text": b"{}" * 99,
    }
    first.write_bytes(broken[damage])
    again = store(folder=tmp_path)
    check(prefill(again, DOCS[:2], model), DOCS[:2], error=0.02)
    assert model.ran == [*DOCS[:2], DOCS[0]]
    assert stats(again)["corrupt"] == 1
    assert "is damaged and is computed again" in caplog.text
    assert stats(store(folder=tmp_path))["disk_bytes"] == len(content) + len(second.read_bytes())
    # The file was written anew.
    assert first.read_bytes() == content


def test_a_disk_that_cannot_be_written_is_done_without(tmp_path, caplog, monkeypatch):
    kept, model = store(folder=tmp_path, device=1 << 20), Model()

    def full(path, content):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with caplog.at_level(logging.WARNING):
        check(prefill(kept, DOCS, model), DOCS, error=0.02)
    check(prefill(kept, DOCS, model), DOCS, error=0.02)
    assert stats(kept)["write_errors"] == 3
    assert caplog.text.count("No space left on device") == 1
    assert not list(tmp_path.glob("*/*"))


def test_the_folder_stays_within_its_bound_and_the_oldest_go(tmp_path):
    kept, model = store(folder=tmp_path, disk=10_000), Model()
    documents = [(i, i + 1, i + 2) for i in range(30)]
    for ids in documents:
        prefill(kept, [ids], model)
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 10_000
    first, last = kept.key(documents[0]), kept.key(documents[-1])
    assert kept.tiers.cached([first, last]) == {last}
    assert stats(kept)["evictions"] > 0


def test_what_a_killed_writer_left_is_cleared_away(tmp_path):
    (tmp_path / "ab").mkdir()
    stale = tmp_path / "ab" / f".{'12' * 16}.partial"
    stale.write_bytes(b"half")
    film = tmp_path / "film.mp4.partial"
    film.write_bytes(b"of another program")
    os.utime(film, (0, 0))
    os.utime(stale, (time.time() - A_DAY - 60,) * 2)
    kept, model = store(folder=tmp_path), Model()
    assert not stale.exists()
    assert film.exists()
    check(prefill(kept, DOCS, model), DOCS, error=0.02)


def test_what_a_writer_still_writes_is_left_alone(tmp_path):
    (tmp_path / "ab").mkdir()
    begun = tmp_path / "ab" / f".{'12' * 16}.partial"
    begun.write_bytes(b"half")
    os.utime(begun, (time.time() - A_DAY + 600,) * 2)
    store(folder=tmp_path)
    assert begun.exists()


def _fill(folder, documents, answers):
    kept, model = store(folder=folder), Model()
    for _ in range(3):
        for ids in documents:
            check(prefill(kept, [ids], model), [ids], error=0.02)
    answers.put(stats(kept)["corrupt"])


@pytest.mark.slow
def test_two_processes_share_a_folder(tmp_path):
    documents = [(i, i + 1, i + 2) for i in range(40)]
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    both = [
        context.Process(target=_fill, args=(tmp_path, documents[::step], answers))
        for step in (1, -1)
    ]
    for process in both:
        process.start()
    for process in both:
        process.join()  # a limit would measure the machine
    assert [process.exitcode for process in both] == [0, 0]
    assert [answers.get(), answers.get()] == [0, 0]
    assert len(list(tmp_path.glob("*/*.prefix"))) == len(documents)
    cache = store(folder=tmp_path)
    assert all(cache.tiers.read_file(cache.key(ids)) is not None for ids in documents)


def test_threads_share_a_store(tmp_path):
    kept, model = store(folder=tmp_path, device=20 * BYTES), Model()
    documents = [(i, i + 1, i + 2) for i in range(20)]

    def use(seed):
        order = sorted(documents, key=lambda ids: hash((seed, ids)))
        for start in range(0, 20, 4):
            check(
                prefill(kept, order[start : start + 4], model), order[start : start + 4], error=0.02
            )

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use, range(24)))
    actual = stats(kept)
    assert actual["device_bytes"] <= 20 * BYTES
    hits = actual["device_hits"] + actual["disk_hits"]
    assert hits + actual["misses"] == 24 * 20


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_nothing_that_is_served(tmp_path):
    code = f"""
import os, sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
from pathlib import Path
from test_prefix_cache import DOCS, Model, prefill, store
write = Path.write_bytes
def dies(path, content):
    write(path, content[:len(content) // 2])
    os._exit(9)
Path.write_bytes = dies
prefill(store(folder={str(tmp_path / "kept")!r}), DOCS, Model())
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 9, done.stderr
    assert len(list((tmp_path / "kept").glob("*/*.partial"))) == 1
    kept, model = store(folder=tmp_path / "kept"), Model()
    check(prefill(kept, DOCS, model), DOCS, error=0.02)
    assert model.ran == DOCS
    assert stats(kept)["corrupt"] == 0


# With a ranker


def keeping(ranker, folder=None, size=None):
    parts = (ranker.backbone, ranker.prompts, ranker.projection, ranker.config)
    return RSRank(*parts, ModelSource(cache_size=size, cache_folder=folder))


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "bert"])
def test_scores_with_kept_prefixes_are_the_same(tiny_ranker, kind):
    ranker = tiny_ranker(kind)
    kept = keeping(ranker)
    expected = score_many(ranker, QUERIES, [DOCUMENTS] * 3)
    for _ in range(2):
        for actual, wanted in zip(
            score_many(kept, QUERIES, [DOCUMENTS] * 3), expected, strict=True
        ):
            assert actual == pytest.approx(wanted, abs=1e-4)
    assert stats(kept)["misses"] == len(DOCUMENTS)
    mixed = [*DOCUMENTS[::-1], "something new"]
    assert kept.score(QUERY, mixed) == pytest.approx(ranker.score(QUERY, mixed), abs=1e-4)
    assert stats(kept)["misses"] == len(DOCUMENTS) + 1


def test_a_second_call_runs_no_document(ranker, monkeypatch):
    kept = keeping(ranker)
    expected = kept.score(QUERY, DOCUMENTS)
    kept.score(QUERIES[1], DOCUMENTS)

    def forbidden(*arguments):
        raise AssertionError("a document was run again")

    monkeypatch.setattr(kept.backbone, "prefill", forbidden)
    assert kept.score(QUERY, DOCUMENTS) == pytest.approx(expected, abs=1e-4)


def test_a_changed_document_is_another_document(ranker):
    kept = keeping(ranker)
    kept.score(QUERY, ["The bridge was opened in 1932."])
    changed = ["The bridge was opened in 1933."]
    assert kept.score(QUERY, changed) == pytest.approx(ranker.score(QUERY, changed), abs=1e-4)
    assert stats(kept)["misses"] == 2


def test_prefixes_on_disk_serve_the_next_process_but_no_other_model(tiny_ranker, tmp_path):
    first = keeping(tiny_ranker("qwen3"), tmp_path)
    expected = first.score(QUERY, DOCUMENTS)
    again = keeping(tiny_ranker("qwen3"), str(tmp_path))
    assert again.score(QUERY, DOCUMENTS) == pytest.approx(expected, abs=0.05)  # 8 bits
    assert stats(again)["disk_hits"] == len(DOCUMENTS)
    other = tiny_ranker("qwen3")
    files = {**other.config.backbone.files, "model.safetensors": "the hash of other weights"}
    backbone = other.config.backbone.model_copy(update={"files": files})
    config = other.config.model_copy(update={"backbone": backbone})
    foreign = RSRank(
        other.backbone, other.prompts, other.projection, config, ModelSource(cache_folder=tmp_path)
    )
    assert identity_of(foreign.cache) != identity_of(again.cache)


@pytest.mark.parametrize(
    ("size", "in_folder", "in_memory", "on_disk"),
    [
        (None, False, memory_share(), 0),
        ("1KB", False, 1000, 0),
        (5000, False, 5000, 0),
        ("50GB", False, 50 * 10**9, 0),
        (None, True, memory_share(), 10 * 10**9),
        ("50GB", True, memory_share(), 50 * 10**9),
        ("1KB", True, 1000, 1000),
    ],
)
def test_the_size_limits_the_folder_or_else_the_memory(
    ranker, tmp_path, size, in_folder, in_memory, on_disk
):
    made = stats(keeping(ranker, tmp_path if in_folder else None, size))
    assert (made["device_limit"], made["disk_limit"]) == (in_memory, on_disk)


@pytest.mark.parametrize(
    ("size", "folder", "message"),
    [
        ("512MBs", None, "'512MBs' is no size"),
        ("1e9", None, "'1e9' is no size"),
        ("prefixes", None, "'prefixes' is no size"),
        (True, None, "True is no size"),
        (1.5, None, "1.5 is no size"),
        (-1, None, "-1 is no size"),
        (None, "", "cache_folder"),
        (None, True, "cache_folder"),
        (0, "prefixes", "Leave one of the two out"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(ranker, size, folder, message):
    with pytest.raises(InputError, match=message):
        keeping(ranker, folder, size)
    assert not Path(str(size)).exists()


def test_a_tilde_stands_for_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert CacheSettings(cache_folder="~/px").cache_folder == "/home/ada/px"


def test_settings_of_the_same_size_and_folder_are_equal(tmp_path):
    for settings in ({"cache_size": 10**9}, {"cache_folder": str(tmp_path)}):
        other = {"cache_size": "1GB"} if "cache_size" in settings else {"cache_folder": tmp_path}
        assert CacheSettings(**settings) == CacheSettings(**other)


def test_without_a_cache_there_are_no_statistics(ranker):
    made = keeping(ranker, size=0)
    assert made.stats() == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512MB", 512_000_000),
        ("1.5 gb", 1_500_000_000),
        ("20", 20),
        ("7k", 7000),
        ("512MiB", 512 * 1024**2),
        ("MB", None),
        ("a/b", None),
    ],
)
def test_sizes_are_read_as_people_write_them(text, expected):
    if expected is None:
        with pytest.raises(InputError, match="is no size"):
            as_bytes(text)
    else:
        assert as_bytes(text) == expected


def test_a_b_for_the_same_model_shares_its_prefixes(ranker, tmp_path):
    keeping(ranker, tmp_path).score(QUERY, DOCUMENTS)
    other = RSRank(
        ranker.backbone,
        ranker.prompts,
        random_projection("qwen3", seed=8),
        ranker.config,
        ModelSource(cache_folder=tmp_path),
    )
    other.score(QUERY, DOCUMENTS)
    assert stats(other)["disk_hits"] == len(DOCUMENTS)


def test_index_fills_a_folder_ahead_of_time_and_goes_on(ranker, tmp_path):
    ranker.save_pretrained(tmp_path / "artifact", include_backbone=True)
    (tmp_path / "passages.txt").write_text("\n".join(DOCUMENTS))
    command = ["index", "--model", tmp_path / "artifact", "--documents", tmp_path / "passages.txt"]
    command += ["--cache-folder", tmp_path / "prefixes", "--device", "cpu", "--dtype", "float32"]
    message = [CliRunner().invoke(app, [str(part) for part in command]) for _ in range(2)]
    assert [result.exit_code for result in message] == [0, 0], message[0].output
    assert f"{len(DOCUMENTS)} run" in message[0].output
    assert "0 run" in message[1].output
    loaded = RSRank.from_pretrained(
        tmp_path / "artifact", device="cpu", dtype="float32", cache_folder=tmp_path / "prefixes"
    )
    loaded.score(QUERY, DOCUMENTS)
    actual = stats(loaded)
    assert (actual["disk_hits"], actual["misses"]) == (len(DOCUMENTS), 0)
    assert json.dumps(actual)


@pytest.mark.shared
def test_8_bits_move_scores_of_a_trained_model_by_less_than_its_rounding(stories, tmp_path):
    documents = [
        "Lily had a red ball. She threw it to her dog Max.",
        "The sun was hot.",
        "Tom lost his boat in the lake.",
    ]
    expected = stories.score("What did Lily throw?", documents)
    keeping(stories, tmp_path).score("What did Lily throw?", documents)
    actual = keeping(stories, tmp_path).score("What did Lily throw?", documents)
    assert actual == pytest.approx(expected, abs=1.6)


def test_rankers_of_tests_keep_nothing(ranker):
    assert unkept(ranker).stats() == {}


# Limits, and what other programs do to a folder


def test_kept_documents_are_read_before_new_ones_can_push_them_out(ranker):
    first, second = (
        [f"{text} {i}" for i in range(4) for text in DOCUMENTS],
        [f"new {text}" for text in DOCUMENTS],
    )
    sized = keeping(ranker)
    sized.score(QUERY, first)
    kept = keeping(ranker, size=stats(sized)["device_bytes"])  # just large enough for the first
    kept.score(QUERY, first)
    hits = stats(kept)["device_hits"]
    kept.score(QUERY, [*second, *first])
    assert stats(kept)["device_hits"] - hits == len(first)


def test_a_folder_that_cannot_be_touched_still_serves(tmp_path, monkeypatch):
    model = Model()
    prefill(store(folder=tmp_path), DOCS, model)

    def refuse(*args, **options):
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "utime", refuse)
    again = store(folder=tmp_path)
    check(prefill(again, DOCS, model), DOCS, error=0.02)
    assert (stats(again)["disk_hits"], stats(again)["corrupt"], model.ran) == (3, 0, DOCS)


def test_nobody_else_may_read_what_is_kept(tmp_path):
    folder = tmp_path / "kept"
    prefill(store(folder=folder), DOCS, Model())
    actual = [folder, *folder.rglob("*")]
    assert {oct(path.stat().st_mode & 0o777) for path in actual if path.is_dir()} == {"0o700"}
    assert {oct(path.stat().st_mode & 0o777) for path in actual if path.is_file()} == {"0o600"}


def test_a_damaged_file_does_not_count_as_indexed(ranker, tmp_path):
    kept = keeping(ranker, tmp_path)
    assert kept.index(DOCUMENTS) == len(DOCUMENTS)
    path = sorted(tmp_path.glob("*/*.prefix"))[2]
    content = path.read_bytes()
    path.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    assert [keeping(ranker, tmp_path).index(DOCUMENTS) for _ in range(2)] == [1, 0]


def test_a_model_that_the_user_named_has_prefixes_of_its_own(tiny_ranker, tiny_folder, tmp_path):
    tiny_ranker("qwen3").save_pretrained(tmp_path / "artifact")
    copy = shutil.copytree(tiny_folder("qwen3"), tmp_path / "copy")
    identities = []
    for epsilon in (1e-6, 1e-3, 1e-6):
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": epsilon}))
        ranker = RSRank.from_pretrained(
            tmp_path / "artifact", backbone=copy, device="cpu", cache_folder=tmp_path / "prefixes"
        )
        identities.append(identity_of(ranker.cache))
    assert identities[0] == identities[2] != identities[1]


def test_the_limit_of_a_folder_holds_for_several_stores_together(tmp_path):
    sized = tmp_path / "sized"
    prefill(store(folder=sized), DOCS[:1], Model())
    size = sum(path.stat().st_size for path in sized.glob("*/*"))
    folder, limit = tmp_path / "kept", 25 * size
    stores = [store(folder=folder, disk=limit) for _ in range(4)]
    for i in range(80):
        prefill(stores[i % 4], [(100 + i, 1, 2)], Model())
    assert sum(path.stat().st_size for path in folder.glob("*/*")) <= 1.2 * limit


def test_indexing_that_could_not_write_is_an_error(ranker, tmp_path, monkeypatch):
    kept = keeping(ranker, tmp_path)

    tried = []

    def full(path, content):
        tried.append(path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(InputError, match=r"could not be written: .*No space left on device: '/"):
        kept.index(DOCUMENTS)
    # It ends at once, because nothing that runs after it could be written either.
    assert len(tried) == 1


def test_indexing_more_than_the_folder_may_hold_is_refused_before_it_starts(ranker, tmp_path):
    kept = keeping(ranker, tmp_path, "1KB")
    with pytest.raises(InputError, match="Raise cache_size"):
        kept.index(DOCUMENTS)
    assert stats(kept)["misses"] == 0


def test_the_documents_that_are_in_the_folder_count_towards_its_limit(ranker, tmp_path):
    full = keeping(ranker, tmp_path / "full")
    full.index(DOCUMENTS)
    size = stats(full)["disk_bytes"]
    kept = keeping(ranker, tmp_path / "small", int(0.9 * size))
    half = len(DOCUMENTS) // 2
    assert kept.index(DOCUMENTS[:half]) == half
    with pytest.raises(InputError, match="Raise cache_size"):
        kept.index(DOCUMENTS)
    # Nothing was removed.
    assert kept.index(DOCUMENTS[:half]) == 0


def test_indexing_names_a_document_by_its_place_in_the_list(ranker, tmp_path, monkeypatch):
    kept = keeping(ranker, tmp_path)
    kept.index(DOCUMENTS[:3])

    def never_fits(*arguments):
        raise MemoryError

    monkeypatch.setattr(kept.backbone, "prefill", never_fits)
    with pytest.raises(ScoringError, match="Document 4"):
        kept.index(["", *DOCUMENTS[:4]])


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 1e30])
def test_what_8_bits_cannot_hold_is_not_kept_in_them(number, tmp_path):
    class Broken(Model):
        def prefill(self, documents):
            prefix = Prefix(torch.full((2, LAYERS, HEADS, 3, WIDTH), number), torch.empty(0))
            return [prefix] * len(documents)

    kept = store(folder=tmp_path)
    prefill(kept, [(1, 2, 3)], Broken())
    assert stats(kept)["disk_bytes"] == 0


def test_the_largest_number_of_float16_stays_finite():
    largest = torch.full((2, 1, 1, 1, 4), 65504.0)
    assert rounded(largest, torch.float16).isfinite().all()


def test_a_file_in_place_of_a_folder_is_a_clear_error(ranker, tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(InputError, match="Give another folder"):
        keeping(ranker, path)


def test_a_folder_that_was_removed_is_made_again(tmp_path):
    kept, model = store(folder=tmp_path / "kept"), Model()
    prefill(kept, DOCS[:1], model)
    shutil.rmtree(tmp_path / "kept")
    prefill(kept, DOCS, model)
    assert stats(kept)["write_errors"] == 0
    assert len(list(tmp_path.glob("kept/*/*.prefix"))) == len(DOCS)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_waits_for_no_thread_of_its_parent(tmp_path):
    kept, model = store(1 << 20, tmp_path, disk=5000), Model()
    prefill(kept, DOCS[:1], model)

    def use():
        check(prefill(kept, DOCS, model), DOCS, error=0.02)
        assert stats(kept)["device_hits"] == 1

    child = multiprocessing.get_context("fork").Process(target=use)
    # As a thread that scores holds it for a moment.
    with kept.tiers.lock:
        child.start()
        child.join(60)
    stuck = child.is_alive()
    child.kill()
    child.join()
    assert not stuck
    assert child.exitcode == 0


def test_views_of_one_model_with_other_salts_share_it_and_no_prefix(ranker):
    own = keeping(ranker)
    tenants = [own.with_salt(name) for name in ("one", "two")]
    for tenant in tenants:
        assert tenant.backbone is own.backbone
        tenant.score(QUERY, DOCUMENTS)
    assert stats(own)["misses"] == 2 * len(DOCUMENTS)
