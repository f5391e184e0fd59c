"""Runs planned steps on a real model: one flattened forward pass, then one draw per sampling sequence."""

from collections.abc import Callable, Sequence

import torch

from engine.config.engine_config import ModelConfig, SchedulerConfig
from engine.interfaces.engine_core import RunnerLimits
from engine.interfaces.plan import Sample, StepPlan
from engine.model.loader import LoadedModel, load_model
from engine.model.progress import OnProgress
from engine.runner.abilities import find_abilities
from engine.runner.attention import ATTENTION_NAME, STEP_KEYWORD, PagedStep, register_attention
from engine.runner.batch import StepBatch, make_batch
from engine.runner.free_memory import free_memory
from engine.runner.grammar_tokenizer import load_grammars
from engine.runner.kv_cache import PagedKVCache
from engine.runner.kv_memory import allocate_cache
from engine.runner.linears import quicken_linears
from engine.runner.pooling import pool, watched
from engine.runner.probe import probe_layers
from engine.runner.sampler import Sampler
from engine.wire.errors import StartupError

Loading = Callable[[ModelConfig, str, OnProgress], LoadedModel]
"""Loads the weights that belong to this process; called with the name of the attention function."""


class TorchRunner:
    """A Hugging Face decoder behind the ``Runner`` protocol. Constructed and run from any one thread at a time."""

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
        self._config = model
        self._load = load
        loaded = _load(load, model, on_progress)
        on_progress("measuring layers", 0.92)
        self._shapes = probe_layers(loaded)
        abilities = find_abilities(loaded)
        max_model_len = _max_model_len(loaded, model.max_model_len)
        on_progress("allocating the KV cache", 0.95)
        cache = allocate_cache(self._shapes, scheduler, max_model_len, loaded.device, reserved_bytes)
        self._loaded: LoadedModel | None = loaded
        self._cache: PagedKVCache | None = cache
        on_progress("reading the tokenizer", 0.97)
        grammars = load_grammars(model, loaded.info)
        self._sampler = Sampler(frozenset(loaded.info.eos_token_ids), grammars)
        self._limits = RunnerLimits(
            max_model_len=max_model_len,
            vocab_size=loaded.info.vocab_size,
            num_blocks=cache.num_blocks,
            block_size=scheduler.block_size,
            eos_token_ids=frozenset(loaded.info.eos_token_ids),
            device=str(loaded.device),
            dtype=str(loaded.dtype).removeprefix("torch."),
            features=frozenset({"logprobs", *abilities.features, *(() if grammars is None else ("grammar",))}),
            hidden_size=abilities.hidden_size,
        )
        on_progress("loaded", 1.0)

    @property
    def limits(self) -> RunnerLimits:
        """Return what the loaded model can do."""
        return self._limits

    def run(self, plan: StepPlan) -> Sequence[Sample]:
        """Run the step; one sample per chunk with ``samples`` set, in plan order."""
        loaded, cache = self._loaded, self._cache
        assert loaded is not None, "the runner sleeps or is closed"
        assert cache is not None, "the runner sleeps or is closed"
        if not plan.chunks:
            return []
        with torch.inference_mode():  # per thread, so entered here and not where the model was loaded
            batch = make_batch(plan, cache.block_size, cache.padding_block, loaded.device)
            if batch.begun_blocks.numel():
                cache.clear(batch.begun_blocks)
            self._sampler.prepare(plan)
            if batch.pooled_rows is None:
                return self._sampler.sample(_forward(loaded, cache, batch), plan)
            with watched(loaded.model) as seen:
                logits = _forward(loaded, cache, batch)
            assert seen.states is not None, "checked when the model was loaded"
            vectors = iter(pool(seen.states, batch.pooled_rows, [chunk for chunk in plan.chunks if chunk.pools]))
            drawn = iter(self._sampler.sample(logits, plan))
            return [next(vectors if chunk.pools else drawn) for chunk in plan.chunks if chunk.samples]

    def sleep(self, level: int) -> None:
        """Give memory back until ``wake_up``: 1 the cache and the weights' place on the device, 2 the weights too.

        The weights of a CPU engine have no other place to go: at level 1 they stay.
        """
        self._cache = None
        if level > 1:
            self._loaded = None
        elif self._loaded is not None:
            self._loaded.model.to("cpu")
        free_memory(self._limits.device)

    def wake_up(self, on_progress: OnProgress) -> None:
        """Put the weights back on the device, read again where they were dropped, and make an empty cache.

        Raises:
            StartupError: the weights can no longer be read. RuntimeError: the device has not the memory any more.
        """
        if self._loaded is None:
            self._loaded = _load(self._load, self._config, on_progress)
        device = self._loaded.device
        self._loaded.model.to(device)
        self._cache = PagedKVCache(self._shapes, self._limits.num_blocks, self._limits.block_size, device)

    def close(self) -> None:
        """Free the device; idempotent."""
        self._loaded = self._cache = None
        free_memory(self._limits.device)


def _load(load: Loading, config: ModelConfig, on_progress: OnProgress) -> LoadedModel:
    loaded = load(config, ATTENTION_NAME, on_progress)
    quicken_linears(loaded.model, loaded.device)
    return loaded


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


def _max_model_len(loaded: LoadedModel, wanted: int | None) -> int:
    limit = loaded.info.max_model_len
    if wanted is None and limit is None:
        raise StartupError(f"{loaded.info.architecture} names no length limit; set max_model_len")
    if wanted is not None and limit is not None and wanted > limit:
        raise StartupError(f"max_model_len={wanted} is more than the model's {limit} positions")
    return wanted if wanted is not None else int(limit or 0)
