"""Where the ``rsrank`` commands print, and how their errors look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

from ..errors import InputError, RSRankError

screen = Console(highlight=False)
problems = Console(stderr=True, highlight=False)


@contextmanager
def catch_errors() -> Iterator[None]:
    """Turn our errors into one line on stderr: exit code 2 for bad input, 1 for everything else."""
    try:
        yield
    except RSRankError as error:
        problems.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, InputError) else 1) from None
