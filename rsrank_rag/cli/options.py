"""What the ``rsrank`` commands share: where they print, how their errors look, options, and the decorator."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter
from typing import Annotated, Any, Literal

import typer
from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined] # public, but loaded lazily
from rich.console import Console
from rich.text import Text
from safetensors import SafetensorError
from typer import Option

from ..adapters.systems import forms
from ..bulk.on_ray import Actors
from ..errors import InputError, RSRankError
from ..language_model.options import LoadOptions, LoadSettings
from ..language_model.threads import use_threads

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
    str | None, Option(help="What to judge by, for a model that takes an instruction.")
]
AsJson = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]
Engine = Literal["local", "ray"]
Address = Annotated[
    str | None,
    Option(help="With ray: of the cluster. Default: RAY_ADDRESS, or one on this machine."),
]


def _load_options(threads: int | None, **given: Any) -> LoadOptions:
    use_threads(threads)
    return LoadSettings(**given).load_options()


def _actors(
    engine: Annotated[
        Engine, Option(help="local: in this process. ray: by actors on a Ray cluster.")
    ] = "local",
    actors: Annotated[
        int | None, Option(help="With ray: how many. Default: as many as have room.")
    ] = None,
    cpus_per_actor: Annotated[
        float, Option(help="With ray: CPU cores, and threads on a CPU, of each.")
    ] = 1.0,
    gpus_per_actor: Annotated[
        float, Option(help="With ray: GPUs of each, such as 1 or 0.5.")
    ] = 0.0,
    address: Address = None,
) -> Actors | None:
    """The actors that were asked for; None to work in this process."""
    return Actors(actors, cpus_per_actor, gpus_per_actor, address) if engine == "ray" else None


def _loading_parameters() -> dict[str, Parameter]:
    """An option for each field of `LoadSettings`, and one for threads."""
    help_text = "Threads to compute with on a CPU. Default: OMP_NUM_THREADS, or the cores that this process may use."
    threads = Annotated[int | None, Option("--threads", min=1, help=help_text)]
    found = {
        "threads": Parameter("threads", Parameter.KEYWORD_ONLY, default=None, annotation=threads)
    }
    for name, setting in LoadSettings.model_fields.items():
        kind: Any = bool if setting.annotation is bool else str | None
        annotation = Annotated[
            kind, Option(f"--{name.replace('_', '-')}", help=setting.description)
        ]
        found[name] = Parameter(
            name, Parameter.KEYWORD_ONLY, default=setting.default, annotation=annotation
        )
    return found


GROUPS: dict[str, tuple[Mapping[str, Parameter], Callable[..., Any]]] = {
    "load": (_loading_parameters(), _load_options),
    "actors": (inspect.signature(_actors, eval_str=True).parameters, _actors),
}
"""Parameters of commands that stand for several options: these, and what makes the argument of them."""


@contextmanager
def catch_errors(resumes: bool = False) -> Iterator[None]:
    """Turn errors into one line on stderr: exit code 2 for bad input, 130 for Ctrl-C, 1 for everything else.

    `resumes`: whether the same command goes on after an interruption.
    """
    again = "Run the same command again to go on." if resumes else ""
    try:
        yield
    except RSRankError as error:
        code, said = 2 if isinstance(error, InputError) else 1, str(error)
    except (OSError, SafetensorError) as error:  # a full disk, no permission
        code, said = 1, f"{re.sub(r'^.Errno [0-9]+. ', '', str(error)).rstrip('.')}. {again}"
    except KeyboardInterrupt:
        problems.print(f"Stopped. {again}")
        raise typer.Exit(130) from None
    else:
        return
    said = " ".join(said.split())
    problems.print(
        Text.assemble(("error: ", "bold red"), said if said[-1:] in ".!?" else f"{said}."),
        soft_wrap=True,
    )
    raise typer.Exit(code)


def command(
    app: typer.Typer, *, resumes: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command: errors become one line, and a parameter named in `GROUPS` several options."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True).parameters
        groups = {name: GROUPS[name] for name in own if name in GROUPS}

        @wraps(function)
        def run(**given: Any) -> None:
            with catch_errors(resumes):
                if "load" in groups:
                    disable_progress_bars()  # of downloads: the commands show what they are doing themselves
                for name, (parameters, make) in groups.items():
                    given[name] = make(**{option: given.pop(option) for option in parameters})
                function(**given)

        options = [parameter for name, parameter in own.items() if name not in groups]
        options += [option for parameters, _ in groups.values() for option in parameters.values()]
        options = [option.replace(kind=Parameter.KEYWORD_ONLY) for option in options]
        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined] # it is what typer reads
        run.__annotations__ = {option.name: option.annotation for option in options}
        app.command()(run)
        return function

    return decorate
