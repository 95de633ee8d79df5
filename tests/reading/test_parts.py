"""Sentences and windows: their offsets, and their use in `rank`, the adapters and the service."""

import asyncio
import json
import random
from itertools import pairwise

import pytest
from conftest import CORPUS, QUERY
from service_helpers import address_of, client_of, scheduler

from rsrank_rag import Reranker, RSRank
from rsrank_rag.backends.options import ModelSource
from rsrank_rag.cli import app
from rsrank_rag.errors import InputError, ScoringError
from rsrank_rag.ranking.pairs import sections_of
from rsrank_rag.reading.parts import (
    CHUNK,
    MAX_CHARACTERS,
    SECTION,
    Excerpt,
    Reading,
    joined,
    sections,
    sentences,
    windows,
)
from rsrank_rag.remote.client import RemoteReranker
from rsrank_rag.reranker import BLANK_SCORE, Pair, Scored, score_in_parts

ODD = (
    "Dr. Ann lit the lamp.\r\nIt shone 3.5 km! \U0001f600 Wer war da? «Ça va?» dit-il.\n\n"
    "日本語です。これは文です。 मैं घर जा रहा हूँ। वह आया।\u2028J.\u00a0Smith left. e\u0301te\u0301."
)


class Hits(Reranker):
    """A text scores its count of "bee" minus 0.5; a word is a token, and eight tokens are read."""

    def __init__(self):
        self.seen, self.calls = [], 0

    def score_texts(self, documents):
        self.calls += 1
        self.seen += documents
        return [
            Scored(self.of(text), len(text.split()) > 8, len(text.split())) for text in documents
        ]

    def score_pairs(self, pairs):
        return self.score_texts([pair.document for pair in pairs])

    def score(self, query, documents):
        return [actual.score for actual in self.score_texts(documents)]

    def of(self, text):
        if "nan" in text:
            return float("nan")
        return text.count("bee") - 0.5

    def token_ends(self, document):
        ends, at = [], 0
        for word in document.split():
            at = document.index(word, at) + len(word)
            ends.append(at)
        return ends, 8


DOCUMENTS = [
    "The sun is hot. A bee flies. The moon is cold.\r\nTwo bees, one bee. The end is near.",
    "Nothing of the kind. Nothing at all.",
    " \n ",
    "Only a bee",
]


def words(number):
    return " ".join(f"w{i}" for i in range(number))


def pieces(text):
    return [text[start:stop] for start, stop in sentences(text)]


def test_sentences_hold_all_of_a_text_in_order_whatever_it_is_written_in():
    actual = sentences(ODD)
    assert pieces(ODD)[:4] == [
        "Dr. Ann lit the lamp.",
        "It shone 3.5 km!",
        "\U0001f600 Wer war da?",
        "«Ça va?» dit-il.",
    ]
    assert {"日本語です。", "これは文です。", "मैं घर जा रहा हूँ।", "J.\u00a0Smith left."} <= set(
        pieces(ODD)
    )
    assert all(stop <= start for (_, stop), (start, _) in pairwise(actual))
    assert "".join("".join(pieces(ODD)).split()) == "".join(ODD.split())


@pytest.mark.parametrize("text", ["", " \n\t\u2028", "\ufeff "])
def test_blank_text_has_no_sentence_worth_reading(text):
    assert [piece for piece in pieces(text) if piece.strip("\ufeff")] == []


def test_random_text_of_all_kinds_of_characters_keeps_its_offsets():
    letters = "ab Z.!?…。！？।\n\r\t\"'()«»“”12é😀e\u0301\u200d\u2028\u00a0\x0b\x00[]*-\ud83d\ude00"
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choice(letters) for _ in range(rng.randrange(60)))
        actual = sentences(text)
        assert "".join("".join(pieces(text)).split()) == "".join(text.split())
        assert all(text[start:stop].strip() == text[start:stop] for start, stop in actual)


def test_a_long_text_is_split_as_its_pieces_are():
    sentence = "This is a sentence about bees, No. 5."
    text = "  ".join([sentence] * (3 * CHUNK // len(sentence)))
    assert set(pieces(text)) == {sentence}
    assert len("".join(pieces("x" * (2 * CHUNK + 5)))) == 2 * CHUNK + 5  # one that nothing ends


def test_a_long_run_of_quotes_is_cut_in_linear_time(monkeypatch):
    # The time of sentencex grows with the square of such a text.
    sentencex = pytest.importorskip("sentencex")
    lengths, split = [], sentencex.get_sentence_boundaries
    monkeypatch.setattr(
        sentencex,
        "get_sentence_boundaries",
        lambda language, text: lengths.append(len(text)) or split(language, text),
    )
    for unit in ("\u201c", '"', "\u00abA. ", '"A." ', "A. " + "\u201c" * 3990):
        lengths.clear()
        text = (unit * 300_000)[:300_000]
        spans = sentences(text)
        cut = "".join(text[start:stop] for start, stop in spans)
        assert cut.replace(" ", "") == text.replace(" ", "")
        assert max(lengths) <= CHUNK
        assert sum(lengths) <= 2 * len(text) + CHUNK


def test_sections_of_sentences_are_the_same_for_all_models():
    pair = Pair("query", "A line.\n" * 10_000, Reading(extract="sentences"))
    assert sections_of(pair, 32_768) == sections_of(pair, None) == sections(pair.document)


def test_sections_of_a_long_text_end_after_lines_and_hold_all_of_it():
    text = "A line of words.\n" * 5000
    spans = sections(text)
    assert "".join(text[start:stop] for start, stop in spans) == text
    assert all(text[:stop].endswith("\n") for _, stop in spans)
    assert max(stop - start for start, stop in spans) <= SECTION
    assert len(sections(text, window_tokens=4000)) == 2
    for mark in (". ", "\u3002", " "):
        text = ("x" * 99 + mark) * 500
        assert all(text[:stop].endswith(mark) for _, stop in sections(text))
    assert len(sections("x" * (2 * SECTION + 1))) == 3


def test_windows_end_with_sentences_overlap_and_hold_everything():
    text = " ".join(f"{words(7)} end{i}." for i in range(20))
    ends, _ = Hits().token_ends(text)
    actual = windows(text, ends, 44)
    assert all(
        text[:stop].endswith(".") and len(text[start:stop].split()) <= 40 for start, stop in actual
    )
    assert actual[0][0] == 0
    assert actual[-1][1] == len(text)
    assert all(first < start < stop < last for (first, stop), (start, last) in pairwise(actual))


def test_a_sentence_that_is_too_long_for_a_window_is_cut_between_tokens():
    text = f"Short one. {words(100)}. Short two."
    actual = windows(text, Hits().token_ends(text)[0], 24)
    assert all(len(text[start:stop].split()) <= 20 for start, stop in actual)
    assert set(" ".join(text[start:stop] for start, stop in actual).split()) == set(text.split())


@pytest.mark.parametrize("room", [1, 4, 5, 9])
def test_windows_of_any_size_come_to_an_end_and_hold_everything(room):
    text = "  ".join(CORPUS)
    actual = windows(text, Hits().token_ends(text)[0], room)
    covered = {i for start, stop in actual for i in range(start, stop)}
    assert all(text[i].isspace() for i in set(range(len(text))) - covered)


def test_documents_shrink_to_the_sentences_above_the_threshold():
    reranker = Hits()
    result = reranker.rank("q", DOCUMENTS, extract="sentences")
    assert [document.index for document in result.kept] == [0, 3]
    assert result.kept[0].excerpts == (
        Excerpt(16, 28, 0.5, "A bee flies."),
        Excerpt(48, 66, 1.5, "Two bees, one bee."),
    )
    assert result.kept[0].score == 1.5
    assert result.texts == ["A bee flies.\r\nTwo bees, one bee.", "Only a bee"]
    assert {document.index: document.score for document in result.dropped} == {
        1: -0.5,
        2: BLANK_SCORE,
    }
    assert reranker.calls == 1
    assert all(
        document.text[one.start : one.end] == one.text
        for document in result.kept
        for one in document.excerpts
    )


def test_neighbours_stay_with_what_stands_between_them():
    result = Hits().rank("q", DOCUMENTS[:1], extract="sentences", context=1)
    assert result.texts == [DOCUMENTS[0]]
    far = "A bee. One. Two. Three. Four. A bee."
    assert Hits().rank("q", [far], extract="sentences", context=1).texts == [
        "A bee. One. Four. A bee."
    ]


@pytest.mark.parametrize("context", [0, 1, 3, 40, 23_082_634_031, pytest.param(10**400, id="huge")])
def test_what_stands_near_a_hit_is_kept_however_far_near_is(context):
    message = random.Random(5).choices(["A bee.", "Not so."], [1, 9], k=40)
    actual = (
        Hits().rank("q", [" ".join(message)], extract="sentences", context=context).kept[0].excerpts
    )
    expected = [
        text
        for i, text in enumerate(message)
        if "A bee." in message[max(0, i - context) : i + context + 1]
    ]
    assert [one.text for one in actual] == expected


def test_without_a_threshold_all_sentences_stay():
    ranked = Hits().rank("q", DOCUMENTS, extract="sentences", threshold=None)
    assert ranked.texts == [DOCUMENTS[0], DOCUMENTS[3], DOCUMENTS[1], DOCUMENTS[2]]


def test_equal_sentences_are_told_apart_by_their_places():
    result = Hits().rank("q", ["A bee. A bee."], extract="sentences")
    assert [(one.start, one.end) for one in result.kept[0].excerpts] == [(0, 6), (7, 13)]


def test_a_sentence_that_is_too_long_is_cut_and_reported():
    assert Hits().rank("q", [f"A bee {words(9)}. No."], extract="sentences").kept[0].truncated


def test_the_best_window_is_the_documents_score():
    text = (
        "One two three four. Five six seven eight. A bee or bee comes. Ten eleven twelve thirteen."
    )
    result = Hits().rank("q", [text, "a bee"], long_documents="windows")
    best = result.kept[0]
    assert (best.index, best.score, best.truncated) == (0, 1.5, False)
    assert "A bee or bee" in text[best.window.start : best.window.end]
    assert best.window.count > 1
    assert result.kept[1].window is None  # nothing to choose from
    assert best.extract == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extract": "words"}, "extract must be 'sentences' or None, got 'words'"),
        (
            {"extract": "sentences", "context": -1},
            "context must be a whole number of at least 0, got -1",
        ),
        ({"extract": "sentences", "context": True}, "context must be a whole number"),
        ({"context": 1}, "no effect without extract"),
        ({"long_documents": "all"}, "long_documents must be 'cut' or 'windows', got 'all'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        Hits().rank("q", DOCUMENTS, **options)


def test_a_misspelt_argument_is_an_error_that_names_it():
    for name, meant in (("topn", "top_n"), ("thresold", "threshold"), ("top_k", "top_n")):
        with pytest.raises(TypeError, match=f"no argument '{name}'. Did you mean '{meant}'"):
            Hits().rank("q", DOCUMENTS, **{name: 3})
    with pytest.raises(TypeError, match=r"no argument 'extrac'. Did you mean 'extract'"):
        Hits().parts(DOCUMENTS, extrac="sentences")


def test_what_is_no_text_or_cannot_be_scored_is_named_by_its_document():
    with pytest.raises(InputError, match="Document 1 must be a string, got int"):
        Hits().rank("q", ["a bee", 5], extract="sentences")
    with pytest.raises(ScoringError, match="Document 1 scored nan") as caught:
        Hits().rank("q", ["a bee", "No. nan. A bee."], extract="sentences")
    assert caught.value.index == 1


@pytest.mark.parametrize("options", [{}, {"extract": "sentences"}, {"long_documents": "windows"}])
def test_a_query_is_checked_where_there_are_no_documents_and_read_once_where_none_was_cut(options):
    with pytest.raises(InputError, match="A query must be a string"):
        Hits().rank(5, [], **options)
    ranker = Hits()
    assert len(ranker.rank("q", ["a bee"], **options)) == 1
    assert ranker.calls == 1


def test_an_error_about_a_part_is_one_about_its_document():
    def score(pairs):
        raise ScoringError("is too large.", 2)

    pairs = [
        Pair("q", "One. Two.", Reading("sentences")),
        Pair("q", "Three.", Reading("sentences")),
    ]
    with pytest.raises(ScoringError, match="Document 1 is too large") as caught:
        score_in_parts(pairs, Hits().token_ends, score)
    assert caught.value.index == 1


def test_an_error_about_a_window_is_one_about_its_document():
    class Refusing(Hits):
        def score_texts(self, documents):
            bad = [
                i for i, text in enumerate(documents) if "bad" in text and len(text.split()) <= 8
            ]
            if bad:
                raise ScoringError("is too large.", bad[0])
            return super().score_texts(documents)

    given = ["short", "One two. " * 9, "One two. " * 9 + "A bad one. "]
    with pytest.raises(ScoringError, match="Document 2 is too large") as caught:
        Refusing().rank("q", given, long_documents="windows")
    assert caught.value.index == 2


@pytest.mark.parametrize(
    "options",
    [{"long_documents": "windows"}, {"extract": "sentences"}],
    ids=["windows", "sentences"],
)
def test_of_a_huge_document_a_beginning_is_read_and_the_result_says_so(options):
    text = "A wasp flies here. " * 40 + "One bee flies."
    reranker = Hits()
    short = reranker.rank("q", [text], threshold=None, max_characters=200, **options).kept[0]
    assert short.truncated
    assert short.score == -0.5
    assert max(text.index(part) + len(part) for part in reranker.seen) <= 200
    whole = Hits().rank("q", [text], threshold=None, max_characters=None, **options).kept[0]
    assert (whole.truncated, whole.score) == (False, 0.5)
    assert Reading().max_characters == MAX_CHARACTERS
    # A document that is cut after a number of tokens is one part.
    cut = Hits().rank("q", [text * 50], threshold=None, max_characters=200).kept[0]
    assert (cut.truncated, cut.window) == (True, None)


def test_who_does_not_count_tokens_makes_no_windows():
    class Plain(Reranker):
        def score(self, query, documents):
            return [1.0] * len(documents)

    with pytest.raises(InputError, match=r"Plain does not say .* Leave long_documents='cut'"):
        Plain().rank("q", ["text"], long_documents="windows")
    assert Plain().rank("q", ["One. Two."], extract="sentences").texts == ["One. Two."]


def test_nothing_is_asked_about_no_documents():
    assert Hits().rank("q", [], extract="sentences").kept == ()
    assert joined("a", [Excerpt(0, 1, 0.0, "a")]) == "a"


@pytest.mark.parametrize("kind", ["qwen3", "bert"])
def test_a_model_reads_each_window_whole_and_by_itself(tiny_ranker, kind):
    ranker = tiny_ranker(kind)
    text = "  ".join(CORPUS * 12)
    result = ranker.rank(QUERY, [text, CORPUS[0]], threshold=None, long_documents="windows")
    long = min(result.kept, key=lambda document: document.index)
    parts = ranker.parts([text], long_documents="windows")
    assert long.window.count >= len(parts) > 1
    assert not long.truncated
    assert long.score == pytest.approx(max(ranker.score(QUERY, parts)), abs=1e-4)
    assert not any(
        actual.truncated for actual in ranker.score_pairs([Pair(QUERY, part) for part in parts])
    )
    assert (
        ranker.rank(QUERY, [text, CORPUS[0]], threshold=None) == result
    )  # what this ranker does anyway
    assert ranker.rank(QUERY, [text], threshold=None, long_documents="cut").kept[0].truncated


def test_a_long_document_is_cut_before_anything_is_scored(tiny_ranker, monkeypatch):
    ranker = tiny_ranker("qwen3")
    # No other test has had the short texts tokenised.
    texts = ["  ".join(CORPUS * 12), CORPUS[0] + " At sea.", CORPUS[1] + " At home."]
    encoded, encode = [], ranker.prompts.encode

    def counted(given):
        encoded.extend(given)
        return encode(given)

    prefilled, prefill = [], ranker.backbone.prefill

    def recorded(documents, *arguments, **options):
        prefilled.extend(documents)
        return prefill(documents, *arguments, **options)

    monkeypatch.setattr(ranker.prompts, "encode", counted)
    monkeypatch.setattr(ranker.backbone, "prefill", recorded)
    ranker.rank("Which bridge?", texts, threshold=None)
    read = {ids for ids in prefilled if ids != ranker.prompts.null_prefix}
    # The short documents are tokenised once, and of the long one a beginning that shows its length.
    assert [encoded.count(text) for text in texts] == [0, 1, 1]
    assert max(map(len, encoded)) < len(texts[0])
    # The windows and the short documents, and not the long one's beginning.
    parts = ranker.parts(texts)
    assert texts[0] not in parts
    assert read == {document.ids for document in ranker.prompts.documents(parts, 0)}


@pytest.mark.parametrize("options", [{}, {"extract": "sentences"}, {"long_documents": "cut"}])
def test_what_was_read_ahead_of_time_is_not_read_again(tiny_ranker, tmp_path, options):
    made = tiny_ranker("qwen3")
    ranker = RSRank(
        made.backbone,
        made.prompts,
        made.projection,
        made.config,
        ModelSource(cache_folder=str(tmp_path)),
    )
    texts = ["  ".join(CORPUS * 12), CORPUS[0], " \n"]
    parts = ranker.parts(texts, **options)
    # The model does not read white space.
    assert ranker.index(parts) == len(parts)
    before = ranker.stats()["misses"]
    result = ranker.rank(QUERY, texts, threshold=None, **options)
    assert ranker.stats()["misses"] == before
    assert any(document.window for document in result.kept) == (not options)


def test_a_models_sentences_score_as_documents_of_their_own(tiny_ranker):
    ranker = tiny_ranker("qwen3")
    result = ranker.rank(QUERY, [" ".join(CORPUS)], threshold=None, extract="sentences")
    actual = result.kept[0].excerpts
    assert [one.score for one in actual] == pytest.approx(
        ranker.score(QUERY, [one.text for one in actual]), abs=1e-4
    )


class TestAdapters:
    both_ways = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])

    @both_ways
    async def test_langchain_documents_shrink_and_say_where_from(self, asynchronous):
        pytest.importorskip("langchain_core")
        from langchain_core.documents import Document

        from rsrank_rag.langchain import RSRankCompressor

        reranker = Hits()
        compressor = RSRankCompressor(
            model=reranker, extract="sentences", metadata_fields=("title",)
        )
        given = [
            Document(text, id=str(i), metadata={"title": "bee bee"})
            for i, text in enumerate(DOCUMENTS)
        ]
        if asynchronous:
            actual = await compressor.acompress_documents(given, "q")
        else:
            actual = await asyncio.to_thread(compressor.compress_documents, given, "q")
        assert [(document.id, document.page_content) for document in actual] == [
            ("0", "A bee flies.\r\nTwo bees, one bee."),
            ("3", "Only a bee"),
        ]
        assert actual[0].metadata["rsrank_excerpts"] == [
            {"start": 16, "end": 28, "score": 0.5},
            {"start": 48, "end": 66, "score": 1.5},
        ]
        assert given[0].page_content == DOCUMENTS[0]
        assert "bee bee" not in " ".join(reranker.seen)
        again = compressor.compress_documents(actual, "q")
        assert again[0].metadata["rsrank_excerpts"][0]["start"] == 0

    async def test_langchain_windows_are_counted_in_the_documents_text(self):
        pytest.importorskip("langchain_core")
        from langchain_core.documents import Document

        from rsrank_rag.langchain import RSRankCompressor

        compressor = RSRankCompressor(
            model=Hits(), long_documents="windows", metadata_fields=("title",)
        )
        text = "One two three four. Five six seven eight. A bee or bee."
        actual = (
            await compressor.acompress_documents([Document(text, metadata={"title": "T"})], "q")
        )[0]
        window = actual.metadata["rsrank_window"]
        assert text[window["start"] : window["end"]].endswith("A bee or bee.")
        assert actual.page_content == text

    @both_ways
    async def test_llama_index_nodes_shrink_and_say_where_from(self, asynchronous):
        pytest.importorskip("llama_index.core")
        from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode

        from rsrank_rag.llama_index import RSRankPostprocessor

        postprocessor = RSRankPostprocessor(model=Hits(), extract="sentences", context=1)
        text = "Far. Near. A bee. Near. Far."
        given = [
            NodeWithScore(
                node=TextNode(text=text, id_="a", metadata={"title": "bee bee"}), score=0.1
            )
        ]
        if asynchronous:
            actual = await postprocessor.apostprocess_nodes(given, query_str="q")
        else:
            actual = await asyncio.to_thread(postprocessor.postprocess_nodes, given, query_str="q")
        assert (actual[0].node.text, actual[0].score) == ("Near. A bee. Near.", 0.5)
        excerpts = actual[0].node.metadata["rsrank_excerpts"]
        assert [text[one["start"] : one["end"]] for one in excerpts] == ["Near.", "A bee.", "Near."]
        assert "rsrank_excerpts" not in actual[0].node.get_content(MetadataMode.LLM)
        assert given[0].node.text == text

    def test_settings_that_make_no_sense_are_refused(self):
        pytest.importorskip("langchain_core")
        from rsrank_rag.langchain import RSRankCompressor

        for wrong in (
            {"extract": "words"},
            {"context": 1},
            {"extract": "sentences", "context": -1},
        ):
            with pytest.raises(ValueError, match=r"extract|context"):
                RSRankCompressor(model=Hits(), **wrong)


class TestService:
    @pytest.mark.parametrize("drop", [False, True])
    async def test_a_row_has_the_sentences_that_are_kept(self, drop):
        async with client_of(scheduler(Hits()), drop=drop) as http:
            body = {
                "query": "q",
                "documents": DOCUMENTS,
                "extract": "sentences",
                "return_documents": True,
            }
            rows = (await http.post("/v1/rerank", json=body)).json()["results"]
            assert [row["index"] for row in rows] == [0, 3]
            assert rows[0]["excerpts"][0] == {
                "start": 16,
                "end": 28,
                "score": 0.5,
                "text": "A bee flies.",
            }
            assert rows[0]["document"]["text"] == "A bee flies.\r\nTwo bees, one bee."
            rows = (
                await http.post("/v1/rerank", json={**body, "threshold": None, "normalize": True})
            ).json()["results"]
            assert len(rows) == 4
            assert len(rows[0]["excerpts"]) == 5
            assert all(0 <= one["score"] <= 1 for row in rows for one in row["excerpts"])

    async def test_a_request_for_windows_gets_them(self):
        async with client_of(scheduler(Hits())) as http:
            body = {
                "query": "q",
                "documents": [f"{words(12)} bee", "a bee"],
                "long_documents": "windows",
            }
            rows = (await http.post("/v1/rerank", json=body)).json()["results"]
            assert [row["index"] for row in rows if "window" in row] == [0]
            wrong = {"query": "q", "documents": ["a"], "extract": "words"}
            assert (await http.post("/v1/rerank", json=wrong)).status_code == 400

    async def test_a_remote_reranker_gives_what_a_local_one_gives(self):
        texts = [*DOCUMENTS, f"Bees\n{ODD} A bee.", "\ud83d\ude00 No. A bee \ud800."]
        # Few tokens and many characters, of which the last token is in a second section.
        texts += ["Intro." + " " * 25_000 + "A bee.", " " * 150_000 + "A bee."]
        with address_of(scheduler(Hits())) as address:
            remote = RemoteReranker(address)
            for options in (
                {"extract": "sentences"},
                {
                    "extract": "sentences",
                    "context": 1,
                    "threshold": 0.6,
                    "max_gap": 3,
                },
                {"extract": "sentences", "threshold": None},
                {"long_documents": "windows"},
                {"long_documents": "cut", "threshold": None},
            ):
                expected = Hits().rank("q", texts, **options)
                assert await asyncio.to_thread(remote.rank, "q", texts, **options) == expected
                assert await remote.arank("q", texts, **options) == expected


@pytest.mark.parametrize("options", [{"extract": "sentences"}, {"long_documents": "windows"}])
def test_a_document_whose_read_part_is_blank_is_truncated(options):
    texts = [" " * 150_000 + "A bee.", " " * 150_000]
    result = Hits().rank("q", texts, threshold=None, **options)
    assert [document.score for document in result.in_order] == [BLANK_SCORE, BLANK_SCORE]
    assert [document.truncated for document in result.in_order] == [True, False]


def test_the_command_prints_what_is_kept(tmp_path):
    from click.testing import CliRunner

    file = tmp_path / "passages.txt"
    file.write_text(
        "A bee's waggle dance tells the hive where the flowers are. The train leaves at noon.\n"
    )
    query = "How do honeybees tell each other where flowers are?"
    arguments = ["rank", "-q", query, "-d", str(file), "--extract", "sentences"]
    actual = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert [one["text"] for one in actual["kept"][0]["excerpts"]] == [
        "A bee's waggle dance tells the hive where the flowers are."
    ]
    refused = CliRunner().invoke(app, [*arguments[:-1], "words"])
    assert refused.exit_code == 2
    assert "'--extract'" in refused.output
