"""Tables in Markdown, and the places of documentation pages that hold them.

A table stands between the lines ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

BLOCK = re.compile(r"(<!-- figures: ([^>]+?) -->\n).*?(<!-- end of figures -->)", re.S)


def line(cells: Iterable[object]) -> str:
    """One row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(head: Sequence[str], rows: Iterable[Sequence[object]], texts: int = 1) -> str:
    """A table whose first columns are texts, and all others numbers, aligned to the right."""
    alignment = "|" + "---|" * texts + "--:|" * (len(head) - texts)
    return "\n".join([line(head), alignment, *map(line, rows)])


def points(share: float) -> str:
    """A share in points of 100."""
    return f"{100 * share:.1f}"


def rewritten(page: str, tables: Mapping[str, str]) -> str:
    """The text of a page with these tables, by name; other tables stay."""

    def replacement(match: re.Match[str]) -> str:
        if match[2] not in tables:
            return match[0]
        return f"{match[1]}{tables[match[2]]}\n{match[3]}"

    return BLOCK.sub(replacement, page)
