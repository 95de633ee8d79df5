"""Every error this package raises on purpose, so that one ``except RSRankError`` is enough."""

from __future__ import annotations


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


class TrainingError(RSRankError):
    """Features or a training run that cannot be used or continued as asked."""


class MissingDependencyError(RSRankError, ImportError):
    """An optional package is not installed; the message holds the exact pip command."""
