"""The configuration of the engines of a deployment, as it travels in their specs. Frozen; unknown keys are errors."""

from enum import StrEnum

from msgspec import Struct


class EngineKind(StrEnum):
    """The runner behind the scheduler: a model with torch, or a timing model."""

    TORCH = "torch"
    SIM = "sim"


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The weights of a model, where they run and how.

    model: local folder, local ``.gguf`` file or hub name. gguf_file: file name inside ``model`` when that is a folder.
    dtype: ``float32``, ``bfloat16``, ``float16`` or ``auto``: the checkpoint's own, or float32 on a CPU that lacks its
        instructions.
    device: ``auto`` (CUDA when there is one), ``cpu``, ``cuda`` or ``cuda:N``.
    max_model_len: prompt + output tokens of one sequence; None takes the model's own limit.
    num_threads: CPU threads of one engine; more than the cores per rank collapses throughput.
    """

    model: str
    gguf_file: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    num_threads: int = 1


class SchedulerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one step and of the KV cache.

    max_num_seqs: sequences running at once. max_num_batched_tokens: tokens of one step, prefill and decode together.
    block_size: tokens per KV block. kv_cache_memory_bytes: memory of the KV pool (torch engine); None takes 512 MiB on
        a CPU and a share of the free memory of a CUDA device.
    enable_prefix_caching: serve beginnings that were computed before from the KV cache.
    kv_cache_memory_fraction: that share, taken when the weights are loaded; the rest is for a step's own tensors.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    kv_cache_memory_fraction: float = 0.9


class SimConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sim engine: a timing model instead of a model.

    A step takes ``step_s + prefill_s_per_token * prefill tokens + decode_s_per_seq * decoding sequences`` seconds.
    Options for tests follow; their defaults are off.

    num_experts: experts it pretends to have when ranks step together. load_s_per_expert: seconds to load one.
    fail_on_token: a prompt that holds this token id makes its own request fail.
    crash_on_token: a prompt that holds this token id makes the engine raise out of its step and die.
    hang_on_token: a prompt that holds this token id makes the step never end.
    hidden_size: numbers of an embedding or pooled vector.
    report_delay_s: reports reach the coordinator this much later; negative sends none after the first ready one.
    """

    vocab_size: int = 256
    max_model_len: int = 8192
    num_kv_tokens: int = 262_144
    step_s: float = 0.010
    prefill_s_per_token: float = 0.000_02
    decode_s_per_seq: float = 0.0
    load_s: float = 0.0
    fail_on_token: int | None = None
    crash_on_token: int | None = None
    hang_on_token: int | None = None
    report_delay_s: float = 0.0
    hidden_size: int = 32
    num_experts: int = 8
    load_s_per_expert: float = 0.0


class ParallelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How ranks depend on each other.

    enable_expert_parallel: ranks step together and share out the experts of a mixture-of-experts model; else each is
        independent and holds a whole model.
    min_members, num_redundant_experts: of the smallest group, in which a member holds the most experts; memory for
        them is left by a KV cache that takes a share of what is free.
    """

    enable_expert_parallel: bool = False
    min_members: int = 1
    num_redundant_experts: int = 0


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that is the same for all ranks of a deployment. ``config_hash`` covers it."""

    kind: EngineKind
    model: ModelConfig | None = None
    scheduler: SchedulerConfig = SchedulerConfig()
    sim: SimConfig = SimConfig()
    parallel: ParallelConfig = ParallelConfig()
