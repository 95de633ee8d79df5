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


HEAVY = ("torch", "transformers")
# B as torch trains it is the one public name that needs torch.
NAMES = ", ".join(name for name in rsrank_rag.__all__ if name != "Projection")


def in_fresh_python(code):
    """Last line that code prints, from JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    return json.loads(done.stdout.splitlines()[-1])


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in {
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    }


def import_nodes(node, *, lazy):
    """Import statements of a tree, without type checkers' ones; those in functions only if lazy."""
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
    assert {"method.scoring", "errors", "artifact.config", "method.arrays"} <= own_imports("rsrank")
    assert "errors" not in own_imports("method.formula")
    assert own_imports("method.template") == {"errors"}


@pytest.mark.parametrize(
    "imported",
    [
        "rsrank_rag",
        f"rsrank_rag; from rsrank_rag import {NAMES}",
        "rsrank_rag.langchain, rsrank_rag.llama_index",
        "rsrank_rag.cli, rsrank_rag.service.app",
    ],
)
def test_importing_loads_neither_torch_nor_transformers(imported):
    code = (
        f"import sys, json, {imported}; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    )
    assert in_fresh_python(code) == []


def test_mini_scores_on_onnx_runtime_without_an_import_of_torch_or_the_hub():
    heavy = (*HEAVY, "huggingface_hub")
    code = (
        "import sys, json; from rsrank_rag import RSRank; "
        "RSRank.from_pretrained(runtime='onnx').score('a query', ['a document']); "
        f"print(json.dumps([m for m in {heavy} if m in sys.modules]))"
    )
    assert in_fresh_python(code) == []


def test_public_names_are_these():
    assert rsrank_rag.__all__ == [
        "Explanation",
        "LoadOptions",
        "Pair",
        "PrefixCache",
        "Projection",
        "RSRank",
        "RSRankError",
        "RankResult",
        "RankedDocument",
        "RemoteReranker",
        "Reranker",
        "Scored",
        "Template",
        "TrainingRecord",
        "__version__",
        "RSRankCompressor",
        "RSRankRetriever",
        "RSRankPostprocessor",
    ]
    assert set(rsrank_rag.__all__) == {*rsrank_rag._HOME, "__version__"}


@pytest.mark.parametrize("name", rsrank_rag.__all__)
def test_every_public_name_resolves_and_is_listed(name):
    assert getattr(rsrank_rag, name) is not None
    assert name in dir(rsrank_rag)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Rerank'"):
        rsrank_rag.Rerank  # noqa: B018


ORDER = [
    "cli",
    "bulk",
    "service",
    "training",
    "evaluation",
    "langchain",
    "llama_index",
    "adapters",
    "remote",
    "rsrank",
    "artifact",
    "language_model",
    "prefixes",
    "method",
    "reranker",
    "passages",
    "partial_files",
    "errors",
]
"""Rooms and top-level modules; each imports only what stands below it."""


def room(module):
    return module.partition(".")[0]


def test_every_room_and_top_level_module_has_its_place_in_the_order():
    assert sorted({room(module) for module in MODULES}) == sorted(ORDER)
    top = [path.name for path in PACKAGE.glob("*.py")]
    assert len(top) <= 8, top


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module):
    above = {
        name for name in own_imports(module) if ORDER.index(room(name)) < ORDER.index(room(module))
    }
    assert above == set()


@pytest.mark.parametrize("module", [name for name in MODULES if room(name) == "method"])
def test_the_method_knows_torch_and_of_ours_errors_only(module):
    assert {name for name in own_imports(module) if room(name) != "method"} <= {"errors"}


def test_the_maths_imports_nothing_of_ours():
    for module in ("method.arrays", "passages.explanation", "errors"):
        assert own_imports(module) == set(), module
    assert own_imports("method.formula") == {"method.arrays"}


def test_adapters_load_no_model_code():
    for module in ("langchain", "llama_index"):
        assert own_imports(module, lazy=False) <= {
            "adapters.settings",
            "adapters.worker",
            "errors",
            "reranker",
        }


def test_no_file_is_longer_than_500_lines():
    lengths = {
        name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()
    }
    assert {name: length for name, length in lengths.items() if length > 500} == {}


def test_what_asks_a_service_knows_nothing_of_models_nor_of_the_service():
    modules = ("client", "transport", "wire", "connections", "address")
    own = {f"remote.{module}" for module in modules}
    known = {"errors", "passages.parts", "reranker"}
    for module in own:
        assert own_imports(module) <= own | known


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("service.")])
def test_the_service_knows_only_the_reranker(module):
    others = {name for name in own_imports(module) if not name.startswith("service.")}
    names = ("explanation", "pairs", "parts", "ranked", "shadow")
    passages = {f"passages.{name}" for name in names}
    assert others <= {"errors", "reranker"} | passages


def test_what_the_service_asks_for_scores_knows_nothing_of_http():
    modules = ("backend", "engine", "fair_queue", "scheduler", "worker")
    for module in modules:
        own = {f"service.{name}" for name in modules}
        known = {"errors", "reranker"}
        known |= {"passages.explanation", "passages.pairs", "passages.parts", "passages.ranked"}
        assert own_imports(f"service.{module}") <= own | known


def test_nothing_imports_the_command_line():
    importers = [
        module
        for module in MODULES
        if not module.startswith("cli") and "cli" in own_imports(module)
    ]
    assert importers == []


def test_a_recipe_is_settings_and_knows_nothing_of_its_running():
    known = own_imports("training.recipe")
    assert not known & {"training.run", "training.features", "method.backbone", "method.scoring"}
    assert {"training.run", "training.features", "method.backbone", "method.scoring"} <= set(
        MODULES
    )


def test_imports_have_no_cycle_not_even_lazy_ones():
    graph = {module: own_imports(module) for module in MODULES}
    assert sum(map(len, graph.values())) > 10
    TopologicalSorter(graph).prepare()  # CycleError names the modules of a cycle
