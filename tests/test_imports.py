"""Imports: fast, and a frozen list of public names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import rsrank_rag

PACKAGE = Path(rsrank_rag.__file__).parent

HEAVY = ("torch", "transformers")


def in_fresh_python(code):
    """Last line that code prints, from JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "imported",
    [
        "rsrank_rag",
        "inspect, rsrank_rag; from rsrank_rag import *; inspect.getmembers(rsrank_rag)",
        "rsrank_rag.langchain, rsrank_rag.llama_index",
        "rsrank_rag.cli, rsrank_rag.service.app",
        "rsrank_rag.evaluation.evaluate, rsrank_rag.training.tune",
    ],
)
def test_importing_loads_neither_torch_nor_transformers(imported):
    code = (
        f"import sys, json, {imported}; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    )
    assert in_fresh_python(code) == []


# Finding torch is allowed, importing it is not: a damaged torch raises OSError.
DAMAGED = """
import json, sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

class Damaged(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name in ("torch", "transformers") else None

    def exec_module(self, module):
        raise OSError("a DLL failed")

sys.meta_path.insert(0, Damaged())
from rsrank_rag import RSRank
RSRank.from_pretrained().score('a query', ['a document'])
print(json.dumps("huggingface_hub" in sys.modules))
"""


def test_by_default_mini_needs_neither_a_working_torch_nor_the_hub():
    assert in_fresh_python(DAMAGED) is False


WITHOUT_FRAMEWORKS = """
import inspect, json, sys
for name in ("torch", "transformers", "langchain_core", "llama_index"):
    sys.modules[name] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in sys.modules else find(name)
import rsrank_rag
from rsrank_rag import *
names = {name for name, _ in inspect.getmembers(rsrank_rag)}
found = [name in names for name in ("RSRank", "RSRankRetriever")]
print(json.dumps([hasattr(rsrank_rag, "Projection"), *found]))
"""


def test_the_base_install_can_be_imported_with_a_star_and_looked_through():
    assert in_fresh_python(WITHOUT_FRAMEWORKS) == [False, True, False]


def test_public_names_are_these():
    assert rsrank_rag.__all__ == [
        "Explanation",
        "Fallback",
        "LoadOptions",
        "Pair",
        "RSRank",
        "RSRankError",
        "RankResult",
        "RankedDocument",
        "RemoteReranker",
        "Reranker",
        "Rule",
        "Scored",
        "Template",
        "TrainingRecord",
        "__version__",
        "RSRankCompressor",
        "RSRankRetriever",
        "RSRankPostprocessor",
    ]


@pytest.mark.parametrize("name", rsrank_rag.__all__)
def test_every_public_name_resolves_and_is_listed(name):
    assert getattr(rsrank_rag, name) is not None
    assert name in dir(rsrank_rag)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Rerank'"):
        rsrank_rag.Rerank  # noqa: B018
