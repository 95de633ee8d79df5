"""What the ``rsrank`` commands share: consoles, options, and the decorator that makes a command."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter
from typing import Annotated, Any, Literal, NamedTuple

import typer
from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]
from rich.console import Console
from rich.text import Text
from safetensors import SafetensorError
from typer import Option

from ..adapters.systems import forms
from ..bulk.on_ray import Actors
from ..errors import InputError, RSRankError
from ..language_model.options import LoadOptions, LoadSettings
from .process import prepare

screen = Console(highlight=False)
problems = Console(stderr=True, highlight=False)

Model = Annotated[str, Option("--model", "-m", help="Built-in name, artifact folder or Hub id.")]
System = Annotated[
    str, Option("--model", "-m", help=f"Built-in name, artifact folder or Hub id; or {forms()}.")
]
Revision = Annotated[str | None, Option(help="Commit, tag or branch on the Hub.")]
Query = Annotated[str, Option("--query", "-q", help="The question.")]
Documents = Annotated[str, Option("--documents", "-d", help="A file, or - for standard input.")]
Instruction = Annotated[
    str | None, Option(help="The criterion, for a model that takes an instruction.")
]
AsJson = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]
Engine = Literal["local", "ray"]
Address = Annotated[
    str | None,
    Option(help="With ray: of the cluster. Default: RAY_ADDRESS, or one on this machine."),
]


class OptionGroup(NamedTuple):
    """Options of the command line that together make one argument of a command's function."""

    options: Mapping[str, Parameter]
    make: Callable[..., Any]


def _load_options(threads: int | None, **settings: Any) -> LoadOptions:
    prepare(threads)
    return LoadSettings(**settings).load_options()


def _actors(
    engine: Annotated[
        Engine, Option(help="local: in this process. ray: by actors on a Ray cluster.")
    ] = "local",
    actors: Annotated[
        int | None, Option(help="With ray: how many. Default: as many as fit.")
    ] = None,
    cpus_per_actor: Annotated[
        float, Option(help="With ray: CPU cores, and threads on a CPU, of each.")
    ] = 1.0,
    gpus_per_actor: Annotated[
        float, Option(help="With ray: GPUs of each, such as 1 or 0.5.")
    ] = 0.0,
    address: Address = None,
) -> Actors | None:
    """None means work in this process."""
    if engine == "local":
        return None
    return Actors(actors, cpus_per_actor, gpus_per_actor, address)


def _option(name: str, default: Any, kind: Any, option: Any) -> Parameter:
    annotation = Annotated[kind, option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _loading_options() -> dict[str, Parameter]:
    """An option for each field of `LoadSettings`, and one for threads."""
    text = "Threads on a CPU. Default: OMP_NUM_THREADS, or the cores that this process may use."
    options = {"threads": _option("threads", None, int | None, Option(min=1, help=text))}
    for name, field in LoadSettings.model_fields.items():
        kind = bool if field.annotation is bool else str | None
        # A switch without a name of its own would get a second one, --no-NAME.
        option = Option(f"--{name.replace('_', '-')}", help=field.description)
        options[name] = _option(name, field.default, kind, option)
    return options


# By the name of the function's parameter.
GROUPS = {
    "load": OptionGroup(_loading_options(), _load_options),
    "actors": OptionGroup(inspect.signature(_actors, eval_str=True).parameters, _actors),
}


@contextmanager
def catch_errors(resumes: bool = False) -> Iterator[None]:
    """Turn errors into one line on stderr.

    The exit code is 2 for bad input, 130 for Ctrl-C and 1 for everything else.

    Args:
        resumes: Whether the same command continues its work after an interruption.
    """
    hint = "Run the same command again to go on." if resumes else ""
    try:
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

    Its errors are printed in one line. A parameter named in `GROUPS` becomes several options.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(function, eval_str=True).parameters
        groups = {name: GROUPS[name] for name in parameters if name in GROUPS}

        @wraps(function)
        def run(**arguments: Any) -> None:
            with catch_errors(resumes):
                # The commands show what they are doing themselves.
                disable_progress_bars()
                for name, group in groups.items():
                    values = {option: arguments.pop(option) for option in group.options}
                    arguments[name] = group.make(**values)
                function(**arguments)

        options = [option for name, option in parameters.items() if name not in groups]
        for group in groups.values():
            options += group.options.values()
        options = [option.replace(kind=Parameter.KEYWORD_ONLY) for option in options]
        # typer reads options from these two.
        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        run.__annotations__ = {option.name: option.annotation for option in options}
        app.command()(run)
        return function

    return decorate
