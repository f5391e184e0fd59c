"""The configuration of one client, as part of its process's spec. Frozen; unknown keys are errors."""

from msgspec import Struct

from client.migration import MigrationConfig
from engine.wire.endpoints import WireSecurity
from engine.wire.ids import ClientId


class ClientConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a client meets the group, and who it is.

    report_endpoint, state_endpoint: the coordinator's, to connect to.
    request_bind, output_bind: endpoints this client binds; port 0 lets the system choose, and what it chose is
        published.
    build_id, config_hash: an engine of others is refused. config: the values behind the hash.
    security: keys of the channels between hosts; None leaves all four plain.
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
