"""A document's title, and other metadata, read as part of the document."""

from collections.abc import Mapping, Sequence
from typing import Any


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
