"""How many threads torch gets, and how they wait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rsrank_rag.language_model.threads import usable_cores

BOUND = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, BOUND),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, BOUND),
        ({"cpu.max": f"{BOUND + 7}00000 100000\n"}, BOUND),
        ({"cpu.max": "nonsense"}, BOUND),
        ({}, BOUND),
    ],
)
def test_a_quota_of_the_control_group_bounds_the_cores_that_are_used(
    tmp_path: Path, files: dict[str, str], cores: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == cores


def ran(code: str, **variables: str) -> str:
    """What a fresh interpreter prints in which nothing is said about threads but ``variables``."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    done = subprocess.run([sys.executable, "-c", code], env={**own, **variables}, text=True, stdout=-1, check=True)
    return done.stdout.strip()


LOW = "import rsrank_rag.language_model.threads as t; t.usable_cores = lambda: 1\n"
SHOW = "import os; print(os.environ.get('OMP_NUM_THREADS'), os.environ.get('OMP_WAIT_POLICY'))"


def test_a_quota_below_the_machine_decides_before_torch_is_imported_and_idle_threads_sleep() -> None:
    code = f"import os; os.cpu_count = lambda: 8\n{LOW}t.use_threads(); {SHOW}"
    assert ran(code) == "1 PASSIVE"
    assert ran(code, OMP_NUM_THREADS="3", OMP_WAIT_POLICY="ACTIVE") == "3 ACTIVE"


def test_a_number_that_is_given_wins_over_the_environment() -> None:
    assert ran(f"{LOW}t.use_threads(2); {SHOW}", OMP_NUM_THREADS="3") == "2 PASSIVE"


@pytest.mark.slow
def test_torch_that_is_there_already_is_given_fewer_threads_but_never_more() -> None:
    there = f"import torch; torch.set_num_threads(4)\n{LOW}"
    assert ran(f"{there}t.use_threads(); print(torch.get_num_threads())") == "1"
    more = f"{there}t.usable_cores = lambda: 8; t.use_threads(); print(torch.get_num_threads())"
    assert ran(more) == "4"


@pytest.mark.slow
def test_the_first_use_of_a_public_name_bounds_threads() -> None:
    assert ran(f"{LOW}import os; os.cpu_count = lambda: 8\nfrom rsrank_rag import RSRank; {SHOW}") == "1 PASSIVE"


@pytest.mark.slow
def test_a_model_that_an_adapter_loads_bounds_threads() -> None:
    code = (
        "import os; os.cpu_count = lambda: 8\n"
        "from rsrank_rag.langchain import RSRankCompressor; from langchain_core.documents import Document\n"
        f"RSRankCompressor(model='mini').compress_documents([Document('A bridge.')], 'bridge'); {SHOW}"
    )
    assert ran(f"{LOW}{code}") == "1 PASSIVE"


def test_fewer_prepared_products_are_kept_unless_somebody_chose_how_many():
    code = "import os, rsrank_rag.language_model.loading; print(os.environ['ONEDNN_PRIMITIVE_CACHE_CAPACITY'])"
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    unset = {key: value for key, value in os.environ.items() if key != name}
    for given, expected in ((unset, "64"), ({**unset, name: "7"}, "7")):
        done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
