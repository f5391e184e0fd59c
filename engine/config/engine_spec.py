"""All that one engine process is told, as JSON on its standard input. Frozen; unknown keys are errors."""

from msgspec import Struct

from engine.config.engine_config import EngineConfig
from engine.wire.control import ClusterSettings
from engine.wire.endpoints import WireSecurity
from engine.wire.ids import EngineId


class EngineSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one engine process gets on its standard input as JSON, and nothing else.

    report_endpoint: the coordinator's PULL. state_endpoint: its XPUB. node: name for people.
    build_id, config_hash: must be the same in the whole deployment.
    security: keys of lines between hosts, without the servers' secret; None leaves all lines plain.
    settings: what the operator wants at the start; newer ones come with the group's state.
    is_joining: the deployment serves already, and grows by this engine.
    """

    engine_id: EngineId
    engine: EngineConfig
    report_endpoint: str
    state_endpoint: str
    build_id: str
    config_hash: str
    node: str = ""
    log_level: str = "INFO"
    security: WireSecurity | None = None
    settings: ClusterSettings = ClusterSettings()
    is_joining: bool = False
