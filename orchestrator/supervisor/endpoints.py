"""The endpoints and keys of the channels: Unix sockets on one host, TCP between hosts, guarded by CURVE there."""

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

import zmq

from engine.wire.curve import draw_keys
from engine.wire.endpoints import WireSecurity, ipc_endpoint, tcp_endpoint
from engine.wire.errors import StartupError
from engine.wire.ids import ClientId


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Endpoints to bind, all chosen once.

    report, state: the coordinator's. request, output: the clients', see ``of_client``.
    advertise_host: under which others reach them; None when what is bound can be reached as it is.
    leaves_host: they can be reached from other hosts.
    """

    report: str
    state: str
    request: str
    output: str
    advertise_host: str | None = None
    leaves_host: bool = False

    def of_client(self, client_id: ClientId) -> tuple[str, str]:
        """Return where one incarnation of a client binds its request and its output channel.

        Each gets Unix sockets of its own: what still connects to those of its predecessor reaches no one else.
        """
        # On TCP each gets fresh ports instead, and publishes them.
        if self.request.startswith("tcp://"):
            return self.request, self.output
        return f"{self.request}-{client_id}", f"{self.output}-{client_id}"


def choose_endpoints(
    run_dir: Path, address: str | None, interface: str | None = None, port_range: str | None = None
) -> Endpoints:
    """Return Unix sockets in ``run_dir``, or TCP ports when engines may run on other hosts or when it was asked for.

    address: of this host, as the others reach it; None when there are none. interface: address or network interface to
    bind to instead. port_range: LOW-HIGH; None takes any free port.

    Raises:
        AddressError: ``run_dir`` is too long for Unix sockets.
        StartupError: bound to every interface, and no address to be reached at; or a name that does not resolve.
    """
    bound = interface or (None if address is None else _own_address(address))
    if bound is None:
        report, state, request, output = (
            ipc_endpoint(run_dir, name) for name in ("report", "state", "request", "output")
        )
        return Endpoints(report, state, request, output)
    # Bound to every interface, peers still need one address to connect to.
    if address is None and _is_unspecified(bound):
        raise StartupError(f"--interface {bound} says on no host where to reach this one: give --advertise-host")
    # One template for all four: each socket gets a port of its own, and what it got is published.
    anywhere = tcp_endpoint(bound, port_range or 0)
    advertise_host = address if address != bound else None
    return Endpoints(anywhere, anywhere, anywhere, anywhere, advertise_host, leaves_host=not is_loopback(bound))


def choose_security(mode: str, chosen: Endpoints) -> WireSecurity | None:
    """Return fresh keys when the channels are to use CURVE. mode: ``none``, ``curve``, or ``auto``: between hosts.

    Unix sockets need none: they are in a folder that only this user may enter.

    Raises:
        StartupError: this build of ZeroMQ cannot.
    """
    is_tcp = chosen.report.startswith("tcp://")
    if not is_tcp or mode == "none" or (mode == "auto" and not chosen.leaves_host):
        return None
    if not zmq.has("curve"):
        raise StartupError("this ZeroMQ has no CURVE: --wire-security none leaves the lines between hosts plain")
    return draw_keys()


def _own_address(name: str) -> str:
    """Return the address behind a name of this host: sockets bind to addresses and network interfaces only.

    Raises:
        StartupError: the name does not resolve.
    """
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:  # UnicodeError: a name no resolver would take
        reason = error.strerror if isinstance(error, OSError) else error
        raise StartupError(f"--advertise-host {name}: {reason}") from error


def is_loopback(host: str) -> bool:
    """Tell whether only this host reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "lo")


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == "*"
