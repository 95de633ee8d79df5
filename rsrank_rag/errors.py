"""Every error this package raises on purpose, so that one ``except RSRankError`` is enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RSRankError(Exception):
    """Base class. The message says what was asked, what was found and what to do."""


class InputError(RSRankError, ValueError):
    """A query, a document or an argument that cannot be used as given."""


class ArtifactError(RSRankError):
    """An artifact (``config.json`` + ``projection.safetensors``) that is missing, damaged or foreign."""


class BackboneError(RSRankError):
    """A language model whose value vectors cannot be read, or that differs from the artifact's."""


class ScoringError(RSRankError):
    """A document that could not be scored.

    Attributes:
        index: Position of the document in the list that was given.
    """

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index

    def __reduce__(self) -> tuple[type[ScoringError], tuple[str, int]]:
        return ScoringError, (str(self), self.index)


class RemoteError(RSRankError):
    """A service that could not be reached, was not ready in time, or answered what cannot be used.

    Attributes:
        status: The HTTP status; None if there was no answer.
        transient: Whether the same request may succeed later.
        retry_after: Seconds that the service asked to wait for; None if it did not say.
    """

    def __init__(
        self, message: str, status: int | None = None, transient: bool = False, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.transient, self.retry_after = status, transient, retry_after

    def __reduce__(self) -> tuple[type[RemoteError], tuple[str, int | None, bool, float | None]]:
        return RemoteError, (str(self), self.status, self.transient, self.retry_after)


class TrainingError(RSRankError):
    """Features or a training run that cannot be used or continued as asked."""


class MissingDependencyError(RSRankError, ImportError):
    """An optional package is not installed; the message holds the exact pip command."""


@contextmanager
def needs_the_whole_package() -> Iterator[None]:
    """Around what loads models: a client's installation lacks it, and gets the pip command."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("rsrank_rag", "torch", "transformers"):
            raise
        raise MissingDependencyError(
            f"A model in this process needs {error.name}, and rsrank-rag-client can only ask a service (base_url). "
            "Install the whole package: pip uninstall -y rsrank-rag-client && pip install rsrank-rag"
        ) from error
