"""Loads any decoder that transformers knows, with the device and number format the configuration asks for."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config import ModelConfig
from engine.model.description import describe
from engine.model.names import ResolvedModel, resolve_model
from engine.model.progress import OnProgress, progress_bars_to
from engine.model.source import load_failure, source_arguments
from engine.model.tokenizer_files import ModelInfo
from engine.wire.errors import StartupError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run: evaluation mode, no gradients, on its device."""

    model: Any
    info: ModelInfo
    device: torch.device
    dtype: torch.dtype


def load_model(config: ModelConfig, attention: str, on_progress: OnProgress) -> LoadedModel:
    """Load weights and modelling code.

    attention: name of an attention function registered with transformers.

    Raises:
        StartupError: model, device or dtype is not there or does not fit together; one line with the reason.
    """
    resolved = resolve_model(config.model, config.gguf_file)
    device, dtype = select_device(config.device), _select_dtype(config.dtype, resolved)
    source = source_arguments(resolved)
    on_progress("reading configuration", 0.0)
    try:
        # Handed on below: reading the configuration again out of a GGUF file takes seconds.
        model_config = AutoConfig.from_pretrained(resolved.path, **source)
        with progress_bars_to(on_progress, 0.1, 0.9), warnings.catch_warnings():
            # PyTorch says this of memory-mapped weights, which are never written to.
            warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writ")
            model: Any = AutoModelForCausalLM.from_pretrained(
                resolved.path, config=model_config, dtype=dtype, attn_implementation=attention, **source
            )
        on_progress(f"moving weights to {device}", 0.9)
        model = model.eval().requires_grad_(requires_grad=False).to(device)
    except Exception as error:  # the library's own, the hub's, the parser's and the device's errors
        raise load_failure(resolved, error) from error
    return LoadedModel(
        model=model, info=describe(model.config, model.generation_config), device=device, dtype=model.dtype
    )


def select_device(name: str) -> torch.device:
    """Return the device a name means; ``auto`` is CUDA when there is one.

    Raises:
        StartupError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise StartupError(f"--device {name!r} is no device; take auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise StartupError(f"--device {name}: this process sees {torch.cuda.device_count()} CUDA devices")
    return device


def _select_dtype(name: str, resolved: ResolvedModel) -> torch.dtype | str:
    if name in _DTYPES:
        return _DTYPES[name]
    if name != "auto":
        raise StartupError(f"--dtype {name!r} is unknown; take auto, {', '.join(_DTYPES)}")
    # Quantised weights have no format of their own to follow; the library would unpack them to float32.
    return torch.bfloat16 if resolved.gguf_file is not None else "auto"
