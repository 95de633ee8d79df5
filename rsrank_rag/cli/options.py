"""Options that several ``rsrank`` commands share, and the decorator that gives them to a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from inspect import Parameter
from typing import Annotated, Any

import typer
from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined] # public, but loaded lazily
from typer import Option

from ..adapters.systems import forms
from ..bulk.on_ray import Actors
from ..language_model.options import LoadOptions, LoadSettings
from .console import catch_errors

Model = Annotated[str, Option("--model", "-m", help="Built-in name, artifact folder or Hub id.")]
System = Annotated[str, Option("--model", "-m", help=f"Built-in name, artifact folder or Hub id; or {forms()}.")]
Revision = Annotated[str | None, Option(help="Commit, tag or branch on the Hub.")]
Query = Annotated[str, Option("--query", "-q", help="The question.")]
Documents = Annotated[str, Option("--documents", "-d", help="A file, or - for standard input.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]
Address = Annotated[str | None, Option(help="With ray: of the cluster. Default: RAY_ADDRESS, or one on this machine.")]


class Where(str, Enum):
    """Where the work is done."""

    local = "local"
    ray = "ray"


def _load_options(**given: Any) -> LoadOptions:
    return LoadSettings(**given).load_options()


def _actors(
    engine: Annotated[Where, Option(help="local: in this process. ray: by actors on a Ray cluster.")] = Where.local,
    actors: Annotated[int | None, Option(help="With ray: how many. Default: as many as have room.")] = None,
    cpus_per_actor: Annotated[float, Option(help="With ray: CPU cores, and threads on a CPU, of each.")] = 1.0,
    gpus_per_actor: Annotated[float, Option(help="With ray: GPUs of each, such as 1 or 0.5.")] = 0.0,
    address: Address = None,
) -> Actors | None:
    """The actors that were asked for; None to work in this process."""
    return Actors(actors, cpus_per_actor, gpus_per_actor, address) if engine is Where.ray else None


def _loading_parameters() -> dict[str, Parameter]:
    """An option for each field of `LoadSettings`."""
    found = {}
    for name, setting in LoadSettings.model_fields.items():
        kind: Any = bool if setting.annotation is bool else str | None
        option = Option(f"--{name.replace('_', '-')}", help=setting.description)
        annotation = Annotated[kind, option]
        found[name] = Parameter(name, Parameter.KEYWORD_ONLY, default=setting.default, annotation=annotation)
    return found


@dataclass(frozen=True)
class _Group:
    """Options that reach a command as one argument, which ``make`` makes of them."""

    parameters: Mapping[str, Parameter]
    make: Callable[..., Any]


GROUPS = {
    "load": _Group(_loading_parameters(), _load_options),
    "actors": _Group(inspect.signature(_actors, eval_str=True).parameters, _actors),
}
"""Parameters of commands that stand for several options."""


def command(app: typer.Typer) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command: our errors become one line, and a parameter named in `GROUPS` several options."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True).parameters
        groups = {name: GROUPS[name] for name in own if name in GROUPS}

        @wraps(function)
        def run(**given: Any) -> None:
            with catch_errors():
                if "load" in groups:
                    disable_progress_bars()  # of downloads: the commands show what they are doing themselves
                for name, group in groups.items():
                    given[name] = group.make(**{option: given.pop(option) for option in group.parameters})
                function(**given)

        options = [parameter for name, parameter in own.items() if name not in groups]
        options += [option for group in groups.values() for option in group.parameters.values()]
        options = [option.replace(kind=Parameter.KEYWORD_ONLY) for option in options]
        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined] # it is what typer reads
        run.__annotations__ = {option.name: option.annotation for option in options}
        app.command()(run)
        return function

    return decorate
