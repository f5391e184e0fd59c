"""Configuration of the coordinator process, read from its standard input. Frozen; unknown keys are errors."""

import msgspec
from msgspec import Struct

from engine.wire.endpoints import WireSecurity, advertised


class LockstepConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group whose ranks step together.

    min_size: members below which it does not serve. num_redundant_experts: copies beside the first of each expert.
    """

    min_size: int = 1
    num_redundant_experts: int = 0


class CoordinatorSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything one coordinator process is configured with, as JSON on standard input.

    generation: 1 for the first coordinator of a deployment, +1 for each successor; the others ignore lower ones.
    report_endpoint: PULL to bind for reports. state_endpoint: XPUB to bind for GroupState and LoadSnapshot.
    client_silence_s: a client that has not reported for this long is no longer listed, and engines free its requests.
    settle_s: a successor listens this long before it publishes: it must not publish a list without the clients that
        it has not heard yet, because engines would free their requests. Five report intervals.
    stall_timeout_s: an engine that has work and makes no progress for this long, or is silent for as long, is hung.
    security: keys of the channels between hosts; None leaves both plain.
    lockstep: None when ranks are independent.
    """

    generation: int
    report_endpoint: str
    state_endpoint: str
    client_silence_s: float = 10.0
    settle_s: float = 1.0
    stall_timeout_s: float = 60.0
    log_level: str = "INFO"
    security: WireSecurity | None = None
    lockstep: LockstepConfig | None = None


class CoordinatorEndpoints(msgspec.Struct, frozen=True):
    """The line on standard output by which a coordinator is ready: the endpoints it has bound."""

    report_endpoint: str
    state_endpoint: str

    def under(self, host: str | None) -> "CoordinatorEndpoints":
        """Return both as others reach them: under ``host``, or as they are with None."""
        return CoordinatorEndpoints(advertised(self.report_endpoint, host), advertised(self.state_endpoint, host))
