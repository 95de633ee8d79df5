"""The package where torch is not installed: `make test-without-torch` makes that environment.

It gives the environment's Python in RSRANK_BASE_PYTHON.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DOCUMENTS, QUERY

from rsrank_rag import RSRank
from rsrank_rag.errors import MissingDependencyError, needs_torch, pip_install

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# A new environment with the package, pip and setuptools has 261 megabytes, of which `mini` is 56,
# and 29 packages.
LARGEST = 280
MOST_PACKAGES = 31

needs_base = pytest.mark.skipif(
    "RSRANK_BASE_PYTHON" not in os.environ, reason="needs make test-without-torch"
)


def test_what_the_package_requires_brings_no_torch_and_the_extra_lm_does():
    names = {line.partition(">")[0] for line in PROJECT["dependencies"]}
    assert {"numpy", "onnxruntime", "tokenizers"} <= names
    lm = {line.partition(">")[0] for line in PROJECT["optional-dependencies"]["lm"]}
    assert lm >= {"torch", "transformers", "accelerate"}
    assert not names & lm


@pytest.mark.parametrize("extra", ["eval", "lm", "serve", "systems", "train"])
def test_pip_commands_are_those_of_the_readme_and_name_extras_that_exist(extra):
    assert pip_install(extra).startswith(f"pip install '.[{extra}]'")
    assert "pip install '.[langchain" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert extra in PROJECT["optional-dependencies"]


def test_the_extra_for_evaluation_brings_no_torch():
    names = {line.partition(">")[0] for line in PROJECT["optional-dependencies"]["eval"]}
    assert names == {"ir-measures", "bm25s"}


@pytest.mark.parametrize("missing", ["torch", "transformers.utils"])
def test_where_torch_is_missing_the_pip_command_is_named(missing):
    with pytest.raises(MissingDependencyError, match=re.escape(pip_install("lm"))), needs_torch():
        raise ModuleNotFoundError("gone", name=missing)
    with pytest.raises(ModuleNotFoundError, match="gone"), needs_torch():
        raise ModuleNotFoundError("gone", name="somebody_elses")


@needs_base
def test_everything_that_is_shown_for_mini_runs_and_scores_as_here():
    python = os.environ["RSRANK_BASE_PYTHON"]
    done = subprocess.run(
        [python, ROOT / "tests" / "without_torch.py", ROOT, QUERY, *DOCUMENTS],
        capture_output=True,
        text=True,
        timeout=900,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stderr
    expected = RSRank.from_pretrained().score(QUERY, DOCUMENTS)
    local, compressed, indexed, served, saved = json.loads(done.stdout.splitlines()[-1])
    assert local == pytest.approx(expected, abs=1e-5)
    assert compressed == pytest.approx(local, abs=2e-7)
    assert served == pytest.approx(local, abs=2e-7)
    assert saved == pytest.approx(local, abs=2e-7)
    # Prefixes on disk have 8 bits.
    assert indexed == pytest.approx(local, abs=0.02)


@needs_base
def test_make_demo_needs_no_torch():
    done = subprocess.run(
        [os.environ["RSRANK_BASE_PYTHON"], ROOT / "examples" / "demo.py"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "of 10 passages go to the language model" in done.stdout


@needs_base
def test_the_environment_is_small():
    environment = Path(os.environ["RSRANK_BASE_PYTHON"]).parents[1]
    for name, most in (("megabytes", LARGEST), ("packages", MOST_PACKAGES)):
        assert int((environment / name).read_text(encoding="utf-8")) <= most
