"""Several queries at once: pairs that share batches against one call after another.

    python -m benchmarks.pairs

What a service gains that joins the requests of its clients. Both take turns in random order in one
process; times are medians, ratios medians over turns.
"""

from __future__ import annotations

import argparse
import random

from rsrank_rag import RSRank
from rsrank_rag.reranker import Pair

from .timing import System, machine, measure
from .workload import passages, question


def compare(
    ranker: RSRank, queries: int, documents: int, turns: int, *, warm: bool
) -> tuple[float, float, float]:
    """Milliseconds of one call after another and of all pairs at once, and the ratio."""
    texts = passages(queries * documents, 100, 1 / 3)
    asked = [
        " ".join(random.Random(number).sample(question(60).split(), 12))
        for number in range(queries)
    ]
    own = {query: texts[number::queries] for number, query in enumerate(asked)}
    pairs = [Pair(query, text) for query, chosen in own.items() for text in chosen]
    store = ranker.cache.tiers

    def prepare() -> None:
        store.clear()
        if warm:
            ranker.score_pairs(pairs)

    def one_by_one() -> None:
        for query, chosen in own.items():
            ranker.score(query, chosen)

    apart, together = measure(
        [
            System("apart", one_by_one, prepare),
            System("together", lambda: ranker.score_pairs(pairs), prepare),
        ],
        turns,
    )
    return 1000 * apart.median, 1000 * together.median, together.times_faster_than(apart)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    ranker = RSRank.from_pretrained("mini")
    print(f"mini, {ranker.backbone.dtype}, passages of 100 words; {machine()}\n")
    print(
        "| queries x documents | | one call each, ms | pairs, ms | ratio |\n|---|---|--:|--:|--:|"
    )
    for queries, documents in ((16, 1), (16, 5), (8, 20)):
        for warm in (False, True):
            apart, together, ratio = compare(ranker, queries, documents, options.turns, warm=warm)
            kind = "warm" if warm else "cold"
            print(
                f"| {queries} x {documents} | {kind} | {apart:.0f} | {together:.0f} | {ratio:.2f} |"
            )


if __name__ == "__main__":
    main()
