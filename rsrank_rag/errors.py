"""Every error this package raises on purpose, so that one ``except RSRankError`` is enough."""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from difflib import get_close_matches
from importlib import import_module
from numbers import Integral
from textwrap import shorten
from typing import Any

from pydantic import ValidationError


class RSRankError(Exception):
    """Base class. The message says what was asked, what was found and what to do."""


class InputError(RSRankError, ValueError):
    """A query, a document or an argument that cannot be used as given."""


class ArtifactError(RSRankError):
    """An artifact that is missing, damaged, or made for another language model."""


class BackboneError(RSRankError):
    """A language model whose value vectors cannot be read, or that differs from the artifact's."""


class ScoringError(RSRankError):
    """A document that could not be scored.

    Attributes:
        reason: Why, as the end of a sentence that begins with the document.
        index: The document's position in its list.
        query: The query's position or name, where a call has several queries.
    """

    def __init__(self, reason: str, index: int, query: int | str | None = None) -> None:
        super().__init__(reason, index, query)
        self.reason = reason
        self.index = index
        self.query = query

    def __str__(self) -> str:
        query = "" if self.query is None else f" of query {self.query}"
        return f"Document {self.index}{query} {self.reason}"

    def move_to(self, index: int) -> None:
        """Set the document's position in the list of the caller, which gets the same error."""
        self.index = index
        self.args = (self.reason, index, self.query)


def finite(score: float, index: int) -> float:
    """Return a score that is a finite number.

    Raises:
        ScoringError: The score is NaN or infinite; ``index`` is the document's position.
    """
    if math.isfinite(score):
        return score
    raise ScoringError(
        f"scored {score}, which can be neither kept nor dropped. If the model overflowed on it, "
        "load it in bfloat16 or float32.",
        index,
    )


def check_count(name: str, value: Any, least: int) -> None:
    """InputError if a value is not a whole number of at least ``least``; ``name`` is its name."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}.")


def check_text(name: str, value: Any) -> None:
    """InputError if a value is not text; ``name`` is what the error calls it."""
    if not isinstance(value, str):
        raise InputError(f"{name} must be a string, got {type(value).__name__}.")


def check_names(function: str, names: Iterable[str], known: Iterable[str]) -> None:
    """TypeError for a keyword that a function does not take; it names the one that was meant."""
    for name in names:
        if name not in known:
            suggestion = nearest(name, known) or f" It takes {', '.join(known)}."
            raise TypeError(f"{function} has no argument {name!r}.{suggestion}")


def check_choice(name: str, value: Any, *choices: Any) -> None:
    """InputError if a value is not one of ``choices``; ``name`` is its name."""
    if value not in choices:
        raise InputError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}.")


def too_large(tokens: int, index: int) -> ScoringError:
    """The error of a document for which there is too little memory."""
    return ScoringError(
        f"({tokens} tokens with the prompt) does not fit into memory even by itself. "
        "Pass a smaller max_length, or load the model in 8-bit or on another device.",
        index,
    )


class RemoteError(RSRankError):
    """A service that could not be reached, was not ready in time, or gave an unusable answer.

    Attributes:
        status: HTTP's status; None if there was no answer.
        transient: Whether the same request may succeed later.
        retry_after: Seconds that the service asks to wait; 0 if it names none.
    """

    def __init__(
        self,
        message: str,
        status: int | None = None,
        transient: bool = False,
        retry_after: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.transient = transient
        self.retry_after = retry_after


class TrainingError(RSRankError):
    """Features or a training run that cannot be used or continued as asked."""


class MissingDependencyError(RSRankError, ImportError):
    """An optional package is not installed; the message gives the pip command that installs it."""

    def __init__(self, message: str, extra: str = "") -> None:
        if extra:
            message += f" Install with: {pip_install(extra)}."
        super().__init__(message)


def pip_install(extra: str) -> str:
    """The command that installs one of the extras, as the README says it."""
    return f"pip install '.[{extra}]' (in a clone)"


def required(module: str, message: str, extra: str) -> Any:
    """Import an optional module.

    Raises:
        MissingDependencyError: It cannot be imported; the error gives the pip command.
    """
    with needs(message, extra, module):
        return import_module(module)


@contextmanager
def needs(message: str, extra: str, *modules: str) -> Iterator[None]:
    """A context manager for imports of optional packages.

    Args:
        message: What needs the packages. ``{}`` stands for the name of the missing module.
        extra: The extra that installs the packages; empty if the message says how.
        *modules: Top-level modules that may be missing. Others raise ModuleNotFoundError.

    Raises:
        MissingDependencyError: One of ``modules`` is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in modules:
            raise
        raise MissingDependencyError(message.format(error.name), extra) from error


def problems_of(error: ValidationError) -> str:
    """Every field that pydantic refuses, with the reason; at most 1,000 characters."""
    problems = []
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        place = ".".join(map(str, problem["loc"]))
        reason = problem["msg"].removeprefix("Value error, ").rstrip(".")
        if problem["type"] == "extra_forbidden":
            reason = "there is no such entry"
        problems.append(f"{place}: {reason}".removeprefix(": "))
    return shorten("; ".join(problems), 1000, placeholder=" ...")


def nearest(name: str, names: Iterable[str]) -> str:
    """A question to add to an error about an unknown name; empty if no known name is similar.

    >>> nearest("epoch", ["epochs", "seed"])
    " Did you mean 'epochs'?"
    """
    matches = get_close_matches(name, list(names), n=3, cutoff=0.7)
    if not matches:
        return ""
    return f" Did you mean {' or '.join(map(repr, matches))}?"


def needs_torch() -> AbstractContextManager[None]:
    """A block that runs language models or trains; raises as `needs` if torch is missing."""
    message = "Training, and language models other than BERT-like encoders, need {}."
    return needs(message, "lm", "torch", "transformers")
