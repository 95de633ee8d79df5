"""The container files: their sources and extras exist, and `rsrank` knows their commands."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from dockerfile_parse import DockerfileParser

from rsrank_rag.cli import app

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Instructions of the Dockerfile with their values. The parser gets a copy: it may write."""
    folder = tmp_path_factory.mktemp("container")
    shutil.copy(ROOT / "Dockerfile", folder)
    return [
        (step["instruction"], step["value"]) for step in DockerfileParser(str(folder)).structure
    ]


def values(steps, instruction):
    return [value for name, value in steps if name == instruction]


def arguments(steps, service):
    """What a service's container runs."""
    return [*json.loads(values(steps, "ENTRYPOINT")[0]), *COMPOSE["services"][service]["command"]]


def resolved(text):
    """Compose's ${NAME:-default} as it is when nothing is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_the_image_begins_with_a_python_that_the_package_supports(steps):
    found = re.fullmatch(r"python:(\d+)\.(\d+)-slim", values(steps, "FROM")[0])
    assert (int(found[1]), int(found[2])) >= tuple(
        map(int, PROJECT["requires-python"].removeprefix(">=").split("."))
    )


def test_everything_that_is_copied_is_there_and_not_ignored(steps):
    let_in = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert let_in[0] == "*"
    sources = [source for value in values(steps, "COPY") for source in value.split()[:-1]]
    assert "rsrank_rag" in sources
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in let_in


def test_what_the_build_of_the_package_needs_is_copied_before_it_is_installed(steps):
    order = [value for name, value in steps if name in ("COPY", "RUN")]
    install = next(i for i, value in enumerate(order) if '".[' in value)
    copied = {source for value in order[:install] for source in value.split()}
    assert {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"], "rsrank_rag"} <= copied


def test_the_extras_exist(steps):
    extras = {
        argument.partition("=")[2].strip('"')
        for argument in values(steps, "ARG")
        if "EXTRAS" in argument
    }
    extras |= {extra for service in COMPOSE["services"].values() for extra in _extras(service)}
    assert extras
    assert {part for extra in extras for part in extra.split(",")} <= set(
        PROJECT["optional-dependencies"]
    )


def _extras(service):
    found = service["build"].get("args", {}).get("EXTRAS")
    return [found] if found else []


def test_the_service_does_not_run_as_root(steps):
    assert values(steps, "USER") == ["rsrank"]
    assert [name for name, _ in steps].index("USER") < [name for name, _ in steps].index(
        "ENTRYPOINT"
    )


@pytest.mark.parametrize("service", [None, *COMPOSE["services"]])
def test_the_commands_are_ones_that_rsrank_takes(steps, service):
    words = (
        json.loads(values(steps, "ENTRYPOINT")[0]) if service is None else arguments(steps, service)
    )
    words += json.loads(values(steps, "CMD")[0]) if service is None else []
    assert words[:2] == ["rsrank", "serve"]
    command = app.commands["serve"]
    context = command.make_context("serve", [resolved(word) for word in words[2:]])
    assert context.params["host"] == "0.0.0.0"
    assert context.params["port"] == 8080
    assert context.params["model"] == "mini"


def test_the_health_check_is_a_program_that_compiles_and_asks_the_port_that_is_served(steps):
    options, _, command = values(steps, "HEALTHCHECK")[0].partition("CMD")
    words = json.loads(command)
    assert words[:2] == ["python", "-c"]
    compile(words[2], "health check", "exec")
    assert ":8080/health" in words[2]
    assert all(word.startswith("--") for word in shlex.split(options))


@pytest.mark.parametrize("service", COMPOSE["services"])
def test_compose_publishes_the_port_to_the_loopback_only_and_keeps_what_must_stay(steps, service):
    chosen = COMPOSE["services"][service]
    assert chosen["ports"] == ["127.0.0.1:8080:8080"]
    volumes = dict(volume.split(":") for volume in chosen["volumes"])
    assert set(volumes) <= set(COMPOSE["volumes"])
    assert set(json.loads(values(steps, "VOLUME")[0])) == set(volumes.values())
    assert chosen["command"][chosen["command"].index("--cache-folder") + 1] in volumes.values()


def test_compose_waits_longer_than_a_request_may_take(steps):
    for service in COMPOSE["services"]:
        command = app.commands["serve"]
        found = command.make_context(
            "serve", [resolved(word) for word in arguments(steps, service)[2:]]
        ).params
        grace = int(COMPOSE["services"][service]["stop_grace_period"].removesuffix("s"))
        assert grace > found["timeout"]


def test_no_secret_stands_in_the_files():
    for service in COMPOSE["services"].values():
        for name, value in service["environment"].items():
            # Without a value, Compose passes the variable of its own environment, if it is set.
            assert value is None, name


@pytest.mark.skipif(
    shutil.which("docker") is None
    or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode,
    reason="needs docker compose",
)
def test_docker_compose_takes_the_file():
    done = subprocess.run(
        ["docker", "compose", "--profile", "gpu", "config", "--quiet"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_no_file_of_the_package_is_left_out_of_the_wheel():
    # hatchling packs the folder but for what .gitignore names, tracked or not.
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"][
        "build"
    ]
    assert build["targets"]["wheel"] == {"packages": ["rsrank_rag"]}
    assert set(build) == {"targets"}
    files = [
        path
        for path in (ROOT / "rsrank_rag").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    kinds = {".html", ".md", ".onnx", ".safetensors", ".toml"}
    assert kinds <= {path.suffix for path in files}
    told = "\n".join(str(path.relative_to(ROOT)) for path in files)
    found = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin"],
        input=told,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if found.returncode == 128:
        pytest.skip("no checkout of git: " + found.stderr)
    assert found.stdout == ""
