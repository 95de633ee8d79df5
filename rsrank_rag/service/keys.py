"""API keys: fixed ones, and those of a file that is read again when it changes."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Sequence
from pathlib import Path

from ..errors import InputError

logger = logging.getLogger(__name__)


def keys_in(file: Path) -> tuple[str, ...]:
    """Keys of a file, one a line; raises InputError if it cannot be read or has none."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--api-key-file {file} could not be read: {error}") from error
    if not any(lines):
        raise InputError(f"--api-key-file {file} holds no key. Write one a line.")
    return tuple(line for line in lines if line)


class Keys:
    """Keys that open the service: fixed ones, and those of a file, which stay when it cannot be read any more.

    Raises:
        InputError: The file cannot be read or holds no key.
    """

    def __init__(self, fixed: Sequence[str], file: Path | None) -> None:
        self._fixed, self._file = [key.strip().encode() for key in fixed], file
        self._seen = self._looks()
        self._read = [] if file is None else [key.encode() for key in keys_in(file)]

    def find(self, authorization: str) -> bytes | None:
        """The key in an ``Authorization`` header, if it is one of ours."""
        if self._file is not None and self._seen != (now := self._looks()):
            self._seen = now
            try:
                self._read = [key.encode() for key in keys_in(self._file)]
                logger.info("The API keys were read again: %d.", len(self._read))
            except InputError as error:
                logger.error("%s The keys that were read before stay.", error)
        kind, _, given = authorization.partition(" ")
        sent = given.strip().encode("latin-1")
        # All are compared, so that the time taken tells nothing about which one it is.
        found = [key for key in (*self._fixed, *self._read) if hmac.compare_digest(key, sent)]
        return found[0] if found and kind.lower() == "bearer" else None

    def _looks(self) -> tuple[int, ...]:
        """What changes when the file does, or the link to it."""
        try:
            found = self._file.stat() if self._file is not None else None
        except OSError:
            found = None
        return () if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)
