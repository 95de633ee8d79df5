"""The number of cores that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rsrank_rag.backends.onnx.cores import usable_cores

BOUND = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, BOUND),
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
