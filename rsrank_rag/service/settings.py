"""What the service allows: its limits, and the keys that open it."""

import hmac
import logging
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, Field, PositiveInt, SecretStr

from ..errors import InputError
from ..remote.address import usable_key
from .schemas.answers import Drop

logger = logging.getLogger(__name__)


# Input is hidden in errors, because it may be a key.
class Settings(BaseModel, extra="forbid", frozen=True, hide_input_in_errors=True):
    """What the service allows, and how it answers unless a request says otherwise.

    Attributes:
        api_keys: A request needs one of these keys. Without keys and a file, it needs none.
        api_key_file: More keys, one a line; read again for each request.
        max_documents: Documents of a request.
        max_body_bytes: Bytes of a request's body.
        timeout: Seconds from a request's arrival to its answer.
        normalize: Answer with scores between 0 and 1.
        drop: Whether answers leave out documents that the model's native rule does not keep.
            True: not in the answer to a request for as many documents as it holds. "always": in
            every answer. Set "always" only if every client reads the index of each row.
    """

    api_keys: tuple[SecretStr, ...] = ()
    api_key_file: Path | None = None
    max_documents: PositiveInt = 1000
    max_body_bytes: PositiveInt = 10_000_000
    timeout: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    normalize: bool = False
    drop: Drop = False

    @property
    def closed(self) -> bool:
        """Whether a request needs a key."""
        return bool(self.api_keys) or self.api_key_file is not None


class Keys:
    """Keys that open the service: fixed ones and those of a file.

    The file is read for each request: a changed file may have the same size and time as before.
    The keys of a file stay when the file cannot be read any more.

    Raises:
        InputError: A key cannot be sent, or the file cannot be read or holds no key.
    """

    def __init__(self, settings: Settings) -> None:
        self._file = settings.api_key_file
        self._from_file = keys_in(self._file)
        self._trouble = ""
        self._fixed: list[str] = []
        if settings.api_keys:
            self._fixed = checked_keys(settings.api_keys, "RSRANK_API_KEY")

    def find(self, sent: str) -> str | None:
        """The key that equals what a client has sent; None if there is none."""
        trouble = ""
        try:
            self._from_file = keys_in(self._file)
        except InputError as error:
            trouble = f"{error} The keys that were read before stay."
        if trouble and trouble != self._trouble:
            logger.error(trouble)
        self._trouble = trouble
        matching = None
        # All keys are compared, so that the time does not depend on which one matches.
        for key in self._fixed + self._from_file:
            if hmac.compare_digest(key.encode(), sent.encode()):
                matching = key
        return matching


def keys_in(file: Path | None) -> list[str]:
    """The API keys in a file with one key a line; no keys if ``file`` is None.

    Lines that begin with ``#`` are comments.

    Raises:
        InputError: The file cannot be read, holds no key, or a key that cannot be sent.
    """
    if file is None:
        return []
    try:
        # Reading a pipe could wait for ever.
        if not file.is_file():
            raise OSError("there is no regular file of this name.")
        # Some editors begin a file with a byte order mark.
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--api-key-file {file} could not be read: {error}") from error
    keys = [SecretStr(line) for line in lines if not line.lstrip().startswith("#")]
    return checked_keys(keys, f"--api-key-file {file}")


def checked_keys(keys: Iterable[SecretStr], source: str) -> list[str]:
    """Keys without white space around them. Empty ones are left out.

    Args:
        keys: The keys.
        source: What errors call the place of the keys.

    Raises:
        InputError: There is no key, or a key that HTTP cannot send. The message holds no key.
    """
    usable = [usable_key(key, source) for key in keys]
    texts = [key.get_secret_value() for key in usable if key]
    if not texts:
        raise InputError(f"{source} holds no key. Write a key into it, or do not set it.")
    return texts
