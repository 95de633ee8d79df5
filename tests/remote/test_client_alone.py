"""rsrank-rag-client: its files, and a request to a service where nothing else is installed.

`make test-without-torch` makes that environment, and gives its Python in RSRANK_CLIENT_PYTHON.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DOCUMENTS, QUERY
from test_imports import MODULES, own_imports

import rsrank_rag
from rsrank_rag.errors import REPOSITORY, MissingDependencyError, pip_install

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
CLIENT = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text(encoding="utf-8"))
WHOLE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def packed():
    """The modules that the client is made of."""
    files = CLIENT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    sources = [(ROOT / "client" / source).resolve() for source in files]
    return {
        name
        for name, path in MODULES.items()
        for source in sources
        if path == source or source in path.parents
    }


def test_the_client_holds_all_that_its_modules_import_and_nothing_else():
    waiting = ["langchain", "llama_index", "remote.client"]
    needed = set()
    while waiting:
        module = waiting.pop()
        needed.add(module)
        # What loads a model is imported when there is one to load; the adapters ask for their
        # client as late.
        waiting += {name for name in own_imports(module, lazy=False) if name not in needed}
    assert packed() == needed
    lazily = set().union(*(own_imports(module) for module in needed)) - needed
    assert lazily == {"artifact.hub", "language_model.hub_errors", "rsrank"}


def test_the_client_is_built_from_files_that_are_there():
    for source, target in CLIENT["tool"]["hatch"]["build"]["targets"]["wheel"][
        "force-include"
    ].items():
        assert (ROOT / "client" / source).exists(), source
        assert target.startswith("rsrank_rag/")
    for folder in {Path(module.replace(".", "/")).parent for module in packed()} - {Path()}:
        assert (ROOT / "rsrank_rag" / folder / "__init__.py").exists()


def test_what_the_client_requires_is_what_the_whole_package_requires():
    whole, client = WHOLE["project"], CLIENT["project"]
    assert set(client["dependencies"]) <= set(whole["dependencies"])
    assert not any("torch" in line or "transformers" in line for line in client["dependencies"])
    for extra, lines in client["optional-dependencies"].items():
        assert lines == whole["optional-dependencies"][extra]
    assert client["requires-python"] == whole["requires-python"]


def test_pip_commands_name_the_repository_of_the_project():
    assert f"git+{WHOLE['project']['urls']['Homepage']}" == REPOSITORY


ALONE = f"pip uninstall -y rsrank-rag-client && {pip_install()}"


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        ("rsrank_rag.rsrank", ALONE),
        ("torch", pip_install("lm")),
        ("transformers.utils", pip_install("lm")),
    ],
)
def test_where_models_cannot_be_loaded_the_pip_command_is_named(monkeypatch, missing, line):
    def gone(*_):
        raise ModuleNotFoundError("gone", name=missing)

    monkeypatch.setattr(rsrank_rag, "import_module", gone)
    with pytest.raises(MissingDependencyError, match=re.escape(line)):
        rsrank_rag.RSRank  # noqa: B018
    missing = "somebody_elses"
    with pytest.raises(ModuleNotFoundError, match="gone"):
        rsrank_rag.RSRank  # noqa: B018


@pytest.mark.skipif(
    "RSRANK_CLIENT_PYTHON" not in os.environ, reason="needs make test-without-torch"
)
def test_alone_it_asks_a_service_and_says_what_a_local_model_needs(ranker, tmp_path):
    from service_helpers import address_of, scheduler

    with address_of(scheduler(ranker)) as address:
        done = subprocess.run(
            [
                os.environ["RSRANK_CLIENT_PYTHON"],
                ROOT / "tests" / "client_alone.py",
                address,
                QUERY,
                *DOCUMENTS,
            ],
            capture_output=True,
            text=True,
            timeout=600,
            cwd=tmp_path,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
    assert done.returncode == 0, done.stderr
    expected = [
        [document.text, pytest.approx(document.score, abs=1e-4)]
        for document in ranker.rank(QUERY, DOCUMENTS).kept
    ]
    found = json.loads(done.stdout.splitlines()[-1])
    assert expected
    assert found[:4] == [expected] * 4
    assert found[4:] == [expected] * 2
