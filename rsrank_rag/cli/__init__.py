"""The ``rsrank`` command, with a module for each group of commands. Only this folder prints."""

import sys
from io import TextIOWrapper
from typing import Annotated

import typer
from typer import Option

from .. import __version__
from . import evaluation, ranking, service, training

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    epilog="Try: `rsrank rank -q 'How do bees find flowers?' -d examples/passages.txt`",
)
for group in (ranking, evaluation, service, training):
    app.add_typer(group.app)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, Option("--version", help="Print the version.")] = False) -> None:
    """Rerank documents for a query and drop the irrelevant ones at zero."""
    # Documents and JSON have characters that a terminal may lack.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    if version:
        typer.echo(__version__)
        raise typer.Exit
