"""From texts to token ids: seams, special tokens, cuts and bad input."""

import tracemalloc

import pytest
from conftest import CHAT, DOCUMENTS, byte_level_tokenizer, word_piece_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.models.ctrl.tokenization_ctrl import CTRLTokenizer

from rsrank_rag import Template
from rsrank_rag.artifact.identity import tokenizer_fingerprint
from rsrank_rag.errors import BackboneError, InputError, RSRankError
from rsrank_rag.method.template import (
    QUERY_RESERVE,
    PromptTokenizer,
)

TOKENIZER = byte_level_tokenizer()
DEFAULT = Template()


def prompts(template=DEFAULT, *, max_length=512, shared_positions=True, tokenizer=TOKENIZER):
    return PromptTokenizer(
        tokenizer, template, max_length=max_length, shared_positions=shared_positions
    )


def plain_ids(text):
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def test_document_ids_are_the_parts_tokenised_apart_and_joined():
    document = "The bridge was opened in 1932."
    [actual] = prompts().documents([document], 5)
    assert actual.ids == plain_ids(DEFAULT.instruction) + plain_ids(document) + plain_ids(
        DEFAULT.separator
    )
    assert not actual.truncated
    assert not actual.empty


def test_many_large_documents_leave_few_bytes_in_memory(monkeypatch):
    monkeypatch.setattr("rsrank_rag.method.template.RECENT_CHARACTERS", 10_000)
    made = prompts()
    made.too_long(["warm up"])
    tracemalloc.start()
    for number in range(20):
        assert made.too_long([f"{number} " + "bridge " * 100_000]) == [True]
    # 14 MB of text
    assert tracemalloc.get_traced_memory()[0] < 500_000
    tracemalloc.stop()


def test_a_document_is_tokenised_once_for_counting_and_for_scoring(monkeypatch):
    made = prompts()
    made.too_long(DOCUMENTS)
    encoded = []
    monkeypatch.setattr(made, "encode", lambda texts: encoded.extend(texts) or [])
    assert len(made.documents(DOCUMENTS, 5)) == len(DOCUMENTS)
    assert encoded == []


def test_no_merge_crosses_a_seam_between_parts():
    assert len(plain_ids("he")) == 1  # so tokenising the joined text would swallow the seams
    tokenizer = prompts(Template(instruction="h", separator="h"))
    assert tokenizer.documents(["e"], 1)[0].ids == plain_ids("h") + plain_ids("e") + plain_ids("h")


def test_query_ids_are_query_and_suffix_tokenised_apart():
    actual = prompts(Template(suffix="\nAnswer:")).query("When was it opened?")
    assert actual.ids == plain_ids("When was it opened?") + plain_ids("\nAnswer:")


def test_query_only_run_starts_with_the_same_template_as_an_empty_document():
    tokenizer = prompts()
    assert tokenizer.null_prefix == tokenizer.documents([""], 3)[0].ids
    assert tokenizer.null_prefix == plain_ids(DEFAULT.instruction) + plain_ids(DEFAULT.separator)


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ("query", lambda q, s: slice(0, q)),
        ("suffix", lambda q, s: slice(q, q + s)),
        ("query+suffix", lambda q, s: slice(0, q + s)),
    ],
)
def test_positions_choose_which_tokens_are_scored(positions, expected):
    query, suffix = "When was it opened?", "<|im_end|>\nRelevant:"
    actual = prompts(Template(suffix=suffix, positions=positions)).query(query)
    lengths = len(plain_ids(query)), len(plain_ids(suffix))
    assert actual.scored == expected(*lengths)
    assert actual.length == len(actual.ids[actual.scored])


def test_special_tokens_written_in_the_template_are_recognised():
    tokenizer = prompts(CHAT)
    end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.null_prefix[0] == TOKENIZER.convert_tokens_to_ids("<s>")
    assert tokenizer.null_prefix.count(end) == 1
    assert tokenizer.query("bridge").ids[-1] == end


@pytest.mark.parametrize("special", ["<|im_end|>", "<s>", "[SEP]", "<pad>"])
def test_special_tokens_in_documents_and_queries_are_plain_text(special):
    tokenizer, number = prompts(), TOKENIZER.convert_tokens_to_ids(special)
    text = f"a{special}b"
    document, query = tokenizer.documents([text], 1)[0].ids, tokenizer.query(text).ids
    assert number not in document
    assert number not in query
    assert TOKENIZER.decode(list(query)) == text


def test_special_tokens_are_plain_text_for_a_word_piece_too():
    tokenizer = word_piece_tokenizer()
    separator = tokenizer.convert_tokens_to_ids("[SEP]")
    actual = prompts(
        Template(instruction="[CLS]", separator="[SEP]"), tokenizer=tokenizer
    ).documents(["a [SEP] b"], 1)
    assert actual[0].ids.count(separator) == 1
    assert actual[0].ids[-1] == separator


def test_nothing_is_added_around_texts_even_if_the_tokenizer_would():
    # A tokenizer whose post-processor wraps every text into <s> ... </s>.
    from tokenizers.processors import TemplateProcessing

    wrapping = byte_level_tokenizer()
    wrapping.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert wrapping.encode("x")[0] == 1
    assert prompts(tokenizer=wrapping).query("bridge").ids == plain_ids("bridge")


def test_a_document_is_cut_only_at_its_end_and_the_cut_is_reported():
    text = "The ice moves a few centimetres a day. " * 60
    tokenizer = prompts(max_length=128)
    [actual] = tokenizer.documents([text], 4)
    head, tail = len(plain_ids(DEFAULT.instruction)), len(plain_ids(DEFAULT.separator))
    inner = actual.ids[head:-tail]
    assert actual.truncated
    assert actual.ids[:head] + actual.ids[-tail:] == tokenizer.null_prefix
    assert inner == plain_ids(text)[: len(inner)]
    assert len(actual.ids) == 128 - 128 // 4


def test_a_document_that_just_fits_is_not_cut_and_one_token_more_is():
    tokenizer = prompts(max_length=128)
    room = 128 - tokenizer.overhead - 128 // 4
    just, over = tokenizer.documents(["!" * room, "!" * (room + 1)], 1)
    assert (len(plain_ids("!" * room)), just.truncated, over.truncated) == (room, False, True)
    assert just.ids == over.ids


def test_where_a_document_is_cut_depends_on_the_query_only_beyond_the_reserve():
    text, tokenizer = "!" * 4000, prompts(max_length=2048 + QUERY_RESERVE)
    cuts = {
        length: len(tokenizer.documents([text], length)[0].ids)
        for length in (1, 20, 511, 512, 513, 600)
    }
    assert cuts[1] == cuts[20] == cuts[511] == cuts[512] == 2048
    assert (cuts[513], cuts[600]) == (2047, 1960)


def test_document_and_query_together_never_exceed_the_positions():
    tokenizer = prompts(max_length=100)
    for length in (1, 10, 25, 40, 53):
        query = tokenizer.query("!" * length)
        [document] = tokenizer.documents(["!" * 1000], len(query.ids))
        assert len(document.ids) + len(query.ids) <= 100


def test_an_encoder_gives_each_part_all_positions():
    tokenizer = prompts(max_length=100, shared_positions=False)
    assert len(tokenizer.documents(["!" * 1000], 90)[0].ids) == 100
    assert len(tokenizer.query("!" * 100).ids) == 100
    with pytest.raises(InputError, match="101 tokens"):
        tokenizer.query("!" * 101)


def test_a_query_is_never_cut_but_refused_when_too_long():
    tokenizer = prompts(max_length=100)
    longest = 100 - tokenizer.overhead - 1
    assert len(tokenizer.query("!" * longest).ids) == longest
    with pytest.raises(
        InputError, match=f"The query has {longest + 1} tokens; .* needs 101 positions .* 100"
    ):
        tokenizer.query("!" * (longest + 1))


@pytest.mark.parametrize("shared_positions", [True, False])
def test_of_a_query_that_is_too_long_the_first_and_the_last_part_fit(shared_positions):
    tokenizer = prompts(max_length=100, shared_positions=shared_positions)
    limit = tokenizer.query_limit
    fits = "!" * limit
    assert tokenizer.fit_query(fits) == fits
    cut = tokenizer.fit_query("begin" + "!" * 1000 + "end")
    assert cut.startswith("begin!")
    assert cut.endswith("!end")
    length = tokenizer.query(cut).length
    assert length <= (limit // 2 + 1 if shared_positions else limit)
    assert length >= limit // 4


@given(st.text(max_size=300), st.integers(60, 120), st.booleans())
@settings(deadline=None)
def test_a_query_of_any_text_fits_after_it_was_cut(text, max_length, shared_positions):
    tokenizer = prompts(max_length=max_length, shared_positions=shared_positions)
    if tokenizer.encode([text])[0]:
        assert tokenizer.query(tokenizer.fit_query(text)).length <= tokenizer.query_limit


def test_an_empty_query_is_refused():
    with pytest.raises(InputError, match="no tokens"):
        prompts().query("")


def test_an_empty_query_is_refused_even_when_the_suffix_has_tokens():
    with pytest.raises(InputError, match="no tokens"):
        prompts(CHAT).query("")


def test_input_errors_are_value_errors_and_errors_of_the_package():
    assert issubclass(InputError, ValueError)
    assert issubclass(InputError, RSRankError)


def test_a_document_without_text_is_marked_empty():
    actual = prompts().documents(["", " \n", "frost"], 1)
    assert [document.empty for document in actual] == [True, True, False]


def test_lone_surrogates_in_documents_and_queries_are_tokenised_as_replacement_characters():
    tokenizer = prompts()
    assert tokenizer.query("a\ud800").ids == plain_ids("a\ufffd")
    assert tokenizer.documents(["a\ud800"], 1) == tokenizer.documents(["a\ufffd"], 1)


def test_emoji_survive():
    assert TOKENIZER.decode(list(prompts().query("👩‍🚀 🇫🇷 😀").ids)) == "👩‍🚀 🇫🇷 😀"


def test_a_hundred_thousand_characters_are_cut_to_the_positions():
    [actual] = prompts().documents(["The bridge is long. " * 5000], 3)
    assert actual.truncated
    assert len(actual.ids) == 512 - 128


PIECES = [
    "a",
    "the bridge ",
    " " * 3000,
    "\n",
    "x" * 150,
    "y" * 9000,
    "1984",
    "é",
    "\ud83d",
    "東京",
    ".",
]


@pytest.mark.parametrize("tokenizer", [TOKENIZER, word_piece_tokenizer()])
@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.sampled_from(PIECES), st.integers(1, 300)), max_size=8),
    count=st.integers(1, 60),
)
def test_a_text_that_is_cut_before_it_is_tokenised_has_the_first_ids_of_the_whole(
    tokenizer, pieces, count
):
    text = "".join(piece * (1 if len(piece) > 1000 else number) for piece, number in pieces)
    reader = prompts(tokenizer=tokenizer)
    [whole], [beginning] = reader.encode([text]), reader.encode_beginnings([text], count)
    assert beginning[:count] == whole[:count]
    assert (len(beginning) > count) == (len(whole) > count)


def test_of_a_text_of_megabytes_only_a_beginning_is_tokenised(monkeypatch):
    lengths = []
    reader = prompts()
    encode = reader.encode

    def counting(texts):
        lengths.extend(map(len, texts))
        return encode(texts)

    monkeypatch.setattr(reader, "encode", counting)
    [document] = reader.documents(["The bridge was opened in 1932. " * 100_000], 5)
    assert document.truncated
    assert sum(lengths) < 50_000


def test_readable_text_of_ids_is_the_text():
    tokenizer = prompts(CHAT)
    query = tokenizer.query("the bridge")
    assert "".join(tokenizer.text_of(query.ids)) == "the bridge<|im_end|>"


def test_a_slow_tokenizer_is_refused(tmp_path):
    (tmp_path / "vocab.json").write_text('{"<unk>": 0, "a": 1}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    slow = CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    with pytest.raises(BackboneError, match="CTRLTokenizer is not a fast tokenizer"):
        prompts(tokenizer=slow)


def test_an_instruction_is_needed():
    with pytest.raises(ValueError, match="instruction"):
        Template(instruction="")


def test_a_template_that_scores_a_suffix_it_lacks_is_refused():
    with pytest.raises(InputError, match="suffix"):
        prompts(Template(positions="suffix"))


@pytest.mark.parametrize("shared", [False, True])
def test_every_length_that_is_accepted_has_room_for_a_query_and_a_document(shared):
    template = Template(instruction="a", separator="b", query_start="c", suffix="d")
    # Four tokens of the template, one of the query and one of the document share the positions.
    shortest = 6 if shared else 3
    for length in range(1, shortest):
        with pytest.raises(InputError, match=f"max_length={length} leaves no room"):
            prompts(template, max_length=length, shared_positions=shared)
    for length in range(shortest, 9):
        made = prompts(template, max_length=length, shared_positions=shared)
        query = made.query(made.fit_query("a"))
        assert made.documents(["It is."], len(query.ids))[0].ids


def test_unknown_fields_and_positions_are_refused():
    with pytest.raises(ValueError, match="prefix"):
        Template(prefix="x")
    with pytest.raises(ValueError, match="positions"):
        Template(positions="document")


def test_a_template_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        DEFAULT.separator = "x"


def test_the_callers_tokenizer_keeps_its_padding_and_truncation():
    tokenizer = byte_level_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=7)
    own = prompts(tokenizer=tokenizer)
    assert own.query("The bridge was opened").ids == plain_ids("The bridge was opened")
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 3
    assert tokenizer.backend_tokenizer.padding["length"] == 7
    assert not tokenizer.backend_tokenizer.encode_special_tokens


def test_fingerprint_tells_tokenizers_apart_and_is_stable():
    assert tokenizer_fingerprint(prompts().tokenizer) == tokenizer_fingerprint(
        prompts(CHAT, tokenizer=byte_level_tokenizer()).tokenizer
    )
    bigger = byte_level_tokenizer()
    bigger.add_tokens(["zyx"])
    assert tokenizer_fingerprint(prompts(tokenizer=bigger).tokenizer) != tokenizer_fingerprint(
        prompts().tokenizer
    )
    assert tokenizer_fingerprint(
        prompts(tokenizer=word_piece_tokenizer()).tokenizer
    ) != tokenizer_fingerprint(prompts().tokenizer)


def test_fingerprint_survives_saving_and_loading(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer_fingerprint(prompts(tokenizer=loaded).tokenizer) == tokenizer_fingerprint(
        prompts().tokenizer
    )
