"""The HTTP port, taken early."""

import re
import socket

import pytest

from engine.wire.errors import StartupError
from orchestrator.supervisor.preflight import Listener


def test_port_0_takes_a_free_one_that_clients_can_reach_at_once() -> None:
    listener = Listener("127.0.0.1", 0)
    assert listener.url == f"http://127.0.0.1:{listener.port}"
    socket.create_connection(("127.0.0.1", listener.port)).close()
    listener.close()
    listener.close()


def test_a_port_that_another_process_listens_on_is_refused() -> None:
    first = Listener("127.0.0.1", 0)
    with pytest.raises(StartupError, match=f"cannot listen on 127.0.0.1:{first.port} .*: Address already in use"):
        Listener("127.0.0.1", first.port)
    first.close()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b", "l" * 70])
def test_a_host_that_does_not_resolve_is_refused(host: str) -> None:
    with pytest.raises(StartupError, match=f"cannot listen on {re.escape(host)}:0"):
        Listener(host, 0)


@pytest.mark.parametrize(("host", "expected"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]")])
def test_the_url_is_one_that_this_host_can_use(host: str, expected: str) -> None:
    listener = Listener(host, 0)
    assert listener.url == f"http://{expected}:{listener.port}"
    listener.close()
