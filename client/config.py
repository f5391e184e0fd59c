"""Configuration of one client, as part of its process's spec. Frozen; unknown keys are errors."""

from msgspec import Struct

from engine.wire.endpoints import WireSecurity
from engine.wire.ids import ClientId


class MigrationConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How sequences that lost their engine go on elsewhere.

    tokens_in_flight: tokens of moved sequences that one engine computes anew at once; a single longer one is let
        through when it is the only one. Bounds what a death costs the streams of the engines that are left.
    timeout_s: a sequence that no engine takes for this long ends with an error.
    resume_memory_bytes: what the client keeps to be able to move sequences: prompts and outputs. Beyond it the largest
        sequences are served on, but cannot be moved any more.
    suspect_rest_s: a sequence whose engine died before it had a token of it waits so long for the next one. Engines
        that die in the same moment are known to be gone by then, and are not taken for its doing.
    """

    tokens_in_flight: int = 16_384
    timeout_s: float = 120.0
    resume_memory_bytes: int = 1 << 30
    suspect_rest_s: float = 0.3


class ClientConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a client meets the group, and who it is.

    report_endpoint, state_endpoint: the coordinator's, to connect to.
    request_bind, output_bind: endpoints this client binds; port 0 lets the system choose, and what it chose is
        published.
    build_id, config_hash: an engine that says otherwise is refused. config: the values behind the hash.
    security: keys of lines between hosts; None leaves all four plain.
    advertise_host: under which engines reach what is bound; None publishes the address that was bound.
    """

    client_id: ClientId
    report_endpoint: str
    state_endpoint: str
    request_bind: str
    output_bind: str
    build_id: str
    config_hash: str
    security: WireSecurity | None = None
    advertise_host: str | None = None
    migrations: MigrationConfig = MigrationConfig()
    config: dict[str, str] = {}
