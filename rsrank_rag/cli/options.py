"""What the ``rsrank`` commands share: consoles, options, and the decorator that makes a command."""

import inspect
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter
from typing import Annotated, Any, get_type_hints

import typer
from pydantic import BaseModel, PositiveInt, ValidationError
from rich.console import Console
from rich.text import Text
from safetensors import SafetensorError
from typer import Option

from ..adapters.systems import forms
from ..errors import InputError, RSRankError, needs_torch, problems_of
from ..language_model.options import LoadOptions, LoadSettings
from .process import hide_library_progress, prepare

# Names and paths may hold what looks like markup of rich, such as [a].
screen = Console(highlight=False, markup=False)
problems = Console(stderr=True, highlight=False, markup=False)

Model = Annotated[str, Option("--model", "-m", help="Built-in name, artifact folder or Hub id.")]
System = Annotated[
    str,
    Option("--model", "-m", help=f"Artifact (name, folder, Hub id), file of tune, or {forms()}."),
]
Revision = Annotated[str | None, Option(help="Commit, tag or branch on the Hub.")]
Query = Annotated[str, Option("--query", "-q", help="The question.")]
Documents = Annotated[str, Option("--documents", "-d", help="A file, or - for standard input.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]


class LoadingOptions(LoadSettings, use_attribute_docstrings=True):
    """Options of every command that loads a model."""

    threads: PositiveInt | None = None
    """Threads on a CPU. Default: OMP_NUM_THREADS, or the cores that this process may use."""


def _options_of(model: type[BaseModel]) -> Iterator[Parameter]:
    """An option for each field."""
    kinds: dict[str, Any] = get_type_hints(model)
    for name, field in model.model_fields.items():
        # A switch without a name of its own would get a second one, --no-NAME.
        option = Option(f"--{name.replace('_', '-')}", help=field.description)
        kind: Any = Annotated[kinds[name], option]
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=field.default, annotation=kind)


@contextmanager
def catch_errors(resumes: bool = False) -> Iterator[None]:
    """Turn errors into one line on stderr.

    The exit code is 2 for bad input, 130 for Ctrl-C and 1 for everything else.

    Args:
        resumes: Whether the same command continues its work after an interruption.
    """
    hint = "Run the same command again to go on." if resumes else ""
    try:
        with needs_torch():
            yield
    except ValidationError as error:
        _exit(2, problems_of(error))
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


def printable(text: str) -> str:
    """A text of others without control characters, which could change what a terminal shows."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


def print_json(content: Any) -> None:
    """Print JSON to standard output."""
    typer.echo(json.dumps(content, ensure_ascii=False, indent=2))


def _exit(code: int, message: str) -> None:
    message = printable(" ".join(message.split()))
    if not message.endswith((".", "!", "?")):
        message += "."
    problems.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
    raise typer.Exit(code)


def command(
    app: typer.Typer, *, resumes: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command of an app. Errors are printed in one line.

    A parameter whose type is a pydantic model becomes an option for each field. A parameter of the
    type `LoadOptions` becomes those of `LoadingOptions`.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        options: list[Parameter] = []
        of_models: list[Parameter] = []
        models: dict[str, type[BaseModel]] = {}
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
            kind = LoadingOptions if parameter.annotation is LoadOptions else parameter.annotation
            if inspect.isclass(kind) and issubclass(kind, BaseModel):
                models[name] = kind
                of_models += _options_of(kind)
            else:
                options.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
        options += of_models

        @wraps(function)
        def run(**arguments: Any) -> None:
            with catch_errors(resumes):
                hide_library_progress()
                for name, model in models.items():
                    values: Any = model(**{key: arguments.pop(key) for key in model.model_fields})
                    if model is LoadingOptions:
                        prepare(values.threads)
                        values = values.load_options()
                    arguments[name] = values
                function(**arguments)

        # typer reads options from these two.
        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        run.__annotations__ = {option.name: option.annotation for option in options}
        app.command()(run)
        return function

    return decorate
