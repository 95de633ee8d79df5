"""Imports: fast, one way, and a frozen list of public names."""

import ast
import json
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import rsrank_rag

PACKAGE = Path(rsrank_rag.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name not in {"__init__.py", "__main__.py"}
}


def in_fresh_python(code):
    """Last line that code prints, from JSON."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    return json.loads(done.stdout.splitlines()[-1])


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def import_nodes(node, *, lazy):
    """Import statements of a tree; without those inside functions unless lazy, never those for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif is_type_checking(child):
            for branch in child.orelse:
                yield from import_nodes(branch, lazy=lazy)
        elif lazy or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from import_nodes(child, lazy=lazy)


def own_imports(module, *, lazy=True):
    """Modules of this package that a module imports, as dotted paths below the package."""
    path = MODULES[module]
    package = path.relative_to(PACKAGE).parent.parts
    found = set()
    for node in import_nodes(ast.parse(path.read_text(encoding="utf-8")), lazy=lazy):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        else:
            base = ("rsrank_rag", *package[: len(package) - node.level + 1]) if node.level else ()
            start = ".".join([*base, *([node.module] if node.module else [])])
            dotted = [start, *(f"{start}.{alias.name}" for alias in node.names)]
        for name in dotted:
            below = name.removeprefix("rsrank_rag.")
            if name != below and below in MODULES:
                found.add(below)
    return found


def test_the_import_reader_sees_what_is_there():
    assert {"backbone", "errors", "hub", "projection"} <= own_imports("rsrank")
    assert "errors" not in own_imports("shift")
    assert own_imports("template") == {"errors"}


def test_importing_the_package_loads_neither_torch_nor_transformers():
    code = "import sys, json, rsrank_rag; print(json.dumps([m for m in ('torch', 'transformers') if m in sys.modules]))"
    assert in_fresh_python(code) == []


def test_the_contract_for_other_rerankers_loads_without_torch():
    code = (
        "import sys, json; from rsrank_rag import Reranker, RankResult, RSRankError; "
        "print(json.dumps([m for m in ('torch', 'transformers') if m in sys.modules]))"
    )
    assert in_fresh_python(code) == []


def test_public_names_are_these():
    assert rsrank_rag.__all__ == [
        "Explanation",
        "LoadOptions",
        "Projection",
        "RSRank",
        "RSRankError",
        "RankResult",
        "RankedDocument",
        "Reranker",
        "Template",
        "TrainingRecord",
        "__version__",
    ]


@pytest.mark.parametrize("name", rsrank_rag.__all__)
def test_every_public_name_resolves_and_is_listed(name):
    assert getattr(rsrank_rag, name) is not None
    assert name in dir(rsrank_rag)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Rerank'"):
        rsrank_rag.Rerank  # noqa: B018


@pytest.mark.parametrize(
    "module", ["errors", "shift", "explanation", "prefix_cache", "reranker", "training.losses", "evaluation.metrics"]
)
def test_the_foundations_import_nothing_of_ours_but_errors(module):
    if module not in MODULES:
        pytest.skip(f"{module} is not there")
    assert own_imports(module) <= {"errors"}


@pytest.mark.parametrize(
    "module", ["worker", "adapter", "langchain", "langchain_cross_encoder", "llama_index", "server"]
)
def test_adapters_know_only_the_reranker(module):
    if module not in MODULES:
        pytest.skip(f"{module} is not there")
    assert own_imports(module, lazy=False) <= {"errors", "prefix_cache", "reranker", "worker", "adapter"}


def test_what_asks_a_service_knows_nothing_of_models_nor_of_the_service():
    for module in ("client", "transport", "wire", "connections"):
        own = {"remote.client", "remote.transport", "remote.wire", "remote.connections"}
        assert own_imports(f"remote.{module}") <= own | {"errors", "reranker", "method.template"}


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("service.")])
def test_the_service_knows_only_the_reranker(module):
    others = {name for name in own_imports(module) if not name.startswith("service.")}
    assert others <= {"errors", "method.explanation", "reranker"}


def test_what_the_service_asks_for_scores_knows_nothing_of_http():
    for module in ("backend", "engine", "worker", "scheduler"):
        own = {f"service.{name}" for name in ("backend", "engine", "worker", "scheduler")}
        assert own_imports(f"service.{module}") <= own | {"errors", "method.explanation", "reranker"}


def test_nothing_imports_the_command_line():
    importers = [module for module in MODULES if not module.startswith("cli") and "cli" in own_imports(module)]
    assert importers == []


def test_a_recipe_is_settings_and_knows_nothing_of_its_running():
    assert not own_imports("training.recipe") & {"training.kitchen", "training.features", "backbone", "reading"}


def test_imports_have_no_cycle_not_even_lazy_ones():
    graph = {module: own_imports(module) for module in MODULES}
    assert sum(map(len, graph.values())) > 10
    TopologicalSorter(graph).prepare()  # CycleError names the modules of a cycle
