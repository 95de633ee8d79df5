"""Settings of a process that belongs to a command, never to a host application."""

import logging
import os
import sys

from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

from ..backends.onnx.cores import usable_cores

logger = logging.getLogger(__name__)

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


def prepare(threads: int | None = None) -> None:
    """Set `DEFAULTS` and the number of torch's threads.

    Call this before torch is imported. Afterwards it can only lower the number of threads.

    Args:
        threads: None for ``OMP_NUM_THREADS``, else torch's own number, but at most `usable_cores`.
    """
    torch = sys.modules.get("torch")
    cores = usable_cores()
    available = (os.cpu_count() or 1) if torch is None else torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ and cores < available:
        threads = threads or cores
    if torch is None:
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
    if threads is None:
        return
    if torch is None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    else:
        torch.set_num_threads(threads)
    logger.info("torch computes with %d threads on %d usable cores.", threads, cores)
