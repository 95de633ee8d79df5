"""Write the documentation's tables of benchmarks, each from one file of figures.

    python -m benchmarks.tables      # after a benchmark has written its file

Each table is replaced whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from research import answers, markdown, rules
from research.decoders import tables as decoders

from . import decoder_cost, few_queries, peers, sentences

ROOT = Path(__file__).parents[1]
BLOCK = markdown.BLOCK


class Table(NamedTuple):
    """A table of the documentation.

    Attributes:
        page: The file in which the table stands.
        figures: The JSON file with its figures.
        render: Makes the table in Markdown from the figures.
    """

    page: str
    figures: str
    render: Callable[[Any], str]


DECODERS = "research/docs/decoders.json"

LARGER = "research/docs/decoders-1.5b.json"
"""Both decoders and `mini` on the queries that the larger decoder has read."""

TABLES = {
    "peers": Table("docs/benchmarks.md", "docs/peers.json", peers.table),
    "sentences": Table("docs/benchmarks.md", "docs/sentences.json", sentences.table),
    "long documents": Table("docs/benchmarks.md", "docs/sentences.json", sentences.long_table),
    "few queries in short": Table(
        "docs/training.md", "docs/few-queries.json", few_queries.overview
    ),
    "rules": Table("research/docs/thresholds.md", "research/docs/thresholds.json", rules.table),
    "tuned rules": Table(
        "research/docs/thresholds.md", "research/docs/thresholds.json", rules.tuned_table
    ),
    "few queries": Table("research/docs/training.md", "docs/few-queries.json", few_queries.tables),
    "models": Table("README.md", LARGER, decoders.ladder),
    "decoders, larger": Table("docs/decoders.md", LARGER, decoders.overview),
    "decoders, larger, typed": Table("docs/decoders.md", LARGER, decoders.typed_by_rule),
    "decoders": Table("research/docs/results.md", DECODERS, decoders.overview),
    "decoders, paper's sets": Table("research/docs/results.md", DECODERS, decoders.papers_sets),
    "decoders, typed": Table("research/docs/results.md", DECODERS, decoders.typed),
    "decoders, thresholds": Table("research/docs/results.md", DECODERS, decoders.thresholds),
    "decoders, gaps": Table("research/docs/results.md", DECODERS, decoders.gaps),
    "decoder cost": Table("docs/decoders.md", "docs/decoder-cost.json", decoder_cost.table),
    "answers": Table("research/docs/answers.md", "research/docs/answers.json", answers.table_of),
    "decoders, ablations": Table("research/docs/results.md", DECODERS, decoders.ablations),
}


def rewritten(page: str, root: Path = ROOT) -> str:
    """A page's text with new tables; a table without a file of figures stays as it is."""
    rendered = {}
    for name, table in TABLES.items():
        file = root / table.figures
        if table.page == page and file.exists():
            rendered[name] = table.render(json.loads(file.read_text(encoding="utf-8")))
    return markdown.rewritten((root / page).read_text(encoding="utf-8"), rendered)


def main(root: Path = ROOT) -> None:
    """Rewrite the pages."""
    for page in dict.fromkeys(table.page for table in TABLES.values()):
        (root / page).write_text(rewritten(page, root), encoding="utf-8")


if __name__ == "__main__":
    main()
