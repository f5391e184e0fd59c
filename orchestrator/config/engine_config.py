"""The engines' configuration, made from the options of ``shoal serve``."""

from engine.config.engine_config import (
    EngineConfig,
    EngineKind,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SimConfig,
)
from engine.model.names import ResolvedModel
from orchestrator.config.serve_config import ServeConfig

_MS = 1e-3
_US = 1e-6


def engine_config(config: ServeConfig, model: ResolvedModel | None, device: str) -> EngineConfig:
    """Return the configuration of every rank. device: as the host of the engines decided."""
    return EngineConfig(
        kind=EngineKind(config.engine),
        model=None if model is None else _model_config(config, model, device),
        scheduler=SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            kv_cache_memory_bytes=None if config.kv_cache_memory is None else int(config.kv_cache_memory),
            enable_prefix_caching=config.enable_prefix_caching,
            kv_cache_memory_fraction=config.kv_cache_memory_fraction,
        ),
        sim=_sim_config(config),
        parallel=ParallelConfig(
            enable_expert_parallel=config.enable_expert_parallel,
            min_members=config.min_data_parallel_size,
            num_redundant_experts=config.num_redundant_experts,
        ),
    )


def _model_config(config: ServeConfig, model: ResolvedModel, device: str) -> ModelConfig:
    return ModelConfig(
        model=model.path,
        gguf_file=model.gguf_file,
        dtype=config.dtype,
        device=device,
        max_model_len=config.max_model_len,
        num_threads=config.num_threads,
    )


def _sim_config(config: ServeConfig) -> SimConfig:
    defaults = SimConfig()
    return SimConfig(
        max_model_len=config.max_model_len or defaults.max_model_len,
        num_kv_tokens=config.sim_num_kv_tokens,
        step_s=config.sim_step_ms * _MS,
        prefill_s_per_token=config.sim_prefill_us_per_token * _US,
        decode_s_per_seq=config.sim_decode_us_per_seq * _US,
        load_s=config.sim_load_s,
        fail_on_token=config.sim_fail_on_token,
        crash_on_token=config.sim_crash_on_token,
        hang_on_token=config.sim_hang_on_token,
        report_delay_s=config.sim_report_delay_s,
        num_experts=config.sim_num_experts,
        load_s_per_expert=config.sim_load_ms_per_expert * _MS,
    )
