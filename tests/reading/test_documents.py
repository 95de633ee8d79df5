"""Documents as strings, dictionaries and objects: what is read, and what comes back."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from rsrank_rag import RankedDocument, Reranker
from rsrank_rag.errors import InputError
from rsrank_rag.reading.documents import InputDocument, as_documents
from rsrank_rag.reranker import Scored


class Recorder(Reranker):
    """Remembers what it read. A text scores its number of words."""

    def score(self, query, documents):
        self.read = list(documents)
        return [float(len(text.split())) for text in documents]


@dataclass
class Note:
    text: str
    id: int


def test_documents_come_back_with_their_ids_and_metadata():
    lock = object()
    given = [
        "one two",
        {"text": "one", "id": "a", "metadata": {"page": 3}, "url": "https://a"},
        Note("one two three", 7),
        SimpleNamespace(text="", metadata=None),
        SimpleNamespace(page_content="a b c d", id="p", metadata={"connection": lock}),
    ]
    result = Recorder().rank("q", given)
    assert [(one.index, one.text, one.id) for one in result.kept] == [
        (4, "a b c d", "p"),
        (2, "one two three", 7),
        (0, "one two", None),
        (1, "one", "a"),
    ]
    assert [dict(one.metadata) for one in result.kept] == [
        {"connection": lock},
        {},
        {},
        {"page": 3, "url": "https://a"},
    ]
    assert [(one.text, one.id) for one in result.dropped] == [("", None)]
    assert Recorder().rank("q", result.kept).kept[0].id == "p"


def test_a_title_is_read_before_the_text_and_does_not_come_back_in_it():
    reranker = Recorder()
    given = [{"text": "is dear", "title": "Gold"}, {"text": "dear", "metadata": {"year": 1999}}]
    assert [one.text for one in reranker.rank("q", given).kept] == ["is dear", "dear"]
    assert reranker.read == ["Gold\nis dear", "dear"]
    reranker.rank("q", given, metadata_fields=["year"])
    assert reranker.read == ["is dear", "1999\ndear"]
    reranker.rank("q", given, extract="sentences")
    assert reranker.read == ["is dear", "dear"]
    with pytest.raises(InputError, match="metadata_fields must be a list of names"):
        reranker.rank("q", given, metadata_fields="year")


def test_a_window_is_one_of_the_text_without_its_title():
    class Windows(Recorder):
        def token_ends(self, document):
            return [place + 1 for place, letter in enumerate(document + " ") if letter == " "], 8

        def score_documents(self, query, documents):
            return [Scored(float(text.count("gold"))) for text in documents]

    text = "iron " * 20 + "gold " + "tin " * 20
    given = [{"text": text, "title": "Two words"}]
    kept = Windows().rank("q", given, long_documents="windows").kept[0]
    assert "gold" in text[kept.window.start : kept.window.end]
    assert kept.text == text


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (5, "Document 1 must be a string, got int"),
        ({"title": "T"}, "The text of document 1 must be a string, got NoneType"),
        (SimpleNamespace(text=3), "The text of document 1 must be a string, got int"),
        ({"text": "b", "metadata": "{}"}, "metadata of document 1 must be a dictionary, got '{}'"),
        (SimpleNamespace(text="b", metadata=object()), "metadata of document 1 must be a dict"),
    ],
)
def test_an_entry_that_is_no_document_is_named(entry, message):
    with pytest.raises(InputError, match=message):
        as_documents(["a", entry])


def test_an_empty_cell_of_a_table_is_no_metadata():
    rows = [{"text": "a", "metadata": math.nan}, {"text": "b", "metadata": None, "page": 3}]
    assert [document.metadata for document in as_documents(rows)] == [{}, {"page": 3}]


def test_an_input_document_stays_itself():
    document = InputDocument("a", 1, {"title": "T"})
    assert as_documents([document])[0] is document


def test_normalised_scores_lie_between_0_and_1_and_say_the_same():
    class Numbers(Reranker):
        threshold = 1.0

        def score(self, query, documents):
            return [float(text) for text in documents]

    texts = ["3", "1", "-200", " "]
    raw = Numbers().rank("q", texts[:3])
    shown = Numbers().rank("q", texts[:3], scores="normalised")
    assert [one.index for one in shown.in_order] == [one.index for one in raw.in_order]
    assert [len(raw), len(shown), shown.threshold, shown.none_relevant] == [1, 1, 0.5, False]
    scores = [one.score for one in shown.in_order]
    assert scores == pytest.approx([1 / (1 + np.exp(-2)), 0.5, 0], abs=1e-12)
    # Limits are raw.
    assert len(Numbers().rank("q", texts[:3], scores="normalised", threshold=0.9)) == 2
    with pytest.raises(InputError, match="scores must be 'raw' or 'normalised', got 'percent'"):
        Numbers().rank("q", texts, scores="percent")


def test_numbers_of_numpy_are_numbers():
    result = Recorder().rank(
        "q",
        ["a", "a b", "a b c"],
        top_n=np.int64(1),
        threshold=np.float32(0.5),
        max_gap=np.int64(2),
        context=np.int8(0),
    )
    assert [one.index for one in result.kept] == [2]


def test_a_ranked_document_can_be_a_key():
    document = RankedDocument(0, "a", 1.0, id="x", metadata={"tags": ["b"]})
    assert {document: 1}[document] == 1
