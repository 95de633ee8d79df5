"""The ``rsrank`` command that answers over HTTP: serve."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import SecretStr, ValidationError
from typer import Option

from ..adapters.systems import load as load_reranker
from ..adapters.systems import parse
from ..errors import InputError, nearest, problems_of
from ..language_model.options import LoadOptions, ModelSource
from ..prefixes.settings import Choice, PrefixCache, as_bytes
from .options import Revision, System, command, screen

if TYPE_CHECKING:
    from ..service.app import Settings
    from ..service.scheduler import Scheduler
    from ..service.server import Limits

logger = logging.getLogger(__name__)

app = typer.Typer()

KEYS = "RSRANK_API_KEY"
"""Environment variable with API keys, separated by commas."""
APPS = json.loads(Path(__file__).parents[1].joinpath("service", "apps.json").read_text("utf-8"))
"""Programs that speak rerank: whether rows may be dropped, and what to enter in each."""
LogLevel = Literal["debug", "info", "warning", "error", "critical"]


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
    return tuple(dict.fromkeys(key for part in environment.split(",") if (key := part.strip())))


def prefix_choice(size: str | None, folder: Path | None) -> Choice:
    """What ``--prefix-cache`` and ``--prefixes`` mean together."""
    if size is None and folder is None:
        return True
    device = None
    if size is not None:
        device = as_bytes(size)
    if device == 0 and folder is None:
        return False
    return PrefixCache(device=device, folder=None if folder is None else os.fspath(folder))


@command(app)
def serve(
    load: LoadOptions,
    model: System = "mini",
    revision: Revision = None,
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0 for any that is free.")] = 8080,
    api_key_file: Annotated[
        Path | None, Option(help=f"API keys, one a line; also from {KEYS}, by commas.")
    ] = None,
    separate_clients: Annotated[
        bool, Option("--separate-clients", help="Each uses only its own cached prefixes.")
    ] = False,
    allowed_host: Annotated[
        list[str], Option(help="Name that clients call the service by; may be repeated.")
    ] = [],  # noqa: B006
    notice: Annotated[
        float, Option(min=0, help="Seconds of 503 from /ready before the end at SIGTERM.")
    ] = 5.0,
    max_documents: Annotated[int, Option(min=1, help="Documents of one request.")] = 1000,
    max_body: Annotated[str, Option(help="Size of one request, such as 20MB.")] = "20MB",
    max_queue: Annotated[
        int, Option(min=1, help="Documents that may wait, of all requests.")
    ] = 10_000,
    timeout: Annotated[
        float, Option(min=0.001, help="Seconds from a request to its answer.")
    ] = 60.0,
    drop: Annotated[
        bool, Option("--drop", help="Leave out what is below the native threshold.")
    ] = False,
    normalize: Annotated[
        bool, Option("--normalize", help="Scores from 0 to 1; 0.5: the native threshold.")
    ] = False,
    program: Annotated[
        str | None,
        Option(
            "--for", help=f"Answer as this program needs, and say what to enter: {', '.join(APPS)}."
        ),
    ] = None,
    no_canary: Annotated[
        bool, Option("--no-canary", help="Be ready without scoring anything.")
    ] = False,
    prefix_cache: Annotated[
        str | None, Option(help="Prefix cache on the device, such as 512MB; 0: none.")
    ] = None,
    prefixes: Annotated[
        Path | None, Option("--prefixes", "-p", help="Folder of a prefix cache on disk.")
    ] = None,
    log_level: Annotated[LogLevel, Option(help="Of this package and the server.")] = "info",
) -> None:
    """Answer over HTTP, as clients of Cohere, Jina, TEI, vLLM, Infinity and NVIDIA ask.

    `rsrank serve --model mini --port 8080`

    `curl localhost:8080/v1/rerank --json '{"query": "How do bees find flowers?",
    "documents": ["Trains run on rails.", "Bees find flowers by their colour and their scent."]}'`

    Ends at SIGTERM or Ctrl-C, when the requests in flight have been answered. API keys may be
    changed in their file.
    """
    parse(model)
    if program is not None and program not in APPS:
        raise InputError(
            f"--for {program} is not known.{nearest(program, APPS)} Choose of: {', '.join(APPS)}."
        )
    for_program = APPS.get(program, {"drop": False, "enter": []})
    source = ModelSource(model, revision, load, prefix_cache=prefix_choice(prefix_cache, prefixes))
    from ..service.app import Settings
    from ..service.engine import Canary
    from ..service.fair_queue import QueueLimits
    from ..service.scheduler import Scheduler
    from ..service.server import Limits

    try:
        settings = Settings(
            api_keys=tuple(map(SecretStr, read_keys(os.environ.get(KEYS, "")))),
            api_key_file=api_key_file,
            separate_clients=separate_clients,
            allowed_hosts=tuple(allowed_host),
            max_documents=max_documents,
            max_body_bytes=as_bytes(max_body),
            timeout=timeout,
            normalize=normalize or program is not None,
            drop=drop or for_program["drop"],
        )
    except ValidationError as error:
        raise InputError(f"{problems_of(error)}.") from None
    canary: Canary | None = Canary()
    if no_canary:
        canary = None
    backend = Scheduler(
        partial(load_reranker, source),
        model,
        limits=QueueLimits(documents=max_queue),
        canary=canary,
        prepare=partial(prepare_logs, log_level.upper()),
    )
    limits = Limits(notice=notice)
    level = log_level.upper()
    key = "any"
    if settings.closed:
        key = "KEY-OF-THIS-SERVICE"
    enter = "".join(f"\n  {line}" for line in for_program["enter"]).replace("{key}", key)
    run(backend, settings, limits, host=host, port=port, log_level=level, enter=enter)


def run(
    backend: Scheduler,
    settings: Settings,
    limits: Limits,
    *,
    host: str,
    port: int,
    log_level: str,
    enter: str = "",
) -> None:
    """Serve until a signal; raises what keeps the backend or the server from starting.

    Args:
        backend: The model.
        settings: Of the service.
        limits: Of connections.
        host: Address to listen on.
        port: 0 for any that is free.
        log_level: Of this package and the server.
        enter: What a user enters in another program, printed with the service's address.
    """
    from ..service.app import create_app
    from ..service.logs import configure
    from ..service.server import Server
    from ..service.worker import trim_regularly

    # The port is taken before the model is loaded, which may take minutes.
    with _bound(host, port) as bound:
        name, number = bound.getsockname()[:2]
        address = f"http://{f'[{name}]' if ':' in name else name}:{number}"
        app = create_app(backend, settings)
        handler = configure(log_level)
        # The command itself shows in one line why the app does not start.
        handler.addFilter(
            lambda record: app.state.failure is None or not record.name.startswith("uvicorn")
        )
        warn_if_open(settings, host)
        trim_regularly()
        server = Server(
            app,
            limits,
            lambda: screen.print(
                f"{backend.description.name} answers at {address}{enter}".replace("{url}", address),
                soft_wrap=True,
            ),
        )
        # A closed terminal is an end like Ctrl-C, unless nohup is in use.
        hangup = getattr(signal, "SIGHUP", None)
        if hangup is not None and signal.getsignal(hangup) is signal.SIG_DFL:
            signal.signal(hangup, server.handle_exit)
        try:
            server.run(sockets=[bound])
        except SystemExit:
            if app.state.failure is None:
                raise
        if app.state.failure is not None:
            raise app.state.failure
        if app.state.metrics.unanswered:
            raise typer.Exit(1)


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
