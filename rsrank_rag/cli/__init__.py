"""The ``rsrank`` command, with a module for each group of commands. Only this folder prints."""

import sys
from io import TextIOWrapper

import click

from .. import __version__
from . import evaluation, ranking, service, training


@click.group(
    epilog="Try: rsrank rank -q 'How do bees tell each other where flowers are?' "
    "-d examples/passages.txt",
)
@click.version_option(__version__, message="%(version)s", help="Print the version.")
def app() -> None:
    """Rerank documents for a query and drop the irrelevant ones."""
    # Documents and JSON have characters that a terminal may lack.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


for group in (ranking, evaluation, service, training):
    for command in group.COMMANDS:
        app.add_command(command)
