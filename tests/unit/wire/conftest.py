"""Sockets that are closed after the test, and a folder short enough for them."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from engine.wire.sockets import make_socket


class Sockets:
    """Makes sockets with ``make_socket`` and closes them all."""

    def __init__(self) -> None:
        self.context = zmq.Context[zmq.Socket[bytes]]()
        self._made: list[zmq.Socket[bytes]] = []

    def __call__(self, socket_type: int, **options: Any) -> zmq.Socket[bytes]:
        """Return a new socket."""
        self._made.append(make_socket(self.context, socket_type, **options))
        return self._made[-1]

    def close(self) -> None:
        """Close what was made, and the context."""
        for socket in self._made:
            socket.close()
        self.context.term()


@pytest.fixture
def make() -> Iterator[Sockets]:
    """Return ``make_socket`` without its context, closing what it made."""
    sockets = Sockets()
    yield sockets
    sockets.close()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Return a folder whose path fits a Unix socket address."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        yield Path(folder)
