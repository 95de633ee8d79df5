"""A host process: importing, loading and scoring change nothing outside the package."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]

SNAPSHOT = """
import logging, os, random, signal, sys, threading, warnings

callers = []

def spy_on(module, name):
    # Records which modules call a function. Other libraries may, when they are imported.
    function = getattr(module, name, None)

    def spy(*arguments, **keywords):
        callers.append((name, sys._getframe(1).f_globals["__name__"]))
        return function(*arguments, **keywords)

    if function is not None:
        setattr(module, name, spy)

spy_on(os, "register_at_fork")
spy_on(warnings, "filterwarnings")
spy_on(warnings, "simplefilter")

import torch, transformers, huggingface_hub
from transformers.utils import logging as transformers_logging

transformers_logging.get_logger()

def loggers():
    every = {"root": logging.root}
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger):
            every[name] = logger
    return {
        name: (logger.level, list(logger.filters), list(logger.handlers), logger.disabled,
               logger.propagate)
        for name, logger in every.items()
    }

def process():
    return {
        # Torch sets this one itself when its compiler is imported.
        "environment": {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"},
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "attention": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
        "kernels": (
            torch.backends.mkldnn.is_available(),
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.quantized.engine,
        ),
        "precision": (torch.get_float32_matmul_precision(), torch.get_default_dtype()),
        "modes": (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.are_deterministic_algorithms_enabled(),
        ),
        "random": (torch.random.get_rng_state().tolist(), random.getstate()),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "bars": (
            transformers_logging.is_progress_bar_enabled(),
            huggingface_hub.utils.are_progress_bars_disabled(),
        ),
        "verbosity": transformers_logging.get_verbosity(),
        "directory": os.getcwd(),
    }
"""

USE = """
loggers_before, before = loggers(), process()
from rsrank_rag import RSRank

dtypes = [None, "float32"]
# torch's attention in bfloat16 fails on processors with AMX if its instructions are limited.
if "ATEN_CPU_CAPABILITY" not in os.environ:
    dtypes.append("bfloat16")
for dtype in dtypes:
    ranker = RSRank.from_pretrained("mini", device="cpu", dtype=dtype)
    ranker.score("How do bees talk?", ["Bees dance. " * 60, "Trains run on rails. " * 60])
loggers_after, after = loggers(), process()
changed = [name for name in before if before[name] != after[name]]
changed += [name for name in loggers_before if loggers_after[name] != loggers_before[name]]
for name in loggers_after.keys() - loggers_before.keys():
    level, filters, *_ = loggers_after[name]
    if filters or (name.startswith("rsrank_rag") and level != logging.NOTSET):
        changed.append(name)
changed += [call for call in callers if call[1].startswith("rsrank_rag")]
print("changed:", *changed)
"""


def test_importing_loading_and_scoring_leave_the_process_as_it_was():
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "ONEDNN_"))}
    code = textwrap.dedent(SNAPSHOT) + textwrap.dedent(USE)
    for variables in ({}, {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "2"}):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, "PYTHONPATH": str(ROOT), **variables},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.stdout.splitlines()[-1:] == ["changed:"], done.stdout + done.stderr[-2000:]
