"""Timings: systems take turns in random order, and ratios are taken within a turn."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class System:
    """Something to be timed.

    Attributes:
        name: The row of tables.
        run: What is timed.
        prepare: Run before each timing, not timed.
    """

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Measured:
    """Time, operations and memory of one system.

    Attributes:
        name: The row of tables.
        seconds: Each turn's time.
        flops: Floating-point operations of one run, as torch counts them.
        peak: Bytes of memory at the highest, above those held before the run.
    """

    name: str
    seconds: tuple[float, ...]
    flops: int
    peak: int

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)

    def times_faster_than(self, other: Measured) -> float:
        """Median over turns of the other's time by this one's."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return statistics.median(theirs / own for own, theirs in pairs)


def measure(
    systems: list[System], turns: int, seed: int = 0, *, memory: bool = True
) -> list[Measured]:
    """Count memory and operations of each system in one run each, then time the turns.

    Args:
        systems: What is measured.
        turns: How often each system is timed.
        seed: Decides the order of the systems within each turn.
        memory: Whether to measure memory. If not, `Measured.peak` is -1.
    """
    peaks = {}
    flops = {}
    times: dict[str, list[float]] = {}
    # The first runs also warm up.
    for system in systems:
        peaks[system.name] = _peak(system) if memory else -1
        flops[system.name] = _flops(system)
        times[system.name] = []
    rng = random.Random(seed)
    for _ in range(turns):
        for system in rng.sample(systems, len(systems)):
            system.prepare()
            _wait()
            _wait_for_threads()
            started = time.perf_counter()
            system.run()
            _wait()
            times[system.name].append(time.perf_counter() - started)
    results = []
    for name, seconds in times.items():
        results.append(Measured(name, tuple(seconds), flops[name], peaks[name]))
    return results


def matmul_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of several large matrix products: what this machine can do at all."""
    size = 8192 if device.type == "cuda" else 2048
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    best = float("inf")
    for _ in range(8):
        _wait()
        started = time.perf_counter()
        torch.mm(a, b)
        _wait()
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def machine() -> str:
    """Device and versions, for the head of a table."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    else:
        name = f"{_processor()}, {torch.get_num_threads()} threads"
    return f"{name}; torch {torch.__version__}, transformers {transformers.__version__}"


def _processor() -> str:
    """Name of the processor; "CPU" where the system does not tell."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "CPU"


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _wait_for_threads() -> None:
    """Wait until this process is idle: threads of ONNX Runtime spin for a while after a run."""
    while True:
        before = time.process_time()
        time.sleep(0.05)
        if time.process_time() - before < 0.005:
            return


def _flops(system: System) -> int:
    system.prepare()
    maps = (torch.ops.onednn.qlinear_pointwise, torch.ops.mkldnn._linear_pointwise)
    threads = torch.get_num_threads()
    # The counter counts operations of this thread alone.
    torch.set_num_threads(1)
    with FlopCounterMode(display=False, custom_mapping=dict.fromkeys(maps, _map_flops)) as counter:
        system.run()
    torch.set_num_threads(threads)
    return int(counter.get_total_flops())


def _map_flops(
    inputs: tuple[int, ...], *args: object, out_shape: tuple[int, ...], **kwargs: object
) -> int:
    """Operations of a linear map with inputs and outputs of these shapes."""
    return 2 * inputs[-1] * math.prod(out_shape)


def _peak(system: System) -> int:
    """Highest memory of a run above what was held before it; -1 where the system does not tell."""
    system.prepare()
    if torch.cuda.is_available():
        _wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        system.run()
        _wait()
        return torch.cuda.max_memory_allocated() - before
    try:
        # 5 resets the greatest use of memory so far.
        Path("/proc/self/clear_refs").write_text("5")
        before = memory_status("VmRSS")
        system.run()
        return memory_status("VmHWM") - before
    except OSError:
        system.run()
        return -1


def memory_status(field: str, process: int | str = "self") -> int:
    """Bytes of a field of a process's status, such as VmRSS.

    Raises:
        OSError: The process is gone, or the system has no such field.
    """
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"the status of process {process} has no field {field}")
