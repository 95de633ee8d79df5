"""What a stranger with a socket can do to `rsrank serve`: malformed, huge, slow and misleading requests, one after another.

    python -m benchmarks.strangers                  # all of them
    python -m benchmarks.strangers --only head      # those with this word in their name

Meanwhile somebody asks for /health again and again over new connections; the longest wait is printed beside what the
stranger was answered. Ends with 1 if an answer was none of those that are allowed (500 never is), /health was not
answered, or the log has a traceback or what is no JSON.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import resource
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from .load import Server
from .timing import machine

KEY = "voil\u00e0"
OPEN_HEAD = b"POST /v1/rerank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEAD = OPEN_HEAD + b"Authorization: Bearer " + KEY.encode() + b"\r\n"
GOOD = b'{"query": "q", "documents": ["one", "two"]}'
PATIENCE = 60.0
"""Seconds without a word after which a connection counts as hanging; the service is started with `--timeout 20`."""

Attack = Callable[[int], Counter[str]]
"""Attacks the service at this port; what was answered, and how often."""


def statuses(answer: bytes) -> list[str]:
    """Of all responses in what came over one connection: HTTP/1.1 begins each status line."""
    return [piece[:3].decode() for piece in answer.split(b"HTTP/1.1 ")[1:]]


def talk(port: int, pieces: Iterable[bytes], *, leave: bool = False) -> Counter[str]:
    """Say these pieces over one connection, and listen to its end; what was answered."""
    answer, ended = b"", "closed"
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
        except OSError:  # closed while much was on its way; what was answered may still be there
            try:
                answer += connection.recv(1 << 16)
            except OSError:
                pass
    return Counter(statuses(answer) or [ended])


def says(*pieces: bytes) -> Attack:
    """These pieces, over one connection."""
    return lambda port: talk(port, pieces)


def post(body: bytes, *more: bytes, head: bytes = HEAD) -> Attack:
    """One request that is well-formed as HTTP."""
    lines = b"".join(line + b"\r\n" for line in (*more, b"Content-Length: %d" % len(body), b"Connection: close"))
    return says(head + lines + b"\r\n" + body)


def rerank(**fields: object) -> Attack:
    """A request with these fields beside or instead of plain ones."""
    return post(json.dumps({"query": "q", "documents": ["one", "two"], **fields}).encode())


def asked(target: str, method: str = "GET", *more: str) -> Attack:
    """A request without a key and a body."""
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", "Connection: close", *more, "", ""]
    return says("\r\n".join(lines).encode())


def many(count: int, attack: Attack) -> Attack:
    """The same, so many times in a row."""
    return lambda port: sum((attack(port) for _ in range(count)), Counter())


def half_open(count: int, seconds: float) -> Attack:
    """So many connections with half a head each, held for some time: is a request answered beside them?"""

    def run(port: int) -> Counter[str]:
        held = []
        for _ in range(count):
            held.append(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
            held[-1].sendall(OPEN_HEAD)
        ends, found = time.monotonic() + seconds, Counter[str]()
        while time.monotonic() < ends:
            found += post(GOOD)(port)
            time.sleep(0.5)
        for connection in held:
            connection.close()
        return found

    return run


def slowly(piece: bytes, pause: float) -> Attack:
    """A body of which a piece comes now and then, until the connection is closed."""

    def pieces() -> Iterable[bytes]:
        yield HEAD + b"Content-Length: 1000000\r\n\r\n"
        while True:
            yield piece
            time.sleep(pause)

    return lambda port: talk(port, pieces())


def chunks(pieces: Iterable[bytes]) -> bytes:
    """A chunked request of these pieces."""
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + body + b"0\r\n\r\n"


def leave(*pieces: bytes) -> Attack:
    """Say this and leave."""
    return lambda port: talk(port, pieces, leave=True)


def texts(entry: bytes, size: int = 19_900_000) -> bytes:
    """A body of so many bytes, full of this entry."""
    start, end = b'{"query": "q", "documents": [', b"]}"
    count = (size - len(start) - len(end)) // (len(entry) + 1)
    return start + b",".join(itertools.repeat(entry, count)) + end


LENGTH = b"Content-Length: %d\r\n" % len(GOOD)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
BIG = 10**4000
PATHS = ["/", "/health", "/ready", "/v1/cluster/auth", "/v1/models", "/v1/models/mini", "/info", "/metrics", "/explain"]
PATHS += ["/v1/rerank", "/v2/rerank", "/rerank", "/score", "/v1/score", "/v1/ranking", "/openapi.json", "/nothing"]
TRICKS = ["//info", "/./info", "/health/../info", "/%69nfo", "/info/", "/health%2f..%2finfo", "/info?/health", "/INFO"]
TRICKS += ["/health;/info", "http://localhost/info", "/info%00", "/v1/models/%2e%2e%2f", "/\\info", "*", "/info#/health"]

REFUSED = {"400", "413", "422"}


def attacks() -> dict[str, tuple[Attack, set[str]]]:
    """Each by its name, with the answers that are allowed."""
    nested = b"[" * 100_000
    found: dict[str, tuple[Attack, set[str]]] = {
        "nothing": (post(GOOD), {"200"}),
        "head: 60 MB": (says(OPEN_HEAD + b"X-Large: " + b"x" * 60_000_000), {"400", "closed"}),
        "head: 200 MB": (says(OPEN_HEAD + b"X-Large: " + b"x" * 200_000_000), {"400", "closed"}),
        "head: 100,000 lines": (says(OPEN_HEAD + b"X: y\r\n" * 100_000), {"400", "closed"}),
        "head: 300 half open": (half_open(300, 15), {"200"}),
        "head: NUL and control bytes": (says(b"GET /health\0 HTTP/1.1\r\nHost: a\r\nX: \1\0\r\n\r\n"), {"400"}),
        "head: two hosts": (asked("/health", "GET", "Host: evil.example"), {"400"}),
        "head: no host": (says(b"GET /health HTTP/1.1\r\n\r\n"), {"400"}),
        "head: HTTP/1.0": (says(b"GET /health HTTP/1.0\r\n\r\n"), {"200"}),
        "head: HTTP/9.9": (says(b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n"), {"200", "400"}),
        "head: HTTP/2": (says(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), {"400", "401"}),
        "head: TLS": (says(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500), {"400"}),
        "head: a websocket": (asked("/health", "GET", "Connection: Upgrade", "Upgrade: websocket"), {"200", "400"}),
        "head: h2c": (asked("/health", "GET", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c"), {"200"}),
        "head: forwarded for whom": (
            many(1, lambda port: sum(
                (asked("/health", "GET", f"X-Forwarded-For: {who}", "X-Forwarded-Proto: x")(port)
                 for who in ("x", "1.2.3.4:99999", "[::1", "[::1]:x", ",,,", "a:b:c", "unix:", "é", " ")), Counter())),
            {"200"},
        ),
        "head: odd values": (
            asked("/health", "GET", "X-Request-ID: é\x7f", "traceparent: 00-x-y-z", "Authorization: é", "Cookie: ="),
            {"200", "400"},
        ),
        "framing: two lengths": (says(HEAD + b"Content-Length: 5\r\n" + LENGTH + b"\r\n" + GOOD), {"400"}),
        "framing: a length and chunks": (says(HEAD + LENGTH + CHUNKED + b"\r\n0\r\n\r\n" + GOOD), {"400"}),
        "framing: chunks and a length": (says(HEAD + CHUNKED + LENGTH + b"\r\n0\r\n\r\n" + GOOD), {"400"}),
        "framing: chunked twice": (says(HEAD + CHUNKED + CHUNKED + b"\r\n0\r\n\r\n"), {"400", "501"}),
        "framing: other codings": (
            many(1, lambda port: sum(
                (says(HEAD + b"Transfer-Encoding: " + how + b"\r\n\r\n0\r\n\r\n")(port)
                 for how in (b"gzip, chunked", b"identity", b"xchunked", b"chunked\x0b", b"chunked, identity")),
                Counter())),
            {"400", "501"},
        ),
        "framing: a space before the colon": (says(HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n"), {"400"}),
        "framing: absurd lengths": (
            lambda port: sum(
                (says(HEAD + b"Content-Length: " + length + b"\r\n\r\n" + GOOD)(port)
                 for length in (b"-1", b"+43", b"0x2b", b"4_3", b"1e3", b"", b"43,44", b"9" * 5000)), Counter()),
            {"400"},
        ),
        "framing: absurd sizes of chunks": (
            lambda port: sum(
                (says(HEAD + CHUNKED + b"\r\n" + size + b"\r\n" + GOOD + b"\r\n0\r\n\r\n")(port)
                 for size in (b"-2b", b"0x2b", b"2b" * 5000, b"2 b", b"", b"2b;" + b"x" * 100_000)), Counter()),
            {"200", "400"},
        ),
        "framing: bare line feeds": (says(HEAD.replace(b"\r", b"") + LENGTH + b"\n" + GOOD), {"200", "400"}),
        "framing: more than was said": (says(HEAD + LENGTH + b"\r\n" + GOOD * 3), {"200", "400"}),
        "framing: less than was said": (many(20, leave(HEAD + b"Content-Length: 900\r\n\r\n" + GOOD)), {"left"}),
        "framing: half a body and no more": (says(HEAD + b"Content-Length: 900\r\n\r\n" + GOOD), {"408"}),
        "framing: 1 MB in chunks of a byte": (says(chunks([b" "] * 1_000_000 + [GOOD])), {"200", "408"}),
        "framing: chunks without end": (
            lambda port: talk(port, itertools.chain(
                [HEAD + CHUNKED + b"\r\n"], itertools.repeat(b"10000\r\n" + b" " * 65536 + b"\r\n", 10_000))),
            {"413", "closed"},
        ),
        "framing: 2,000 requests at once": (says(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 2000), {"200"}),
        "framing: 50 rankings at once": (says((HEAD + LENGTH + b"\r\n" + GOOD) * 50), {"200", "429"}),
        "framing: half a body, slowly": (slowly(b" ", 0.5), {"408"}),
        "framing: 100-continue": (
            says(HEAD + LENGTH + b"Connection: close\r\nExpect: 100-continue\r\n\r\n", GOOD), {"100", "200"}),
        "framing: 100-continue without a key": (
            says(OPEN_HEAD + LENGTH + b"Connection: close\r\nExpect: 100-continue\r\n\r\n"), {"401"}),
        "body: gzip": (post(gzip.compress(GOOD), b"Content-Encoding: gzip"), {"400", "415"}),
        "body: UTF-16": (post(GOOD.decode().encode("utf-16")), {"400"}),
        "body: Latin-1": (post('{"query": "é", "documents": ["é"]}'.encode("latin-1")), {"400"}),
        "body: other kinds": (
            lambda port: sum(
                (post(GOOD, b"X: y", head=HEAD.replace(b"application/json", kind))(port)
                 for kind in (b"text/plain", b"multipart/form-data", b"application/json; charset=utf-16", b"\xff", b"")),
                Counter()),
            {"200", "400"},
        ),
        "body: none": (post(b""), {"400"}),
        "body: 19.9 MB of []": (post(texts(b"[]")), {"413"}),
        "body: 19.9 MB of {}": (post(texts(b"{}")), {"413"}),
        "body: 19.9 MB of 0": (post(texts(b"0")), {"413"}),
        "body: 19.9 MB of [], as UTF-16 behind a quote": (
            post((rb'{"query": "\"", "documents": [' + b",".join([b"[]"] * 3_300_000) + b"]}").decode().encode("utf-16")),
            {"400", "413"}),
        "body: 19.9 MB in one text": (post(texts(b'"' + b"x" * 19_800_000 + b'"')), {"413"}),
        "body: 19.9 MB in 20 texts": (post(texts(b'"' + b"x" * 990_000 + b'"')), {"200", "429", "504"}),
        "body: 19.9 MB of escapes": (post(texts(b'"' + rb"\u0041" * 160_000 + b'"')), {"200", "429", "504"}),
        "body: 19.9 MB of spaces": (post(b" " * 19_900_000 + GOOD), {"200"}),
        "body: 19.9 MB of digits": (post(b"[1." + b"1" * 19_900_000 + b"]"), {"400"}),
        "body: 19.9 MB in one name": (post(b'{"' + b"x" * 19_900_000 + b'": 1}'), {"400"}),
        "body: 50,000 objects in one": (rerank(documents=[{"text": "one", "x": [{}] * 50_000}]), {"200"}),
        "body: 100,000 texts of one byte": (rerank(documents=["x"] * 100_000), {"413"}),
        "body: 1,000 texts of one byte": (rerank(documents=["x"] * 1000), {"200", "429", "504"}),
        "body: a query of 1 MB": (rerank(query="x" * 1_000_000), {"413"}),
        "body: a query of 10,000 characters": (rerank(query="x y " * 2500), {"422"}),
        "body: 100,000 deep": (
            lambda port: sum((post(body)(port) for body in (
                nested, nested + b"]" * 100_000, b'{"a":' * 100_000, b'{"model": ' + nested + b"]" * 100_000 + b"}")),
                Counter()), {"400", "413"}),
        "body: 900 deep": (
            lambda port: sum((post(b'{"query": "q", "documents": ["x"], "%s": ' % name + b"[" * 900 + b"]" * 900 + b"}")(
                port) for name in (b"model", b"x", b"threshold", b"extract", b"instruction")), Counter()),
            {"200", "400"}),
        "body: huge numbers": (
            lambda port: sum((rerank(**{name: value})(port) for value in (BIG, -BIG, 2**63, 2**31, 1e308) for name in (
                "top_n", "min_docs", "max_tokens_per_doc", "truncate_prompt_tokens", "context", "threshold",
                "documents", "query", "return_documents")), Counter()),
            {"200", *REFUSED}),
        "body: huge numbers, with sentences and windows": (
            lambda port: sum((rerank(**{name: value}, **how)(port) for value in (BIG, 2**63, 1e308) for name in (
                "top_n", "min_docs", "max_tokens_per_doc", "truncate_prompt_tokens", "context", "threshold")
                for how in ({"extract": "sentences"}, {"long_documents": "windows"})), Counter()),
            {"200", *REFUSED}),
        "body: numbers that are none": (
            lambda port: sum((post(b'{"query": "q", "documents": ["x"], "threshold": %s}' % value)(port) for value in (
                b"NaN", b"Infinity", b"-Infinity", b"1e999", b"01", b"1.", b"--1", b"\xd9\xa1")), Counter()),
            {"400"}),
        "body: half a surrogate pair": (
            lambda port: sum((rerank(**{name: value})(port) for name, value in (
                ("query", "\ud800"), ("documents", ["\udfff", "x"]), ("instruction", "\ud800"), ("instruct", "\udc00"),
                ("documents", [{"text": "\ud800"}]), ("extract", "\ud800"), ("documents", {"\ud800": 1}),
                ("chat_template_kwargs", {"instruction": "\ud800"}), ("texts", ["\ud800"]))), Counter()), {"400", "422"}),
        "body: half a surrogate pair where nobody looks": (
            rerank(model="\ud800", x={"\ud800": "\ud800"}, documents=[{"text": "x", "\ud800": "\ud800"}]), {"200"}),
        "body: NUL and other odd characters": (
            rerank(query="\0 \u202e\ufffe", documents=["\0", "\0x", "\ufeff", "\u0085", "\U0010ffff", "e" + "\u0301" * 5000],
                   return_documents=True), {"200"}),
        "body: of each wrong type": (
            lambda port: sum((post(value.encode())(port) for value in (
                "null", "1", '"x"', "[]", "{}", "[{}]", '{"query": null}', '{"query": "q", "documents": null}',
                '{"query": "q", "documents": [null]}', '{"query": ["q"], "documents": ["x"]}', "tru", "\ufeff{}", "{}{}",
                '{"query": "q", "documents": [], "documents": 1}')), Counter()), {"400"}),
        "body: the same name 50,000 times": (post(b'{"query":"q",' + b'"documents":["x"],' * 50_000 + b'"x":1}'), {"200"}),
        "key: none": (post(GOOD, head=OPEN_HEAD), {"401"}),
        "key: 2,000 wrong ones": (many(2000, asked("/info", "GET", "Authorization: Bearer wrong")), {"401"}),
        "key: odd ones": (
            lambda port: sum((asked("/info", "GET", f"Authorization: {key}")(port) for key in (
                "Bearer", "Bearer ", "Bearer é", "Bearer \u2028", "Bearer " + "x" * 10_000, f"Bearer {KEY} x", f"Bearer {KEY}x",
                f"Basic {KEY}", KEY, f"Bearer\t{KEY}", f"Bearer {KEY.upper()}", "Bearer vo", "Bearer voil\u00c3")), Counter()),
            {"401"}),
        "key: the right one, oddly written": (
            lambda port: sum((asked("/info", "GET", f"Authorization: {key}")(port) for key in (
                f"Bearer {KEY}", f"bearer {KEY}", f"Bearer   {KEY}  ")), Counter()), {"200"}),
        "paths: every method on every route": (
            lambda port: sum((asked(path, method, "Content-Length: 0", f"Authorization: Bearer {KEY}")(port)
                for path in PATHS for method in ("HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "PATCH", "X" * 100)),
                Counter()), {"200", "404", "405"}),
        "paths: tricks to come in without a key": (
            lambda port: sum((asked(path)(port) for path in TRICKS), Counter()), {"400", "401", "404", "307"}),
        "paths: as long as a head may be": (asked("/" + "%41" * 5000), {"401", "404"}),
        "paths: another machine": (asked("evil.example:443", "CONNECT"), {"400", "401", "404", "405"}),
    }
    return found


class Witness:
    """Asks for /health over and over, in a thread; knows the longest wait and how often there was no answer."""

    def __init__(self, port: int) -> None:
        self.port, self.longest, self.missed, self.asked = port, 0.0, 0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        request = asked("/health")
        while not self._stop.is_set():
            started = time.perf_counter()
            try:
                found = request(self.port)
            except OSError:
                found = Counter[str]()
            self.longest = max(self.longest, time.perf_counter() - started)
            self.asked += 1
            self.missed += found != {"200": 1}
            self._stop.wait(0.02)


def odd_lines(log: Path) -> list[str]:
    """Lines of the log that are no JSON, or tell of an error."""
    odd = []
    for line in log.read_text().splitlines():
        try:
            told = json.loads(line)
        except ValueError:
            odd.append(line)
            continue
        if "exc_info" in told or told.get("level") in ("ERROR", "CRITICAL"):
            odd.append(line)
    return odd


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="attacks with this in their name")
    options = parser.parse_args()
    chosen = {name: attack for name, attack in attacks().items() if options.only in name}
    failed = 0
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        server = Server("mini", "--timeout", "20", "--log-level", "info")
        server.popen = {
            "env": {**os.environ, "RSRANK_API_KEY": KEY},
            "stderr": log,
            "preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
        }
        with server:
            print(f"one key, 256 files, --timeout 20; {machine()}\n")
            print("| attack | seconds | answered | /health asked | longest ms |\n|---|--:|---|--:|--:|", flush=True)
            for name, (attack, allowed) in chosen.items():
                started, seen = time.perf_counter(), len(odd_lines(Path(log.name)))
                with Witness(server.port) as witness:
                    found = attack(server.port)
                new = odd_lines(Path(log.name))[seen:]
                wrong = bool(found.keys() - allowed or witness.missed or new)
                failed += wrong
                told = ", ".join(f"{count} x {answer}" for answer, count in found.items())
                row = [name, f"{time.perf_counter() - started:.1f}", told, witness.asked, f"{1000 * witness.longest:.0f}"]
                print(f"| {' | '.join(map(str, row))} |" + " WRONG" * wrong + f" {witness.missed} missed" * bool(witness.missed), flush=True)
                for line in new:
                    print(line, flush=True)
            print(f"\n{len(chosen)} attacks, {failed} not as they should be; restarts: {post_metric(server)}")
    sys.exit(bool(failed))


def post_metric(server: Server) -> str:
    """A number of /metrics, which needs the key."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(
            f"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
        )
        text = b""
        while piece := connection.recv(1 << 16):
            text += piece
    return next((line for line in text.decode().splitlines() if line.startswith("rsrank_restarts_total")), "?")


if __name__ == "__main__":
    main()
