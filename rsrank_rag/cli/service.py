"""The ``rsrank`` command that answers over HTTP: serve."""

from __future__ import annotations

import json
import logging
import os
import socket
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
from click import option
from pydantic import BaseModel, Field, PositiveInt, SecretStr

from ..adapters.kinds import load as load_reranker
from ..adapters.kinds import parse
from ..backends.options import LoadOptions
from ..errors import InputError
from ..prefixes.settings import CacheSettings, as_bytes
from .options import command, revision_option, system_option

if TYPE_CHECKING:
    from ..service.scheduler import Scheduler
    from ..service.settings import Settings

logger = logging.getLogger(__name__)

STDOUT = 1

LOOPBACK = ("127.0.0.1", "::1", "localhost")

KEYS = "RSRANK_API_KEY"
"""Environment variable with API keys, separated by commas."""
APPS = json.loads(Path(__file__).parents[1].joinpath("service", "apps.json").read_text("utf-8"))
"""Programs that speak rerank: `Settings.drop`, and what to enter in each."""


def prepare_logs(level: str) -> None:
    """Set up the logs of the model's process like those of the service."""
    from ..service.logs import configure

    configure(level)
    if find_spec("transformers"):
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_default_handler()
        transformers_logging.enable_propagation()
    # With dtype="int8" in bfloat16, it logs a line for each product of each layer.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


class ServeOptions(BaseModel, use_attribute_docstrings=True):
    """Options of ``rsrank serve``, most of them for `Settings`."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: int = Field(default=8080, ge=0, le=65535)
    """0 for any that is free."""
    api_key_file: Path | None = None
    """File of API keys, one a line; RSRANK_API_KEY adds keys."""
    max_documents: int = 1000
    """Documents of one request."""
    max_body: str = "10MB"
    """Size of one request, such as 10MB."""
    queue_tokens: PositiveInt = 800_000
    """Tokens that may wait, of all requests; a client may have half."""
    batch_tokens: PositiveInt = 1_024
    """Tokens that the model scores at a time. A GPU needs more."""
    timeout: float = 60.0
    """Seconds from a request to its answer."""
    drop: bool = False
    """Leave out documents not above the native threshold."""
    normalize: bool = False
    """Scores from 0 to 1; 0.5: the native threshold."""
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    """Of this package and the server."""


@command()
@system_option
@revision_option
@option(
    "--for",
    "program",
    type=click.Choice(list(APPS)),
    help="Answer as this program needs, and say what to enter in it.",
)
def serve(
    load: LoadOptions,
    cache: CacheSettings,
    options: ServeOptions,
    model: str,
    revision: str | None,
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
    for_program = APPS.get(program, {"drop": False, "enter": []})
    source = load.source(model, revision, **dict(cache))
    from ..service.scheduler import Scheduler
    from ..service.settings import Settings
    from ..service.work_queue import QueueLimits

    keys: tuple[SecretStr, ...] = ()
    if KEYS in os.environ:
        keys = tuple(map(SecretStr, os.environ[KEYS].split(",")))
    settings = Settings(
        api_keys=keys,
        api_key_file=options.api_key_file,
        max_documents=options.max_documents,
        max_body_bytes=as_bytes(options.max_body),
        timeout=options.timeout,
        normalize=options.normalize or program is not None,
        drop=for_program["drop"] or options.drop,
    )
    backend = Scheduler(
        partial(load_reranker, source),
        model,
        limits=QueueLimits(options.queue_tokens, options.batch_tokens),
        prepare=partial(prepare_logs, options.log_level.upper()),
    )
    key = "KEY-OF-THIS-SERVICE" if settings.closed else "any"
    enter = "".join(f"\n  {line}" for line in for_program["enter"]).replace("{key}", key)
    run(backend, settings, options, enter)


def run(backend: Scheduler, settings: Settings, options: ServeOptions, enter: str = "") -> None:
    """Serve until a signal; raises what keeps the backend or the server from starting.

    Args:
        backend: The model.
        settings: Of the service.
        options: Of the server and its logs.
        enter: What a user enters in another program, printed with the service's address.
    """
    from ..service.app import create_app
    from ..service.logs import configure
    from ..service.model_process import trim_regularly
    from ..service.server import Server

    # The port is taken before the model is loaded, which may take minutes.
    with _bound(options.host, options.port) as bound:
        name, number = bound.getsockname()[:2]
        address = f"http://{f'[{name}]' if ':' in name else name}:{number}"
        entered = address
        if ip_address(name).is_unspecified:
            entered = f"http://ADDRESS-OF-THIS-MACHINE:{number}"
        app = create_app(backend, settings)
        handler = configure(options.log_level.upper())
        # The command itself shows in one line why the app does not start.
        handler.addFilter(
            lambda record: app.state.failure is None or not record.name.startswith("uvicorn")
        )
        if not settings.closed and options.host not in LOOPBACK:
            logger.warning("The service listens at %s without an API key.", options.host)
        trim_regularly()

        def announce() -> None:
            text = f"{backend.name} answers at {address}{enter.replace('{url}', entered)}\n"
            # Nobody may read standard output, or its disk may be full.
            with suppress(OSError):
                os.write(STDOUT, text.encode())

        try:
            Server(app, announce).run(sockets=[bound])
        finally:
            backend.abort()
            # It says more than the SystemExit of the server.
            if app.state.failure is not None:
                raise app.state.failure


def open_standard_files() -> None:
    """Open closed standard files to nothing, so that no connection gets their numbers."""
    for number in (0, STDOUT, 2):
        try:
            os.fstat(number)
        except OSError:
            # The system gives a file the lowest number that is free.
            os.open(os.devnull, os.O_RDWR)


def _bound(host: str, port: int) -> socket.socket:
    """A socket with that address."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        raise InputError(
            f"Nobody can listen at {host}, port {port}: {error}. Choose --host and --port."
        ) from error


COMMANDS = (serve,)
