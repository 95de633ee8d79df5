"""The example of a proxy does what docs/serving.md asks of a proxy."""

import inspect
import os
import re
import shutil
import socket
import ssl
import subprocess
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

pytest.importorskip("uvicorn")

from service_helpers import Numbers, address_of, scheduler
from uvicorn import Config

from rsrank_rag.service.settings import Settings

CONF = Path(__file__).parents[2] / "examples" / "nginx.conf"
UNITS = {"s": 1, "k": 1000, "m": 1_000_000}


def directives(text):
    """Every directive with its arguments, by name; blocks count as directives."""
    text = re.sub(r"#.*", "", text)
    result = {}
    for statement in re.split(r"[;{}]", text):
        name, *arguments = statement.split() or [""]
        result.setdefault(name, []).append(arguments)
    return result


def amount(text):
    return int(text[:-1]) * UNITS[text[-1]]


@pytest.fixture
def conf():
    return directives(CONF.read_text(encoding="utf-8"))


def test_its_blocks_are_closed():
    text = re.sub(r"#.*", "", CONF.read_text(encoding="utf-8"))
    assert text.count("{") == text.count("}")
    for line in text.splitlines():
        assert not line.strip() or line.rstrip()[-1] in ";{}"


def test_slow_heads_bodies_and_readers_are_cut_off(conf):
    for name in ("client_header_timeout", "client_body_timeout", "send_timeout"):
        assert amount(conf[name][0][0]) <= 30


def test_requests_and_answers_are_buffered(conf):
    assert conf["proxy_request_buffering"] == [["on"]]
    assert conf["proxy_buffering"] == [["on"]]


def test_one_address_has_few_connections_and_bodies_are_as_large_as_the_service_allows(conf):
    assert int(conf["limit_conn"][0][1]) <= 100
    assert amount(conf["client_max_body_size"][0][0]) == Settings().max_body


def test_connections_to_the_service_are_fewer_and_idle_for_less_than_the_service_allows(conf):
    upstream, _ = conf["keepalive_timeout"]
    assert amount(upstream[0]) < inspect.signature(Config).parameters["timeout_keep_alive"].default
    servers = [one for one in conf["server"] if one]
    assert int(servers[0][1].removeprefix("max_conns=")) > 0
    assert ["Connection", '""'] in conf["proxy_set_header"]


def test_the_proxy_waits_longer_than_the_service(conf):
    assert amount(conf["proxy_read_timeout"][0][0]) > Settings().timeout


needs_nginx = pytest.mark.skipif(
    shutil.which("nginx") is None or os.geteuid() != 0, reason="needs nginx, and root for its logs"
)


@pytest.fixture
def copy(tmp_path):
    """Writes the example with a certificate, a port of its own and the service's address."""
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes"),
            *("-subj", "/CN=localhost", "-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )

    def write(listens="443", service="127.0.0.1:8080"):
        text = CONF.read_text(encoding="utf-8")
        for old, new in (
            ("/etc/ssl/rank.example.org.pem", certificate),
            ("/etc/ssl/rank.example.org.key", key),
            ("listen 443", f"listen {listens}"),
            ("127.0.0.1:8080", service),
        ):
            assert old in text
            text = text.replace(old, str(new))
        written = tmp_path / "nginx.conf"
        written.write_text(text, encoding="utf-8")
        return written

    return write


@needs_nginx
def test_nginx_takes_it(copy):
    done = subprocess.run(["nginx", "-t", "-c", copy()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_nginx
def test_behind_nginx_one_address_with_very_many_requests_is_limited_and_others_are_answered(
    copy, tmp_path
):
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    requests = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 300
    with ExitStack() as stack, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        name = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        url = stack.enter_context(address_of(scheduler(Numbers())))
        conf = copy(name, url.removeprefix("http://"))
        general = f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/log;"
        nginx = stack.enter_context(subprocess.Popen(["nginx", "-c", conf, "-g", general]))
        stack.callback(nginx.terminate)
        transport = httpx.HTTPTransport(verify=trust, local_address="127.0.0.2", retries=9)
        other = stack.enter_context(httpx.Client(transport=transport, timeout=60))
        assert other.get(f"https://{name}/health").status_code == 200
        floods = []
        for _ in range(40):
            plain = socket.create_connection(name.split(":"), timeout=60)
            flood = stack.enter_context(trust.wrap_socket(plain))
            flood.sendall(requests)
            floods.append(flood)
        # On a slow machine the rate allows some requests of every connection.
        assert any(b"HTTP/1.1 429" in flood.recv(1 << 16) for flood in floods)
        assert other.get(f"https://{name}/health").status_code == 200
        text = httpx.get(f"{url}/metrics", timeout=60).text
        answered = re.search(r'request_seconds_count{route="/health",status="200"} (\S+)', text)
        assert float(answered[1]) < 0.5 * 40 * 300
