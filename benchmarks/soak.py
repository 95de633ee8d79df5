"""Mixed lengths and a fault every minute, for an hour: answers stay right, and memory stable.

    python -m benchmarks.soak --minutes 60

Passages have 5 to 2,000 words and requests 1 to 40 of them. Clients ask again as soon as they have
been answered, and again a second later where they were refused (429, 503). Each minute the next
fault is made: the model's process is killed, or stopped for five seconds; another key sends one of
the rude bodies of `benchmarks.load` (giant documents, quotes, copies, long queries, large answers),
or holds bodies back; megabytes of nonsense are sent; clients leave before their answer; more is
asked at a time than can be answered. After a third of the time the process is killed no more, so
that one process's memory can be seen over the rest. Answers are checked as `benchmarks.load` does.

The exit status is 1 if an answer was wrong or lost, or the HTTP process took more memory than
docs/reliability.md says, or the memory of the model's process grows: the least of the last quarter
of the time is more than `MOST_GROWTH` times the least of the quarter before. The most says little,
because it depends on the faults of a quarter.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from research import markdown

from .load import (
    MOST_MEMORY,
    Record,
    Server,
    Traffic,
    arguments,
    clients,
    resident,
    rude_bodies,
    server_options,
    verdict,
)
from .timing import machine
from .workload import passages, question

MOST_GROWTH = 1.05
"""How many times the memory of the quarter before the model's process may take in the last one."""


@dataclass(frozen=True)
class Mixed(Traffic):
    """Requests of 1 to ``count`` passages of 5 to 2,000 words (log-uniform)."""

    def request(self, rng: random.Random) -> tuple[int, list[int]]:
        """Numbers of a question and of distinct passages."""
        query = rng.randrange(len(self.questions))
        return query, rng.sample(range(len(self.corpus)), rng.randint(1, self.count))

    @classmethod
    def of(cls, options: argparse.Namespace) -> Mixed:
        """A corpus of so many passages."""
        rng = random.Random(0)
        words = passages(1, 2000)[0].split()
        corpus = []
        for _ in range(options.corpus):
            length = math.exp(rng.uniform(math.log(5), math.log(len(words))))
            corpus.append(" ".join(rng.sample(words, round(length))))
        queries = question(200).split()
        questions = []
        for _ in range(50):
            questions.append(" ".join(rng.sample(queries, rng.randint(1, 60))))
        return cls(corpus, questions, options.documents)


@dataclass
class Soak:
    """One run: what was asked, answered and measured."""

    server: Server
    traffic: Mixed
    client: httpx.AsyncClient
    record: Record = field(default_factory=Record)
    counts: Counter[str] = field(default_factory=Counter)
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """Minutes, bytes of the server, and bytes of the model's process."""

    async def ask(self, rng: random.Random, ends: float) -> None:
        """Ask until the end; a request is lost if no answer comes at all, or one that is none."""
        while time.perf_counter() < ends:
            query, places = self.traffic.request(rng)
            body = self.traffic.body(query, places)
            try:
                response = await self.client.post("/v1/rerank", json=body)
            except httpx.TransportError as error:
                self.counts[f"lost ({type(error).__name__})"] += 1
                continue
            self.counts[str(response.status_code)] += 1
            if response.status_code == 200:
                self.record.take(query, places, response.json()["results"])
            else:
                await asyncio.sleep(1)

    async def watch(self, ends: float) -> None:
        """Memory, every five seconds."""
        began = time.perf_counter()
        while time.perf_counter() < ends:
            process = self.server.process
            assert process is not None
            sizes = (resident(process.pid), resident(self.server.model_process))
            self.samples.append(((time.perf_counter() - began) / 60, *sizes))
            await asyncio.sleep(5)

    async def break_things(self, ends: float, every: float) -> None:
        """The next fault, every so many seconds."""
        gentle: list[Callable[[], Awaitable[None]]] = [
            self.stop, self.held_back, self.nonsense, self.leave, self.crowd
        ]  # fmt: skip
        for name, body in rude_bodies().items():
            gentle.append(self.rude(name, body))
        began = time.perf_counter()
        for number in itertools.count():
            now = time.perf_counter()
            if now + every >= ends:
                break
            await asyncio.sleep(every)
            faults = gentle
            if now - began < (ends - began) / 3:
                faults = [self.kill, *gentle]
            fault = faults[number % len(faults)]
            self.counts[f"fault: {fault.__name__}"] += 1
            await fault()
            if (await self.client.get("/health")).status_code != 200:
                self.counts["not alive"] += 1

    async def kill(self) -> None:
        """The model's process is killed."""
        if (child := self.server.model_process) is not None:
            os.kill(child, signal.SIGKILL)

    async def stop(self) -> None:
        """The model's process does nothing for five seconds."""
        if (child := self.server.model_process) is not None:
            os.kill(child, signal.SIGSTOP)
            await asyncio.sleep(5)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGCONT)

    def rude(self, name: str, body: bytes) -> Callable[[], Awaitable[None]]:
        """A fault: another key sends a body four times at once, and leaves after twenty seconds."""

        async def send() -> None:
            headers = {"Authorization": "Bearer rude", "content-type": "application/json"}
            posts = []
            for _ in range(4):
                posts.append(self.client.post("/v1/rerank", content=body, headers=headers))
            with contextlib.suppress(asyncio.TimeoutError, httpx.TransportError):
                await asyncio.wait_for(asyncio.gather(*posts), 20)

        send.__name__ = name
        return send

    async def held_back(self) -> None:
        """Ten connections of another key send all of 10 MB but the last byte, and wait."""
        head = (
            b"POST /v1/rerank HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer rude\r\n"
            b"Content-Type: application/json\r\nContent-Length: 10000000\r\n\r\n"
        )
        opened = [await asyncio.open_connection("127.0.0.1", self.server.port) for _ in range(10)]
        for _, writer in opened:
            writer.write(head + b" " * 9_999_999)
        await asyncio.sleep(12)
        for _, writer in opened:
            writer.close()

    async def nonsense(self) -> None:
        """Bodies that are large and none of what was agreed on."""
        headers = {"content-type": "application/json"}
        for content in (
            b"[" * 10_000_000,
            b'{"documents": [' + b"[]," * 5_000_000,
            b"\xff" * 10_000_000,
            b"{" * 25_000_000,
        ):
            # The connection may be closed while much is on its way.
            with contextlib.suppress(httpx.TransportError):
                await self.client.post("/v1/rerank", content=content, headers=headers)

    async def leave(self) -> None:
        """Fifty clients leave before they are answered."""
        rng = random.Random(time.perf_counter())
        tasks = []
        for _ in range(50):
            body = self.traffic.body(*self.traffic.request(rng))
            tasks.append(asyncio.create_task(self.client.post("/v1/rerank", json=body)))
        await asyncio.sleep(0.3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def crowd(self) -> None:
        """Forty clients more, for ten seconds."""
        ends = time.perf_counter() + 10
        await asyncio.gather(*self.askers(range(1000, 1040), ends))

    def askers(self, seeds: Iterable[int], ends: float) -> list[Coroutine[Any, Any, None]]:
        """Clients that ask until the end, one for each seed."""
        return [self.ask(random.Random(seed), ends) for seed in seeds]


async def soak(options: argparse.Namespace, server: Server) -> Soak:
    """All of it at a time."""
    async with clients(server.url) as client:
        client.headers["Authorization"] = "Bearer polite"
        run = Soak(server, Mixed.of(options), client)
        ends = time.perf_counter() + 60 * options.minutes
        asking = run.askers(range(options.clients), ends)
        await asyncio.gather(run.watch(ends), run.break_things(ends, options.every), *asking)
        run.counts["restarts"] = int(server.metric("rsrank_restarts_total"))
    return run


def main() -> None:
    """Command line; the exit status is 1 if anything was wrong or lost."""
    parser = arguments(str(__doc__))
    parser.set_defaults(documents=40, corpus=300, timeout=60.0)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--every", type=float, default=60.0, help="seconds from one fault to the next"
    )
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args()
    # A small cache is full after a minute. From then on, memory must not grow.
    settings = ["--timeout", str(options.timeout), "--cache-size", "64MB"]
    server = Server("mini", *server_options(options), *settings)
    server.popen = {"env": {**os.environ, "RSRANK_API_KEY": "polite,rude"}}
    with server:
        run = asyncio.run(soak(options, server))
    process = server.process
    assert process is not None
    print(f"{options.minutes:g} minutes, {options.clients} clients, {options.dtype}; {machine()}\n")
    print(f"{dict(run.counts)}; exit status {process.returncode}")
    message, wrong = verdict(run.traffic, [run.record], options.dtype)
    print(f"{message}\n")
    rows = []
    for share in (0, 1 / 12, 1 / 3, 2 / 3, 0.999):
        minute, server_bytes, model_bytes = run.samples[int(share * len(run.samples))]
        rows.append([f"{minute:.1f}", f"{server_bytes / 1e6:.0f}", f"{model_bytes / 1e6:.0f}"])
    print(markdown.table(["minute", "server MB", "model MB"], rows, texts=0))
    lost = 0
    for name, count in run.counts.items():
        if name.startswith(("lost", "500", "504", "not")):
            lost += count
    _, server_sizes, sizes = zip(*run.samples, strict=True)
    times = growth(sizes)
    print(
        f"\nmodel's process: at most {max(sizes) / 1e6:.0f} MB; at least {times:.3f} times as much "
        "in the last quarter as in the quarter before"
    )
    largest = max(server_sizes)
    print(f"HTTP process: at most {largest / 1e6:.0f} MB; promised: {MOST_MEMORY / 1e6:.0f}")
    grows = times > MOST_GROWTH or largest > MOST_MEMORY
    sys.exit(bool(lost or wrong or grows or process.returncode))


def growth(sizes: Sequence[int]) -> float:
    """The least of the last quarter of sizes divided by the least of the quarter before."""
    quarter = len(sizes) // 4
    return min(sizes[-quarter:]) / min(sizes[-2 * quarter : -quarter])


if __name__ == "__main__":
    main()
