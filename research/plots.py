"""What the figures of this folder share: one style, a grid of panels, and PNG files.

Every figure can be read without colour, because shapes, line styles and labels differ, too. The
colours are those of Okabe and Ito, which colour-blind readers tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VERMILION = "#D55E00"
BLACK = "#000000"
SKY = "#56B4E9"

# Panels in a row of a figure.
COLUMNS = 3

# Settings that every figure is drawn and written with.
STYLE = Path(__file__).with_suffix(".mplstyle")


def style() -> AbstractContextManager[None]:
    """A context manager in which matplotlib has the settings of these figures."""
    from matplotlib import rc_context

    return rc_context(fname=STYLE)


def png(figure: Figure) -> bytes:
    """A figure as a PNG file. Equal figures give equal bytes."""
    file = BytesIO()
    with style():
        figure.savefig(file)
    return file.getvalue()


def panel_grid(names: Collection[str], height: float) -> tuple[Figure, list[Axes]]:
    """A figure with a small panel for each name, in rows of this height (inches).

    The figure belongs to no window and no global state.
    """
    from matplotlib.figure import Figure

    columns = min(len(names), COLUMNS)
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(2 + 2.5 * columns, height * rows + 0.9), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, n + 1) for n in range(len(names))]


def name_axes(figure: Figure, x_label: str, y_label: str) -> None:
    """Name the axes, and put one legend above all panels, which show the same things."""
    figure.supxlabel(x_label, size="medium")
    figure.supylabel(y_label, size="medium")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
