"""The paper's sets by name: the real `datasets` client, and a local Hub with made-up rows."""

import copy
import io
import json
import sys

import pytest
from click.testing import CliRunner
from hub_server import HubServer, connected

from research.hub_datasets import _SOURCES, _from_hotpotqa, _rows, load_named, load_sets, write
from research.negatives import Negatives
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
PARAGRAPHS = [
    ("0", "Bell", "The bell was cast in Fenwick.", True),
    ("1", "Rope", "Rope is made of hemp.", False),
    ("2", "Fenwick", "Orla founded Fenwick.", True),
]
COLUMNS = ("idx", "title", "paragraph_text", "is_supporting")
HOP = {
    "id": "2hop__1_2",
    "question": "Who founded the town where the bell was cast?",
    "answer": "Orla",
    "answerable": True,
    "paragraphs": [dict(zip(COLUMNS, paragraph, strict=True)) for paragraph in PARAGRAPHS],
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
    card = "---\nconfigs:\n"
    for name in ("distractor", "fullwiki"):
        card += f"- config_name: {name}\n  data_files:\n"
        for split in ("train", "validation"):
            card += f"  - {{split: {split}, path: {name}/{split}-*}}\n"
    return {
        "README.md": (card + "---\n").encode(),
        "distractor/train-00000-of-00001.parquet": table(train),
        "distractor/validation-00000-of-00001.parquet": table(validation),
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
        downloads = str(home / "datasets" / "downloads")
        monkeypatch.setattr(config, "DOWNLOADED_DATASETS_PATH", downloads)
        monkeypatch.setattr(config, "HF_MODULES_CACHE", home / "modules")
        # Attempts follow each other at once.
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _seconds: None)
        yield server


@pytest.fixture
def publish(hub):
    """Function: name of a set, files -> the commit that `load_named` asks for."""

    def make(name, files):
        source = _SOURCES[name]
        return hub.commit(f"datasets/{source.repository}", files, sha=source.revision)

    return make


def fields_of(query):
    return [(row.id, row.title, row.text, row.relevant) for row in query.documents]


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
    assert fields_of(light) == [
        ("0:Gull Rock#0", "Gull Rock", "Gull Rock is an island.", False),
        ("0:Gull Rock#1", "Gull Rock", "The Grey Tower stands on it.", True),
        ("1:Salt#0", "Salt", "Salt is white.", False),
        ("2:Grey Tower#0", "Grey Tower", "Mara lit the lamp of the Grey Tower.", True),
        ("2:Grey Tower#1", "Grey Tower", "She kept bees.", False),
    ]
    assert labels_of(bread) == {"0:Dough#0": True, "1:Stone#0": False}


def test_a_paragraph_is_relevant_if_a_supporting_fact_has_its_title(publish):
    files = {"train": table([BREAD]), "validation": table([LIGHT])}
    publish("2wiki", {f"data/{name}-00000-of-00001.parquet": rows for name, rows in files.items()})
    (light,) = load_named("2wiki", granularity="paragraph")
    assert fields_of(light) == [
        ("0:Gull Rock", "Gull Rock", "Gull Rock is an island. The Grey Tower stands on it.", True),
        ("1:Salt", "Salt", "Salt is white.", False),
        ("2:Grey Tower", "Grey Tower", "Mara lit the lamp of the Grey Tower. She kept bees.", True),
    ]


def test_paragraphs_of_one_title_keep_apart_and_blank_ones_are_left_out():
    context = {"title": ["Salt", "Salt", "Sea"], "sentences": [["White."], ["Coarse."], [" ", ""]]}
    facts = {"title": ["Salt", "Salt"], "sent_id": [0, 7]}
    row = {**LIGHT, "context": context, "supporting_facts": facts}
    assert labels_of(_from_hotpotqa(row, "sentence")) == {"0:Salt#0": True, "1:Salt#0": True}
    assert labels_of(_from_hotpotqa(row, "paragraph")) == {"0:Salt": True, "1:Salt": True}


def test_hidden_test_labels_are_replaced_by_the_validation_split(publish):
    publish("hotpotqa", hotpotqa(validation=[LIGHT], train=[BREAD]))
    for split, expected in (("test", "q-light"), ("validation", "q-light"), ("train", "q-bread")):
        assert [query.id for query in load_named("hotpotqa", split=split)] == [expected]


def test_supporting_paragraphs_are_relevant_and_unanswerable_questions_are_left_out(publish):
    rows = [HOP | {"id": "2hop__0_0", "answerable": False}, HOP]
    publish(
        "musique",
        {"musique_ans_v1.0_dev.jsonl": lines(rows), "musique_ans_v1.0_train.jsonl": lines([HOP])},
    )
    (query,) = load_named("musique")
    assert query.query == HOP["question"]
    assert fields_of(query) == PARAGRAPHS


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
    rows = {row["_id"]: (row["title"] or None, row["text"]) for row in CORPUS}
    for query in queries.values():
        for document in query.documents:
            assert (document.title, document.text) == rows[document.id]


def test_relevant_documents_have_no_place_of_their_own(publish):
    labels = [{"query-id": f"q{i}", "corpus-id": "d07", "score": 1} for i in range(6)]
    publish("fiqa", beir(labels=labels))
    places = {list(labels_of(query).values()).index(True) for query in load_named("fiqa")}
    assert len(places) > 1


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


def test_ids_are_found_across_the_chunks_of_a_column():
    column = pa.chunked_array([["a", "b"], ["c"], ["d", None, "e"]])
    assert _rows(column, {"e", "b", "missing"}) == {"b": 1, "e": 5}
    assert _rows(column, set()) == {}


SENTENCES = [
    "The lamp is lit.", "A lamp burns oil.", "Bees make honey.", "Oil lamp, lamp oil.",
    "The tower is tall.",
]  # fmt: skip
WORDS = [{"_id": f"w{i}", "title": "", "text": text} for i, text in enumerate(SENTENCES)]


def test_hard_negatives_are_what_the_first_stage_ranks_highest_without_the_relevant_ones(publish):
    queries = [{"_id": "q0", "text": "lamp oil"}]
    labels = [{"query-id": "q0", "corpus-id": "w3", "score": 1}]
    publish("fiqa", beir(corpus=WORDS, queries=queries, labels=labels))
    (query,) = load_named("fiqa", negatives=Negatives(kind="bm25", count=2))
    assert labels_of(query) == {"w3": True, "w1": False, "w0": False}
    (query,) = load_named("fiqa", negatives=Negatives(kind="bm25", count=4))
    # No other has a common word: the rest comes at random.
    assert set(labels_of(query)) == {"w0", "w1", "w2", "w3", "w4"}
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
    texts = {
        "a lamp": ["lamp oil burns", "bees hum", "rope"],
        "the bees": ["bees make honey", "lamp posts", "salt"],
    }
    rows = []
    for i, (query, of_query) in enumerate(texts.items()):
        documents = [{"id": t, "text": t, "relevant": t == of_query[0]} for t in of_query]
        rows.append({"id": f"f{i}", "query": query, "documents": documents})
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
        ({"name": "squad"}, "no set 'squad'. Choose one of: 2wiki, hotpotqa, musique, fiqa, nf"),
        ({"name": "beir:../x"}, "no set 'beir:../x'"),
        ({"name": "fiqa", "split": "dev"}, "no split 'dev' of fiqa. Choose one of: train, valid"),
        ({"name": "fever", "granularity": "sentence"}, "cannot be had with granularity 'sentence'"),
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
    row = copy.deepcopy(LIGHT)
    for table_of_columns in (row, row["context"]):
        table_of_columns.pop(column, None)
    publish("hotpotqa", hotpotqa(validation=[row], train=[row]))
    message = error_message("hotpotqa")
    assert "hotpotqa/hotpot_qa" in message
    assert f"no column {column!r}, which hotpotqa needs" in message


@pytest.mark.parametrize(("part", "column"), [("labels", "corpus-id"), ("queries", "text")])
def test_a_missing_column_of_a_retrieval_set_is_named(part, column, publish):
    rows = copy.deepcopy({"labels": LABELS, "queries": QUERIES}[part])
    for row in rows:
        del row[column]
    publish("fiqa", beir(**{part: rows}))
    message = error_message("fiqa")
    assert f"mteb/fiqa at revision '{_SOURCES['fiqa'].revision}' has no column" in message
    assert repr(column) in message


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
