"""research.answers: what a language model answers from what is kept."""

import pytest
from conftest import DOCUMENTS, QUERY
from transformers import AutoModelForCausalLM, AutoTokenizer

from research import answers
from research.answers import Answer, AnsweringModel, GoldAnswers, exact_match, token_f1
from rsrank_rag.evaluation.datasets import LabelledDocument, LabelledQuery

GOLD = [GoldAnswers(set="bridges", id="q", query=QUERY, answers=("1932", "in 1932"))]


@pytest.fixture
def question():
    documents = [
        LabelledDocument(id=str(number), text=text, relevant=number == 0)
        for number, text in enumerate(DOCUMENTS)
    ]
    return LabelledQuery(id="q", query=QUERY, documents=tuple(documents))


class Reader:
    """Answers with the first passage, and counts its calls."""

    def __init__(self):
        self.calls = 0

    def answer(self, question, passages):
        self.calls += 1
        return (passages or ["1932"])[0], 10 * len(passages)


def test_answers_are_compared_by_their_words():
    assert exact_match("The year 1932.", ["1932", "year 1932"]) == 1
    assert exact_match("1933", ["1932"]) == 0
    assert token_f1("in the year 1932", ["1932", "May 1932"]) == pytest.approx(0.5)
    assert token_f1("yes", ["no"]) == 0


def test_each_condition_answers_once_and_equal_passages_are_read_once(question, tmp_path):
    reader = Reader()
    conditions = {
        "all": lambda query: range(len(query.documents)),
        "the same": lambda query: range(len(query.documents)),
        "none": lambda query: (),
    }
    file = tmp_path / "answers.jsonl"
    for _ in range(2):
        answers.answer_all(reader, conditions, {"bridges": [question]}, file)
    assert reader.calls == 2
    read = answers.read_answers(file)
    assert [answer.condition for answer in read] == ["all", "the same", "none"]
    figures = answers.figures_of("reader", read, GOLD)
    assert figures.questions == {"bridges": 1}
    assert figures.conditions["none"].exact.mean == 1
    assert figures.conditions["all"].exact.mean == 0
    assert figures.conditions["all"].tokens == 10 * len(DOCUMENTS)
    assert "| none | 100.0 | 100.0 | 100.0 | 100.0 | 0.0 | 0 |" in answers.table(figures)


def test_figures_count_the_questions_that_every_condition_has_answered():
    def answer(condition, name):
        return Answer(
            condition=condition,
            set=name,
            id="q",
            places=(),
            answer="1932",
            tokens=1,
            ranking_seconds=0,
            reading_seconds=0,
        )

    gold = [*GOLD, GOLD[0].model_copy(update={"set": "towers"})]
    rows = [answer("all", "bridges"), answer("none", "bridges"), answer("all", "towers")]
    assert answers.figures_of("reader", rows, gold).questions == {"bridges": 1}


def test_rerankers_keep_what_their_rules_say(question, ranker, monkeypatch):
    monkeypatch.setattr(answers, "load", lambda source: ranker)
    conditions = answers.selections(["tiny@folder"])
    assert list(conditions["relevant passages"](question)) == [0]
    texts = [document.content() for document in question.documents]
    documents = ranker.rank(QUERY, texts, max_gap=None, fallback=None).kept
    assert conditions["tiny, above zero"](question) == [document.index for document in documents]


def test_a_language_model_answers_greedily_from_the_passages(tiny_folder, tmp_path):
    folder = tiny_folder("qwen3")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    model = AnsweringModel(str(tmp_path))
    text, tokens = model.answer(QUERY, DOCUMENTS[:2])
    assert model.answer(QUERY, DOCUMENTS[:2]) == (text, tokens)
    prompt = answers.PROMPT.format(passages="", question=QUERY)
    assert model.answer(QUERY, [])[1] == len(tokenizer(prompt)["input_ids"]) < tokens
