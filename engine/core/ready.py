"""The handshake of a loaded engine: its limits and its configuration as ``EngineReady``."""

import os

from engine.config.engine_config import EngineConfig
from engine.interfaces.engine_core import EngineCore
from engine.wire.build import config_values
from engine.wire.ids import EngineId
from engine.wire.messages import EngineReady


def describe(
    core: EngineCore, engine_id: EngineId, config: EngineConfig, build_id: str, config_hash: str, node: str
) -> EngineReady:
    """Return the handshake of an engine in this process. node: name for people."""
    limits = core.limits
    return EngineReady(
        engine_id=engine_id,
        build_id=build_id,
        config_hash=config_hash,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        num_kv_tokens=limits.num_blocks * limits.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        device=limits.device,
        dtype=limits.dtype,
        node=node,
        pid=os.getpid(),
        features=tuple(sorted(limits.features)),
        hidden_size=limits.hidden_size,
        config=config_values(config),
    )
