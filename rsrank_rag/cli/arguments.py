"""What the ``rsrank`` commands share: options, output, and the decorator that makes a command."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from errno import ENOSPC
from functools import wraps
from inspect import isclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import click
from click import echo, option
from pydantic import AfterValidator, BaseModel, ValidationError
from safetensors import SafetensorError
from tqdm import tqdm

from ..adapters.kinds import forms
from ..backends.options import CacheSettings, LoadSettings, ModelSource
from ..errors import InputError, RSRankError, needs_torch, problems_of
from ..reranker import Fallback
from .process import hide_library_progress, prepare

PATH = click.Path(path_type=Path)

MODELS = f"Artifact (name, folder, Hub id), file of tune, or {forms()}."

model_option = option("--model", "-m", default="mini", help=MODELS)
query_option = option("--query", "-q", required=True, help="The question.")
documents_option = option(
    "--documents", "-d", required=True, help="A file, or - for standard input."
)
json_option = option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def _number(text: str) -> float | str | None:
    """A part of the rule: a number, "native", or None for "none"."""
    if text == "native":
        return text
    return None if text == "none" else float(text)


def _fallback(text: str) -> Fallback | float | str | None:
    """The fallback: two numbers with a comma between them, "native", or None for "none"."""
    max_gap, comma, max_depth = text.partition(",")
    if not comma:
        return _number(text)
    return Fallback(float(max_gap), float(max_depth))


class RuleOptions(BaseModel, use_attribute_docstrings=True):
    """Options of commands that apply a rule."""

    threshold: Annotated[Any, AfterValidator(_number)] = "native"
    """Keep documents that score above this number. none: rank only."""
    max_gap: Annotated[Any, AfterValidator(_number)] = "native"
    """Drop documents further below the best one. none: no gap."""
    fallback: Annotated[Any, AfterValidator(_fallback)] = "native"
    """GAP,DEPTH: if nothing scores above the threshold, keep documents so far below the best one
    and so far below the threshold. none: keep nothing."""


class ModelOptions(LoadSettings, CacheSettings):
    """Options of commands that load a model."""

    revision: str | None = None
    """Commit, tag or branch on the Hub."""

    def source(self, name: str) -> ModelSource:
        """The model of this name, to be loaded with these options."""
        return ModelSource(name=name, **dict(self))


def _options_of(model: type[BaseModel]) -> Iterator[click.Option]:
    """An option for each field of a model. The model checks what click does not."""
    for name, field in model.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        choices = [get_args(kind) for kind in kinds if get_origin(kind) is Literal]
        yield click.Option(
            [f"--{name.replace('_', '-')}"],
            type=click.Choice(choices[0]) if choices else None,
            default=field.default,
            is_flag=bool in kinds,
            help=str(field.description).replace("`", ""),
        )


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
    # The reader of standard output, such as `head`, has ended. click ends the command.
    except BrokenPipeError:
        raise
    except (OSError, SafetensorError) as error:
        message = re.sub(r"^.Errno [0-9]+. ", "", str(error)).rstrip(".")
        if isinstance(error, OSError) and error.errno == ENOSPC:
            message += f". Make room. {hint}"
        _exit(1, message)
    except KeyboardInterrupt:
        echo(f"Stopped. {hint}", err=True)
        raise click.exceptions.Exit(130) from None


def printable(text: str) -> str:
    """A text of others without control characters, which could change what a terminal shows."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


def print_json(content: Any) -> None:
    """Print JSON to standard output."""
    echo(json.dumps(content, ensure_ascii=False, indent=2))


def on_terminal() -> bool:
    """Whether a terminal shows standard error. A daemon may have closed standard error."""
    return bool(sys.stderr and sys.stderr.isatty())


def show_waiting(text: str) -> None:
    """Say on a terminal what takes a while."""
    if on_terminal():
        echo(text, err=True)


def progress(items: Iterable[Any], description: str) -> Any:
    """Iterate with a progress bar, which only a terminal shows."""
    return tqdm(items, description, leave=False, disable=not on_terminal())


def print_table(title: str, heading: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, whose first column holds words and the others numbers."""
    lines = [heading, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    echo(f"\n{title}")
    for words, *numbers in lines:
        cells = map(str.rjust, numbers, widths[1:])
        echo("  ".join([words.ljust(widths[0]), *cells]))


def _exit(code: int, message: str) -> None:
    message = printable(" ".join(message.split()))
    if not message.endswith((".", "!", "?")):
        message += "."
    echo(f"error: {message}", err=True)
    raise click.exceptions.Exit(code)


def command(*, resumes: bool = False) -> Callable[[Callable[..., None]], click.Command]:
    """Make a function a command. Errors are printed in one line.

    A parameter whose type is a pydantic model becomes an option for each field.
    """

    def decorate(function: Callable[..., None]) -> click.Command:
        models: dict[str, type[BaseModel]] = {}
        for name, kind in get_type_hints(function).items():
            if isclass(kind) and issubclass(kind, BaseModel):
                models[name] = kind

        # The options that stand as decorators below this one are attributes of the function, and
        # `wraps` copies them.
        @wraps(function)
        def run(**arguments: Any) -> None:
            with catch_errors(resumes):
                hide_library_progress()
                for name, model in models.items():
                    if issubclass(model, LoadSettings):
                        prepare()
                    values = {field: arguments.pop(field) for field in model.model_fields}
                    arguments[name] = model(**values)
                function(**arguments)

        # A shell would run what stands between backticks.
        text = str(function.__doc__).replace("`", "")
        made = click.command(
            help=text,
            # click would cut the first sentence.
            short_help=text.partition("\n")[0],
            context_settings={"show_default": True, "max_content_width": 100},
        )(run)
        for model in models.values():
            made.params += _options_of(model)
        return made

    return decorate
