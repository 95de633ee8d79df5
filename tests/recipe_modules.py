"""The modules of research/mini, which are scripts and no package, for tests."""

import argparse
import contextlib
import importlib
import sys
from pathlib import Path

RECIPE = Path(__file__).parents[1] / "research" / "mini"


@contextlib.contextmanager
def recipe_modules(*names):
    """Import modules of the recipe by name; gives them as attributes. They are forgotten after."""
    sys.path.insert(0, str(RECIPE))
    try:
        yield argparse.Namespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(RECIPE))
        for name, module in list(sys.modules.items()):
            if Path(getattr(module, "__file__", None) or "").parent == RECIPE:
                del sys.modules[name]
