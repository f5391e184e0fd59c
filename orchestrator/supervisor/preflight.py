"""The preflight of a deployment: model, HTTP port and run folder, checked and taken before any process runs.

Whatever is plainly wrong is an error within milliseconds, not after minutes of loading.
"""

import logging
import socket
from typing import Any

from engine.model.names import ResolvedModel, resolve_model
from engine.wire.errors import StartupError
from orchestrator.config.serve_config import ServeConfig
from orchestrator.processes.module_guard import check_packages
from orchestrator.supervisor.run_dir import RunDir, sweep

_LOG = logging.getLogger(__name__)

_BACKLOG = 2048


class Preflight:
    """What a deployment holds before it starts anything. model: None for the sim engine.

    Raises:
        StartupError: a foreign package, no such model, a taken port or no run folder.
    """

    def __init__(self, config: ServeConfig) -> None:
        check_packages()
        self.model: ResolvedModel | None = None
        if config.engine == "torch":
            assert config.model is not None
            self.model = resolve_model(config.model)
        self.listener = Listener(config.host, config.port)
        try:
            self.run_dir = RunDir(config.run_dir)
            for folder in sweep(config.run_dir):
                _LOG.info("removed %s, left behind by a run that was killed", folder)
        except BaseException:
            self.listener.close()
            raise

    async def stop(self, _force_stop: Any) -> list[str]:
        """Give port and folder back; return a line when the folder could not be removed."""
        self.listener.close()
        return [] if self.run_dir.remove() else [f"the run folder {self.run_dir.path} could not be removed"]


class Listener:
    """The listening socket of the HTTP port, inherited by the API processes.

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
        """Return the descriptor that children inherit."""
        return self._socket.fileno()

    @property
    def port(self) -> int:
        """Return the port that was bound, also where any free one was asked for."""
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        """Return the base URL at which this host reaches the port."""
        host = self._socket.getsockname()[0]
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1" if host == "0.0.0.0" else "::1"
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def close(self) -> None:
        """Close this process's copy: the port is free once the children have closed theirs. Idempotent."""
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    # Listening, not only binding: two sockets may share an address until one of them listens.
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # A port whose last connections are in TIME_WAIT is free for a deployment that is started again.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
