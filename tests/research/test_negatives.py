"""Negatives: against scoring every document of the corpus one by one and sorting."""

import math
import random

import pytest

from research.negatives import Negatives, bm25_scores, choose, replace_negatives
from rsrank_rag.backends.options import LoadOptions
from rsrank_rag.errors import InputError
from rsrank_rag.evaluation.datasets import LabelledDocument, LabelledQuery
from rsrank_rag.evaluation.systems.bm25 import BM25
from rsrank_rag.evaluation.systems.sentence_transformers import BiEncoder

WORDS = [
    "lamp", "oil", "tower", "bee", "honey", "salt", "rope", "bell", "bridge", "frost", "dough",
    "starter",
]  # fmt: skip


def corpus(size=60, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 9))) + f" n{i}" for i in range(size)]


TEXTS = corpus()
QUERIES = [
    ("a", "lamp oil tower", {3, 5}),
    ("b", "honey of the bee", {7}),
    ("c", "salt", {0, 1, 2}),
]


@pytest.fixture(scope="module")
def encoder(tiny_folder, tmp_path_factory):
    """Folder of a tiny random sentence-transformers model."""
    st = pytest.importorskip("sentence_transformers")
    folder = tmp_path_factory.mktemp("encoder")
    st.SentenceTransformer(str(tiny_folder("bert")), device="cpu").save(str(folder))
    return folder


def read(rows):
    return [TEXTS[row] for row in rows]


def irrelevant_rows(negatives, queries=QUERIES, seed=0):
    return choose(negatives, queries, len(TEXTS), read, seed=seed)


def words_of(text):
    return text.lower().replace("of the", "").split()


def slow_bm25(query, k1=1.5, b=0.75):
    """Lucene's BM25, document by document."""
    documents = [words_of(text) for text in TEXTS]
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for words in documents:
        score = 0.0
        for word in words_of(query):
            holding = sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
            count = words.count(word)
            score += idf * count / (count + k1 * (1 - b + b * len(words) / mean))
        scores.append(score)
    return scores


def best_of(scores, relevant, count):
    order = sorted(range(len(scores)), key=lambda row: -scores[row])
    return [row for row in order if row not in relevant][:count]


def test_bm25_negatives_are_those_of_scoring_every_document():
    rows_of_queries = irrelevant_rows(Negatives(kind="bm25", count=6))
    for (_, text, relevant), rows in zip(QUERIES, rows_of_queries, strict=True):
        slow = slow_bm25(text)
        best = [slow[row] for row in best_of(slow, relevant, 6)]
        assert [slow[row] for row in rows] == pytest.approx(best, rel=1e-5)
        assert not relevant & set(rows)
        assert len(set(rows)) == 6


def test_dense_negatives_are_those_of_scoring_every_document(encoder):
    options = LoadOptions(device="cpu")
    dense = Negatives(kind="dense", count=6, encoder=str(encoder))
    rows_of_queries = choose(dense, QUERIES, len(TEXTS), read, options=options)
    ranker = BiEncoder(str(encoder), options=options)
    for (_, text, relevant), rows in zip(QUERIES, rows_of_queries, strict=True):
        cosines = ranker.score(text, TEXTS)
        best = [cosines[row] for row in best_of(cosines, relevant, 6)]
        assert [cosines[row] for row in rows] == pytest.approx(best, abs=1e-5)
        assert not relevant & set(rows)


def test_one_index_scores_queries_as_one_index_a_query_does():
    system = BM25()
    together = list(bm25_scores(["lamp oil", "the", "bee"], TEXTS))
    assert [list(map(float, row)) for row in together] == [
        system.score(q, TEXTS) for q in ("lamp oil", "the", "bee")
    ]
    assert list(together[1]) == [0.0] * len(TEXTS)


def test_without_a_common_word_negatives_are_random():
    (rows,) = irrelevant_rows(Negatives(kind="bm25", count=5), [("z", "zebra", {4})])
    assert rows == irrelevant_rows(Negatives(count=5), [("z", "zebra", {4})])[0]
    assert rows != irrelevant_rows(Negatives(count=5), [("z", "zebra", {4})], seed=1)[0]


@pytest.mark.parametrize("kind", ["random", "bm25"])
def test_a_part_of_the_corpus_gives_all_negatives(kind):
    part = set(random.Random("corpus:0").sample(range(len(TEXTS)), 20))
    rows_of_queries = irrelevant_rows(Negatives(kind=kind, count=30, corpus=20))
    for (_, _, relevant), rows in zip(QUERIES, rows_of_queries, strict=True):
        assert set(rows) == part - relevant


def test_what_a_query_gets_depends_on_no_other_query():
    for kind in ("random", "bm25"):
        alone = [irrelevant_rows(Negatives(kind=kind, count=5), [query])[0] for query in QUERIES]
        assert irrelevant_rows(Negatives(kind=kind, count=5)) == alone


def query(key, text, *documents):
    rows = tuple(
        LabelledDocument(id=str(i), text=body, relevant=label)
        for i, (body, label) in enumerate(documents)
    )
    return LabelledQuery(id=key, query=text, documents=rows)


def test_the_candidates_of_all_queries_are_the_corpus_of_a_file():
    queries = [
        query("one", "lamp oil", ("lamp oil burns", True), ("bees hum", False)),
        query("two", "bees", ("lamp posts", False), ("bees hum", True), ("oil of a lamp", False)),
    ]
    one, two = replace_negatives(queries, Negatives(kind="bm25", count=2))
    labels = {"lamp oil burns": True, "oil of a lamp": False, "lamp posts": False}
    assert {d.text: d.relevant for d in one.documents} == labels
    texts = {d.text: d.relevant for d in two.documents}
    assert texts.pop("bees hum")
    assert len(texts) == 2
    assert not any(texts.values())
    assert len({d.id for d in two.documents}) == 3
    assert replace_negatives(queries, Negatives(kind="bm25", count=2)) == [one, two]
    assert queries[0].documents[1].text == "bees hum"  # what was given is as it was


def test_negatives_are_written_as_a_kind_and_an_encoder():
    for kind in ("random", "bm25", "dense"):
        assert Negatives.parse(kind) == Negatives(kind=kind)
    named = Negatives(kind="dense", encoder="./models/mine:v2")
    assert Negatives.parse("dense:./models/mine:v2") == named


@pytest.mark.parametrize("text", ["", "hard", "BM25", "bm25:x", "random:", "dense:"])
def test_other_negatives_are_refused(text):
    with pytest.raises(InputError, match="random, bm25, dense or dense:ENCODER"):
        Negatives.parse(text)
