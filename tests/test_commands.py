"""The shell commands of the README and the docs.

Each command of the README runs alone, offline, in a new folder that holds nothing but `examples/`
and the file of a user's own questions.
So does each command of a page of the docs that only reads files of `examples/`. Commands that need
other files are checked: their options, modules, extras and folders exist.
"""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import urllib.request
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from rsrank_rag.cli import app

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)((?:    .*\n|\n(?=    ))+)")
NAMES = ("git", "pip", "rsrank", "python", "curl")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def commands(page):
    """The commands of a page's shell blocks, each as a list of words."""
    text = page.read_text("utf-8")
    blocks = [body for kind, body in FENCE.findall(text) if kind == "sh"]
    blocks += INDENTED.findall(FENCE.sub("", text))
    actual = []
    for block in blocks:
        waiting = ""
        for line in block.splitlines():
            waiting += line + "\n"
            try:
                words = shlex.split(waiting, comments=True)
            except ValueError:  # a quote or a backslash at the end: the command goes on
                continue
            waiting = ""
            part = []
            for word in [*words, "&&"]:
                if word != "&&":
                    part.append(word)
                    continue
                if part and part[0] in NAMES:
                    actual.append(part)
                part = []
    return actual


README = commands(ROOT / "README.md")
OF_DOCS = [command for page in DOCS for command in commands(page)]
ALL = [list(words) for words in dict.fromkeys(map(tuple, README + OF_DOCS))]


def runs_from_examples(words):
    """Whether a command is quick and reads no file but those of `examples/`."""
    if words[0] != "rsrank" or words[1] in ("train", "serve", "push"):
        return False
    if words[1] == "info":
        return words[2] == "mini"
    options = dict(pairwise(words))
    files = [options.get(name, "examples/") for name in ("--documents", "-d", "--data", "--input")]
    known = options.get("--model", "mini") in ("mini", "bm25")
    return known and all(name.startswith("examples/") for name in files)


OFFLINE = [words for words in ALL if words in README and words[0] == "rsrank"]
OFFLINE += [words for words in ALL if words not in README and runs_from_examples(words)]
SERVE = [words for words in OFFLINE if words[1] == "serve"]
RUN = [words for words in OFFLINE if words[1] != "serve"]


def joined(words):
    return shlex.join(words)


@pytest.fixture
def shell(tmp_path):
    """Arguments of a process in a new folder, with this clone's package and without a network."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "your-questions.jsonl").symlink_to(ROOT / "examples" / "labelled.jsonl")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RSRANK")},
        **nowhere,
        "no_proxy": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    return {"cwd": tmp_path, "env": environment, "text": True}


def arguments(words):
    return [sys.executable, "-m", "rsrank_rag", *words[1:]]


def test_the_commands_of_the_first_pages_are_found():
    assert {words[1] for words in RUN} >= {"rank", "explain", "evaluate", "score", "train", "tune"}
    assert len(SERVE) == 1
    assert ["git", "clone", PROJECT["urls"]["Homepage"]] in README


@pytest.mark.slow
@pytest.mark.parametrize("words", RUN, ids=joined)
def test_a_command_runs_alone_in_a_new_folder(words, shell):
    for package in ("bm25s", "ir_measures"):
        pytest.importorskip(package)
    done = subprocess.run(arguments(words), capture_output=True, **shell)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    named = [value for name, value in pairwise(words) if name == "--output"]
    assert all((shell["cwd"] / path).exists() for path in named)
    assert named or done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("words", SERVE, ids=joined)
def test_the_service_of_the_readme_starts_answers_and_ends(words, shell):
    pytest.importorskip("starlette")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (request,) = [words for words in commands(ROOT / "docs" / "serving.md") if words[0] == "curl"]
    body = request[request.index("--json") + 1]
    path = request[1].partition("/")[2]
    process = subprocess.Popen(
        [*arguments(words), "--port", str(port)], stdout=subprocess.PIPE, **shell
    )
    try:
        assert f":{port}" in process.stdout.readline()  # printed when the model is loaded
        sent = urllib.request.Request(
            f"http://127.0.0.1:{port}/{path}",
            data=body.encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(sent) as answer:
            assert json.load(answer)["results"][0]["index"] == 0
    finally:
        process.terminate()
        process.communicate()
    assert process.returncode == 0


@pytest.mark.parametrize("words", [one for one in ALL if one[0] == "rsrank"], ids=joined)
def test_the_options_of_a_command_exist(words):
    command = app.commands[words[1]]
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    assert {word for word in words if word.startswith("-")} <= known


@pytest.mark.parametrize("words", [one for one in ALL if one[0] == "pip"], ids=joined)
def test_what_pip_is_asked_to_install_is_in_the_clone(words):
    assert words[1] == "install"
    for name in (word for word in words[2:] if word != "-e"):
        folder, _, extras = name.rstrip("]").partition("[")
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))["project"]
        extras = {extra for extra in extras.split(",") if extra}
        assert extras <= set(project["optional-dependencies"])


@pytest.mark.parametrize("words", [one for one in ALL if one[0] == "python"], ids=joined)
def test_a_script_that_a_page_runs_exists_with_its_options(words):
    file = Path(find_spec(words[2]).origin) if words[1] == "-m" else ROOT / words[1]
    text = file.read_text("utf-8")
    options = [word for word in words[2:] if word.startswith("--")]
    assert [option for option in options if f'"{option}"' not in text] == []
