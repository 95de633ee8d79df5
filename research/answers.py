"""Let a language model answer from the passages that a pipeline keeps, and measure the answers.

`python -m research.answers --help`. The questions are those of HotpotQA, 2Wiki and MuSiQue whose
gold answers are known. Every answer is a line of a file, so that a run goes on where it stopped.
"""

import json
import re
import statistics
import string
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

import click
import torch
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import research.systems  # noqa: F401 - makes the systems of the paper known by name
from rsrank_rag.adapters.kinds import load
from rsrank_rag.backends.options import ModelSource
from rsrank_rag.cli.arguments import PATH, command, progress
from rsrank_rag.evaluation.datasets import LabelledQuery, read_lines, read_sets
from rsrank_rag.evaluation.statistics import Estimate, Record
from rsrank_rag.partial_files import write_text
from rsrank_rag.reranker import Reranker

from . import markdown
from .comparison import estimate_mean
from .markdown import points

SUFFIX = ".paragraph"

PROMPT = (
    "{passages}Question: {question}\n\n"
    "Answer the question with as few words as possible. Write only the answer, without a sentence."
)

NEW_TOKENS = 24
"""Most tokens of an answer."""


class GoldAnswers(BaseModel):
    """The gold answers of a question; the first one is the data set's, the others are aliases."""

    set: str
    id: str
    query: str
    answers: tuple[str, ...]


class Answer(BaseModel, frozen=True):
    """One answer: a line of the output.

    Attributes:
        condition: What selected the passages.
        set: The question's set.
        id: The question.
        places: Places of the passages that were read, in the order of reading.
        answer: The text.
        tokens: Number of tokens that were read.
        ranking_seconds: Time of the selection.
        reading_seconds: Time of the answer, from prompt to last token.
    """

    condition: str
    set: str
    id: str
    places: tuple[int, ...]
    answer: str
    tokens: int
    ranking_seconds: float
    reading_seconds: float


Select = Callable[[LabelledQuery], Sequence[int]]
"""Selects passages of a question: places, in the order of reading."""


class AnsweringModel:
    """An instruction-tuned language model that answers greedily, in bfloat16.

    Args:
        name: Folder or Hub id.
    """

    def __init__(self, name: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
        self.model = model.eval()

    @torch.inference_mode()
    def answer(self, question: str, passages: Sequence[str]) -> tuple[str, int]:
        """The first line of the answer, and the number of tokens of the prompt."""
        blocks = ""
        for number, text in enumerate(passages, start=1):
            blocks += f"Passage {number}: {text}\n\n"
        content = PROMPT.format(passages=blocks, question=question)
        inputs = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        generated = self.model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        length = inputs["input_ids"].shape[1]
        text = self.tokenizer.decode(generated[0, length:], skip_special_tokens=True)
        return text.strip().split("\n")[0], length


def selections(systems: Iterable[str]) -> dict[str, Select]:
    """All conditions by name: without a reranker, and each reranker by its rules.

    A reranker with a threshold keeps what scores above zero, or what its default rule keeps. Other
    rerankers keep the best three or five.

    Args:
        systems: Names of rerankers. ``NAME@FOLDER`` loads the language model from a folder, and
            ``LABEL=NAME`` has another label in the table.
    """
    conditions: dict[str, Select] = {
        "all passages": lambda query: range(len(query.documents)),
        "no passage": lambda query: (),
        "relevant passages": _relevant,
    }
    for text in systems:
        label, _, system = text.rpartition("=")
        name, _, folder = system.partition("@")
        label = label or name
        ranker = load(ModelSource(name=name, backbone=folder or None))
        if ranker.threshold is None:
            conditions[f"{label}, best 3"] = _by_rule(ranker, threshold=None, top_n=3)
            conditions[f"{label}, best 5"] = _by_rule(ranker, threshold=None, top_n=5)
        else:
            conditions[f"{label}, above zero"] = _by_rule(ranker, max_gap=None, fallback=None)
            conditions[f"{label}, default rule"] = _by_rule(ranker)
    return conditions


def _relevant(query: LabelledQuery) -> list[int]:
    return [place for place, document in enumerate(query.documents) if document.relevant]


def _by_rule(ranker: Reranker, **limits: object) -> Select:
    def select(query: LabelledQuery) -> list[int]:
        texts = [document.content() for document in query.documents]
        result = ranker.rank(query.query, texts, **limits)  # type: ignore[arg-type]
        return [document.index for document in result.kept]

    return select


def answer_all(
    model: AnsweringModel,
    conditions: dict[str, Select],
    sets: dict[str, list[LabelledQuery]],
    output: Path,
) -> None:
    """Append the answers that the output lacks, question by question.

    Passages that were read before for the same question, in the same order, are not read again.
    """
    answers = read_answers(output)
    done = {(answer.condition, answer.set, answer.id) for answer in answers}
    read = {(answer.set, answer.id, answer.places): answer for answer in answers}
    for name, query in progress(in_turn(sets), "questions"):
        for condition, select in conditions.items():
            if (condition, name, query.id) in done:
                continue
            started = time.perf_counter()
            places = tuple(select(query))
            ranked = time.perf_counter()
            same = read.get((name, query.id, places))
            if same is None:
                passages = [query.documents[place].content() for place in places]
                text, tokens = model.answer(query.query, passages)
                seconds = time.perf_counter() - ranked
            else:
                text, tokens, seconds = same.answer, same.tokens, same.reading_seconds
            answer = Answer(
                condition=condition,
                set=name,
                id=query.id,
                places=places,
                answer=text,
                tokens=tokens,
                ranking_seconds=ranked - started,
                reading_seconds=seconds,
            )
            read[name, query.id, places] = answer
            with output.open("a", encoding="utf-8") as file:
                file.write(answer.model_dump_json() + "\n")


def in_turn(sets: dict[str, list[LabelledQuery]]) -> list[tuple[str, LabelledQuery]]:
    """The first question of each set, then the second ones, and so on."""
    longest = max(map(len, sets.values()), default=0)
    questions = []
    for place in range(longest):
        for name, queries in sets.items():
            if place < len(queries):
                questions.append((name, queries[place]))
    return questions


def read_answers(output: Path) -> list[Answer]:
    """All answers so far."""
    if not output.exists():
        return []
    return [Answer.model_validate_json(line) for _, line in read_lines(output)]


def normalised(text: str) -> list[str]:
    """The words of an answer in lower case, without punctuation and articles, as in SQuAD.

    >>> normalised("The Statue of Liberty!")
    ['statue', 'of', 'liberty']
    """
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def exact_match(answer: str, gold: Iterable[str]) -> float:
    """1 if the answer is one of the gold answers, normalised; else 0."""
    return float(normalised(answer) in map(normalised, gold))


def token_f1(answer: str, gold: Iterable[str]) -> float:
    """The best F1 of the answer's words with a gold answer's words.

    >>> round(token_f1("Liberty statue", ["the Statue of Liberty"]), 2)
    0.8
    """
    return max(map(partial(_f1, normalised(answer)), map(normalised, gold)))


def _f1(answer: list[str], gold: list[str]) -> float:
    shared = sum((Counter(answer) & Counter(gold)).values())
    if not shared:
        return float(answer == gold)
    return 2 * shared / (len(answer) + len(gold))


class ConditionFigures(Record):
    """Means over the questions of all sets, each set counting the same, and of each set.

    Attributes:
        exact: Exact match.
        f1: Token F1.
        first_exact: Exact match with the first gold answer alone.
        first_f1: Token F1 with the first gold answer alone.
        passages: Passages a question.
        tokens: Tokens read a question.
        ranking_seconds: Median seconds of a question for the selection.
        reading_seconds: Median seconds of a question for the answer.
        sets: Exact match and token F1 of each set.
    """

    exact: Estimate
    f1: Estimate
    first_exact: Estimate
    first_f1: Estimate
    passages: float
    tokens: float
    ranking_seconds: float
    reading_seconds: float
    sets: dict[str, tuple[Estimate, Estimate]]


class AnswerFigures(Record):
    """What the table is made from."""

    model: str
    questions: dict[str, int]
    conditions: dict[str, ConditionFigures]


def figures_of(model: str, answers: Sequence[Answer], gold: Sequence[GoldAnswers]) -> AnswerFigures:
    """Figures of all conditions, over the questions that every condition has answered."""
    known = {(one.set, one.id): one.answers for one in gold}
    conditions: dict[str, None] = {}
    questions: dict[tuple[str, str], dict[str, Answer]] = {}
    for answer in answers:
        conditions[answer.condition] = None
        questions.setdefault((answer.set, answer.id), {})[answer.condition] = answer
    complete = {}
    counts: dict[str, int] = {}
    for key, by_condition in questions.items():
        if len(by_condition) == len(conditions):
            complete[key] = by_condition
            counts[key[0]] = counts.get(key[0], 0) + 1
    figures = {}
    for condition in conditions:
        rows: dict[str, list[list[float]]] = {}
        for key, by_condition in complete.items():
            answer = by_condition[condition]
            golds = known[key]
            row = [
                exact_match(answer.answer, golds),
                token_f1(answer.answer, golds),
                exact_match(answer.answer, golds[:1]),
                token_f1(answer.answer, golds[:1]),
                len(answer.places),
                answer.tokens,
                answer.ranking_seconds,
                answer.reading_seconds,
            ]
            rows.setdefault(key[0], []).append(row)
        # Each set's columns: exact match, token F1, and so on.
        columns = {}
        sets = {}
        for name, values in rows.items():
            columns[name] = list(zip(*values, strict=True))
            sets[name] = (estimate_mean(columns[name][0]), estimate_mean(columns[name][1]))
        means = list(starmap(estimate_mean, zip(*columns.values(), strict=True)))
        figures[condition] = ConditionFigures(
            exact=means[0],
            f1=means[1],
            first_exact=means[2],
            first_f1=means[3],
            passages=means[4].mean,
            tokens=means[5].mean,
            ranking_seconds=median_of(columns, 6),
            reading_seconds=median_of(columns, 7),
            sets=sets,
        )
    return AnswerFigures(model=model, questions=counts, conditions=figures)


def median_of(columns: dict[str, list[tuple[float, ...]]], place: int) -> float:
    """The median over the questions of all sets; a run that was stopped for a while counts once."""
    seconds: list[float] = []
    for of_set in columns.values():
        seconds += of_set[place]
    return statistics.median(seconds)


def table_of(figures: Any) -> str:
    """The content of ``answers.json`` as Markdown."""
    return table(AnswerFigures.model_validate(figures))


def table(figures: AnswerFigures) -> str:
    """The figures as Markdown."""
    names = list(figures.questions)
    head = ["passages", "exact match", "token F1"]
    head += [f"F1 {name}" for name in names]
    head.append("F1, first gold answer")
    head += ["passages a question", "tokens", "median seconds: selection, answer"]
    rows = []
    for condition, row in figures.conditions.items():
        cells = [condition, row.exact.shown(points), row.f1.shown(points)]
        cells += [points(row.sets[name][1].mean) for name in names]
        cells.append(points(row.first_f1.mean))
        cells += [f"{row.passages:.1f}", f"{row.tokens:.0f}"]
        cells.append(f"{row.ranking_seconds:.1f}, {row.reading_seconds:.1f}")
        rows.append(cells)
    return markdown.table(head, rows)


@command(resumes=True)
@click.argument("model")
@click.argument("gold", type=PATH)
@click.argument("data", type=PATH, nargs=-1, required=True)
@click.option("--system", "systems", multiple=True, help="[LABEL=]NAME[@FOLDER].")
@click.option("--questions", type=click.IntRange(1), default=100, help="Of each set.")
@click.option("--output", type=PATH, default="runs/answers", help="Folder of answers and figures.")
def main(
    model: str,
    gold: Path,
    data: tuple[Path, ...],
    systems: tuple[str, ...],
    questions: int,
    output: Path,
) -> None:
    """Let MODEL answer the questions of DATA from what rerankers keep, and print the table.

    GOLD holds the answers: lines of set, id, query, answers.
    """
    lines = [GoldAnswers.model_validate_json(line) for _, line in read_lines(gold)]
    known = {(one.set, one.id) for one in lines}
    sets = {}
    for name, queries in read_sets(data).items():
        name = name.removesuffix(SUFFIX)
        answered = [query for query in queries if (name, query.id) in known]
        sets[name] = answered[:questions]
    output.mkdir(parents=True, exist_ok=True)
    file = output / "answers.jsonl"
    answer_all(AnsweringModel(model), selections(systems), sets, file)
    figures = figures_of(Path(model).name, read_answers(file), lines)
    write_text(output / "answers.json", json.dumps(figures.model_dump(), indent=1) + "\n")
    click.echo(table(figures))


if __name__ == "__main__":
    main()
