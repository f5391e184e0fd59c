"""Where the lines of a deployment are bound: Unix sockets in the run folder on one host, TCP between hosts."""

from dataclasses import dataclass
from pathlib import Path

from engine.wire.sockets import ipc_endpoint, tcp_endpoint


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Endpoints to bind, all chosen once. report, state: the coordinator's. request, output: the client's."""

    report: str
    state: str
    request: str
    output: str


def choose_endpoints(run_dir: Path, address: str | None) -> Endpoints:
    """Return Unix sockets in ``run_dir``, or free TCP ports of ``address`` when engines may run on other hosts."""
    if address is None:
        return Endpoints(*(ipc_endpoint(run_dir, name) for name in ("report", "state", "request", "output")))
    anywhere = tcp_endpoint(address)
    return Endpoints(anywhere, anywhere, anywhere, anywhere)
