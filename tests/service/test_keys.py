"""Names and keys that open the service. No secret is printed."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("starlette")

from click.testing import CliRunner
from service_helpers import Numbers, scheduler, serving

from rsrank_rag.cli import app
from rsrank_rag.cli import service as cli_service
from rsrank_rag.cli.service import KEYS
from rsrank_rag.errors import InputError
from rsrank_rag.service.app import create_app
from rsrank_rag.service.settings import Settings, keys_of


def serve(monkeypatch, value):
    """What `rsrank serve` does with this value of the variable of keys; and its settings."""
    monkeypatch.setenv(KEYS, value)
    settings = []

    def run(backend, own, *_):
        create_app(backend, own)
        settings.append(own)

    monkeypatch.setattr(cli_service, "run", run)
    result = CliRunner().invoke(app, ["serve", "--model", "bm25"], env={"COLUMNS": "200"})
    return result, settings


@pytest.mark.parametrize("value", ["", ",", "\n", " , "])
def test_a_variable_without_a_key_keeps_the_service_from_starting_open(value, monkeypatch):
    result, started = serve(monkeypatch, value)
    assert (result.exit_code, started) == (2, [])
    assert "RSRANK_API_KEY or --api-key-file is set, and holds no key" in result.stderr


@pytest.mark.parametrize("value", ["secret\udcff", "secr\u00e9t", "sec\x01ret"])
def test_a_key_that_cannot_be_sent_is_an_error_at_the_start_that_does_not_show_it(
    value, monkeypatch
):
    monkeypatch.setitem(os.environb, KEYS.encode(), os.fsencode(value))
    with pytest.raises(InputError, match="holds characters") as caught:
        create_app(scheduler(Numbers()), Settings(api_keys=[os.environ[KEYS]]))
    assert "sec" not in str(caught.value)
    assert "sec" not in repr(Settings(api_keys=["secret"]))


def test_keys_of_the_environment_close_a_service(monkeypatch):
    result, (settings,) = serve(monkeypatch, " one, two,")
    assert (result.exit_code, settings.closed) == (0, True)


async def test_keys_may_stand_between_white_space():
    async with serving(api_keys=[" one", "two\n"]) as http:
        for key, status in (("one", 200), (" two ", 200), ("three", 401), ("\u00e9", 401)):
            header = {b"Authorization": b"Bearer " + key.encode("latin-1")}
            assert (await http.get("/info", headers=header)).status_code == status


def test_a_file_holds_a_key_a_line_and_at_least_one(tmp_path):
    file = tmp_path / "keys"
    # An editor may begin a file with a byte order mark.
    file.write_text("one\n\n two \n  # of a team\n#old\n", encoding="utf-8-sig")
    assert keys_of(Settings(api_key_file=file)) == ["one", "two"]
    file.write_text("\n", encoding="utf-8")
    for bad, says in ((file, "holds no key"), (tmp_path / "none", "could not be read")):
        arguments = ["serve", "--api-key-file", str(bad)]
        done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
        assert (done.exit_code, says in done.stderr, len(done.stderr.splitlines())) == (2, True, 1)


async def test_keys_change_with_their_file_and_stay_if_it_is_broken(tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_text("old\n")
    async with serving(api_key_file=file) as http:

        async def opens(*keys):
            is_open = []
            for key in keys:
                answer = await http.get("/info", headers={"Authorization": f"Bearer {key}"})
                is_open.append(answer.status_code == 200)
            return is_open

        assert await opens("old", "new") == [True, False]
        before = file.stat()
        file.write_text("new\n")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert await opens("old", "new") == [False, True]
        file.write_text("\n")
        assert await opens("new", "") == [True, False]
        file.unlink()
        assert await opens("new") == [True]
        assert "The keys that were read before stay." in caplog.text
    file.write_text("old\n")
    async with serving(api_keys=["fixed"], api_key_file=file) as http:
        assert await opens("fixed", "old") == [True, True]


@pytest.mark.parametrize(
    ("host", "keys", "warned"),
    [("0.0.0.0", "", True), ("0.0.0.0", "k", False), ("127.0.0.1", "", False)],
)
def test_an_open_service_beyond_loopback_is_warned_of(host, keys, warned, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != KEYS}
    if keys:
        environment[KEYS] = keys
    code = (
        "import sys\nfrom rsrank_rag.service.app import Server\n"
        "Server.run = lambda self, sockets: None\n"
        "from rsrank_rag.cli import app\napp(sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", code, "serve", "--host", host, "--port", "0"]
    options = {"env": environment, "capture_output": True, "text": True, "check": True}
    done = subprocess.run([*command, "--model", "bm25"], timeout=300, **options)
    assert ("without an API key" in done.stderr) is warned
