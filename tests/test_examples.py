"""The built-in model gets right, with a margin, what the first pages show."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from rsrank_rag import RSRank
from rsrank_rag.cli import app
from rsrank_rag.cli.service import serve
from rsrank_rag.evaluation.datasets import read_labelled

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text("utf-8")
MARGIN = 0.2
"""How far from zero: several times what bfloat16 moves a score by."""


@pytest.fixture(scope="module")
def mini():
    return RSRank.from_pretrained(device="cpu", cache_size=0)


def served(text, relevant):
    """The request that curl sends."""
    body = json.loads(re.search(r"--json '(\{.*?\})'", text, flags=re.DOTALL)[1])
    return body["query"], body["documents"], {relevant}


def readme():
    names = {}
    exec(re.search(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)[1], names)
    return re.search(r'rank\("(.*?)"', README)[1], names["passages"], {0}


def demo(query):
    return query, (EXAMPLES / "passages.txt").read_text("utf-8").splitlines(), {0, 1, 2}


def demo_query():
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.QUERY


CASES = {
    "serve --help": lambda: served(serve.__doc__, 1),
    "serving": lambda: served((ROOT / "docs/serving.md").read_text("utf-8"), 0),
    "README": readme,
    "the demo": lambda: demo(demo_query()),
    "rank in the README": lambda: demo(re.search(r'rsrank rank --query "(.*?)"', README)[1]),
    "rank in the guide and in --help": lambda: demo(
        "How do bees tell each other where flowers are?"
    ),
    "explain": lambda: (
        "How do bees find flowers?",
        ["Bees find flowers by their colour and their scent."],
        {0},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_shown_is_kept_and_dropped_with_a_margin(case, mini):
    query, documents, relevant = CASES[case]()
    scores = mini.score(query, documents)
    wrong = {
        text: score
        for number, (text, score) in enumerate(zip(documents, scores, strict=True))
        if (score < MARGIN if number in relevant else score > -MARGIN)
    }
    assert wrong == {}


def test_what_mini_cannot_do_stands_in_its_description_and_in_the_readme():
    message = " ".join(
        CliRunner().invoke(app, ["info", "mini"], env={"COLUMNS": "200"}).stdout.split()
    )
    assert "English only" in message
    assert "510 tokens" in message
    assert "ships with `mini`, an English model" in README


def test_the_island_guides_labels_are_as_the_notebooks_say():
    lines = (EXAMPLES / "island" / "questions.jsonl").read_text("utf-8").splitlines()
    relevant = {row["question"]: row["relevant"] for row in map(json.loads, lines)}
    assert len(relevant) == 20
    assert sum(not ids for ids in relevant.values()) == 4
    assert len(relevant["Where can I get cash?"]) == 1
    assert relevant["How do I apply for a fishing licence?"] == []
    assert len((EXAMPLES / "island" / "passages.jsonl").read_text("utf-8").splitlines()) == 61


def island(name):
    lines = (EXAMPLES / "island" / f"{name}.jsonl").read_text("utf-8").splitlines()
    return list(map(json.loads, lines))


def printed(name):
    """What the saved cells of a notebook print."""
    notebook = json.loads((EXAMPLES / f"{name}.ipynb").read_text("utf-8"))
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return "".join("".join(output.get("text", "")) for output in outputs)


@pytest.mark.parametrize(
    ("question", "wanted"),
    [
        ("Where can I get cash?", ["money"]),
        ("When can I see puffins?", ["puffins"]),
        ("How do I apply for a fishing licence?", []),
    ],
)
def test_mini_keeps_what_the_text_of_the_notebooks_relies_on(question, wanted, mini):
    passages = island("passages")
    scores = mini.score(question, [f"{row['title']}\n{row['text']}" for row in passages])
    kept = {row["id"] for row, score in zip(passages, scores, strict=True) if score > 0}
    assert kept >= set(wanted)
    assert kept or not wanted
    assert wanted or not kept


def test_a_question_that_keeps_no_passage_of_its_answer_is_called_lost_in_the_notebooks():
    answers = {row["question"]: row["relevant"] for row in island("questions")}
    lines = re.findall(r"^ *(\d+) kept of 15  (lost|    )  (.*)$", printed("llama_index_rag"), re.M)
    assert {question for _, _, question in lines} == set(answers)
    for count, verdict, question in lines:
        if not answers[question]:
            assert verdict == "    "
        elif count == "0":
            assert verdict == "lost"

    titles = {row["id"]: row["title"] for row in island("passages")}
    shown = re.split(r"^(.*\?)  \(passages that.*\n", printed("langchain_rag"), flags=re.M)
    blocks = dict(zip(shown[1::2], shown[2::2], strict=True))
    assert len(blocks) == 4
    for question, block in blocks.items():
        right = {titles[passage] for passage in answers[question]}
        kept = set(re.findall(r"^   kept [+-][\d.]+  (.*?):", block, flags=re.M))
        assert kept & right or not right or "   lost" in block


def test_the_outcomes_that_the_notebooks_call_right_are_in_their_outputs():
    llama, langchain = printed("llama_index_rag"), printed("langchain_rag")
    assert "\nEmpty Response\n" in llama
    assert "\n0 kept without the fallback\n" in langchain
    (puffins,) = [row["text"] for row in island("passages") if row["id"] == "puffins"]
    for text in (llama, langchain):
        context = re.search(r"(?:Answer from these|Context information).*?puffins\?", text, re.S)[0]
        assert puffins in context
    before, after = re.search(
        r"([\d,]+) characters of context before, ([\d,]+)", langchain
    ).groups()
    assert int(before.replace(",", "")) > int(after.replace(",", ""))


def test_what_the_notebook_on_agents_says_that_an_agent_reads_is_in_its_outputs():
    text = printed("agents")
    (puffins,) = [row["text"] for row in island("passages") if row["id"] == "puffins"]
    answered, unanswered = re.split(r"^How do I apply for a fishing licence\?\n", text, flags=re.M)[
        :2
    ]
    assert puffins in answered
    assert "Puffins" in re.findall(r"^   [+][\d.]+  (.*)$", answered, re.M)
    assert unanswered.startswith("No passage scored above the threshold.\n")
    counts = re.findall(r"^   (with|without) +(\d+) passages, +([\d,]+) characters$", text, re.M)
    assert [(name, count) for name, count, _ in counts[::2]] == [("without", "15")] * 2
    kept, none = [(count, characters) for _, count, characters in counts[1::2]]
    assert 0 < int(kept[0]) < 15
    assert none == ("0", str(len("No passage scored above the threshold.")))
    assert text.rstrip().endswith("No passage scored above the threshold.")


def test_no_notebook_shows_progress_bars_or_logs():
    for path in EXAMPLES.glob("*.ipynb"):
        notebook = json.loads(path.read_text("utf-8"))
        outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
        assert [output for output in outputs if output.get("name") == "stderr"] == []
        assert "Loading weights" not in path.read_text("utf-8")


def test_the_labelled_file_has_questions_with_and_without_an_answer():
    queries = read_labelled(EXAMPLES / "labelled.jsonl")
    answered = [any(document.relevant for document in query.documents) for query in queries]
    assert len(queries) >= 20
    assert 0 < answered.count(False) < answered.count(True)


def test_every_file_that_a_command_of_the_first_pages_reads_is_in_the_repository():
    for page in (
        README,
        *((ROOT / "docs" / name).read_text("utf-8") for name in ("guide.md", "evaluation.md")),
    ):
        named = set(re.findall(r"examples/[\w.]+\.(?:txt|jsonl)\b", page))
        assert named
        assert [name for name in named if not (ROOT / name).is_file()] == []


def test_no_command_installs_a_name_that_is_not_on_the_package_index():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "research").rglob("*.md")]
    pages += EXAMPLES.glob("*.ipynb")
    pages += [*(ROOT / "rsrank_rag").rglob("*.py")]
    name = re.compile(r"pip install [^\n`]*(?<![/\w])rsrank[-_]rag(?![^\n`]*@ )")
    assert [str(page) for page in pages if name.search(page.read_text("utf-8"))] == []


def test_no_page_asks_a_stranger_for_files_that_only_we_have():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert [str(page) for page in pages if "../shared" in page.read_text("utf-8")] == []


def test_every_extra_that_a_command_of_the_readme_names_is_part_of_the_one_install_line():
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    line = re.search(r'^cli = \["rsrank-rag\[(.*?)\]"\]', project, flags=re.MULTILINE)[1].split(",")
    block = re.search(r"```sh\n(.*?)```", README, flags=re.DOTALL)[1]
    named = {
        extra for actual in re.findall(r"# \[([\w,]+)\]", block) for extra in actual.split(",")
    }
    assert named <= set(line)
    assert "'.[cli]'" in README
