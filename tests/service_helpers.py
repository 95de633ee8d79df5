"""Rerankers, and the HTTP service around them, for tests."""

import asyncio
import os
import socket
import threading
import time
from contextlib import asynccontextmanager, contextmanager, suppress

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rsrank_rag import Reranker
from rsrank_rag.errors import InputError, ScoringError
from rsrank_rag.ranking.explanation import Explanation
from rsrank_rag.reranker import Scored
from rsrank_rag.service.app import Server, Settings, create_app
from rsrank_rag.service.model_process import ModelProcess, answer_calls
from rsrank_rag.service.scheduler import Scheduler


class Numbers(Reranker):
    """Scores "3.5" as 3.5, a blank document as 0; reads a word a token, and at most ten."""

    threshold = 1.0

    def __init__(self):
        self.batches = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def score_pairs(self, pairs):
        self.batches.append([pair.document for pair in pairs])
        self.may_go_on.wait(120)  # a test that fails must end
        return [self.scored(number, pair) for number, pair in enumerate(pairs)]

    def scored(self, number, pair):
        text, most = pair.document, 10
        if pair.query == "refused":
            raise InputError("The query is refused.")
        if text == "no score":
            raise ScoringError("has no score.", number)
        if text == "broken":
            raise ZeroDivisionError
        words = text.split()
        return Scored(
            float(words[0]) if words else 0.0, len(words) > most, tokens=min(len(words), most) + 1
        )

    def score(self, query, documents):
        raise AssertionError("The service scores pairs.")

    def explain(self, query, document):
        truncated = len(document.split()) > 10
        return Explanation(
            query, document, 3.0, truncated, ("a", "b"), (1, 2), ((1.0, 0.5), (1.0, 0.5)), ()
        )


class Words(Reranker):
    """The share of the query's words that a document holds, less a half; whatever the text."""

    def score(self, query, documents):
        words = set(query.lower().split())
        return [
            len(words & set(text.lower().split())) / max(1, len(words)) - 0.5 for text in documents
        ]


class InThread(ModelProcess):
    """A model in a thread of the test's own process, so that the test can reach the model."""

    def _launch(self, connection):
        self.pid = os.getpid()

        def run():
            # `kill` sends no tasks.
            with connection, suppress(TypeError, EOFError, OSError):
                answer_calls(connection, self.make)

        threading.Thread(target=run, daemon=True).start()

    def kill(self):
        """A thread cannot be killed; it ends with its connection, when the model is free."""
        with suppress(OSError, AttributeError):
            self._connection.send(None)


def in_thread(make, name="fake", **options):
    """A `Scheduler` before a model in a thread."""
    made = Scheduler(make, name, **options)
    made.model = InThread(make)
    return made


def scheduler(reranker, **limits):
    return in_thread(lambda: reranker, **limits)


JSON = {"content-type": "application/json"}
RERANK = {"query": "q", "documents": ["3", "1", "2"]}


def serving(reranker=None, **settings):
    """An HTTP client of a service around a reranker."""
    return client_of(scheduler(reranker or Numbers()), **settings)


def scope_of(body=b"", size=None):
    """What ASGI says of a request to rank."""
    size = len(body) if size is None else size
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % size)]
    scope = {"type": "http", "method": "POST", "path": "/v1/rerank", "query_string": b""}
    return {**scope, "headers": headers}


def metrics(text):
    """The numbers of /metrics by their name and labels."""
    numbers = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            numbers[(sample.name, *sorted(sample.labels.items()))] = sample.value
    return numbers


async def until(condition):
    """Wait in an event loop until something is true."""
    ends = time.monotonic() + 120  # far beyond what a loaded machine takes to start a process
    while not condition():
        assert time.monotonic() < ends, "it never came true"
        await asyncio.sleep(0.005)


def wait_until(condition):
    """Wait in a thread until something is true."""
    ends = time.monotonic() + 300  # a test that fails must end
    while not condition():
        assert time.monotonic() < ends, "it never came true"
        time.sleep(0.02)


@asynccontextmanager
async def client_of(backend, **settings):
    """An HTTP client of a service in this process, without a network."""
    app = create_app(backend, Settings(**settings))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as http,
    ):
        http.app = app
        yield http


@contextmanager
def address_of(backend, **settings):
    """The address of a service in a thread, on a port of its own."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = Server(create_app(backend, Settings(**settings)))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
