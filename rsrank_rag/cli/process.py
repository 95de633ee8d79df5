"""Settings of a process that belongs to a command, never to a host application."""

import os
import sys

from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

from ..backends.onnx.cores import usable_cores

# Environment variables that a command sets unless its user did. Processes that it starts inherit
# them.
DEFAULTS = {
    # Idle threads sleep. Spinning costs most where other processes share the cores.
    "OMP_WAIT_POLICY": "PASSIVE",
    # On ONNX Runtime, numpy's products are small: its threads took longer to wait than to multiply.
    "OPENBLAS_NUM_THREADS": "1",
    # Products that oneDNN prepares and caches: with 64 instead of its 1,024, `mini` takes 45 MB
    # less and no more time (research/docs/speed.md).
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    # Transformers lists the weights of layers that B does not need, and shows progress bars.
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def hide_library_progress() -> None:
    """Switch off the progress bars of other libraries, as the commands show their own."""
    disable_progress_bars()
    # When transformers is imported, it takes over the Hub's setting.
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()


def prepare() -> None:
    """Set `DEFAULTS` and the number of torch's threads.

    The number is ``OMP_NUM_THREADS``, else torch's own, but at most `usable_cores`. Once torch is
    imported, the number can only be lowered.
    """
    torch = sys.modules.get("torch")
    cores = usable_cores()
    if torch is None:
        defaults = dict(DEFAULTS)
        if cores < (os.cpu_count() or 1):
            defaults["OMP_NUM_THREADS"] = str(cores)
        for name, value in defaults.items():
            os.environ.setdefault(name, value)
    elif "OMP_NUM_THREADS" not in os.environ and cores < torch.get_num_threads():
        torch.set_num_threads(cores)
