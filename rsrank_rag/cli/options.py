"""What the ``rsrank`` commands share: consoles, options, and the decorator that makes a command."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from safetensors import SafetensorError
from typer import Option

from ..adapters.systems import forms
from ..errors import InputError, RSRankError, needs_torch
from ..language_model.options import LoadSettings
from .process import hide_library_progress, prepare

screen = Console(highlight=False)
problems = Console(stderr=True, highlight=False)

Model = Annotated[str, Option("--model", "-m", help="Built-in name, artifact folder or Hub id.")]
System = Annotated[
    str,
    Option("--model", "-m", help=f"Artifact (name, folder, Hub id), file of tune, or {forms()}."),
]
Revision = Annotated[str | None, Option(help="Commit, tag or branch on the Hub.")]
Query = Annotated[str, Option("--query", "-q", help="The question.")]
Documents = Annotated[str, Option("--documents", "-d", help="A file, or - for standard input.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]


def _loading_options() -> list[Parameter]:
    """An option for threads, and one for each field of `LoadSettings`."""
    text = "Threads on a CPU. Default: OMP_NUM_THREADS, or the cores that this process may use."
    options = [_option("threads", None, int | None, Option(min=1, help=text))]
    for name, field in LoadSettings.model_fields.items():
        kind = bool if field.annotation is bool else str | None
        # A switch without a name of its own would get a second one, --no-NAME.
        option = Option(f"--{name.replace('_', '-')}", help=field.description)
        options.append(_option(name, field.default, kind, option))
    return options


def _option(name: str, default: Any, kind: Any, option: Any) -> Parameter:
    annotation = Annotated[kind, option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@contextmanager
def catch_errors(resumes: bool = False) -> Iterator[None]:
    """Turn errors into one line on stderr.

    The exit code is 2 for bad input, 130 for Ctrl-C and 1 for everything else.

    Args:
        resumes: Whether the same command continues its work after an interruption.
    """
    hint = ""
    if resumes:
        hint = "Run the same command again to go on."
    try:
        with needs_torch():
            yield
    except InputError as error:
        _exit(2, str(error))
    except RSRankError as error:
        _exit(1, str(error))
    # Such as a full disk, or no permission.
    except (OSError, SafetensorError) as error:
        message = re.sub(r"^.Errno [0-9]+. ", "", str(error)).rstrip(".")
        _exit(1, f"{message}. {hint}")
    except KeyboardInterrupt:
        problems.print(f"Stopped. {hint}")
        raise typer.Exit(130) from None


def _exit(code: int, message: str) -> None:
    message = " ".join(message.split())
    if not message.endswith((".", "!", "?")):
        message += "."
    problems.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
    raise typer.Exit(code)


def command(
    app: typer.Typer, *, resumes: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command of an app.

    Errors are printed in one line. A parameter ``load`` becomes several options: the threads of
    this process, and the fields of `LoadSettings`.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(function, eval_str=True).parameters
        options = [option for name, option in parameters.items() if name != "load"]
        loading = []
        if "load" in parameters:
            loading = _loading_options()
        options = [option.replace(kind=Parameter.KEYWORD_ONLY) for option in [*options, *loading]]

        @wraps(function)
        def run(**arguments: Any) -> None:
            with catch_errors(resumes):
                hide_library_progress()
                if loading:
                    values = {option.name: arguments.pop(option.name) for option in loading}
                    prepare(values.pop("threads"))
                    arguments["load"] = LoadSettings(**values).load_options()
                function(**arguments)

        # typer reads options from these two.
        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        run.__annotations__ = {option.name: option.annotation for option in options}
        app.command()(run)
        return function

    return decorate
