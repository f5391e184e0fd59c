"""The spec of one engine process, which reads it as JSON from standard input. Frozen; unknown keys are errors."""

from msgspec import Struct

from engine.config.engine_config import EngineConfig
from engine.wire.control import ClusterSettings
from engine.wire.endpoints import WireSecurity
from engine.wire.ids import EngineId


class EngineSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that one engine process is started with; what it learns at start-up it reports.

    report_endpoint: the coordinator's PULL. state_endpoint: its XPUB. node: name for people.
    build_id, config_hash: must be the same in the whole deployment.
    security: keys of the channels between hosts, without the servers' secret; None leaves all plain.
    settings: those in force at the start; newer ones come with GroupStates.
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
