"""The ``rsrank`` command."""

from .main import app

__all__ = ["app"]
