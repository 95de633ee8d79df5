"""The service under load: `rsrank serve` in processes of its own, and many clients over HTTP.

    python -m benchmarks.load throughput   # requests a second and latencies, and a cross-encoder's
    python -m benchmarks.load rude         # nine polite clients, and one that sends all it may
    python -m benchmarks.load kill         # the model's process is killed again and again
    python -m benchmarks.load restart      # the server itself is killed and started again
    python -m benchmarks.load disk         # the disk of the cached prefixes is full (Linux, root)

Every answer must have its rows, and a sample of all scores is compared with those of plain
transformers code in float32 (`workload.by_hooks`), which shares nothing with the service but the
weights. How far they lie apart is printed, and how far a pair's scores lie apart from one request
to the next. A request holds a made-up question and passages
drawn from a corpus by popularity (Zipf), as in a RAG application, so that some come back.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from research import markdown
from rsrank_rag.ranking.pairs import Pair, parts_of, spans_of
from rsrank_rag.reading.parts import Reading

from .timing import machine, memory_status
from .workload import Plain, by_hooks, load, on_torch, passages, question

TOLERANCE = {"int8": 0.5, "float32": 0.001, "bfloat16": 0.2}
"""Largest difference from the plain float32 score.

Rounding to bfloat16 alone gives up to 0.1, and rounding of documents to int8 up to 0.35.
"""

SAMPLE = 200
"""Pairs of those that were answered which are scored again."""


MOST_MEMORY = 300_000_000 + 30 * 10_000_000
"""Bytes that the HTTP process may take with the default of --max-body (docs/reliability.md)."""


@dataclass(frozen=True)
class Traffic:
    """What clients ask.

    Attributes:
        corpus: Passages.
        questions: Questions.
        count: Passages in a request.
    """

    corpus: list[str]
    questions: list[str]
    count: int

    @classmethod
    def made_up(cls, options: argparse.Namespace) -> Traffic:
        """A corpus of passages of like length, and questions of twelve words."""
        corpus = passages(options.corpus, options.words, 1 / 3)
        rng = random.Random(2)
        words = question(200).split()
        questions = [" ".join(rng.sample(words, 12)) for _ in range(50)]
        return cls(corpus, questions, options.documents)

    def request(self, rng: random.Random) -> tuple[int, list[int]]:
        """Numbers of a question and of distinct passages, the popular ones more often."""
        places: dict[int, None] = {}
        while len(places) < self.count:
            places.setdefault(min(int(rng.paretovariate(0.7)) - 1, 10**9) % len(self.corpus))
        return rng.randrange(len(self.questions)), list(places)

    def body(self, query: int, places: Sequence[int]) -> dict[str, Any]:
        """The body of a request, from its numbers."""
        documents = [self.corpus[place] for place in places]
        return {"query": self.questions[query], "documents": documents}


@dataclass
class Record:
    """What became of requests."""

    latencies: list[float] = field(default_factory=list)  # seconds of those that were answered
    outcomes: Counter[str] = field(default_factory=Counter)  # how many had which status
    wrong: int = 0  # answers with a missing row
    scores: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    """The lowest and the highest score of each pair of a question and a passage."""
    started: float = field(default_factory=time.perf_counter)
    ended: float = 0.0

    @property
    def failed(self) -> int:
        """Requests that were not answered with 200."""
        return sum(self.outcomes.values()) - self.outcomes["200"]

    @property
    def rate(self) -> float:
        """Requests answered a second."""
        return len(self.latencies) / (self.ended - self.started)

    def quantile(self, share: float) -> float:
        """Milliseconds within which this share was answered."""
        if not self.latencies:
            return float("nan")
        ranked = sorted(self.latencies)
        return 1000 * ranked[min(len(ranked) - 1, int(share * len(ranked)))]

    def add(self, other: Record) -> None:
        """Count the requests of another record, too; not their scores."""
        self.latencies += other.latencies
        self.outcomes += other.outcomes

    def take(self, query: int, places: list[int], rows: list[dict[str, float]]) -> None:
        """An answer: one row for each passage, or it is wrong."""
        scores = {int(row["index"]): row["relevance_score"] for row in rows}
        if len(rows) != len(places) or scores.keys() != set(range(len(places))):
            self.wrong += 1
            return
        for index, score in scores.items():
            pair = (query, places[index])
            low, high = self.scores.get(pair, (score, score))
            self.scores[pair] = (min(low, score), max(high, score))


class Server:
    """`rsrank serve` as a process.

    Args:
        model: What it serves.
        arguments: More of its options.
    """

    def __init__(self, model: str, *arguments: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [sys.executable, "-m", "rsrank_rag", "serve"]
        self.command += ["--model", model, "--port", str(self.port), *arguments]
        self.popen: dict[str, Any] = {}  # how the process is started
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.end(signal.SIGTERM)

    def start(self) -> None:
        """Start it and wait until it is ready."""
        # The log has a line for each request.
        options = {"stderr": subprocess.DEVNULL, **self.popen}
        self.process = subprocess.Popen(self.command, **options)
        for _ in range(6000):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/ready").status_code == 200:
                    return
            if self.process.poll() is not None:
                sys.exit(f"The server ended with {self.process.returncode}.")
            time.sleep(0.05)
        sys.exit("The server did not become ready in five minutes.")

    def end(self, how: signal.Signals) -> None:
        """Send a signal and wait for the end."""
        assert self.process is not None
        self.process.send_signal(how)
        self.process.wait(150)

    @property
    def model_process(self) -> int | None:
        """Id of the process with the model; the server's other child tracks its semaphores."""
        assert self.process is not None
        tasks = Path(f"/proc/{self.process.pid}/task/{self.process.pid}")
        for child in (tasks / "children").read_text().split():
            with contextlib.suppress(OSError):  # it has ended just now
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        return None

    def metric(self, name: str) -> float:
        """A sum over a metric's samples, as /metrics gives them."""
        headers = {"Authorization": "Bearer polite"}  # for a service with keys
        total = 0.0
        for line in httpx.get(f"{self.url}/metrics", headers=headers).text.splitlines():
            if line.partition("{")[0].partition(" ")[0] == name:
                total += float(line.rpartition(" ")[2])
        return total


def resident(process: int | None, field: str = "VmRSS") -> int:
    """Bytes of memory that a process holds (VmHWM: has held at most); 0 if it is gone."""
    if process is None:
        return 0
    try:
        return memory_status(field, process)
    except OSError:
        return 0


def verdict(traffic: Traffic, records: Sequence[Record], dtype: str) -> tuple[str, int]:
    """One line about the answers, as the module's docstring says, and the number of wrong ones."""
    plain = load("mini", device="cpu", dtype="float32")
    reference = Plain(plain, by_hooks(plain), 1)
    missing = 0
    scores: dict[tuple[int, int], list[float]] = {}
    for record in records:
        missing += record.wrong
        for numbers, extremes in record.scores.items():
            scores.setdefault(numbers, []).extend(extremes)
    sample = random.Random(0).sample(sorted(scores), min(SAMPLE, len(scores)))
    distances = [0.0]
    for query, place in sample:
        # Of a long passage, the score of the best window counts.
        reading = Reading(long_documents=plain.long_documents)
        pair = Pair(traffic.questions[query], traffic.corpus[place], reading=reading)
        parts = parts_of(pair, spans_of(pair, plain.token_ends))
        expected = max(reference.score(pair.query, [part.document for part in parts]))
        for score in scores[query, place]:
            distances.append(abs(score - expected))
    apart = max(map(np.ptp, scores.values()), default=0.0)
    wrong = int(np.count_nonzero(np.greater(distances, TOLERANCE[dtype])))
    line = (
        f"{missing} answers with missing rows; of {len(sample)} pairs scored again by plain "
        f"float32 code, {wrong} scores are more than {TOLERANCE[dtype]} away, the furthest "
        f"{max(distances):.4f}; the same pair in other requests: at most {apart:.4f} apart"
    )
    return line, missing + wrong


async def ask(
    client: httpx.AsyncClient, traffic: Traffic, rng: random.Random, record: Record
) -> bool:
    """One request, recorded; whether it was answered with scores."""
    query, places = traffic.request(rng)
    body = {"model": "any", **traffic.body(query, places)}
    started = time.perf_counter()
    try:
        response = await client.post("/v1/rerank", json=body)
    except httpx.TransportError as error:
        record.outcomes[f"no connection ({type(error).__name__})"] += 1
        await asyncio.sleep(0.05)
        return False
    record.outcomes[str(response.status_code)] += 1
    if response.status_code == 200:
        record.latencies.append(time.perf_counter() - started)
        record.take(query, places, response.json()["results"])
    return response.status_code == 200


@contextlib.asynccontextmanager
async def clients(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """Connections without a limit of their own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        yield client


async def closed_loop(
    url: str,
    traffic: Traffic,
    concurrency: int,
    seconds: float,
    *others: Awaitable[None],
) -> Record:
    """Clients that ask again as soon as they are answered, or 0.5 s after an error response."""
    async with clients(url) as client:
        record = Record()
        ends = record.started + seconds

        async def one(number: int) -> None:
            rng = random.Random(number)
            while time.perf_counter() < ends:
                if not await ask(client, traffic, rng, record):
                    await asyncio.sleep(0.5)

        await asyncio.gather(*map(one, range(concurrency)), *others)
        record.ended = time.perf_counter()
    return record


async def open_loop(url: str, traffic: Traffic, rate: float, seconds: float) -> Record:
    """Requests as a Poisson process, whether or not the last one has been answered."""
    async with clients(url) as client:
        record, rng = Record(), random.Random(0)
        running = []
        due = record.started
        while due < record.started + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            running.append(asyncio.create_task(ask(client, traffic, rng, record)))
            due += rng.expovariate(rate)
        await asyncio.gather(*running)
        record.ended = time.perf_counter()
    return record


@contextlib.contextmanager
def cross_encoder() -> Iterator[str]:
    """A cross-encoder of mini's size with random weights, as a model name for `rsrank serve`."""
    from transformers import AutoModelForSequenceClassification

    ranker = on_torch()
    base = ranker.backbone.model.config
    config = type(base).from_dict(
        {**base.to_dict(), "id2label": {0: "relevant"}, "label2id": {"relevant": 0}}
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
        ranker.prompts.tokenizer.save_pretrained(folder)
        yield f"cross-encoder:{folder}"


def throughput(options: argparse.Namespace) -> None:
    """Requests a second and latencies, for mini and a cross-encoder, in turns."""
    traffic = Traffic.made_up(options)
    records: dict[str, dict[str, list[Record]]] = {"mini": {}, "cross-encoder": {}}
    hits: list[float] = []
    with cross_encoder() as other:
        for turn in range(options.turns):
            models = ["mini", other]
            if turn % 2:
                models.reverse()
            for model in models:
                with Server(model, *server_options(options)) as server:
                    of_turn = one_turn(server.url, traffic, options)
                    if model == "mini":
                        taken = server.metric("rsrank_prefix_device_hits_total")
                        hits.append(taken / (taken + server.metric("rsrank_prefix_misses_total")))
                for kind, record in of_turn.items():
                    records[model.partition(":")[0]].setdefault(kind, []).append(record)
    print(
        f"{traffic.count} passages of {options.words} words a request, {options.dtype}; "
        f"{machine()}\n"
    )
    rows = []
    for name, by_kind in records.items():
        for kind, of_kind in by_kind.items():
            of_kind = sorted(of_kind, key=lambda record: record.rate)
            median = of_kind[len(of_kind) // 2]
            failed = sum(record.failed for record in of_kind)
            cells = [name, kind, f"{median.rate:.1f}", f"{median.quantile(0.5):.0f}"]
            rows.append([*cells, f"{median.quantile(0.99):.0f}", failed])
    head = ["", "load", "requests/s", "p50 ms", "p99 ms", "other than 200"]
    print(markdown.table(head, rows, texts=2))
    for kind, of_mini in records["mini"].items():
        pairs = zip(of_mini, records["cross-encoder"][kind], strict=True)
        ratio = statistics.median(mini.rate / other.rate for mini, other in pairs)
        print(f"mini / cross-encoder, {kind}: {ratio:.2f} x requests/s")
    print(f"passages found among the kept ones: {statistics.median(hits):.0%}")
    of_all = list(itertools.chain(*records["mini"].values()))
    print(f"mini: {verdict(traffic, of_all, options.dtype)[0]}")


def one_turn(url: str, traffic: Traffic, options: argparse.Namespace) -> dict[str, Record]:
    """Clients in closed loops, then requests at 60% of the best rate; records by kind of load."""
    records = {}
    for concurrency in options.clients:
        loop = closed_loop(url, traffic, concurrency, options.seconds)
        records[f"{concurrency} clients"] = asyncio.run(loop)
    best = max(record.rate for record in records.values())
    loop = open_loop(url, traffic, 0.6 * best, options.seconds)
    records["60% of the most, at random times"] = asyncio.run(loop)
    return records


def rude_bodies() -> dict[str, bytes]:
    """Bodies of requests that take as much as the service allows, by what they consist of."""
    long = "It was a long day. " * 52_500
    query = "How did the market of the harbour do in winter? " * 200

    def body(documents: Sequence[str], query: str = "q", **fields: object) -> bytes:
        return json.dumps({"query": query, "documents": documents, **fields}).encode()

    def cut(count: int, size: int) -> list[str]:
        """So many different texts of so many characters."""
        return [long[number : number + size] for number in range(count)]

    windows = {"long_documents": "windows", "max_characters": None}
    short = [f"{number} short" for number in range(120)]
    return {
        "999,000 characters in windows": body(cut(1, 999_000), **windows),
        "five of 130,000 in windows": body(cut(5, 130_000), **windows),
        "ten of 900,000, cut": body(cut(10, 900_000)),
        "300,000 quotes in sentences": body(["\u201c" * 300_000], extract="sentences"),
        "a thousand of 500 characters": body([f"{n} {long[:500]}" for n in range(1000)]),
        "long queries": body(short, query[:9990]),
        "copies and long queries": body(short[:60] * 2, query[:9990]),
        "answers of 16 MB": body(["1 " + "x" * 800_000] * 10, return_documents=True, top_k=10),
        "10 MB of []": b'{"query": "q", "documents": [' + b",".join([b"[]"] * 3_300_000) + b"]}",
        "10 MB in one text": body(["x" * 9_900_000]),
    }


MOST_TIMES = 3.0
"""How many times longer the polite clients' p99 may be beside a rude one."""

RUDE_AT_ONCE = 4
"""Requests of the rude client at a time."""

POLITE = [f"polite{number}" for number in range(9)]
"""API keys of the polite clients."""


async def polite_clients(
    url: str, traffic: Traffic, seconds: float, body: bytes | None, seed: int
) -> Record:
    """Nine clients that pause between requests, each with a key of its own, and perhaps a tenth.

    Each of the nine begins with a pause, too: a burst of nine first requests would be the slowest
    hundredth of all, with a rude client and without one. Another seed gives other requests, so
    that not all of their documents have been read before.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def client(key: str) -> httpx.AsyncClient:
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            http = httpx.AsyncClient(base_url=url, timeout=600, headers=headers)
            return await stack.enter_async_context(http)

        # A client takes about 20 ms to make, which must not count as waiting.
        clients_of_keys = [await client(key) for key in POLITE]
        record = Record()
        ends = record.started + seconds

        async def polite(number: int) -> None:
            rng = random.Random(len(POLITE) * seed + number)
            await asyncio.sleep(rng.expovariate(1.0))
            while time.perf_counter() < ends:
                await ask(clients_of_keys[number], traffic, rng, record)
                await asyncio.sleep(rng.expovariate(1.0))

        # The rude client has a process of its own, so that its work does not slow these down.
        rude = None
        if body is not None:
            rude = await asyncio.create_subprocess_exec(
                sys.executable, "-c", RUDE_CLIENT, url, str(RUDE_AT_ONCE), stdin=-1
            )
            assert rude.stdin is not None
            rude.stdin.write(body)
            rude.stdin.close()
        await asyncio.gather(*map(polite, range(len(POLITE))))
        record.ended = time.perf_counter()
        if rude is not None:
            rude.kill()
            await rude.wait()
    return record


RUDE_CLIENT = """
import sys, threading, time, httpx
url, count = sys.argv[1], int(sys.argv[2])
body = sys.stdin.buffer.read()
headers = {"Authorization": "Bearer rude", "Content-Type": "application/json"}
def besiege():
    with httpx.Client(base_url=url, timeout=600, headers=headers) as http:
        while True:
            try:
                answer = http.post("/v1/rerank", content=body)
                # A flood that does not wait after a 429 is a proxy's business.
                time.sleep(float(answer.headers.get("Retry-After", 0)))
            except httpx.TransportError:
                time.sleep(0.1)
for _ in range(count):
    threading.Thread(target=besiege).start()
"""


def rude(options: argparse.Namespace) -> None:
    """Latencies of nine polite clients, with and without one client that sends all it may."""
    traffic = Traffic.made_up(options)
    server = Server("mini", *server_options(options))
    server.popen = {"env": {**os.environ, "RSRANK_API_KEY": ",".join(["rude", *POLITE])}}
    calm = Record()
    records = {"nothing": calm}

    def turn(body: bytes | None, seed: int) -> Record:
        return asyncio.run(polite_clients(server.url, traffic, options.seconds, body, seed))

    with server:
        # The first seconds, in which the cache fills, do not count.
        turn(None, 0)
        for seed, (name, body) in enumerate(rude_bodies().items(), 1):
            if options.only in name:
                # In turns, because other work on the machine comes and goes.
                calm.add(turn(None, 2 * seed))
                records[name] = turn(body, 2 * seed + 1)
    print(f"{traffic.count} passages a request, {options.dtype}; {machine()}\n")
    broken = False
    rows = []
    for name, record in records.items():
        times = record.quantile(0.99) / calm.quantile(0.99)
        broken = broken or times > MOST_TIMES or record.failed > 0
        cells = [name, sum(record.outcomes.values()), f"{record.quantile(0.5):.0f}"]
        rows.append([*cells, f"{record.quantile(0.99):.0f}", f"{times:.2f}", record.failed])
    head = ["beside", "requests", "p50 ms", "p99 ms", "times the p99 without", "other than 200"]
    print(markdown.table(head, rows))
    sys.exit(broken)


def kill(options: argparse.Namespace) -> None:
    """The model's process is killed under load; nobody may notice but by waiting."""
    traffic = Traffic.made_up(options)
    killed = 0
    with Server("mini", *server_options(options)) as server:
        ends = time.perf_counter() + options.seconds

        async def murder() -> None:
            nonlocal killed
            while time.perf_counter() < ends - 5:
                await asyncio.sleep(4)
                ready = await asyncio.to_thread(httpx.get, f"{server.url}/ready", timeout=60)
                if ready.status_code == 200 and (child := server.model_process) is not None:
                    os.kill(child, signal.SIGKILL)
                    killed += 1

        record = asyncio.run(
            closed_loop(server.url, traffic, options.clients[-1], options.seconds, murder())
        )
    print(
        f"{killed} kills of the model's process in {options.seconds:.0f} s, {options.clients[-1]} "
        "clients"
    )
    print(f"{dict(record.outcomes)}; {verdict(traffic, [record], options.dtype)[0]}")
    print(
        f"p50 {record.quantile(0.5):.0f} ms, p99 {record.quantile(0.99):.0f} ms, most "
        f"{record.quantile(1):.0f} ms"
    )


def restart(options: argparse.Namespace) -> None:
    """The server is killed and started again under load by our own client, which tries again."""
    from rsrank_rag.errors import RSRankError
    from rsrank_rag.remote.client import RemoteReranker

    traffic = Traffic.made_up(options)
    record = Record()
    server = Server("mini", *server_options(options))
    server.start()
    counts: Counter[str] = Counter()
    ends = time.perf_counter() + options.seconds

    async def one(number: int, ranker: RemoteReranker) -> None:
        rng = random.Random(number)
        while time.perf_counter() < ends:
            query, places = traffic.request(rng)
            try:
                ranked = await ranker.arank(**traffic.body(query, places), threshold=None)
            except RSRankError as error:
                counts[type(error).__name__] += 1
                continue
            rows = []
            for document in ranked.kept:
                rows.append({"index": document.index, "relevance_score": document.score})
            counts["answered"] += 1
            record.take(query, places, rows)

    async def murder() -> None:
        while time.perf_counter() < ends - 15:
            await asyncio.sleep(5)
            await asyncio.to_thread(server.end, signal.SIGKILL)
            counts["server killed"] += 1
            await asyncio.to_thread(server.start)

    async def run() -> None:
        ranker = RemoteReranker(server.url, timeout=60, max_retries=12)
        asking = [one(number, ranker) for number in range(options.clients[-1])]
        await asyncio.gather(murder(), *asking)

    try:
        asyncio.run(run())
    finally:
        server.end(signal.SIGTERM)
    print(f"{options.seconds:.0f} s, {options.clients[-1]} clients: {dict(counts)}")
    print(verdict(traffic, [record], options.dtype)[0])


def disk(options: argparse.Namespace) -> None:
    """Prefixes are kept in a file system of one megabyte, which is soon full."""
    traffic = Traffic.made_up(options)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True
        )
        if done.returncode:
            sys.exit(
                f"No file system of one megabyte could be made: {done.stderr.decode().strip()}"
            )
        try:
            with Server("mini", *server_options(options), "--cache-folder", folder) as server:
                record = asyncio.run(
                    closed_loop(server.url, traffic, options.clients[-1], options.seconds)
                )
                errors = server.metric("rsrank_prefix_write_errors_total")
        finally:
            subprocess.run(["umount", folder], check=True)
    print(f"{dict(record.outcomes)}; {verdict(traffic, [record], options.dtype)[0]}")
    print(f"{errors:.0f} prefixes could not be written")


def arguments(description: str) -> argparse.ArgumentParser:
    """Options of traffic and server."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=20, help="passages in a request")
    parser.add_argument("--words", type=int, default=100)
    parser.add_argument("--corpus", type=int, default=2000, help="passages in all")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="of soak: seconds for an answer"
    )
    parser.add_argument("--dtype", default="int8", choices=TOLERANCE)
    return parser


def server_options(options: argparse.Namespace) -> list[str]:
    """Options for `rsrank serve`."""
    return ["--dtype", options.dtype]


def main() -> None:
    """Command line."""
    parser = arguments(str(__doc__))
    parts = {part.__name__: part for part in (throughput, rude, kill, restart, disk)}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", default="", help="of rude: bodies with this in their name")
    options = parser.parse_args()
    parts[options.part](options)


if __name__ == "__main__":
    main()
