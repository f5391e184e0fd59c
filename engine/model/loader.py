"""The loader: any decoder that transformers knows, with the device and number format the configuration names.

The weights of a GGUF file are unpacked once and kept: the library takes half a minute for what then takes a second.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GgufConfig

from engine.config.engine_config import ModelConfig
from engine.interfaces.engine_core import OnProgress
from engine.model.cache import cached_name, default_cache_dir, making_folder, one_at_a_time
from engine.model.model_info import ModelInfo, describe
from engine.model.names import ResolvedModel, load_failure, resolve_model, source_arguments
from engine.model.placement import computes_natively, select_device, select_dtype
from engine.model.progress import progress_bars_to

_LOGGER = logging.getLogger(__name__)


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
    device = select_device(config.device)
    dtype = select_dtype(config.dtype)
    on_progress("reading the model", 0.0)
    try:
        with progress_bars_to(on_progress, 0.1, 0.9):
            model = _read(resolved, dtype, device, attention, on_progress)
        on_progress(f"moving weights to {device}", 0.9)
        # Only where nobody chose the checkpoint's format: float32 holds the same values and is multiplied faster.
        if dtype is None and not computes_natively(device, model.dtype):
            model = model.float()
        model = model.requires_grad_(requires_grad=False).to(device)
    except Exception as error:  # the library's own, the hub's, the parser's and the device's errors
        raise load_failure(resolved, error) from error
    return LoadedModel(
        model=model, info=describe(model.config, model.generation_config), device=device, dtype=model.dtype
    )


def _read(
    resolved: ResolvedModel, dtype: torch.dtype | None, device: torch.device, attention: str, on_progress: OnProgress
) -> Any:
    """Return the model in host memory; no ``dtype`` means the checkpoint's own, and for GGUF the device's best."""
    path = resolved.path
    if resolved.gguf_file is not None:
        # Quantised weights have no format of their own to follow.
        dtype = dtype or (torch.bfloat16 if computes_natively(device, torch.bfloat16) else torch.float32)
        try:
            path = str(unpacked_weights(resolved, dtype, on_progress))
        except OSError as error:
            _LOGGER.warning("unpacked weights cannot be kept, so every start unpacks them again: %s", error)
            return unpack(resolved, dtype, attention)
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype or "auto", attn_implementation=attention, trust_remote_code=False
    )


def unpacked_weights(model: ResolvedModel, dtype: torch.dtype, on_progress: OnProgress) -> Path:
    """Return a folder with the weights of a GGUF model as safetensors of ``dtype``, made now if need be.

    Of several ranks that start together one unpacks and the others wait for it.

    Raises:
        OSError: the cache folder cannot be written, or the file cannot be read.
        ValueError: the library does not know the file's architecture.
    """
    folder = default_cache_dir() / "weights" / cached_name(model, str(dtype).removeprefix("torch."))
    if folder.is_dir():
        return folder
    on_progress("unpacking the GGUF file (once)", 0.05)
    with one_at_a_time(folder):
        if not folder.is_dir():  # another rank may have made it while this one waited
            with making_folder(folder) as made:
                unpack(model, dtype).save_pretrained(made)
    return folder


def unpack(model: ResolvedModel, dtype: torch.dtype, attention: str | None = None) -> Any:
    """Return the model straight from its GGUF file, every weight unpacked."""
    return AutoModelForCausalLM.from_pretrained(
        model.path,
        dtype=dtype,
        attn_implementation=attention,
        quantization_config=GgufConfig(dequantize=True),  # packed weights need kernels downloaded from the hub
        **source_arguments(model),
    )
