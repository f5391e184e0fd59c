"""The configuration of one API process, as it travels on its standard input. Frozen; unknown keys are errors."""

from typing import Any

from msgspec import Struct

from client.config import ClientConfig
from metrics.shared_status import StatsMemory
from orchestrator.config.defaults import MAX_PENDING_REQUESTS, SHUTDOWN_TIMEOUT_S, START_TIMEOUT_S


class ApiSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that one API process is given.

    client: how it reaches the engines. listen_fd: an inherited socket that is bound and listening already, so that a
    taken
        port is found before anything else starts. host, port: what that socket is bound to, for people.
    served_model_name: the only accepted ``model``. model_root: where it came from, for ``/v1/models``.
    tokenizer_dir: folder of tokenizer.json, tokenizer_config.json and chat_template.jinja; None takes bytes (sim).
    shutdown_timeout_s: streams may finish for this long after SIGTERM, then they are aborted.
    start_timeout_s: the process gives up when no engine is ready by then.
    max_pending_requests: more requests than this at once, in all API processes, are refused with 503 and Retry-After.
    stats: inherited memory that it shares with the other API processes, where it has the row of its client's index;
        None: there are no others.
    control_endpoint: where the supervisor can be asked; None without one.
    serve_config: the options of the deployment without its secrets, for ``/server_info``.
    api_keys, admin_api_key: see ``auth.py``; none at all leaves everything open.
    """

    client: ClientConfig
    listen_fd: int
    host: str
    port: int
    served_model_name: str
    tokenizer_dir: str | None = None
    model_root: str = ""
    shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S
    start_timeout_s: float = START_TIMEOUT_S
    max_pending_requests: int = MAX_PENDING_REQUESTS
    stats: StatsMemory | None = None
    log_level: str = "INFO"
    control_endpoint: str | None = None
    serve_config: dict[str, Any] = {}
    api_keys: tuple[str, ...] = ()
    admin_api_key: str | None = None

    @property
    def url(self) -> str:
        """Return the base URL, with an IPv6 address in brackets."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"
