"""Results and explanations in a notebook, as HTML.

Colours are translucent, so that text stays readable on light and dark pages.
"""

from html import escape
from textwrap import shorten
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .explanation import Explanation
    from .results import RankResult

TEXT_LENGTH = 300
# Red, green and blue of tokens that raise and that lower the score.
RAISES, LOWERS = "0, 160, 60", "220, 40, 40"


def result_html(result: "RankResult") -> str:
    """A table with a row for each document; rows of dropped documents are pale."""
    rows = ["<tr><th></th><th>score</th><th>document</th><th>text</th></tr>"]
    for place, document in enumerate(result.kept + result.dropped):
        name = document.index if document.id is None else document.id
        cells = [
            result.mark(place),
            f"{document.score:+.2f}",
            escape(str(name)),
            escape(shorten(document.extract, TEXT_LENGTH, placeholder=" …")),
        ]
        opacity = 1.0 if place < len(result.kept) else 0.6
        columns = "".join(f'<td style="text-align: left">{cell}</td>' for cell in cells)
        rows.append(f'<tr style="opacity: {opacity}">{columns}</tr>')
    return f"<p>{escape(result.summary)}</p><table>{''.join(rows)}</table>"


def explanation_html(explanation: "Explanation") -> str:
    """The query's tokens, marked by their shares of the score, above the score and the document.

    Of a document with a similarity window, the window is shown.
    """
    totals = explanation.columns()[1].sum(1).tolist()
    largest = max(map(abs, totals), default=0.0) or 1.0
    tokens = []
    for token, total in zip(explanation.tokens, totals, strict=True):
        colour = RAISES if total > 0 else LOWERS
        strength = 0.6 * abs(total) / largest
        tokens.append(
            f'<span title="{total:+.3f}" style="background: rgba({colour}, {strength:.2f})">'
            f"{escape(token)}</span>"
        )
    start, end = explanation.similarity_window or (0, None)
    document = escape(shorten(explanation.document[start:end], TEXT_LENGTH, placeholder=" …"))
    return f"<p>{' '.join(tokens)}</p><p><b>{explanation.score:+.2f}</b> {document}</p>"
