"""Results as tables for a terminal (rich)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from .. import __version__
from ..artifact.config import RSRankConfig
from ..passages.explanation import Explanation
from ..reranker import RankResult


def result_text(result: RankResult) -> Text:
    """As a result prints itself: kept documents in green, then dropped ones in grey."""
    styles = {"+": "green", "-": "dim"}
    return Text("\n").join(Text(line, styles.get(line[0], "bold")) for line in str(result).splitlines())


def explanation_text(explanation: Explanation) -> Text:
    """As an explanation prints itself, below what was asked and read."""
    document, verdict = " ".join(explanation.document.split())[:200], "kept" if explanation.score > 0 else "dropped"
    return Text.assemble((explanation.query, "bold"), "\n", (document, "dim"), f"\n{explanation}\n{verdict}")


WHY = {
    "bfloat16": "the hardware multiplies it",
    "int8": "documents; the hardware multiplies no bfloat16, and this was measured to be good enough",
    "float32": "the hardware multiplies no bfloat16",
}


def info_table(name: str, config: RSRankConfig, limits: str, dtype: str) -> Table:
    """What an artifact says of itself, and the dtype that it is computed in here."""
    layers, heads, dim, head_dim = config.shape
    rows = {
        "rsrank_rag": __version__,
        "artifact": name,
        "backbone": f"{config.backbone.name} at {config.backbone.revision or 'no pinned revision'} "
        f"({config.backbone.model_type}, {config.depth})",
        **({"fusion": f"queries see documents from layer {config.fusion_layer} on"} if config.fusion_layer else {}),
        "B": f"{layers} layers ({config.layers[0]}-{config.layers[-1]}) x {heads} heads x P {dim} x D {head_dim} = "
        f"{layers * heads * dim * head_dim:,} numbers",
        "template": f"{config.template.instruction!r} document {config.template.separator!r} query "
        f"{config.template.suffix!r}, scored: {config.template.positions}",
        "training data": ", ".join(config.training.data) or "not recorded",
        "computed here in": f"{dtype}: {WHY[dtype]}",
        "limits": limits,
        "notes": config.training.notes or "-",
        "licence": config.license or "not recorded",
    }
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(value))
    return table


KEPT = {
    "queries": "queries",
    "precision@tau": "precision",
    "recall@tau": "recall",
    "f1@tau": "F1",
    "kept": "kept a\nquery",
    "empty": "empty\nlists",
    "false_keeps": "false\nkeeps",
}
"""What users ask of a selection, and the columns' headings: such that all fit into 80 columns."""

RANKED = {
    "ndcg@5": "nDCG@5",
    "recall@5": "Recall@5",
    "f1@best": "best F1\nof the set",
    "tau_best": "at the\nthreshold",
    "f1@query_best": "best F1 of\neach query",
}


def evaluation_tables(name: str, rule: str, records: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """A model's two tables, a row a dataset: what its threshold keeps; how it ranks, with the best thresholds."""
    titles = (f"{name}: {rule}", f"{name}: ranking, and thresholds chosen on these very labels")
    for title, columns in zip(titles, (KEPT, RANKED), strict=True):
        table = Table(title=Text(title, overflow="fold"), title_justify="left", padding=(0, 0, 0, 1))
        table.add_column("dataset", overflow="fold")  # a path may be longer than all else; the numbers stay whole
        for heading in columns.values():
            table.add_column(heading, justify="right", overflow="fold")
        for record in records:
            table.add_row(Text(str(record["dataset"])), *(cell(key, record.get(key)) for key in columns))
        yield table


def cell(key: str, value: float | None) -> str:
    """A number as people write it.

    >>> cell("tau_best", -5e-324), cell("tau_best", 0.35), cell("queries", 4.0), cell("empty", 0.125), cell("f1@0", 0.5)
    ('0', '0.35', '4', '12%', '0.500')
    """
    if value is None:
        return "-"
    if key in ("queries", "unanswered", "tau_best"):
        return f"{round(value, 3) + 0.0:g}"
    return f"{value:.0%}" if key == "empty" else f"{value:.1f}" if key in ("kept", "false_keeps") else f"{value:.3f}"
