"""`rsrank serve` as a process: what its files and signals do to it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals and files")

SLOW = """
import time
from rsrank_rag import Reranker
class Slow(Reranker):
    def score(self, query, documents):
        time.sleep(600 if "hang" in documents else 0)
        return [float(len(text)) for text in documents]
"""
MAIN = """
import sys
from rsrank_rag.cli import service
from slow import Slow
if __name__ == "__main__":
    # In the place of the function that loads the model.
    service.partial = lambda function, *arguments: Slow
    from rsrank_rag.cli import app
    app(["serve", "--model", "bm25", "--timeout", "60", "--port", sys.argv[1]])
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Served:
    """A service whose model takes ten minutes for "hang", as a process."""

    def __init__(self, folder, **options):
        (folder / "slow.py").write_text(SLOW)
        (folder / "main.py").write_text(MAIN)
        self.port = free_port()
        path = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
        environment = {k: v for k, v in os.environ.items() if k != "RSRANK_API_KEY"}
        command = [sys.executable, str(folder / "main.py"), str(self.port)]
        if "shell" in options:
            command = ["sh", "-c", f'exec "$@" {options.pop("shell")}', "sh", *command]
        self.process = subprocess.Popen(
            command, env={**environment, "PYTHONPATH": path}, cwd=folder, **options
        )
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        ends = time.monotonic() + 120
        while time.monotonic() < ends and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/ready").status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.05)
        self.process.kill()
        raise AssertionError(f"it never answered; exit status {self.process.poll()}")

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def ask(self, *documents):
        body = {"query": "q", "documents": documents}
        return httpx.post(f"{self.url}/v1/rerank", json=body, timeout=60).status_code


@pytest.mark.parametrize("stdout", ["/dev/full", "closed"])
def test_a_full_or_closed_standard_output_does_not_keep_the_service_from_listening(
    tmp_path, stdout
):
    if stdout == "closed":
        options = {"shell": ">&-", "stderr": subprocess.DEVNULL}
    else:
        options = {"stdout": os.open(stdout, os.O_WRONLY), "stderr": subprocess.DEVNULL}
    with Served(tmp_path, **options) as served:
        assert served.ask("1") == 200
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(60) == 0


def test_closed_standard_files_get_no_connection(tmp_path):
    with Served(tmp_path, shell="<&- >&- 2>&-") as served:
        assert served.ask("1") == 200
        if Path("/proc/self/fd").is_dir():
            for number in range(3):
                opened = Path(f"/proc/{served.process.pid}/fd/{number}").readlink()
                assert str(opened) == os.devnull
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(60) == 0


def test_a_standard_error_that_nobody_reads_stops_nothing(tmp_path):
    with Served(tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as served:
        with httpx.Client(base_url=served.url, timeout=30) as http:
            # Their lines are more than a pipe holds, and more than wait for a reader.
            for _ in range(1500):
                assert http.get("/info").status_code == 200
            assert http.get("/health").status_code == 200
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(60) == 0
        lines = served.process.stderr.read().splitlines()
        assert 100 < len(lines) < 1500
        assert all(json.loads(line) for line in lines[:100])


def test_a_second_ctrl_c_ends_the_service_while_its_model_works(tmp_path):
    with Served(tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as served:
        with httpx.Client() as http:
            body = {"query": "q", "documents": ["hang"]}
            with pytest.raises(httpx.HTTPError):
                http.post(f"{served.url}/v1/rerank", json=body, timeout=1.0)
        request = threading.Thread(target=lambda: suppressed(served.ask, "hang"))
        request.start()
        while " 1.0" not in waiting(served):
            time.sleep(0.05)
        served.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert served.process.poll() is None
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(30) == 0
        request.join(60)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_the_models_process_ends_with_a_killed_service(tmp_path):
    with Served(tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as served:
        pid = served.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert children
        served.process.kill()
        served.process.wait()
        ends = time.monotonic() + 60
        while any(Path(f"/proc/{child}").exists() for child in children):
            assert time.monotonic() < ends, "a process is left"
            time.sleep(0.05)


def suppressed(function, *arguments):
    try:
        function(*arguments)
    except httpx.HTTPError:
        return


def waiting(served):
    text = httpx.get(f"{served.url}/metrics").text
    return text.partition("\nrsrank_waiting_documents")[2].partition("\n")[0]
