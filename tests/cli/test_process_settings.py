"""The settings of a command's own process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def output_of(code: str, **variables: str) -> str:
    """What a fresh interpreter prints whose environment sets no threads but ``variables``."""
    unset = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "ONEDNN_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**unset, **variables},
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    return done.stdout.strip()


ONE_CORE = "import rsrank_rag.cli.process as process; process.usable_cores = lambda: 1\n"
SHOW = """
import os
names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
print(*map(os.environ.get, names))
"""


def test_a_quota_below_the_machine_decides_before_torch_is_imported_and_idle_threads_sleep() -> (
    None
):
    code = f"import os; os.cpu_count = lambda: 8\n{ONE_CORE}process.prepare()\n{SHOW}"
    assert output_of(code) == "1 PASSIVE 64"
    variables = {
        "OMP_NUM_THREADS": "3",
        "OMP_WAIT_POLICY": "ACTIVE",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "7",
    }
    assert output_of(code, **variables) == "3 ACTIVE 7"


@pytest.mark.slow
def test_torch_that_is_imported_already_gets_fewer_threads_but_never_more() -> None:
    start = f"import torch; torch.set_num_threads(4)\n{ONE_CORE}"
    threads = "process.prepare(); print(torch.get_num_threads())"
    assert output_of(f"{start}{threads}") == "1"
    assert output_of(f"{start}process.usable_cores = lambda: 8; {threads}") == "4"
