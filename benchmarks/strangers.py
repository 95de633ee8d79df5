"""Attacks on `rsrank serve`: malformed, huge and misleading requests, in turn, and odd starts.

    python -m benchmarks.strangers                # all of them
    python -m benchmarks.strangers --only head    # those with this word in their name

Meanwhile /health is requested again and again over new connections; the longest wait stands in the
row of the attack. The service has two keys and may open 256 files. Ends with 1 if an answer
was none of those that are allowed (500 never is), /health was not answered, the HTTP process took
more memory than docs/reliability.md says, or the log has a traceback or a line that is no JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import itertools
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from research import markdown

from .load import MOST_MEMORY, Server, resident, rude_bodies
from .timing import machine

KEY = "stranger"
OTHER = "polite"
OPEN_HEAD = b"POST /v1/rerank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEAD = OPEN_HEAD + f"Authorization: Bearer {KEY}\r\n".encode()
GOOD = b'{"query": "q", "documents": ["one", "two"]}'
LENGTH = b"Content-Length: %d\r\n" % len(GOOD)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
BIG = 10**4000
PATIENCE = 60.0
"""Silent seconds after which a connection counts as hanging; the service's timeout is 20."""

Attack = Callable[[int], Counter[str]]
"""Attacks the service at this port; what was answered, and how often."""

Attacks = dict[str, tuple[Attack, str]]
"""By their names; with each, the answers that are allowed."""


def talk(port: int, pieces: Iterable[bytes], *, leave: bool = False) -> Counter[str]:
    """Send pieces over one connection and read to its end, or ``leave``; counts of statuses."""
    answer = b""
    ended = "closed"
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            if leave:
                return Counter({"left": 1})
            while piece := connection.recv(1 << 16):
                answer += piece
        except TimeoutError:
            ended = "hangs"
        except OSError:
            # Closed while much was on its way; what was answered may still be there.
            with contextlib.suppress(OSError):
                answer += connection.recv(1 << 16)
    statuses = Counter[str]()
    for response in answer.split(b"HTTP/1.1 ")[1:]:
        statuses[response[:3].decode()] += 1
    return statuses or Counter({ended: 1})


def says(*pieces: bytes) -> Attack:
    """These pieces, over one connection."""
    return lambda port: talk(port, pieces)


def each(attacks: Iterable[Attack]) -> Attack:
    """One after another."""
    in_order = list(attacks)

    def run(port: int) -> Counter[str]:
        statuses = Counter[str]()
        for attack in in_order:
            statuses += attack(port)
        return statuses

    return run


def post(body: bytes, *more: bytes, head: bytes = HEAD) -> Attack:
    """One request that is well-formed as HTTP."""
    lines = [*more, b"Content-Length: %d" % len(body), b"Connection: close", b"", body]
    return says(head + b"\r\n".join(lines))


def rerank(**fields: object) -> Attack:
    """A request with these fields added to plain ones, or in their place."""
    return post(json.dumps({"query": "q", "documents": ["one", "two"], **fields}).encode())


def bodyless(target: str, method: str = "GET", *more: str) -> Attack:
    """A request without a body, and without a key unless ``more`` has it."""
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", "Connection: close", *more, "", ""]
    return says("\r\n".join(lines).encode())


PLAIN_OF_OTHER = post(GOOD, head=HEAD.replace(KEY.encode(), OTHER.encode()))
"""A plain request of the other key."""


def slowly(port: int) -> Counter[str]:
    """A body of which a byte comes every half a second, for a minute at most."""

    def pieces() -> Iterable[bytes]:
        yield HEAD + b"Content-Length: 1000000\r\n\r\n"
        for _ in range(120):
            yield b" "
            time.sleep(0.5)

    return talk(port, pieces())


def endless(port: int) -> Counter[str]:
    """Chunks of 100 MB together, without an end."""
    chunks = itertools.repeat(b"10000\r\n" + b" " * 65536 + b"\r\n", 1500)
    return talk(port, itertools.chain([HEAD + CHUNKED + b"\r\n"], chunks))


def unfinished(port: int) -> Counter[str]:
    """A body that is shorter than was said; the client leaves."""
    return talk(port, [HEAD + b"Content-Length: 900\r\n\r\n" + GOOD], leave=True)


def recovers(port: int) -> Counter[str]:
    """A plain request again and again, for five minutes at most, until it is not refused."""
    ends = time.monotonic() + 300
    statuses = post(GOOD)(port)
    while statuses == {"429": 1} and time.monotonic() < ends:
        time.sleep(1)
        statuses = post(GOOD)(port)
    return statuses


def large(name: str, count: int = 4) -> Attack:
    """A body of `benchmarks.load`, several times at once, and plain requests of another key.

    What the large bodies are answered counts with "greedy:" before the status.
    """
    attack = post(rude_bodies()[name])

    def run(port: int) -> Counter[str]:
        with ThreadPoolExecutor(count) as pool:
            answers = pool.map(attack, [port] * count)
            statuses = each([PLAIN_OF_OTHER] * 10)(port)
            for status, number in sum(answers, Counter[str]()).items():
                statuses[f"greedy:{status}"] += number
        return statuses

    return run


def held_back(port: int) -> Counter[str]:
    """Ten bodies without their last byte; meanwhile, plain requests of another key."""
    size = 10_000_000
    with contextlib.ExitStack() as held:
        for _ in range(10):
            connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
            held.enter_context(connection)
            with contextlib.suppress(OSError):
                connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % size)
                connection.sendall(b" " * (size - 1))
        return each([PLAIN_OF_OTHER] * 50)(port)


def greedy() -> Attacks:
    """One key takes all it may; another key must be answered."""
    allowed = "200 greedy:200 greedy:400 greedy:429 greedy:504"
    attacks: Attacks = {f"greedy: {name}": (large(name), allowed) for name in rude_bodies()}
    many = json.dumps({"query": "q", "documents": ["x " * 260_000] * 19}).encode()
    flood = each([post(many.replace(b"x ", b"%d " % n)) for n in range(60)])
    attacks["greedy: bodies that are held back"] = (held_back, "200")
    attacks["greedy: 60 requests of 19 large documents"] = (flood, "200 413")
    return attacks


def texts(entry: bytes, size: int = 9_900_000) -> bytes:
    """A body of about so many bytes, full of this entry."""
    entries = b",".join([entry] * (size // (len(entry) + 1)))
    return b'{"query": "q", "documents": [' + entries + b"]}"


def heads() -> Attacks:
    """What comes before a body."""
    addresses = ("x", "1.2.3.4:99999", "[::1", "[::1]:x", ",,,", "a:b:c", "unix:", "\u00e9", " ")

    def forwarded(address: str) -> Attack:
        return bodyless("/health", "GET", f"X-Forwarded-For: {address}")

    odd = (
        "X-Request-ID: \u00e9\x7f",
        "traceparent: 00-x-y-z",
        "Authorization: \u00e9",
        "Cookie: =",
    )
    return {
        "head: 60 MB": (says(OPEN_HEAD + b"X-Large: " + b"x" * 60_000_000), "400 closed"),
        "head: 200 MB": (says(OPEN_HEAD + b"X-Large: " + b"x" * 200_000_000), "400 closed"),
        "head: 100,000 lines": (says(OPEN_HEAD + b"X: y\r\n" * 100_000), "400 closed"),
        "head: NUL and control bytes": (
            says(b"GET /health\0 HTTP/1.1\r\nHost: a\r\nX: \1\0\r\n\r\n"),
            "400",
        ),
        "head: two hosts": (bodyless("/health", "GET", "Host: evil.example"), "400"),
        "head: no host": (says(b"GET /health HTTP/1.1\r\n\r\n"), "400"),
        "head: HTTP/1.0": (says(b"GET /health HTTP/1.0\r\n\r\n"), "200"),
        "head: HTTP/9.9": (
            says(b"GET /health HTTP/9.9\r\nHost: a\r\nConnection: close\r\n\r\n"),
            "200 400",
        ),
        "head: HTTP/2": (says(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), "400 401"),
        "head: TLS": (says(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500), "400"),
        "head: a websocket": (
            bodyless("/health", "GET", "Connection: Upgrade", "Upgrade: websocket"),
            "200",
        ),
        "head: h2c": (
            bodyless("/health", "GET", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c"),
            "200",
        ),
        "head: forwarded for odd names": (
            each(map(forwarded, addresses)),
            "200",
        ),
        "head: odd values": (bodyless("/health", "GET", *odd), "200 400"),
    }


def frames() -> Attacks:
    """Where bodies begin and end."""
    codings = (b"gzip, chunked", b"identity", b"xchunked", b"chunked\x0b", b"chunked, identity")
    lengths = (b"-1", b"+43", b"0x2b", b"4_3", b"1e3", b"", b"43,44", b"9" * 5000)
    sizes = (b"-2b", b"0x2b", b"2b" * 5000, b"2 b", b"", b"2b;" + b"x" * 100_000)
    bytes_apart = (
        HEAD + CHUNKED + b"Connection: close\r\n\r\n" + b"1\r\n \r\n" * 1_000_000 + b"0\r\n\r\n"
    )
    last = b"Connection: close\r\n\r\n"

    def coded(coding: bytes) -> Attack:
        return says(HEAD + b"Transfer-Encoding: " + coding + b"\r\n\r\n0\r\n\r\n")

    def as_long_as(length: bytes) -> Attack:
        return says(HEAD + b"Content-Length: " + length + b"\r\n\r\n" + GOOD)

    def in_chunk(size: bytes) -> Attack:
        return says(HEAD + CHUNKED + last + size + b"\r\n" + GOOD + b"\r\n0\r\n\r\n")

    return {
        "framing: two lengths": (
            says(HEAD + b"Content-Length: 5\r\n" + LENGTH + b"\r\n" + GOOD),
            "400",
        ),
        "framing: a length and chunks": (
            says(HEAD + LENGTH + CHUNKED + b"Connection: close\r\n\r\n0\r\n\r\n" + GOOD),
            "200 400",
        ),
        "framing: chunks and a length": (
            says(HEAD + CHUNKED + LENGTH + b"Connection: close\r\n\r\n0\r\n\r\n" + GOOD),
            "200 400",
        ),
        "framing: chunked twice": (says(HEAD + CHUNKED + CHUNKED + b"\r\n0\r\n\r\n"), "400 501"),
        "framing: other codings": (each(map(coded, codings)), "400 501"),
        "framing: a space before the colon": (
            says(HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n"),
            "400",
        ),
        "framing: absurd lengths": (each(map(as_long_as, lengths)), "400"),
        "framing: absurd sizes of chunks": (each(map(in_chunk, sizes)), "200 400 closed"),
        "framing: nonsense for a chunk": (
            says(OPEN_HEAD + CHUNKED + b"\r\n", b"nonsense\r\n\r\n"),
            "400 401 closed",
        ),
        "framing: bare line feeds": (
            says((HEAD + LENGTH + last).replace(b"\r", b"") + GOOD),
            "200 400",
        ),
        "framing: more than was said": (says(HEAD + LENGTH + last + GOOD * 3), "200 400"),
        "framing: less than was said": (each([unfinished] * 20), "left"),
        "framing: half a body and no more": (
            says(HEAD + b"Content-Length: 900\r\n\r\n" + GOOD),
            "408",
        ),
        "framing: half a body, slowly": (slowly, "408"),
        "framing: 1 MB in chunks of a byte": (says(bytes_apart), "400 408"),
        "framing: the same without a key": (says(bytes_apart.replace(HEAD, OPEN_HEAD)), "401"),
        "framing: chunks without end": (endless, "413"),
        "framing: 2,000 requests at once": (
            says(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 2000),
            "200",
        ),
        "framing: 50 rankings at once": (says((HEAD + LENGTH + b"\r\n" + GOOD) * 50), "200 429"),
        "framing: 100-continue": (
            says(HEAD + LENGTH + b"Expect: 100-continue\r\n" + last, GOOD),
            "100 200",
        ),
        "framing: 100-continue without a key": (
            says(OPEN_HEAD + LENGTH + b"Expect: 100-continue\r\n" + last),
            "401",
        ),
    }


def large_bodies() -> Attacks:
    """Bodies that are large, or cost much."""
    nested = b"[" * 100_000
    hidden = rb'{"query": "\"", "documents": [' + b",".join([b"[]"] * 1_600_000) + b"]}"
    deep = (
        nested,
        nested + b"]" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": ' + nested + b"]" * 100_000 + b"}",
    )
    fields = (b"model", b"x", b"threshold", b"extract", b"instruction")

    def nested_in(field: bytes) -> Attack:
        start = b'{"query": "q", "documents": ["x"], "%s": ' % field
        return post(start + b"[" * 900 + b"]" * 900 + b"}")

    return {
        "body: 9.9 MB of []": (post(texts(b"[]")), "400 413"),
        "body: 9.9 MB of {}": (post(texts(b"{}")), "400 413"),
        "body: 9.9 MB of 0": (post(texts(b"0")), "400 413"),
        "body: 9.9 MB of [], as UTF-16 after a quote": (
            post(hidden.decode().encode("utf-16")),
            "400 413",
        ),
        "body: 9.9 MB in one text": (post(texts(b'"' + b"x" * 9_800_000 + b'"')), "200 429 504"),
        "body: 9.9 MB in 20 texts": (post(texts(b'"' + b"x" * 990_000 + b'"')), "200 429 504"),
        "body: 9.9 MB of escapes": (
            post(texts(b'"' + rb"\u0041" * 160_000 + b'"')),
            "200 429 504",
        ),
        "body: 9.9 MB of spaces": (post(b" " * 9_900_000 + GOOD), "200"),
        "body: 9.9 MB of digits": (post(b"[1." + b"1" * 9_900_000 + b"]"), "400"),
        "body: 9.9 MB in one name": (post(b'{"' + b"x" * 9_900_000 + b'": 1}'), "400"),
        "body: 50,000 objects in one": (
            rerank(documents=[{"text": "one", "x": [{}] * 50_000}]),
            "200",
        ),
        "body: 100,000 texts of one byte": (rerank(documents=["x"] * 100_000), "413"),
        "body: 1,000 texts of one byte": (rerank(documents=["x"] * 1000), "200 429 504"),
        "body: the same name 50,000 times": (
            post(b'{"query":"q",' + b'"documents":["x"],' * 50_000 + b'"x":1}'),
            "200",
        ),
        "body: a query of 1 MB": (rerank(query="x" * 1_000_000), "400"),
        "body: a query of 10,000 characters": (rerank(query="x y " * 2500), "200"),
        "body: 100,000 deep": (each(map(post, deep)), "400 413"),
        "body: 900 deep": (each(map(nested_in, fields)), "200 400"),
    }


def odd_bodies() -> Attacks:
    """Bodies that mean nothing, or something else."""
    kinds = (
        b"text/plain",
        b"multipart/form-data",
        b"application/json; charset=utf-16",
        b"\xff",
        b"",
    )
    fields = (
        "top_n",
        "min_docs",
        "max_tokens_per_doc",
        "truncate_prompt_tokens",
        "context",
        "threshold",
        "documents",
    )
    values = (BIG, -BIG, 2**63, 23_082_634_031, 1e308)
    parts: list[dict[str, object]] = [
        {},
        {"long_documents": "windows"},
        {"extract": "sentences"},
        {"extract": "sentences", "threshold": None},
    ]
    huge = []
    for value, name, part in itertools.product(values, fields, parts):
        huge.append(rerank(**{**part, name: value}))
    numbers = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"01", b"1.", b"--1", b"\xd9\xa1")
    half = [
        rerank(query="\ud800"),
        rerank(instruction="\ud800"),
        rerank(instruct="\ud800"),
        rerank(extract="\ud800"),
        rerank(documents=["\udfff", "x"]),
        rerank(documents=[{"text": "\ud800"}]),
        rerank(documents={"\ud800": 1}),
        rerank(chat_template_kwargs={"instruction": "\ud800"}),
    ]
    unseen = {
        "model": "\ud800",
        "x": {"\ud800": "\ud800"},
        "documents": [{"text": "x", "\ud800": "\ud800"}],
    }
    characters = ["\0", "\0x", "\ufeff", "\u0085", "\U0010ffff", "e" + "\u0301" * 5000]
    wrong = [b"null", b"1", b'"x"', b"[]", b"{}", b"[{}]", b"tru", b"{}{}", b"\xef\xbb\xbf{}"]
    wrong += [
        b'{"query": null}',
        b'{"query": "q", "documents": null}',
        b'{"query": "q", "documents": [null]}',
        b'{"query": ["q"], "documents": ["x"]}',
    ]

    def of_kind(kind: bytes) -> Attack:
        return post(GOOD, head=HEAD.replace(b"application/json", kind))

    def with_threshold(number: bytes) -> Attack:
        return post(b'{"query": "q", "documents": ["x"], "threshold": %s}' % number)

    return {
        "body: none": (post(b""), "400"),
        "body: gzip": (post(gzip.compress(GOOD), b"Content-Encoding: gzip"), "400 415"),
        "body: UTF-16": (post(GOOD.decode().encode("utf-16")), "200 400"),
        "body: Latin-1": (post('{"query": "\u00e9", "documents": ["x"]}'.encode("latin-1")), "400"),
        "body: other kinds": (each(map(of_kind, kinds)), "200 400"),
        "body: huge numbers": (each(huge), "200 400 413 422"),
        "body: numbers that are none": (each(map(with_threshold, numbers)), "400"),
        "body: half a surrogate pair": (each(half), "400 422"),
        "body: half a surrogate pair where nobody looks": (rerank(**unseen), "400"),
        "body: NUL and other odd characters": (
            rerank(query="\0 \u202e\ufffe", documents=characters, return_documents=True),
            "200",
        ),
        "body: of each wrong type": (each(map(post, wrong)), "400"),
    }


def doors() -> Attacks:
    """Keys, paths and methods."""
    paths = (
        "/ /health /ready /v1/models /v1/models/mini /info /metrics /explain "
        "/v1/rerank /v2/rerank /rerank /v1/ranking /openapi.json /nothing"
    )
    tricks = (
        "//info /./info /health/../info /%69nfo /info/ /health%2f..%2finfo /info?/health /INFO "
        "/health;/info http://localhost/info /info%00 /v1/models/%2e%2e%2f /\\info * "
        "/info#/health"
    )
    methods = ("HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "PATCH", "X" * 100)
    wrong = [
        "Bearer",
        "Bearer ",
        "Bearer \u00e9",
        "Bearer \u2028",
        "Bearer " + "x" * 10_000,
        f"Bearer {KEY} x",
        f"Bearer {KEY}x",
        f"Bearer-{KEY}",
        f"Bearer {KEY.upper()}",
        f"Basic {KEY}",
        KEY,
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY}\u00c3",
    ]
    right = [f"Bearer {KEY}", f"bearer {KEY}", f"Bearer   {KEY}  "]

    def with_key(key: str) -> Attack:
        return bodyless("/info", "GET", f"Authorization: {key}")

    def with_method(route: tuple[str, str]) -> Attack:
        return bodyless(*route, f"Authorization: Bearer {KEY}")

    routes = itertools.product(paths.split(), methods)
    return {
        "key: none": (post(GOOD, head=OPEN_HEAD), "401"),
        "key: 2,000 wrong ones": (
            each([with_key("Bearer wrong")] * 2000),
            "401",
        ),
        "key: odd ones": (
            each(map(with_key, wrong)),
            "401",
        ),
        "key: the right one, oddly written": (
            each(map(with_key, right)),
            "200",
        ),
        "paths: every method on every route": (
            each(map(with_method, routes)),
            "200 404 405",
        ),
        "paths: tricks to come in without a key": (
            each(map(bodyless, tricks.split())),
            "307 400 401 404",
        ),
        "paths: as long as a head may be": (bodyless("/" + "%41" * 5000), "401 404"),
        "paths: another machine": (bodyless("evil.example:443", "CONNECT"), "400 401 404 405"),
        "last: 250,000 sentences in one text, and a plain request after it": (
            each(
                [
                    rerank(documents=["Ab. " * 250_000], extract="sentences", max_characters=None),
                    recovers,
                ]
            ),
            "200 413 504",
        ),
    }


class Witness:
    """A thread that requests /health; it records the longest wait and the missing answers."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.longest = 0.0
        self.missed = 0
        self.requests = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        request = bodyless("/health")
        while not self._stop.is_set():
            started = time.perf_counter()
            statuses = Counter[str]()
            with contextlib.suppress(OSError):
                statuses = request(self.port)
            self.longest = max(self.longest, time.perf_counter() - started)
            self.requests += 1
            self.missed += statuses != {"200": 1}
            self._stop.wait(0.02)


def odd_lines(log: Path) -> list[str]:
    """Lines of the log that are no JSON, or tell of an error."""
    odd = []
    for line in log.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            record = {"exc_info": "no JSON"}
        if "LocalProtocolError" in line or "without completing response" in line:
            # uvicorn's own, where a body breaks off in nonsense: it closes the connection.
            continue
        if "exc_info" in record or record.get("level") == "ERROR":
            odd.append(line)
    return odd


STARTS = {
    "start: stdout is full": (">/dev/full", {}, 0),
    "start: stdout is closed": (">&-", {}, 0),
    "start: all standard files are closed": ("<&- >&- 2>&-", {}, 0),
    "start: no key in RSRANK_API_KEY": ("", {"RSRANK_API_KEY": ","}, 2),
    "start: a key that is no text": ("", {"RSRANK_API_KEY": "k\udcff"}, 2),
}
"""How the service is started: redirections, variables, and the exit status after SIGTERM."""


def start(redirections: str, variables: dict[str, str], expected: int) -> str:
    """Start a service and end it by SIGTERM; what was wrong."""
    server = Server("mini")
    command = ["sh", "-c", f'exec "$@" {redirections}', "sh", *server.command]
    process = subprocess.Popen(command, env={**os.environ, **variables}, stderr=subprocess.DEVNULL)
    ends = time.monotonic() + 120
    answer = Counter[str]()
    while time.monotonic() < ends and process.poll() is None and answer != {"200": 1}:
        with contextlib.suppress(OSError):
            answer = bodyless("/ready")(server.port)
        time.sleep(0.1)
    process.terminate()
    try:
        status = process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        return "it did not end"
    is_started = answer == {"200": 1}
    if status == expected and is_started == (expected == 0):
        return ""
    return f"/ready {dict(answer)}, exit status {status}"


def run(server: Server, name: str, attack: Attack, allowed: str) -> list[str]:
    """Make one attack and print its row; what was wrong."""
    started = time.perf_counter()
    with Witness(server.port) as witness:
        statuses = attack(server.port)
    seconds = time.perf_counter() - started
    assert server.process is not None
    peak = resident(server.process.pid, "VmHWM")
    model = resident(server.model_process)
    answers = ", ".join(f"{count} x {status}" for status, count in statuses.items())
    row = [name, f"{seconds:.1f}", answers, witness.requests]
    row += [f"{1000 * witness.longest:.0f}", f"{peak / 1e6:.0f}", f"{model / 1e6:.0f}"]
    print(markdown.line(row), flush=True)
    wrong = [f"{status} is not allowed" for status in statuses.keys() - set(allowed.split())]
    if witness.missed:
        wrong.append(f"/health was not answered {witness.missed} times")
    if peak > MOST_MEMORY:
        wrong.append(f"more than {MOST_MEMORY / 1e6:.0f} MB")
    return wrong


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="attacks with this in their name")
    options = parser.parse_args()
    attacks: Attacks = {"nothing": (post(GOOD), "200")}
    failed = 0
    for name, (redirections, variables, expected) in STARTS.items():
        if options.only in name:
            wrong_start = start(redirections, variables, expected)
            print(f"{name}: {wrong_start or 'as it should be'}", flush=True)
            failed += bool(wrong_start)
    for group in (heads, frames, large_bodies, greedy, odd_bodies, doors):
        for name, attack_and_answers in group().items():
            if options.only in name:
                attacks[name] = attack_and_answers
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as file:
        log, server = Path(file.name), Server("mini", "--timeout", "20")
        server.popen = {
            "env": {**os.environ, "RSRANK_API_KEY": f"{KEY},{OTHER}"},
            "stderr": file,
            "preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
        }
        with server:
            print(f"Two keys, 256 files, --timeout 20; {machine()}\n")
            print(
                "| attack | seconds | answered | /health | longest ms | HTTP peak MB | model MB |\n"
                "|---|--:|---|--:|--:|--:|--:|"
            )
            for name, (attack, allowed) in attacks.items():
                before = len(odd_lines(log))
                wrong = [*run(server, name, attack, allowed), *odd_lines(log)[before:]]
                failed += bool(wrong)
                for message in wrong:
                    print(f"WRONG: {message}", flush=True)
        left = odd_lines(log)[before:]
    print(
        f"\n{len(attacks)} attacks, {failed} not answered as they should be; exit status "
        f"{server.process.returncode}"
    )
    for line in left:
        print(line)
    sys.exit(bool(failed or left or server.process.returncode))


if __name__ == "__main__":
    main()
