"""The torch runner: one flattened forward pass of a real model per step, then one draw per sampling sequence."""

import ctypes
import gc
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from engine.config.engine_config import ModelConfig, SchedulerConfig
from engine.interfaces.engine_core import OnProgress, RunnerLimits
from engine.interfaces.plan import Sample, StepPlan
from engine.model.loader import LoadedModel, load_model
from engine.model.model_info import ModelInfo
from engine.runner.attention import ATTENTION_NAME, STEP_KEYWORD, PagedStep, register_attention
from engine.runner.batch import StepBatch, make_batch
from engine.runner.grammar import Grammars, load_grammars
from engine.runner.kv_cache import PagedKVCache, allocate_cache
from engine.runner.linears import optimize_linears
from engine.runner.pooling import capture_hidden_states, pool
from engine.runner.probe import ModelFeatures, probe_features, probe_layers
from engine.runner.sampler import Sampler
from engine.wire.errors import StartupError

Loading = Callable[[ModelConfig, str, OnProgress], LoadedModel]
"""Loads the weights that belong to this process; called with the name of the attention function."""


class _Awake(NamedTuple):
    """What a step runs on."""

    loaded: LoadedModel
    cache: PagedKVCache


class TorchRunner:
    """A Hugging Face decoder behind the ``Runner`` protocol. Constructed and run from any one thread at a time.

    _awake: None while it sleeps, and when it is closed. _loaded: None where the weights were dropped with that.
    """

    def __init__(
        self,
        model: ModelConfig,
        scheduler: SchedulerConfig,
        on_progress: OnProgress,
        *,
        load: Loading = load_model,
        reserved_bytes: int = 0,
    ) -> None:
        """Load the weights and allocate the cache.

        load: by default the whole model. reserved_bytes: memory of the device that comes to be used later, and that a
        cache sized by what is free must leave.

        Raises:
            StartupError: model, device, dtype, lengths and memory do not fit together; names the option.
        """
        torch.set_num_threads(model.num_threads)  # of the whole process: ranks with more threads than cores collapse
        register_attention()
        self._config, self._load = model, load
        loaded = _load(load, model, on_progress)
        on_progress("measuring layers", 0.92)
        self._shapes = probe_layers(loaded)
        features = probe_features(loaded)
        max_model_len = _max_model_len(loaded.info, model.max_model_len)
        on_progress("allocating the KV cache", 0.95)
        cache = allocate_cache(self._shapes, scheduler, max_model_len, loaded.device, reserved_bytes)
        on_progress("reading the tokenizer", 0.97)
        grammars = load_grammars(model, loaded.info)
        self._sampler = Sampler(frozenset(loaded.info.eos_token_ids), grammars)
        self._limits = _limits(loaded, cache, max_model_len, features, grammars)
        self._loaded: LoadedModel | None = loaded
        self._awake: _Awake | None = _Awake(loaded, cache)
        on_progress("loaded", 1.0)

    @property
    def limits(self) -> RunnerLimits:
        """Return what the loaded model can do."""
        return self._limits

    @property
    def loaded(self) -> LoadedModel | None:
        """Return the model; None where its weights were dropped."""
        return self._loaded

    def run(self, plan: StepPlan) -> Sequence[Sample]:
        """Run the step; one sample per chunk with ``samples`` set, in plan order."""
        assert self._awake is not None, "the runner sleeps or is closed"
        loaded, cache = self._awake
        if not plan.chunks:
            return []
        with torch.inference_mode():  # per thread, so entered here and not where the model was loaded
            batch = make_batch(plan, cache.block_size, cache.padding_block, loaded.device)
            if batch.begun_blocks.numel():
                cache.clear(batch.begun_blocks)
            self._sampler.prepare(plan)
            if batch.pooled_rows is None:
                return self._sampler.sample(_forward(loaded, cache, batch), plan)
            with capture_hidden_states(loaded.model) as captured:
                logits = _forward(loaded, cache, batch)
            vectors = iter(pool(captured[-1], batch.pooled_rows, [chunk for chunk in plan.chunks if chunk.pools]))
            drawn = iter(self._sampler.sample(logits, plan))
            return [next(vectors if chunk.pools else drawn) for chunk in plan.chunks if chunk.samples]

    def sleep(self, level: int) -> None:
        """Give memory back until ``wake_up``: 1 the cache and the weights' place on the device, 2 the weights too.

        The weights of a CPU engine have no other place to go: at level 1 they stay.
        """
        self._awake = None
        if level > 1:
            self._loaded = None
        elif self._loaded is not None:
            self._loaded.model.to("cpu")
        free_memory(self._limits.device)

    def wake_up(self, on_progress: OnProgress) -> None:
        """Put the weights back on the device, read again where they were dropped, and make an empty cache.

        Raises:
            StartupError: the weights can no longer be read.
            RuntimeError: the device has not the memory any more.
        """
        loaded = self._loaded or _load(self._load, self._config, on_progress)
        self._loaded = loaded
        loaded.model.to(loaded.device)
        # As many blocks as before, whatever is free now: the scheduler goes on with the same pool.
        cache = PagedKVCache(self._shapes, self._limits.num_blocks, self._limits.block_size, loaded.device)
        self._awake = _Awake(loaded, cache)

    def close(self) -> None:
        """Free the device; idempotent."""
        self._loaded = self._awake = None
        free_memory(self._limits.device)


def _load(load: Loading, config: ModelConfig, on_progress: OnProgress) -> LoadedModel:
    loaded = load(config, ATTENTION_NAME, on_progress)
    optimize_linears(loaded.model, loaded.device)
    return loaded


def _max_model_len(info: ModelInfo, wanted: int | None) -> int:
    limit = info.max_model_len
    if wanted is not None and limit is not None and wanted > limit:
        raise StartupError(f"max_model_len={wanted} is more than the model's {limit} positions")
    chosen = limit if wanted is None else wanted
    if chosen is None:
        raise StartupError(f"{info.architecture} names no length limit; set max_model_len")
    return chosen


def _limits(
    loaded: LoadedModel, cache: PagedKVCache, max_model_len: int, features: ModelFeatures, grammars: Grammars | None
) -> RunnerLimits:
    return RunnerLimits(
        max_model_len=max_model_len,
        vocab_size=loaded.info.vocab_size,
        num_blocks=cache.num_blocks,
        block_size=cache.block_size,
        eos_token_ids=frozenset(loaded.info.eos_token_ids),
        device=str(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        features=frozenset({"logprobs", *features.names, *(() if grammars is None else ("grammar",))}),
        hidden_size=features.hidden_size,
    )


def _forward(loaded: LoadedModel, cache: PagedKVCache, batch: StepBatch) -> torch.Tensor:
    """Return the logits [S + P, vocabulary] of the rows to keep."""
    inputs = {"input_ids": batch.input_ids}
    if batch.embeds is not None:
        inputs = {"inputs_embeds": batch.embeds.overwrite(loaded.model.get_input_embeddings()(batch.input_ids))}
    output = loaded.model(
        **inputs,
        position_ids=batch.position_ids,
        use_cache=False,
        logits_to_keep=batch.kept_rows,
        **{STEP_KEYWORD: PagedStep(cache, batch)},
    )
    logits: torch.Tensor = output.logits[0]
    return logits


def free_memory(device: str) -> None:
    """Collect what was dropped, and hand its memory back to the device and the system.

    device: as in ``RunnerLimits``.
    """
    # An engine's process has frozen what it loaded, and a model is full of cycles: it is thawed to be collected.
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if was_frozen:
        gc.freeze()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        # The C library keeps freed memory for itself until it is asked; glibc alone can be.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
