"""Device and number format: what the configuration's words for them mean on this machine."""

import torch

from engine.wire.errors import StartupError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def select_device(name: str) -> torch.device:
    """Return the device that a name stands for; ``auto`` is CUDA when there is one.

    Raises:
        StartupError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise StartupError(f"device {name!r} is unknown; take auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise StartupError(f"device {name!r} is not there: this process sees {torch.cuda.device_count()} CUDA devices")
    return device


def device_of_rank(name: str, rank: int) -> str:
    """Return the device of one of several ranks in one process: those that name no CUDA device go round all of them.

    Raises:
        StartupError: no such device here.
    """
    device = select_device(name)
    if device.type != "cuda" or ":" in name:
        return name
    return f"cuda:{rank % torch.cuda.device_count()}"


def select_dtype(name: str) -> torch.dtype | None:
    """Return the number format that a name stands for; None for ``auto``.

    Raises:
        StartupError: no such format.
    """
    if name == "auto":
        return None
    if name not in _DTYPES:
        raise StartupError(f"dtype {name!r} is unknown; take auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def computes_natively(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether a device multiplies matrices of this format at full speed."""
    # A CPU without the instructions still does it, 2-7 times slower than in float32, which holds the same values.
    if device.type != "cpu":
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True
