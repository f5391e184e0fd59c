"""By which address peers reach this process: the one it has towards the coordinator."""

import socket

_LOOPBACK = "127.0.0.1"


def own_address(coordinator_endpoint: str) -> str:
    """Return this host's address on the way to a ZeroMQ endpoint; loopback when that is on this host.

    Raises:
        OSError: there is no way to the coordinator's host.
    """
    transport, _, address = coordinator_endpoint.partition("://")
    if transport != "tcp":
        return _LOOPBACK
    host, _, port = address.rpartition(":")
    family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # a datagram socket sends nothing for that: it only looks up the route
        return str(probe.getsockname()[0])
