"""How much other documents change a score: each document alone, and among others.

    python -m benchmarks.same_score --model mini
    python -m benchmarks.same_score --model qwen2.5-coder-0.5b --backbone FOLDER --dtype bfloat16

Documents have about 1 to 360 words. Among others, they share batches with documents of other
lengths. Cached prefixes come from runs of one document.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rsrank_rag import RSRank
from rsrank_rag.evaluation.datasets import read_labelled

from .workload import passages

QUERIES = (
    "when did the bridge open",
    "what did the treaty change for the old harbour and its province",
    "capital",
)


def main() -> None:
    """Score everything alone, among others and cached, and print the largest differences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mini")
    parser.add_argument("--backbone", help="folder of the language model")
    parser.add_argument("--dtype", help="as in RSRank.from_pretrained")
    parser.add_argument("--data", type=Path, help="labelled queries in place of made-up documents")
    parser.add_argument("--documents", type=int, default=40, help="documents a query")
    options = parser.parse_args()
    names = {"backbone": options.backbone, "dtype": options.dtype}
    plain = RSRank.from_pretrained(options.model, cache_size=0, **names)
    caching = RSRank.from_pretrained(options.model, cache_size="2GB", **names)
    differences: dict[str, list[float]] = {"among others": [], "cached": []}
    scores: list[float] = []
    signs = 0
    for query, documents in _lists(options.data, options.documents):
        alone = [plain.score(query, [document])[0] for document in documents]
        # The prefixes are run alone, the queries together.
        for document in documents:
            caching.score(QUERIES[0], [document])
        among = {
            "among others": plain.score(query, documents),
            "cached": caching.score(query, documents),
        }
        for name, of_list in among.items():
            differences[name] += np.abs(np.subtract(of_list, alone)).tolist()
            signs += int(np.count_nonzero(np.greater(of_list, 0) != np.greater(alone, 0)))
        scores += alone
    print(
        f"{plain!r}: {len(scores)} scores with a standard deviation of {np.std(scores):.2f}; "
        f"{signs} of {2 * len(scores)} changed their sign"
    )
    for name, changes in differences.items():
        print(f"{name}: at most {max(changes):.1e}, mean {np.mean(changes):.1e}")


def _lists(data: Path | None, count: int) -> list[tuple[str, Sequence[str]]]:
    """Queries and their documents."""
    if data is None:
        return [(query, passages(count, 180, 0.99, seed)) for seed, query in enumerate(QUERIES)]
    lists: list[tuple[str, Sequence[str]]] = []
    for query in read_labelled(data)[: len(QUERIES)]:
        texts = [document.content() for document in query.documents]
        lists.append((query.query, texts[:count]))
    return lists


if __name__ == "__main__":
    main()
