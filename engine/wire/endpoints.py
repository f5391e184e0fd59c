"""Endpoints of channels, and the keys to them, as plain data: what a process is given to reach the others. Pure."""

import ipaddress
import os
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from engine.wire.errors import AddressError

MAX_IPC_PATH = 100


def tcp_endpoint(host: str, port: int | str = 0) -> str:
    """Return ``tcp://host:port``, with an IPv6 host in brackets.

    port: 0 lets the system choose; to ``bind``, ``LOW-HIGH`` means the first free one from LOW to HIGH.
    """
    try:
        bracketed = f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        bracketed = host
    return f"tcp://{bracketed}:{port}"


def advertised(endpoint: str, host: str | None) -> str:
    """Return a bound TCP endpoint as other hosts reach it, under ``host``; others, and with None all, as they are."""
    if host is None or not endpoint.startswith("tcp://"):
        return endpoint
    return tcp_endpoint(host, endpoint.rpartition(":")[2])


def ipc_endpoint(folder: Path, name: str) -> str:
    """Return ``ipc://folder/name``; the folder is private to the run (mode 0700).

    Raises:
        AddressError: the path is longer than a Unix socket address can hold.
    """
    path = folder / name
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        raise AddressError(f"socket path {path} is longer than {MAX_IPC_PATH} bytes; choose a shorter run folder")
    return f"ipc://{path}"


class WireSecurity(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of one deployment, 40 characters each (Z85). They travel in specs only and are never shown.

    server_*: of every socket that binds. member_*: of every socket that connects; no other is let in.
    server_secret: None for processes that bind nothing.
    """

    server_public: str
    member_public: str
    member_secret: str
    server_secret: str | None = None

    def for_connecting(self) -> "WireSecurity":
        """Return what a process needs that binds nothing."""
        return replace(self, server_secret=None)

    def __repr__(self) -> str:
        """Show no key: whatever holds this may be logged."""
        return "WireSecurity(...)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Show no key here either."""
        return []
