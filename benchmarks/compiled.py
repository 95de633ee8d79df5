"""Whether torch.compile helps calls whose documents are kept: the layers of `mini`, and their MLPs alone.

    python -m benchmarks.compiled

Where the work is small, starting each operation is what costs, and compiled code starts fewer.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

from rsrank_rag import RSRank

from .timing import System, machine, measure
from .workload import QUERY, load, passages


def kept() -> RSRank:
    """`mini`, which keeps all documents."""
    base = load("mini")
    return RSRank(base.backbone, base.prompts, base.projection, base.config, prefix_cache=10**9)


def main() -> None:
    """Time all three on a few and on many documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[1, 5, 10, 50])
    parser.add_argument("--turns", type=int, default=21)
    options = parser.parse_args()
    rankers = {"as it is": kept(), "compiled MLPs": kept(), "compiled layers": kept()}
    for part in rankers["compiled MLPs"].backbone.model.encoder.layer:
        part.intermediate.forward = torch.compile(part.intermediate.forward, dynamic=True)
        part.output.forward = torch.compile(part.output.forward, dynamic=True)
    for part in rankers["compiled layers"].backbone.model.encoder.layer:
        part.forward = torch.compile(part.forward, dynamic=True)
    print(machine())
    for count in options.documents:
        documents = passages(count, 100, 1 / 3)
        systems = [System(name, partial(ranker.score, QUERY, documents)) for name, ranker in rankers.items()]
        for system in (*systems, *systems):  # documents are read, code is compiled
            system.run()
        found = measure(systems, options.turns)
        for m in found:
            print(f"{count:4} documents, {m.name:16}{m.median * 1e3:9.1f} ms{m.times_faster_than(found[0]):7.2f}x")


if __name__ == "__main__":
    main()
