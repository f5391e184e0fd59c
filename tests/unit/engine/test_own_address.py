"""The address at which a lockstep rank is reached."""

import socket

import pytest

from engine.proc.lockstep import own_address


def test_on_one_host_it_is_loopback() -> None:
    assert own_address("ipc:///somewhere/reports") == "127.0.0.1"
    assert own_address("tcp://127.0.0.1:5000") == "127.0.0.1"


def test_an_ipv6_coordinator_is_reached_from_an_ipv6_address() -> None:
    assert own_address("tcp://[::1]:5000") == "::1"


def test_a_host_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(socket.gaierror):
        own_address("tcp://no-such-host.invalid:5000")
