"""The loading of an engine's core from its configuration: here alone is known which runner belongs to which kind."""

import socket

import msgspec

from engine.config.engine_config import EngineConfig, EngineKind
from engine.core.lockstep import LockstepCore, LockstepRunner
from engine.core.native import NativeCore
from engine.core.ready import describe
from engine.interfaces.engine_core import EngineCore, OnProgress, Runner
from engine.sim.runner import SimRunner
from engine.wire.build import build_id, config_hash
from engine.wire.ids import EngineId
from engine.wire.messages import EngineReady


def load_core(config: EngineConfig, on_progress: OnProgress) -> EngineCore:
    """Load what the configuration asks for; torch is imported only for the engine that needs it.

    Raises:
        StartupError: model, device and memory do not fit together; names the option.
    """
    if config.parallel.enable_expert_parallel:
        return load_lockstep_core(config, on_progress)
    return NativeCore(config.scheduler, _load_runner(config, on_progress))


def load_lockstep_core(config: EngineConfig, on_progress: OnProgress) -> LockstepCore:
    """Load the core of a rank that steps together with others.

    Raises:
        StartupError: as ``load_core``.
    """
    return LockstepCore(config.scheduler, _load_lockstep_runner(config, on_progress))


def load_rank(config: EngineConfig, engine_id: EngineId, on_progress: OnProgress) -> tuple[EngineReady, EngineCore]:
    """Load one of the ranks that share this process; return its handshake and its core.

    Raises:
        StartupError: as ``load_core``.
    """
    core = load_core(_on_own_device(config, engine_id.rank), on_progress)
    return describe(core, engine_id, config, build_id(), config_hash(config), socket.gethostname()), core


def _load_runner(config: EngineConfig, on_progress: OnProgress) -> Runner:
    if config.kind is EngineKind.SIM:
        return SimRunner(config.sim, config.scheduler, on_progress)
    assert config.model is not None, "checked where the spec was read"
    on_progress("importing torch", 0.0)
    from engine.runner.torch_runner import TorchRunner

    return TorchRunner(config.model, config.scheduler, on_progress)


def _load_lockstep_runner(config: EngineConfig, on_progress: OnProgress) -> LockstepRunner:
    on_progress("importing torch", 0.0)
    if config.kind is EngineKind.SIM:
        from engine.parallel.sim import SimLockstepRunner

        return SimLockstepRunner(config.sim, config.scheduler, on_progress)
    assert config.model is not None, "checked where the spec was read"
    from engine.parallel.runner import ParallelRunner

    return ParallelRunner(config.model, config.scheduler, config.parallel, on_progress)


def _on_own_device(config: EngineConfig, rank: int) -> EngineConfig:
    """Spread the ranks of one process over its CUDA devices: no host gives each of them one of its own."""
    if config.kind is EngineKind.SIM or config.model is None:
        return config
    from engine.model.placement import device_of_rank

    model = msgspec.structs.replace(config.model, device=device_of_rank(config.model.device, rank))
    return msgspec.structs.replace(config, model=model)
