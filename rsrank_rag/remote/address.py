"""A service's address and key, checked. Light, because the adapters check their settings here."""

import re
from typing import Any

from pydantic import SecretStr

from ..errors import InputError

# Scheme, host (or an address of IPv6), port and path; and the path that clients append.
_ADDRESS = re.compile(
    r"(?i)(https?://(?:\[[\da-f:.]+\]|[^/?#@:\s.][^/?#@:\s]*)(?::[1-9]\d*)?(?:/[^?#@\s]*?)??)"
    r"(?:/v1(?:/rerank)?)?/*",
)


class ApiKey(SecretStr):
    """A service's API key. A deep copy is the same object. A pickle holds None for the key."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "ApiKey":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def usable_key(key: SecretStr | None, source: str = "api_key") -> ApiKey | None:
    """A key without white space around it; None if it is empty.

    Raises:
        InputError: HTTP cannot send the key. The message does not contain it.
    """
    text = key.get_secret_value().strip() if key else ""
    if not (text.isascii() and text.isprintable()):
        raise InputError(
            f"{source} holds characters that cannot be sent. Only printable ASCII can."
        )
    if not text:
        return None
    return ApiKey(text)


def service_address(base_url: str) -> str:
    """The address of a service without ``/v1`` or ``/v1/rerank`` at its end.

    Raises:
        InputError: ``base_url`` is no http(s) address, or has a user, password, query or fragment.

    >>> service_address("http://localhost:8080/v1/")
    'http://localhost:8080'
    """
    address = _ADDRESS.fullmatch(str(base_url).strip())
    if address is None:
        raise InputError(
            "base_url must be an address such as http://localhost:8080, without user, password, "
            "query or fragment. A key belongs into api_key."
        )
    return address[1]
