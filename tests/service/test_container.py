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
    """What a service's container runs; None for a container without Compose."""
    words = json.loads(values(steps, "ENTRYPOINT")[0])
    if service is None:
        return words + json.loads(values(steps, "CMD")[0])
    return words + COMPOSE["services"][service]["command"]


def params_of(words):
    """What `rsrank serve` reads of a command, in which no ${NAME:-default} is set."""
    assert words[:2] == ["rsrank", "serve"]
    words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in words[2:]]
    return app.commands["serve"].make_context("serve", words).params


def test_the_image_begins_with_a_python_that_the_package_supports(steps):
    actual = re.fullmatch(r"python:(\d+)\.(\d+)-slim", values(steps, "FROM")[0])
    least = PROJECT["requires-python"].removeprefix(">=").split(".")
    assert (int(actual[1]), int(actual[2])) >= tuple(map(int, least))


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
    extras = set()
    for argument in values(steps, "ARG"):
        name, _, value = argument.partition("=")
        if "EXTRAS" in name:
            extras |= set(value.strip('"').split(","))
    for service in COMPOSE["services"].values():
        if "EXTRAS" in service["build"].get("args", {}):
            extras |= set(service["build"]["args"]["EXTRAS"].split(","))
    assert extras
    assert extras <= set(PROJECT["optional-dependencies"])


def test_the_service_does_not_run_as_root(steps):
    assert values(steps, "USER") == ["rsrank"]
    names = [name for name, _ in steps]
    assert names.index("USER") < names.index("ENTRYPOINT")


@pytest.mark.parametrize("service", [None, *COMPOSE["services"]])
def test_the_commands_are_ones_that_rsrank_takes(steps, service):
    params = params_of(arguments(steps, service))
    assert (params["host"], params["port"], params["model"]) == ("0.0.0.0", 8080, "mini")


def test_the_health_check_is_a_program_that_compiles_and_asks_the_port_that_is_served(steps):
    options, _, command = values(steps, "HEALTHCHECK")[0].partition("CMD")
    words = json.loads(command)
    assert words[:2] == ["python", "-c"]
    compile(words[2], "health check", "exec")
    assert ":8080/health" in words[2]
    assert all(word.startswith("--") for word in shlex.split(options))


@pytest.mark.parametrize("service", COMPOSE["services"])
def test_compose_publishes_the_port_to_the_loopback_only_and_keeps_what_must_stay(steps, service):
    compose = COMPOSE["services"][service]
    assert compose["ports"] == ["127.0.0.1:8080:8080"]
    volumes = dict(volume.split(":") for volume in compose["volumes"])
    assert set(volumes) <= set(COMPOSE["volumes"])
    assert set(json.loads(values(steps, "VOLUME")[0])) == set(volumes.values())
    assert compose["command"][compose["command"].index("--cache-folder") + 1] in volumes.values()


def test_compose_waits_longer_than_a_request_may_take(steps):
    for service in COMPOSE["services"]:
        grace = int(COMPOSE["services"][service]["stop_grace_period"].removesuffix("s"))
        assert grace > params_of(arguments(steps, service))["timeout"]


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
    command = ["docker", "compose", "--profile", "gpu", "config", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_file_of_the_package_is_left_out_of_the_wheel():
    # hatchling packs the folder but for what .gitignore names, tracked or not.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    build = project["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"] == {"packages": ["rsrank_rag"]}
    assert set(build) == {"targets"}
    files = []
    for path in (ROOT / "rsrank_rag").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            files.append(path)
    kinds = {".html", ".md", ".onnx", ".safetensors", ".toml"}
    assert kinds <= {path.suffix for path in files}
    names = "\n".join(str(path.relative_to(ROOT)) for path in files)
    command = ["git", "check-ignore", "--no-index", "--stdin"]
    result = subprocess.run(command, input=names, cwd=ROOT, capture_output=True, text=True)
    if result.returncode == 128:
        pytest.skip("no checkout of git: " + result.stderr)
    assert result.stdout == ""
