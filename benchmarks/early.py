"""What early decisions save and what they lose, on labelled passages.

    rsrank calibrate --model mini --data held-out.jsonl --output mini-early
    python -m benchmarks.early --model mini-early --data ../shared/data/dev/hotpotqa.paragraph.jsonl.gz

Nothing is kept between calls. Full and early runs take turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from rsrank_rag import RSRank
from rsrank_rag.evaluation.datasets import dataset_name, read_labelled


def main() -> None:
    """Rank everything in all modes and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="an artifact with a calibration")
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=20, help="queries of each file")
    parser.add_argument("--dtype", default=None)
    options = parser.parse_args()
    full = RSRank.from_pretrained(options.model, dtype=options.dtype, prefix_cache=False)
    parts = (full.backbone, full.prompts, full.projection, full.config)
    modes = {"exact": RSRank(*parts, prefix_cache=False, early_decisions="exact")}
    modes["calibrated"] = RSRank(*parts, prefix_cache=False, early_decisions="calibrated")
    rng = random.Random(0)
    print(f"{'set':20}{'mode':12}{'documents':>10}{'left early':>12}{'kept':>7}{'lost':>6}{'x full':>8}")
    for path in options.data:
        counts = {mode: [0, 0] for mode in modes}
        kept_in_full = documents = 0
        times: dict[str, list[float]] = {"full": [], **{mode: [] for mode in modes}}
        for query in read_labelled(path)[: options.limit]:
            texts = [document.content() for document in query.documents]
            found = {}
            for mode in rng.sample(list(times), len(times)):
                started = time.perf_counter()
                found[mode] = (modes.get(mode) or full).rank(query.query, texts)
                times[mode].append(time.perf_counter() - started)
            expected = {document.index for document in found["full"].kept}
            kept_in_full, documents = kept_in_full + len(expected), documents + len(texts)
            for mode, count in counts.items():
                count[0] += sum(document.is_bound for document in found[mode].dropped)
                count[1] += len(expected - {document.index for document in found[mode].kept})
        for mode, (left, lost) in counts.items():
            ratio = statistics.median(a / b for a, b in zip(times["full"], times[mode], strict=True))
            print(f"{dataset_name(path):20}{mode:12}{documents:10}{left:12}{kept_in_full:7}{lost:6}{ratio:8.2f}")


if __name__ == "__main__":
    main()
