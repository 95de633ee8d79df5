"""The ``rsrank`` command that answers over HTTP: serve."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click import option
from pydantic import Field, PositiveInt, SecretStr
from tqdm import tqdm

from ..adapters.kinds import load as load_reranker
from ..adapters.kinds import parse
from ..backends.options import ModelSource
from ..service.settings import Options, Settings
from .arguments import ModelOptions, command, model_option

if TYPE_CHECKING:
    from ..reranker import Reranker
    from ..service.scheduler import Scheduler

logger = logging.getLogger(__name__)

STDOUT = 1

KEYS = "RSRANK_API_KEY"
"""Environment variable with API keys, separated by commas."""
APPS = json.loads(Path(__file__).parents[1].joinpath("service", "apps.json").read_text("utf-8"))
"""Programs that speak rerank: `Settings.drop`, and what to enter in each."""


def load_in_process(source: ModelSource) -> Reranker:
    """Load the model in the model's process, which logs as the service does."""
    from ..service.logs import configure

    configure()
    # The default lock is shared between processes, and leaks when this process is killed.
    tqdm.set_lock(threading.RLock())
    return load_reranker(source)


class ServeOptions(Options):
    """Options of ``rsrank serve``."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: int = Field(default=8080, ge=0, le=65535)
    """0 for any that is free."""
    queue_tokens: PositiveInt = 800_000
    """Tokens that may wait, of all requests; a client may have half."""
    batch_tokens: PositiveInt = 1_024
    """Tokens that the model scores at a time. A GPU needs more."""
    drop: bool = False
    """Leave out documents not above the native threshold."""


@command()
@model_option
@option(
    "--for",
    "program",
    type=click.Choice(list(APPS)),
    help="Answer as this program needs, and say what to enter in it.",
)
def serve(
    model: str,
    load: ModelOptions,
    options: ServeOptions,
    program: str | None,
) -> None:
    """Answer over HTTP, as clients of Cohere, Jina, TEI, vLLM, Infinity and NVIDIA ask.

    `rsrank serve --model mini --port 8080`

    `curl localhost:8080/v1/rerank --json '{"query": "How do bees find flowers?",
    "documents": ["Trains run on rails.", "Bees find flowers by their colour and their scent."]}'`

    Ends at SIGTERM or Ctrl-C, when the requests in flight have been answered. API keys may be
    changed in their file.
    """
    open_standard_files()
    parse(model)
    from ..service.scheduler import Scheduler

    fields = options.model_dump(include=set(Settings.model_fields))
    if KEYS in os.environ:
        fields["api_keys"] = [SecretStr(key) for key in os.environ[KEYS].split(",")]
    enter = []
    if program is not None:
        fields["normalize"] = True
        fields["drop"] = APPS[program]["drop"] or options.drop
        enter = APPS[program]["enter"]
    source = load.source(model)
    load_model = partial(load_in_process, source)
    backend = Scheduler(load_model, model, options.queue_tokens, options.batch_tokens)
    run(backend, Settings(**fields), options, enter)


def run(
    backend: Scheduler, settings: Settings, options: ServeOptions, enter: Sequence[str]
) -> None:
    """Serve until a signal; raises what keeps the backend or the server from starting.

    Args:
        backend: The model.
        settings: Of the service.
        options: Of the server and its logs.
        enter: What a user enters in another program, printed with the service's address.
    """
    from ..service.app import Server, create_app
    from ..service.logs import configure

    # The port is taken before the model is loaded, which may take minutes.
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.create_server((options.host, options.port), family=family) as bound:
        name, number = bound.getsockname()[:2]
        url = f"http://{f'[{name}]' if ':' in name else name}:{number}"
        app = create_app(backend, settings)
        configure()
        key = "KEY-OF-THIS-SERVICE" if settings.closed else "any"
        lines = [f"{backend.name} answers at {url} when it is loaded."]
        lines += ["  " + line.replace("{url}", url).replace("{key}", key) for line in enter]
        # Nobody may read standard output, or its disk may be full.
        with suppress(OSError):
            os.write(STDOUT, "\n".join([*lines, ""]).encode())
        # The command itself shows in one line why the app does not start.
        logging.getLogger("uvicorn.error").addFilter(lambda _: app.state.failure is None)
        if not settings.closed and not ip_address(name).is_loopback:
            logger.warning("The service listens at %s without an API key.", options.host)
        server = Server(app)
        try:
            server.run(sockets=[bound])
        except SystemExit:
            # A signal while the model is loaded is no failure.
            if not server.is_signalled:
                raise
        finally:
            backend.abort()
            # It says more than the SystemExit of the server.
            if app.state.failure is not None and not server.is_signalled:
                raise app.state.failure


def open_standard_files() -> None:
    """Open closed standard files to nothing, so that no connection gets their numbers."""
    for number in (0, STDOUT, 2):
        try:
            os.fstat(number)
        except OSError:
            # The system gives a file the lowest number that is free.
            os.open(os.devnull, os.O_RDWR)


COMMANDS = (serve,)
