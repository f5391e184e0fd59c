"""Loads any decoder that transformers knows, with the device and number format the configuration asks for."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine.config.engine_config import ModelConfig
from engine.model.conversion import unpack, unpacked_weights
from engine.model.description import describe
from engine.model.names import ResolvedModel, resolve_model
from engine.model.placement import computes_natively, select_device, select_dtype
from engine.model.progress import OnProgress, progress_bars_to
from engine.model.source import load_failure
from engine.model.tokenizer_files import ModelInfo

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
