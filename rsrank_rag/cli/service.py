"""The ``rsrank`` command that answers over HTTP: serve."""

from __future__ import annotations

import json
import logging
import os
import socket
from functools import partial
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
from click import echo, option
from pydantic import BaseModel, Field, NonNegativeFloat, PositiveInt, SecretStr

from ..adapters.systems import load as load_reranker
from ..adapters.systems import parse
from ..errors import InputError
from ..language_model.options import LoadOptions, ModelSource
from ..prefixes.settings import Choice, PrefixCache, as_bytes
from .options import PATH, command, revision_option, system_option

if TYPE_CHECKING:
    from ..service.app import Settings
    from ..service.scheduler import Scheduler

logger = logging.getLogger(__name__)

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
    # With load_in_8bit in bfloat16, it logs a line for each product of each layer.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def read_keys(environment: str) -> tuple[str, ...]:
    """API keys of the environment variables, separated by commas."""
    return tuple(key for part in environment.split(",") if (key := part.strip()))


def prefix_choice(size: str | None, folder: Path | None) -> Choice:
    """The prefix cache for ``--prefix-cache`` (size) and ``--prefixes`` (folder).

    Without a folder it is a number of bytes, False for a size of 0, or True for the default size.

    Raises:
        InputError: ``size`` is no size.
    """
    device = None if size is None else as_bytes(size)
    if folder is not None:
        return PrefixCache(device=device, folder=str(folder))
    if device is None:
        return True
    return device or False


class ServeOptions(BaseModel, use_attribute_docstrings=True):
    """Options of ``rsrank serve``, most of them for `Settings`."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: int = Field(default=8080, ge=0, le=65535)
    """0 for any that is free."""
    api_key_file: Path | None = None
    """File of API keys, one a line; RSRANK_API_KEY adds keys."""
    separate_clients: bool = False
    """Each client uses only its own prefixes."""
    allowed_host: list[str] = []
    """Name that clients call the service by; may be repeated."""
    notice: NonNegativeFloat = 5.0
    """Seconds of 503 from /ready between SIGTERM and shutdown."""
    max_documents: int = 1000
    """Documents of one request."""
    max_body: str = "20MB"
    """Size of one request, such as 20MB."""
    max_queue: PositiveInt = 10_000
    """Documents that may wait, of all requests."""
    timeout: float = 60.0
    """Seconds from a request to its answer."""
    drop: bool = False
    """Leave out documents not above the native threshold."""
    normalize: bool = False
    """Scores from 0 to 1; 0.5: the native threshold."""
    no_canary: bool = False
    """Skip the canary (test scores)."""
    prefix_cache: str | None = None
    """Prefix cache on the device, such as 512MB; 0: none."""
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    """Of this package and the server."""


@command()
@system_option
@revision_option
@option("--prefixes", "-p", type=PATH, help="Folder of a prefix cache on disk.")
@option(
    "--for",
    "program",
    type=click.Choice(list(APPS)),
    help="Answer as this program needs, and say what to enter in it.",
)
def serve(
    load: LoadOptions,
    options: ServeOptions,
    model: str,
    revision: str | None,
    prefixes: Path | None,
    program: str | None,
) -> None:
    """Answer over HTTP, as clients of Cohere, Jina, TEI, vLLM, Infinity and NVIDIA ask.

    `rsrank serve --model mini --port 8080`

    `curl localhost:8080/v1/rerank --json '{"query": "How do bees find flowers?",
    "documents": ["Trains run on rails.", "Bees find flowers by their colour and their scent."]}'`

    Ends at SIGTERM or Ctrl-C, when the requests in flight have been answered. API keys may be
    changed in their file.
    """
    parse(model)
    for_program = APPS.get(program, {"drop": False, "enter": []})
    cache = prefix_choice(options.prefix_cache, prefixes)
    source = ModelSource(model, revision, load, prefix_cache=cache)
    from ..service.app import Settings
    from ..service.engine import Canary
    from ..service.fair_queue import QueueLimits
    from ..service.scheduler import Scheduler

    settings = Settings(
        api_keys=tuple(map(SecretStr, read_keys(os.environ.get(KEYS, "")))),
        api_key_file=options.api_key_file,
        separate_clients=options.separate_clients,
        allowed_hosts=tuple(options.allowed_host),
        max_documents=options.max_documents,
        max_body_bytes=as_bytes(options.max_body),
        timeout=options.timeout,
        normalize=options.normalize or program is not None,
        drop=for_program["drop"] or options.drop,
    )
    backend = Scheduler(
        partial(load_reranker, source),
        model,
        limits=QueueLimits(documents=options.max_queue),
        canary=None if options.no_canary else Canary(),
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
    from ..service.server import ConnectionLimits, Server
    from ..service.worker import trim_regularly

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
        warn_if_open(settings, options.host)
        trim_regularly()
        server = Server(
            app,
            ConnectionLimits(notice=options.notice),
            lambda: echo(
                f"{backend.description.name} answers at {address}{enter.replace('{url}', entered)}"
            ),
        )
        try:
            server.run(sockets=[bound])
        finally:
            # It says more than the SystemExit of the server.
            if app.state.failure is not None:
                raise app.state.failure
        if app.state.metrics.unanswered:
            raise click.exceptions.Exit(1)


def _bound(host: str, port: int) -> socket.socket:
    """A socket with that address, which nobody can reach yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise InputError(
            f"Nobody can listen at {host}, port {port}: {error}. Choose --host and --port."
        ) from error
    return bound


def warn_if_open(settings: Settings, host: str) -> None:
    """Log a warning if other machines can reach a service without keys."""
    if not settings.closed and host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning(
            "The service listens at %s without an API key. Set %s, or give --api-key-file.",
            host,
            KEYS,
        )


COMMANDS = (serve,)
