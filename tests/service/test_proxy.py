"""The example of a proxy does what docs/serving.md asks of a proxy."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from rsrank_rag.service.middleware import Settings
from rsrank_rag.service.server import Limits

CONF = Path(__file__).parents[2] / "examples" / "nginx.conf"
UNITS = {"s": 1, "k": 1000, "m": 1_000_000}


def directives(text):
    """Every directive with its arguments, by name; blocks count as directives."""
    text = re.sub(r"#.*", "", text)
    found = {}
    for statement in re.split(r"[;{}]", text):
        name, *arguments = statement.split() or [""]
        found.setdefault(name, []).append(arguments)
    return found


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
    assert amount(conf["client_max_body_size"][0][0]) == Settings().max_body_bytes


def test_connections_to_the_service_are_fewer_and_idle_for_less_than_the_service_allows(conf):
    upstream, _ = conf["keepalive_timeout"]
    assert amount(upstream[0]) < Limits().idle_seconds
    servers = [one for one in conf["server"] if one]
    assert int(servers[0][1].removeprefix("max_conns=")) < Limits().connections
    assert ["Connection", '""'] in conf["proxy_set_header"]


def test_the_proxy_waits_longer_than_the_service(conf):
    assert amount(conf["proxy_read_timeout"][0][0]) > Settings().timeout


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_takes_it(tmp_path):
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes"),
            *("-subj", "/CN=localhost", "-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    text = CONF.read_text(encoding="utf-8")
    text = text.replace("/etc/ssl/rank.example.org.pem", str(certificate))
    text = text.replace("/etc/ssl/rank.example.org.key", str(key))
    copy = tmp_path / "nginx.conf"
    copy.write_text(text, encoding="utf-8")
    done = subprocess.run(["nginx", "-t", "-c", copy], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
