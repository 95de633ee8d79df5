"""What the service allows: its limits, and the keys that open it."""

import hmac
import logging
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ByteSize, Field, PositiveFloat, PositiveInt, SecretStr

from ..errors import InputError
from ..remote.address import usable_key

logger = logging.getLogger(__name__)


# Input is hidden in errors, because it may be a key.
class Options(BaseModel, hide_input_in_errors=True, use_attribute_docstrings=True):
    """Settings that are also options of ``rsrank serve``."""

    api_key_file: Path | None = None
    """File of API keys, one a line; RSRANK_API_KEY adds keys."""
    max_documents: PositiveInt = 1000
    """Documents of one request."""
    max_body: ByteSize = Field(default="10MB", gt=0, validate_default=True)
    """Size of one request, such as 10MB."""
    timeout: PositiveFloat = 60.0
    """Seconds from a request to its answer."""
    normalize: bool = False
    """Scores from 0 to 1; 0.5: the native threshold."""


class Settings(Options, extra="forbid"):
    """What the service allows, and how it answers unless a request says otherwise."""

    api_keys: tuple[SecretStr, ...] = ()
    """A request needs a key of these or of the file. Without keys and a file, it needs none."""
    drop: bool | Literal["always"] = False
    """Whether answers leave out documents that the model's native rule does not keep. True: not in
    the answer to a request for as many documents as it holds. "always": in every answer. Set
    "always" only if every client reads the index of each row."""

    @property
    def closed(self) -> bool:
        """Whether a request needs a key."""
        return bool(self.api_keys) or self.api_key_file is not None


class Keys:
    """Keys that open the service.

    Their file is read for each request: a changed file may have the same size and time as before.
    While the file cannot be used, the keys that were read before stay.

    Raises:
        InputError: As `keys_of`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._keys = keys_of(settings)

    def find(self, sent: str) -> str | None:
        """The key that equals what a client has sent; None if there is none."""
        try:
            self._keys = keys_of(self._settings)
        except InputError as error:
            logger.error("%s The keys that were read before stay.", error)
        # All keys are compared, so that the time does not depend on which one matches.
        matching = [key for key in self._keys if hmac.compare_digest(key.encode(), sent.encode())]
        return matching[0] if matching else None


def keys_of(settings: Settings) -> list[str]:
    """The API keys of a service. Empty lines, and lines that begin with ``#``, are no keys.

    Raises:
        InputError: A key cannot be sent, the file cannot be read, or there is no key although
            there should be one. No message holds a key.
    """
    lines = [key.get_secret_value() for key in settings.api_keys]
    file = settings.api_key_file
    if file is not None:
        try:
            # Some editors begin a file with a byte order mark.
            lines += file.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--api-key-file {file} could not be read: {error}") from error
    keys = []
    for line in lines:
        key = usable_key(SecretStr(line), "RSRANK_API_KEY or --api-key-file")
        if key is not None and not line.lstrip().startswith("#"):
            keys.append(key.get_secret_value())
    if settings.closed and not keys:
        raise InputError(
            "RSRANK_API_KEY or --api-key-file is set, and holds no key. Write a key into it, or do "
            "not set it."
        )
    return keys
