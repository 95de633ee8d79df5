"""A document's title, and other metadata, read as part of the document."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

# How pandas, JSON and `str` write a value that is missing.
MISSING = {"", "<na>", "nan", "nat", "none", "null"}

# What office programs and PDF printers write as the title of a file that has none.
NO_TITLE = re.compile(
    r"\(?anonymous\)?|untitled.*|(document|presentation|slide) ?\d*|powerpoint presentation"
    r"|microsoft (word|powerpoint|excel|office) - .*"
    r"|.*\.(csv|docx?|dotx?|dvi|html?|indd|key|md|od[pst]|pages|pdf|pptx?|ps|qxd|rtf|tex|txt|xlsx?)",
    re.IGNORECASE,
)


def lines_before(text: str, metadata: Mapping[str, Any], fields: Sequence[str]) -> str:
    r"""What is read before a text: the values of metadata fields, one a line.

    These values are left out: missing ones (None, NaN, blank), those that the text begins with, and
    a ``title`` that is none: a file name, or what a program writes instead of a title.

    >>> lines_before("Coins.", {"title": "Money", "year": 1999}, ("title", "year"))
    'Money\n1999\n'
    >>> lines_before("Coins.", {"title": "Microsoft Word - final_v3.docx"}, ("title",))
    ''
    """
    lines = ""
    for field in fields:
        line = str(metadata.get(field, "")).strip()
        is_missing = line.lower() in MISSING or (field == "title" and NO_TITLE.fullmatch(line))
        # "Bee" is no beginning of "Beekeeping".
        if not is_missing and not re.match(re.escape(line) + r"(?!\w)", text):
            lines += line + "\n"
    return lines
