"""The options of ``shoal serve``, each written once: command line, environment and files are read after this model."""

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, SecretStr, field_validator, model_validator

from engine.config.engine_config import SchedulerConfig, SimConfig
from engine.wire.process import LogLevel
from orchestrator.config.defaults import MAX_PENDING_REQUESTS, MAX_RANKS, SHUTDOWN_TIMEOUT_S, START_TIMEOUT_S

_MAX_PORT = 65535

# Defaults stand beside what they act on; here only those are repeated whose unit is another.
_SCHEDULER, _SIM = SchedulerConfig(), SimConfig()

GROUPS = {
    "model": "what is served",
    "engine": "what one rank is and where it runs",
    "parallelism": "how many ranks",
    "scheduler": "bounds of one step and of the KV cache",
    "sim": "the sim engine: a timing model instead of a model",
    "server": "the HTTP port",
    "cluster": "where the ranks are hosted",
    "lifecycle": "deadlines and restarts",
    "survival": "how the streams of a rank that is gone go on",
    "logging": "what is written to standard error",
}


SECRET_OPTIONS = ("api_key", "admin_api_key")
"""Never written anywhere, and hidden from the list of this machine's processes."""

_KEY = re.compile(r"[\x21-\x7e]+")


def option(default: Any, group: str, text: str, **constraints: Any) -> Any:
    """Declare one option: its default, the group it is listed under in ``--help``, and its help text."""
    assert group in GROUPS
    return Field(default, description=text, json_schema_extra={"group": group}, **constraints)


class ServeConfig(BaseModel):
    """Configuration of one deployment; frozen, and an unknown key is an error. Read it with ``sources.load``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None = option(None, "model", "known name, local folder, .gguf file or hub name")
    served_model_name: str | None = option(
        None, "model", "name of the model in the API; default: the model's own", min_length=1
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", "model", "auto: the checkpoint's own")
    max_model_len: int | None = option(
        None, "model", "prompt + output tokens of one sequence; default: the model's", ge=2
    )

    engine: Literal["torch", "sim"] = option("torch", "engine", "what runs behind the scheduler")
    device: str = option("auto", "engine", "auto, cpu, cuda or cuda:N", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    num_threads: int = option(1, "engine", "CPU threads of one rank; keep ranks x threads <= cores", ge=1)

    data_parallel_size: int = option(1, "parallelism", "number of engine ranks", ge=1, le=MAX_RANKS)

    enable_expert_parallel: bool = option(
        False, "parallelism", "ranks step together and share out the experts of a mixture-of-experts model"
    )
    max_data_parallel_size: int | None = option(
        None, "parallelism", "ranks that scaling may reach; default: as many as there is room for", ge=1, le=MAX_RANKS
    )
    num_redundant_experts: int = option(0, "parallelism", "replicas of experts beside one copy of each", ge=0)
    min_data_parallel_size: int = option(
        1, "parallelism", "ranks below which an expert-parallel group does not serve, nor is scaled to", ge=1
    )

    max_num_seqs: int = option(_SCHEDULER.max_num_seqs, "scheduler", "sequences one rank runs at once", ge=1)
    max_num_batched_tokens: int = option(
        _SCHEDULER.max_num_batched_tokens, "scheduler", "tokens of one step, prefill and decode together", ge=1
    )
    block_size: int = option(_SCHEDULER.block_size, "scheduler", "tokens of one KV block", ge=1)
    kv_cache_memory: ByteSize | None = option(
        None, "scheduler", "memory of one rank's KV cache, e.g. 2GiB; default: 512MiB, on a GPU a share", gt=0
    )
    kv_cache_memory_fraction: float = option(
        _SCHEDULER.kv_cache_memory_fraction,
        "scheduler",
        "share of a GPU's free memory for a KV cache whose size is not given",
        gt=0,
        lt=1,
    )
    enable_prefix_caching: bool = option(
        _SCHEDULER.enable_prefix_caching, "scheduler", "serve prompts that begin alike from the same KV blocks"
    )

    sim_step_ms: float = option(10.0, "sim", "duration of one step", ge=0)
    sim_prefill_us_per_token: float = option(20.0, "sim", "added per prefilled token", ge=0)
    sim_decode_us_per_seq: float = option(0.0, "sim", "added per decoding sequence", ge=0)
    sim_num_kv_tokens: int = option(_SIM.num_kv_tokens, "sim", "tokens the KV cache holds", ge=16)
    sim_num_experts: int = option(
        _SIM.num_experts, "sim", "experts it pretends to have with --enable-expert-parallel", ge=1
    )
    sim_load_ms_per_expert: float = option(0.0, "sim", "how long loading one expert takes", ge=0)
    sim_load_s: float = option(0.0, "sim", "how long loading takes", ge=0)
    sim_fail_on_token: int | None = option(None, "sim", "a prompt with this token id fails alone")
    sim_crash_on_token: int | None = option(None, "sim", "a prompt with this token id kills the engine")
    sim_hang_on_token: int | None = option(None, "sim", "a prompt with this token id hangs the engine")
    sim_report_delay_s: float = option(0.0, "sim", "reports arrive this much later; negative: only the first ready one")

    host: str = option("127.0.0.1", "server", "address the HTTP port binds to", min_length=1)
    port: int = option(8000, "server", "HTTP port; 0 takes any free one", ge=0, le=65535)
    api_server_count: int = option(1, "server", "API processes that share the port and its requests", ge=1, le=64)
    max_pending_requests: int = option(
        MAX_PENDING_REQUESTS, "server", "requests in flight before new ones are told to come back", ge=1
    )

    api_key: tuple[SecretStr, ...] | None = option(
        None,
        "server",
        "key that callers of /v1 must name, repeatable (commas in SHOAL_API_KEY); default: no key needed",
        min_length=1,
    )
    admin_api_key: SecretStr | None = option(
        None, "server", "key for admin calls, and good for all others; with --api-key alone admin calls are refused"
    )

    executor: Literal["ray", "local"] = option("ray", "cluster", "Ray actors, or plain local processes (for tests)")
    ray_address: str | None = option(
        None, "cluster", "host:port of a running Ray cluster, or auto; default: start one here"
    )
    advertise_host: str | None = option(
        None, "cluster", "address of this host that the other nodes of the cluster reach"
    )
    interface: str | None = option(
        None,
        "cluster",
        "address or network interface that lines between hosts bind to; default: what is advertised",
    )
    port_range: str | None = option(
        None, "cluster", "LOW-HIGH: ports that the lines between hosts bind to; default: any free one"
    )
    wire_security: Literal["auto", "none", "curve"] = option(
        "auto", "cluster", "encrypt and guard TCP lines with CURVE; auto: when they leave this host"
    )
    run_dir: Path | None = option(
        None, "cluster", "where the run's private folder is made; default: the system's temporary one"
    )

    start_timeout: float = option(
        START_TIMEOUT_S,
        "lifecycle",
        "seconds until every rank must be ready, and later one that is started again",
        gt=0,
    )
    shutdown_timeout: float = option(
        SHUTDOWN_TIMEOUT_S, "lifecycle", "seconds that running requests get to finish when stopping", ge=0
    )

    stall_timeout: float = option(
        60.0, "lifecycle", "seconds without a step, or without a sign, after which a rank is killed and replaced", gt=0
    )
    max_restarts: int = option(
        5, "lifecycle", "restarts of a rank without a minute of service in between; then it stays dead; 0: none", ge=0
    )

    move_tokens_in_flight: int = option(
        16_384, "survival", "tokens of moved sequences that one rank computes anew at once", ge=1
    )
    move_timeout: float = option(
        120.0, "survival", "seconds that a sequence without a rank waits for one before it fails", gt=0
    )
    resume_memory: ByteSize = option(
        ByteSize(1 << 30),
        "survival",
        "memory of one API process for what it takes to move sequences; beyond it the largest cannot be moved",
        gt=0,
    )

    log_level: LogLevel = option("info", "logging", "least severe level that is written")

    @field_validator("api_key", mode="before")
    @classmethod
    def _split_keys(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value

    @field_validator("api_key", "admin_api_key")
    @classmethod
    def _are_keys(cls, value: Any) -> Any:
        for key in value if isinstance(value, tuple) else (value,):
            if not _KEY.fullmatch(key.get_secret_value()):
                raise ValueError("a key is one or more printable ASCII characters without spaces")
        return value

    @model_validator(mode="after")
    def _keys_differ(self) -> "ServeConfig":
        if self.admin_api_key is not None and self.admin_api_key in (self.api_key or ()):
            raise ValueError("--admin-api-key must not be one of --api-key: callers of /v1 would be administrators")
        return self

    @field_validator("log_level", mode="before")
    @classmethod
    def _lower(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @field_validator("port_range")
    @classmethod
    def _is_a_range(cls, value: str | None) -> str | None:
        low, _, high = (value or "1-1").partition("-")
        if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high) <= _MAX_PORT):
            raise ValueError(f"must be LOW-HIGH with 1 <= LOW <= HIGH <= {_MAX_PORT}")
        return value

    @model_validator(mode="after")
    def _model_is_named(self) -> "ServeConfig":
        if self.engine == "torch" and self.model is None:
            raise ValueError("--model is required with --engine torch: a known name, a path or a hub name")
        return self

    @model_validator(mode="after")
    def _group_is_possible(self) -> "ServeConfig":
        if self.min_data_parallel_size > self.data_parallel_size:
            raise ValueError("--min-data-parallel-size is more than --data-parallel-size")
        if self.max_data_parallel_size is not None and self.max_data_parallel_size < self.data_parallel_size:
            raise ValueError("--max-data-parallel-size is less than --data-parallel-size")
        return self

    @model_validator(mode="after")
    def _ray_is_used(self) -> "ServeConfig":
        if self.ray_address is not None and self.executor == "local":
            raise ValueError("--ray-address and --executor local exclude each other")
        if self.ray_address is not None and self.ray_address.startswith("ray://"):
            raise ValueError("--ray-address takes host:port of the cluster's head, not a ray:// client address")
        if ":" in self.device and self.executor == "ray":
            raise ValueError("--device cuda:N needs --executor local: on Ray each rank gets a GPU of its own, use cuda")
        return self
