"""A small local service that keeps `rsrank serve`'s contract, and breaks it on demand."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from rsrank_rag import Reranker

Send = Callable[[dict[str, Any]], Any]


class Overlap(Reranker):
    """Counts the words that query and document share, less one."""

    def score(self, query, documents):
        return [float(len(set(query.split()) & set(text.split())) - 1) for text in documents]


class Service:
    """An ASGI app. ``script`` holds steps for the next requests; without steps it answers normally.

    A step of the script is a number of seconds to wait before the answer, a status with a body and
    headers, or a function that changes the answer.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Forget all requests; none may be running."""
        self.script: deque[Any] = deque()
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.peers: set[tuple[str, int]] = set()
        self.left, self.running, self.most = 0, 0, 0
        self.together = 0
        """No answer before so many requests have been here at the same time."""
        self.key: str | None = None
        self.threshold: float | None = 0.0

    async def __call__(self, scope, receive, send) -> None:
        assert scope["type"] == "http"  # uvicorn takes an error for "no lifespan events"
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        self.peers.add(tuple(scope["client"]))
        if (
            scope["path"] != "/ready"
            and self.key
            and self.headers[-1].get("authorization") != f"Bearer {self.key}"
        ):
            await self.reply(send, 401, {"message": "This service needs an API key."})
            return
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            while self.most < self.together:
                await asyncio.sleep(0.005)
            await self.answer(scope["path"], body, receive, send)
        finally:
            self.running -= 1

    async def answer(self, path, body, receive, send) -> None:
        step = self.script.popleft() if self.script else None
        if isinstance(step, tuple):
            self.seen.append(json.loads(body) if body else {})
            await self.reply(send, *step)
        elif path == "/ready":
            await self.reply(send, 200, {"status": "ready"})
        elif path == "/info":
            await self.reply(send, 200, {"model_id": "overlap", "threshold": self.threshold})
        elif path == "/v1/rerank":
            request = json.loads(body)
            self.seen.append(request)
            if isinstance(step, (int, float)) and await self.hears_of_leaving(receive, step):
                return
            while isinstance(step, threading.Event) and not step.is_set():
                await asyncio.sleep(0.005)
            actual = self.rows(request)
            await self.reply(send, 200, step(actual) if callable(step) else actual)
        else:
            await self.reply(send, 404, {"detail": "Not Found"})

    async def hears_of_leaving(self, receive, seconds) -> bool:
        """Wait; true if the client left meanwhile."""
        try:
            await asyncio.wait_for(receive(), seconds)
        except asyncio.TimeoutError:
            return False
        self.left += 1
        return True

    def rows(self, asked):
        scores = Overlap().score(asked["query"], asked["documents"])
        results = [
            {
                "index": i,
                "relevance_score": score,
                "truncated": asked["documents"][i].endswith("..."),
            }
            for i, score in enumerate(scores)
        ]
        results.sort(key=lambda row: -row["relevance_score"])
        usage = {"prompt_tokens": 0, "total_tokens": 0}
        return {
            "id": "1",
            "model": "overlap",
            "results": results,
            "threshold": self.threshold,
            "usage": usage,
        }

    async def reply(self, send, status, content, headers=()) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        length = (b"content-length", str(len(body)).encode())
        lines = [
            length,
            *((name.encode(), value.encode()) for name, value in dict(headers).items()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": lines})
        await send({"type": "http.response.body", "body": body})


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """Serve an ASGI app in a thread; gives its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=600,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


@contextmanager
def talking(*answers: Iterable[bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """A server that answers each coming connection with pieces of bytes, 0.1 s apart, and hangs up.

    Gives its address and a list that will hold what it was sent.
    """
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for pieces in answers:
                try:
                    connection, _ = listener.accept()
                except OSError:  # the test is over
                    return
                with connection:
                    heard.append(connection.recv(1 << 20))
                    for piece in pieces:
                        try:
                            connection.sendall(piece)
                        except OSError:
                            break
                        time.sleep(0.1)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", heard
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)
