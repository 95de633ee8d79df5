"""Hits of kept prefixes with replicas on Ray: documents at their own replica, and documents anywhere.

Requests ask for documents that are popular by Zipf's law, and every replica may keep a share of them. Hits are counted
in the second half of the requests, when the replicas have seen what there is.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import time
import uuid
from functools import partial

import ray

from rsrank_rag import RSRank
from rsrank_rag.prefixes.settings import PrefixCache
from rsrank_rag.reranker import Pair
from rsrank_rag.service import ray_backend
from rsrank_rag.service.ray_backend import RayBackend, Replicas, deploy, take_down

WORDS = "the bees dance a map of every flower near hive and keep honey for winter while trains run late".split()  # noqa: SIM905


def requests(options: argparse.Namespace) -> list[list[Pair]]:
    """Queries with popular documents."""
    generator = random.Random(0)
    documents = [" ".join(generator.choices(WORDS, k=options.words)) for _ in range(options.documents)]
    weights = [1 / (rank + 1) for rank in range(options.documents)]
    return [
        [Pair(f"Where is number {i}?", text) for text in generator.choices(documents, weights, k=options.ask)]
        for i in range(options.requests)
    ]


async def ask(asked: list[list[Pair]]) -> tuple[float, float, list[float]]:
    """Hit rate and pairs a second of the second half, and all scores."""
    backend = RayBackend()
    await backend.start()
    scores, hits, misses, started = [], 0.0, 0.0, 0.0
    for number, pairs in enumerate(asked):
        if number == len(asked) // 2:
            before = backend.stats()
            hits, misses, started = before["model_device_hits"], before["model_misses"], time.perf_counter()
        scores += [outcome.score or 0.0 for outcome in await backend.score(pairs)]
    seconds, after = time.perf_counter() - started, backend.stats()
    hits, misses = after["model_device_hits"] - hits, after["model_misses"] - misses
    await backend.stop()
    return hits / (hits + misses), sum(map(len, asked[len(asked) // 2 :])) / seconds, scores


def main() -> None:
    """Try one replica, several with their own documents, and several with any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--words", type=int, default=50)
    parser.add_argument("--ask", type=int, default=20, help="documents of a request")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--keep", default="120MB", help="size of all replicas' prefixes together")
    options = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    asked = requests(options)
    total = PrefixCache(device=options.keep).device or 0
    own = ray_backend.key_of
    first: list[float] = []
    for replicas, routing, key in (
        (1, "one replica", own),
        (options.replicas, "own documents", own),
        (options.replicas, "any documents", lambda text: uuid.uuid4().hex),
    ):
        ray_backend.key_of = key
        make = partial(
            RSRank.from_pretrained, "mini", dtype="float32", prefix_cache=PrefixCache(device=total // replicas)
        )
        deploy(make, "mini", Replicas(replicas, cpus=0.5))
        rate, speed, scores = asyncio.run(ask(asked))
        first = first or scores
        largest = max(abs(a - b) for a, b in zip(first, scores, strict=True))
        print(
            f"{replicas} x {total // replicas / 1e6:.0f} MB, {routing:14} hits {rate:6.1%}   {speed:6.0f} pairs/s",
            end="",
        )
        print(f"   scores differ by at most {largest:.1e}")
        take_down()
    ray.shutdown()


if __name__ == "__main__":
    main()
