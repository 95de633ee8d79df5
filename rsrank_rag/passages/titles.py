"""A document's title, and other metadata, read as part of the document."""

from collections.abc import Mapping, Sequence
from typing import Any


def with_title(text: str, title: str | None) -> str:
    r"""The title on a line of its own, then the text: the form that `mini` was trained with.

    A text that begins with its title, or that has none, stays as it is.

    >>> with_title("Coins and notes.", "Money")
    'Money\nCoins and notes.'
    """
    return lines_before(text, {"title": title}, ("title",)) + text


def lines_before(text: str, metadata: Mapping[str, Any], fields: Sequence[str]) -> str:
    r"""What is read before a text: the values of metadata fields, one a line.

    Missing, None and blank values are left out, and those that the text begins with.

    >>> lines_before("Coins.", {"title": "Money", "year": 1999}, ("title", "year"))
    'Money\n1999\n'
    """
    lines = ""
    for field in fields:
        value = metadata.get(field)
        line = "" if value is None else str(value).strip()
        if line and not text.startswith(line):
            lines += line + "\n"
    return lines
