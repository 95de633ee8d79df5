"""Draw the picture of the README: the ten passages of `make demo` on one axis.

python examples/picture.py docs/images/demo.png     # needs the extra [examples]
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
from demo import QUERY

from rsrank_rag import RSRank

PASSAGES = Path(__file__).with_name("passages.txt")
WIDTH = 64
"""Characters of a passage that are shown."""


def main(picture: str) -> None:
    """Rank the passages and write the picture."""
    result = RSRank.from_pretrained().rank(QUERY, PASSAGES.read_text("utf-8").splitlines())
    ranked = [*result.kept, *result.dropped]
    labels = [
        text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"
        for text in (document.text for document in ranked)
    ]
    colours = ["#1f5bbf"] * len(result.kept) + ["#b9b9b9"] * len(result.dropped)

    figure, axis = plt.subplots(figsize=(9, 3.4), layout="constrained")
    places = range(len(ranked), 0, -1)
    bars = axis.barh(places, [document.score for document in ranked], color=colours)
    axis.bar_label(bars, [f"{document.score:+.2f}" for document in ranked], padding=3, fontsize=8)
    axis.axvline(0, color="black", linewidth=1)
    axis.set_yticks(places, labels, fontsize=8)
    axis.margins(x=0.12)
    axis.set_title(QUERY, fontsize=9, loc="left")
    axis.set_xlabel("score: above zero is kept (blue), the rest is dropped (grey)", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
