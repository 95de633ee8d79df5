"""Technical documentation without labels: docstrings, their first sentences as queries.

    pip install -e '.[research,dev]'
    python research/mini/library_docs.py --output runs/library-docs.json

Only the teacher's order of the passages is learned from them, so nobody has to label anything. The
libraries' licences are BSD, MIT or Apache-2.0; what is found depends on the installed versions
(constraints.txt).
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

LIBRARIES = (
    "accelerate", "aiohttp", "click", "datasets", "fastapi", "fsspec", "httpx", "huggingface_hub",
    "jinja2", "joblib", "langchain_core", "llama_index", "mkdocs", "networkx", "numpy", "pandas",
    "pip", "pyarrow", "pydantic", "pygments", "ray", "rich", "safetensors", "schemathesis",
    "scipy", "sklearn", "starlette", "sympy", "torch", "tornado", "transformers", "typer",
    "uvicorn",
)  # fmt: skip
MODULES_OF_LIBRARY, PASSAGES_OF_MODULE, MODULES = 14, (5, 14), 140
"""At most so many modules of a library, so many passages of each, and so many modules in all."""
WORDS = (60, 90, 110)
"""Lengths to which docstrings are cut."""


def passages_of(module: Path, rng: random.Random) -> Iterator[dict[str, str]]:
    """Name, first sentence and the rest of each docstring that is long enough."""
    try:
        tree = ast.parse(module.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
        if not isinstance(node, kinds) or node.name.startswith("_"):
            continue
        first, _, rest = (ast.get_docstring(node) or "").partition("\n\n")
        query = " ".join(first.split()).rstrip(".")
        described = re.split(r"\n\s*(Examples?|References|>>>)", rest)[0]
        words = re.sub(r"[`*:]{1,3}", "", described).split()
        if 3 < len(query.split()) < 25 and len(words) >= 35:
            text = " ".join(words[: rng.choice(WORDS)])
            yield {"title": node.name, "query": query, "text": text}


def collect(folder: Path) -> list[list[dict[str, str]]]:
    """Groups of passages, one a module, from the libraries that are installed in ``folder``."""
    rng = random.Random(0)
    groups = []
    least, most = PASSAGES_OF_MODULE
    for library in LIBRARIES:
        of_library = []
        for module in sorted((folder / library).rglob("*.py")):
            if "test" not in module.as_posix().removeprefix(folder.as_posix()):
                passages = list(passages_of(module, rng))
                if len(passages) >= least:
                    of_library.append(passages[:most])
        groups += rng.sample(of_library, min(MODULES_OF_LIBRARY, len(of_library)))
    return rng.sample(groups, min(MODULES, len(groups)))


def main() -> None:
    """Write the groups."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    groups = collect(Path(sysconfig.get_path("purelib")))
    options.output.write_text(json.dumps(groups) + "\n", encoding="utf-8")
    print(f"{sum(map(len, groups))} passages of {len(groups)} modules: {options.output}")


if __name__ == "__main__":
    main()
