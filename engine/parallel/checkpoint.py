"""The checkpoint of a model whose experts are shared out, and how much of it a member may come to hold."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.config.engine_config import ModelConfig, ParallelConfig
from engine.model.expert_weights import ExpertCheckpoint
from engine.model.names import load_failure, resolve_model
from engine.model.placement import computes_natively, select_dtype
from engine.parallel.experts import EXPERTS_NAME
from engine.runner.attention import ATTENTION_NAME
from engine.wire.errors import StartupError


def open_checkpoint(config: ModelConfig, device: torch.device) -> ExpertCheckpoint:
    """Open a checkpoint without reading its weights.

    Raises:
        StartupError: it is not there, or its experts cannot be shared out.
    """
    resolved = resolve_model(config.model, config.gguf_file)
    if resolved.gguf_file is not None:
        raise StartupError("expert parallelism reads safetensors, not GGUF")
    with failures_as_startup_errors(config):
        return ExpertCheckpoint(resolved.path, _dtype(config, device), ATTENTION_NAME, EXPERTS_NAME)


@contextmanager
def failures_as_startup_errors(config: ModelConfig) -> Iterator[None]:
    """Turn whatever goes wrong with a model into a ``StartupError`` that names it."""
    try:
        yield
    except StartupError:
        raise
    except Exception as error:  # the library's own, the hub's, the parser's and the device's errors
        raise load_failure(resolve_model(config.model, config.gguf_file), error) from error


def max_rows(num_experts: int, parallel: ParallelConfig) -> int:
    """Return how many experts may lie in memory at a time: those of a group, and of the one that takes over from it."""

    def share(num_members: int) -> int:
        # No member holds an expert twice, however many replicas there are.
        return min(num_experts, -(-(num_experts + parallel.num_redundant_experts) // num_members))

    # The smallest group has the largest shares. One member alone holds all experts and is never placed anew, so the
    # group before or after it has two.
    return share(parallel.min_members) + share(max(2, parallel.min_members))


def _dtype(config: ModelConfig, device: torch.device) -> torch.dtype | None:
    dtype = select_dtype(config.dtype)
    if dtype is None and not computes_natively(device, torch.bfloat16):
        return torch.float32
    return dtype
