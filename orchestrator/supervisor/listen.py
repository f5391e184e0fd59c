"""The HTTP port, taken before anything slow starts: a port in use is found out in milliseconds."""

import socket

from engine.wire.errors import StartupError

_BACKLOG = 2048


class Listener:
    """A listening socket that a child process will serve.

    Raises:
        StartupError: with the address and the system's reason.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            self._socket = _listen(host, port)
        except (OSError, UnicodeError) as error:  # UnicodeError: a name no resolver would take
            reason = error.strerror if isinstance(error, OSError) else error
            raise StartupError(f"cannot listen on {host}:{port} (--host, --port): {reason}") from error

    @property
    def fd(self) -> int:
        """Return the descriptor to hand to the child."""
        return self._socket.fileno()

    @property
    def port(self) -> int:
        """Return the real port."""
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        """Return the base URL at which this host reaches the port."""
        host = self._socket.getsockname()[0]
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1" if host == "0.0.0.0" else "::1"
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def close(self) -> None:
        """Close this process's copy: the port is free once the child has closed its own. Idempotent."""
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    # Listening, not only binding: two sockets may share an address until one of them listens.
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
