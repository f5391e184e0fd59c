"""Gives memory that nothing refers to any more back to the device and to the system."""

import ctypes
import gc
import sys

import torch


def free_memory(device: str) -> None:
    """Collect what was dropped and hand its memory back.

    device: as in ``RunnerLimits``. An engine's process has frozen what it loaded (``gc.freeze``), and a model is full
    of cycles: it is thawed to be collected. The C library keeps freed memory for itself unless it is asked.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if was_frozen:
        gc.freeze()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
        if trim is not None:
            trim(0)
