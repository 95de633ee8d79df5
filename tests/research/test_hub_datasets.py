"""The paper's sets by name: the real `datasets` client, and a local Hub with made-up rows."""

import inspect
import io
import json
import random
import sys

import pytest
from click.testing import CliRunner
from hub_server import HubServer, connected

from research.hub_datasets import (
    _SOURCES,
    _from_hotpotqa,
    _rows,
    _sample,
    load_named,
    load_sets,
    write,
)
from research.negatives import Negatives, choose, replace_negatives
from rsrank_rag.errors import InputError, MissingDependencyError
from rsrank_rag.evaluation.datasets import read_labelled

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

LIGHT = {
    "id": "q-light",
    "question": "Who lit the lamp of the tower that stands on Gull Rock?",
    "answer": "Mara",
    "supporting_facts": {"title": ["Gull Rock", "Grey Tower"], "sent_id": [1, 0]},
    "context": {
        "title": ["Gull Rock", "Salt", "Grey Tower"],
        "sentences": [
            ["Gull Rock is an island.", " The Grey Tower stands on it.", " "],
            ["Salt is white."],
            ["Mara lit the lamp of the Grey Tower.", " She kept bees."],
        ],
    },
}
BREAD = {
    "id": "q-bread",
    "question": "What rises?",
    "answer": "Dough",
    "supporting_facts": {"title": ["Dough"], "sent_id": [0]},
    "context": {"title": ["Dough", "Stone"], "sentences": [["Dough rises."], ["Stone sinks."]]},
}
HOP = {
    "id": "2hop__1_2",
    "question": "Who founded the town where the bell was cast?",
    "answer": "Orla",
    "answerable": True,
    "paragraphs": [
        {
            "idx": 0,
            "title": "Bell",
            "paragraph_text": "The bell was cast in Fenwick.",
            "is_supporting": True,
        },
        {
            "idx": 1,
            "title": "Rope",
            "paragraph_text": "Rope is made of hemp.",
            "is_supporting": False,
        },
        {
            "idx": 2,
            "title": "Fenwick",
            "paragraph_text": "Orla founded Fenwick.",
            "is_supporting": True,
        },
    ],
}
CORPUS = [
    {"_id": f"d{i:02}", "title": f"Title {i}" if i % 2 else "", "text": f"Text {i}."}
    for i in range(40)
]
QUERIES = [{"_id": f"q{i}", "text": f"Question {i}?"} for i in range(6)]
LABELS = [
    {"query-id": "q0", "corpus-id": "d03", "score": 1.0},
    {"query-id": "q0", "corpus-id": "d04", "score": 2.0},
    {"query-id": "q0", "corpus-id": "d05", "score": 0.0},
    {"query-id": "q0", "corpus-id": "gone", "score": 1.0},
    {"query-id": "q1", "corpus-id": "d05", "score": 1.0},
    {"query-id": "q2", "corpus-id": "d06", "score": 0.0},
    {"query-id": "q3", "corpus-id": "gone", "score": 1.0},
    {"query-id": "q4", "corpus-id": "d39", "score": 1.0},
]
CARD = """---
configs:
- config_name: default
  data_files:
  - {split: train, path: qrels/train.jsonl}
  - {split: dev, path: qrels/dev.jsonl}
  - {split: test, path: qrels/test.jsonl}
- config_name: corpus
  data_files: [{split: corpus, path: corpus.jsonl}]
- config_name: queries
  data_files: [{split: queries, path: queries.jsonl}]
---
"""


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def table(rows):
    file = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


def beir(*, corpus=CORPUS, queries=QUERIES, labels=LABELS):
    """The files of a repository in the layout of BEIR."""
    files = {"corpus.jsonl": corpus, "queries.jsonl": queries, "qrels/test.jsonl": labels}
    files |= {"qrels/dev.jsonl": labels[4:5] or labels, "qrels/train.jsonl": labels[:1]}
    return {"README.md": CARD.encode(), **{path: lines(rows) for path, rows in files.items()}}


def hotpotqa(validation=(LIGHT, BREAD), train=(BREAD,)):
    card = "---\nconfigs:\n" + "".join(
        f"- config_name: {name}\n  data_files:\n"
        f"  - {{split: train, path: {name}/train-*}}\n"
        f"  - {{split: validation, path: {name}/validation-*}}\n"
        for name in ("distractor", "fullwiki")
    )
    files = {
        "distractor/train-00000-of-00001.parquet": train,
        "distractor/validation-00000-of-00001.parquet": validation,
    }
    return {
        "README.md": (card + "---\n").encode(),
        **{path: table(rows) for path, rows in files.items()},
    }


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub with nothing on it, which both clients of this process are connected to."""
    config, home = datasets.config, tmp_path / "home"
    with HubServer() as server, connected(server, home):
        monkeypatch.setattr(config, "HF_ENDPOINT", server.url)
        monkeypatch.setattr(config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(config, "HF_UPDATE_DOWNLOAD_COUNTS", False)
        monkeypatch.setattr(config, "HF_DATASETS_CACHE", home / "datasets")
        monkeypatch.setattr(
            config, "DOWNLOADED_DATASETS_PATH", str(home / "datasets" / "downloads")
        )
        monkeypatch.setattr(config, "HF_MODULES_CACHE", home / "modules")
        monkeypatch.setattr(
            "huggingface_hub.utils._http.time.sleep", lambda _seconds: None
        )  # between attempts
        yield server


@pytest.fixture
def publish(hub):
    """Function: name of a set, files -> the commit that `load_named` asks for."""

    def make(name, files):
        source = _SOURCES[name]
        return hub.commit(f"datasets/{source.repository}", files, sha=source.revision)

    return make


def labels_of(query):
    return {document.id: document.relevant for document in query.documents}


def error_message(*arguments, **options):
    """The message of the one error that loading ends with."""
    with pytest.raises(InputError) as caught:
        load_named(*arguments, **options)
    return str(caught.value)


# Multi-hop sets


def test_a_sentence_is_relevant_if_it_is_a_supporting_fact(publish):
    publish("hotpotqa", hotpotqa())
    bread, light = load_named("hotpotqa")
    assert (light.id, light.query) == ("q-light", LIGHT["question"])
    assert [(d.id, d.title, d.text, d.relevant) for d in light.documents] == [
        ("0:Gull Rock#0", "Gull Rock", "Gull Rock is an island.", False),
        ("0:Gull Rock#1", "Gull Rock", "The Grey Tower stands on it.", True),
        ("1:Salt#0", "Salt", "Salt is white.", False),
        ("2:Grey Tower#0", "Grey Tower", "Mara lit the lamp of the Grey Tower.", True),
        ("2:Grey Tower#1", "Grey Tower", "She kept bees.", False),
    ]
    assert labels_of(bread) == {"0:Dough#0": True, "1:Stone#0": False}


def test_a_paragraph_is_relevant_if_a_supporting_fact_has_its_title(publish):
    publish(
        "2wiki",
        {
            "data/train-00000-of-00001.parquet": table([BREAD]),
            "data/validation-00000-of-00001.parquet": table([LIGHT]),
        },
    )
    (light,) = load_named("2wiki", granularity="paragraph")
    assert [(d.id, d.title, d.text, d.relevant) for d in light.documents] == [
        ("0:Gull Rock", "Gull Rock", "Gull Rock is an island. The Grey Tower stands on it.", True),
        ("1:Salt", "Salt", "Salt is white.", False),
        ("2:Grey Tower", "Grey Tower", "Mara lit the lamp of the Grey Tower. She kept bees.", True),
    ]


def test_paragraphs_of_one_title_keep_apart_and_blank_ones_are_left_out():
    context = {"title": ["Salt", "Salt", "Sea"], "sentences": [["White."], ["Coarse."], [" ", ""]]}
    row = LIGHT | {
        "context": context,
        "supporting_facts": {"title": ["Salt", "Salt"], "sent_id": [0, 7]},
    }
    assert labels_of(_from_hotpotqa(row, "sentence")) == {"0:Salt#0": True, "1:Salt#0": True}
    assert labels_of(_from_hotpotqa(row, "paragraph")) == {"0:Salt": True, "1:Salt": True}


def test_hidden_test_labels_are_replaced_by_the_validation_split(publish):
    publish("hotpotqa", hotpotqa(validation=[LIGHT], train=[BREAD]))
    queries = {
        split: [query.id for query in load_named("hotpotqa", split=split)]
        for split in ("test", "validation", "train")
    }
    assert queries == {"test": ["q-light"], "validation": ["q-light"], "train": ["q-bread"]}


def test_supporting_paragraphs_are_relevant_and_unanswerable_questions_are_left_out(publish):
    rows = [HOP | {"id": "2hop__0_0", "answerable": False}, HOP]
    publish(
        "musique",
        {"musique_ans_v1.0_dev.jsonl": lines(rows), "musique_ans_v1.0_train.jsonl": lines([HOP])},
    )
    (query,) = load_named("musique")
    assert query.query == HOP["question"]
    assert [(d.id, d.title, d.text, d.relevant) for d in query.documents] == [
        ("0", "Bell", "The bell was cast in Fenwick.", True),
        ("1", "Rope", "Rope is made of hemp.", False),
        ("2", "Fenwick", "Orla founded Fenwick.", True),
    ]


# Retrieval sets


@pytest.mark.parametrize("name", ["fiqa", "nfcorpus", "fever"])
def test_relevant_documents_come_with_random_others(name, publish):
    publish(name, beir())
    queries = {query.id: query for query in load_named(name)}
    assert list(queries) == ["q0", "q1", "q4"]  # the others have no relevant document in the corpus
    assert queries["q0"].query == "Question 0?"
    assert {key for key, label in labels_of(queries["q0"]).items() if label} == {"d03", "d04"}
    assert {key for key, label in labels_of(queries["q4"]).items() if label} == {"d39"}
    assert [len(query.documents) for query in queries.values()] == [2 + 15, 1 + 15, 1 + 15]
    rows = {row["_id"]: row for row in CORPUS}
    for document in (document for query in queries.values() for document in query.documents):
        assert (document.title, document.text) == (
            rows[document.id]["title"] or None,
            rows[document.id]["text"],
        )


def test_relevant_documents_have_no_place_of_their_own(publish):
    publish(
        "fiqa",
        beir(labels=[{"query-id": f"q{i}", "corpus-id": "d07", "score": 1} for i in range(6)]),
    )
    assert (
        len({[d.relevant for d in query.documents].index(True) for query in load_named("fiqa")}) > 1
    )


def test_the_same_seed_draws_the_same_and_another_seed_draws_others(publish):
    publish("fiqa", beir())
    first = load_named("fiqa", seed=3)
    assert load_named("fiqa", seed=3) == first
    assert load_named("fiqa", seed=4) != first


def test_what_a_query_gets_depends_on_no_other_query_and_on_no_order(publish, hub):
    publish("fiqa", beir())
    every = {query.id: query for query in load_named("fiqa")}
    (one,) = load_named("fiqa", queries=1)
    assert one == every[one.id]
    turned = hub.commit(
        f"datasets/{_SOURCES['fiqa'].repository}", beir(queries=QUERIES[::-1], labels=LABELS[::-1])
    )
    assert load_named("fiqa", revision=turned) == list(every.values())
    assert load_named("fiqa", revision=turned, queries=1) == [one]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_document_is_relevant(seed):
    relevant = set(random.Random(seed).sample(range(30), 12))
    irrelevant, every = (
        choose(Negatives(count=count), [("key", "A query", relevant)], 30, list, seed=seed)[0]
        for count in (10, 99)
    )
    assert len(set(irrelevant)) == 10
    assert not relevant & set(irrelevant)
    assert set(every) == set(range(30)) - relevant


@pytest.mark.parametrize("count", [None, 1, 7, 20, 99])
def test_the_sample_of_queries_is_independent_of_their_order(count):
    ids = [f"id-{i}" for i in range(20)]
    expected = _sample(ids, count=count, seed=5)
    assert expected == sorted(expected)
    assert len(expected) == min(count or 20, 20)
    for seed in range(5):
        shuffled = random.Random(seed).sample(ids, 20)
        assert _sample(shuffled, count=count, seed=5) == expected


def test_ids_are_found_across_the_chunks_of_a_column():
    column = pa.chunked_array([["a", "b"], ["c"], ["d", None, "e"]])
    assert _rows(column, {"e", "b", "missing"}) == {"b": 1, "e": 5}
    assert _rows(column, set()) == {}


WORDS = [
    {"_id": f"w{i}", "title": "", "text": text}
    for i, text in enumerate(
        [
            "The lamp is lit.",
            "A lamp burns oil.",
            "Bees make honey.",
            "Oil lamp, lamp oil.",
            "The tower is tall.",
        ]
    )
]


def test_hard_negatives_are_what_the_first_stage_ranks_highest_without_the_relevant_ones(publish):
    queries = [{"_id": "q0", "text": "lamp oil"}]
    publish(
        "fiqa",
        beir(
            corpus=WORDS,
            queries=queries,
            labels=[{"query-id": "q0", "corpus-id": "w3", "score": 1}],
        ),
    )
    (query,) = load_named("fiqa", negatives=Negatives(kind="bm25", count=2))
    assert labels_of(query) == {"w3": True, "w1": False, "w0": False}
    (query,) = load_named("fiqa", negatives=Negatives(kind="bm25", count=4))
    assert set(labels_of(query)) == {
        f"w{i}" for i in range(5)
    }  # no other has a common word: the rest comes at random
    (query,) = load_named("fiqa", negatives=Negatives(corpus=2))
    assert len(query.documents) in (2, 3)  # the relevant one may be among the two
    assert load_named("fiqa", negatives=Negatives(corpus=2)) == [query]


@pytest.mark.parametrize("name", ["beir:made-up", "beir/made-up"])
def test_any_set_in_the_layout_of_beir_is_found_by_its_name(name, hub):
    hub.commit("datasets/mteb/made-up", beir())
    assert [query.id for query in load_named(name)] == ["q0", "q1", "q4"]


def test_a_set_of_the_paper_is_pinned_under_its_beir_name_too(publish):
    publish("fiqa", beir())
    assert load_named("beir:fiqa") == load_named("fiqa")


# Files and names together


@pytest.fixture
def file(tmp_path):
    """Two queries: each one's documents are candidates of the other."""
    path = tmp_path / "mine.jsonl"
    words = [["lamp oil burns", "bees hum", "rope"], ["bees make honey", "lamp posts", "salt"]]
    rows = [
        {
            "id": f"f{i}",
            "query": text,
            "documents": [
                {"id": str(j), "text": t, "relevant": j == 0} for j, t in enumerate(words[i])
            ],
        }
        for i, text in enumerate(["a lamp", "the bees"])
    ]
    path.write_bytes(lines(rows))
    return path


def test_files_and_names_are_read_side_by_side(publish, file):
    publish("fiqa", beir())
    sets = load_sets([file, "fiqa", str(file)])
    assert sets == {"mine": read_labelled(file), "fiqa": load_named("fiqa")}
    cut = load_sets(["beir:fiqa", file], limit=1)
    assert cut == {"mine": read_labelled(file)[:1], "beir:fiqa": load_named("fiqa", queries=1)}


def test_a_file_that_is_called_like_a_set_is_the_file(hub, file, monkeypatch):
    monkeypatch.chdir(file.parent)
    file.rename(file.parent / "fiqa")
    assert [query.id for query in load_sets(["fiqa"])["fiqa"]] == ["f0", "f1"]
    assert hub.log == []
    with pytest.raises(InputError, match="scifact could not be read"):
        load_sets(["scifact"])


def test_negatives_of_a_file_come_from_all_of_it_also_where_few_queries_are_taken(publish, file):
    publish(
        "fiqa",
        beir(
            corpus=WORDS,
            queries=QUERIES[:1],
            labels=[{"query-id": "q0", "corpus-id": "w3", "score": 1}],
        ),
    )
    hard = Negatives(kind="bm25", count=1)
    sets = load_sets([file, "fiqa"], limit=1, negatives=hard)
    assert sets["mine"] == replace_negatives(read_labelled(file), hard)[:1]
    assert {d.text: d.relevant for d in sets["mine"][0].documents} == {
        "lamp oil burns": True,
        "lamp posts": False,
    }
    assert sets["fiqa"] == load_named("fiqa", negatives=hard)


# The Hub


def test_the_commit_this_package_was_written_against_is_read_unless_another_is_given(publish, hub):
    repository = f"datasets/{_SOURCES['hotpotqa'].repository}"
    publish("hotpotqa", hotpotqa(validation=[LIGHT]))
    hub.commit(repository, hotpotqa(validation=[BREAD]))
    assert [query.id for query in load_named("hotpotqa")] == ["q-light"]
    assert [query.id for query in load_named("hotpotqa", revision="main")] == ["q-bread"]


def test_what_was_loaded_once_needs_no_hub_any_more(publish, hub):
    publish("fiqa", beir())
    first = load_named("fiqa")
    hub.stop()
    assert load_named("fiqa") == first


def test_without_datasets_the_pip_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[research\]"):
        load_named("fiqa")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "squad"},
            (
                "no set 'squad'. Choose one of: 2wiki, hotpotqa, musique, fiqa, nfcorpus, fever; "
                "or beir:NAME"
            ),
        ),
        ({"name": "beir:../x"}, "no set 'beir:../x'"),
        (
            {"name": "fiqa", "split": "dev"},
            "no split 'dev' of fiqa. Choose one of: train, validation, test",
        ),
        (
            {"name": "fever", "granularity": "sentence"},
            "fever cannot be had with granularity 'sentence'",
        ),
        ({"name": "2wiki", "granularity": "page"}, "2wiki cannot be had with granularity 'page'"),
        ({"name": "fiqa", "negatives": -1}, "negatives >= 0, not -1"),
        ({"name": "fiqa", "queries": 0}, "queries >= 1"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_without_asking_the_hub(arguments, message, hub):
    assert message in error_message(**arguments)
    assert hub.log == []


def test_a_repository_that_is_gone_is_named_with_what_to_do(hub):
    message = error_message("musique")
    assert "dgslibisey/MuSiQue (config 'default', split 'validation', revision" in message
    assert "could not be loaded from the Hub: DatasetNotFoundError" in message
    assert "Connect once to download it" in message


@pytest.mark.parametrize("column", ["id", "sentences"])
def test_a_missing_column_of_a_multihop_set_is_named(column, publish):
    row = {name: value for name, value in LIGHT.items() if name != column}
    row = {
        n: {k: v for k, v in x.items() if k != column} if isinstance(x, dict) else x
        for n, x in row.items()
    }
    publish("hotpotqa", hotpotqa(validation=[row], train=[row]))
    message = error_message("hotpotqa")
    assert "hotpotqa/hotpot_qa" in message
    assert f"no column {column!r}, which hotpotqa needs" in message


@pytest.mark.parametrize(
    ("part", "column"),
    [("labels", "corpus-id"), ("queries", "text")],
)
def test_a_missing_column_of_a_retrieval_set_is_named(part, column, publish):
    rows = inspect.signature(beir).parameters[part].default
    publish("fiqa", beir(**{part: [{k: v for k, v in row.items() if k != column} for row in rows]}))
    assert (
        f"mteb/fiqa at revision '{_SOURCES['fiqa'].revision}' has no column {column!r}"
        in error_message("fiqa")
    )


def test_a_split_without_labels_is_an_error(publish):
    publish("fiqa", beir(labels=LABELS[5:7]))
    assert "mteb/fiqa has no labelled queries in 'test'" in error_message("fiqa")


def test_the_command_writes_a_file_with_negatives_from_the_whole_file(tmp_path):
    first = {"id": "a", "text": "oil of the lamp", "relevant": True}
    second = {"id": "b", "text": "lamp oil, lamp oil", "relevant": True}
    rows = [
        {"id": "0", "query": "lamp oil", "documents": [first]},
        {"id": "1", "query": "rope", "documents": [second]},
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    output = tmp_path / "hard.jsonl"
    arguments = ["--data", str(data), "--output", str(output), "--limit", "1"]
    result = CliRunner().invoke(write, [*arguments, "--negatives", "bm25"])
    assert result.exit_code == 0, result.output
    (query,) = read_labelled(output)
    assert {document.text for document in query.documents} == {first["text"], second["text"]}
    wrong = CliRunner().invoke(write, [*arguments, "--negatives", "hard"])
    assert wrong.exit_code == 2
    assert "random, bm25, dense or dense:ENCODER" in " ".join(wrong.output.split())
