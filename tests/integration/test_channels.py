"""The channels of a real deployment: the addresses they listen on, and the keys without which no peer gets in."""

import ipaddress
import os
import signal
from collections.abc import Iterator

import httpx
import pytest
import zmq

from engine.wire.endpoints import WireSecurity
from engine.wire.messages import GROUP_TOPIC, LOAD_TOPIC
from engine.wire.sockets import connect, make_socket
from tests.integration.serving import Deployment, chat, deployment, eventually, rank_is, ranks_of, wire_mechanism

SIM = ("--engine", "sim", "--executor", "local", "--data-parallel-size", "2")
PORT_RANGE = range(21070, 21100)
PORTS = f"{PORT_RANGE[0]}-{PORT_RANGE[-1]}"
TCP = (*SIM, "--advertise-host", "127.0.0.1", "--wire-security", "curve", "--port-range", PORTS)


@pytest.fixture(scope="module")
def secured() -> Iterator[Deployment]:
    with deployment(*TCP) as served:
        served.wait_ready()
        yield served


def test_on_one_host_nothing_but_the_http_port_listens_and_that_on_loopback() -> None:
    with deployment(*SIM) as served:
        url = served.wait_ready()
        assert served.listening() == {"127.0.0.1": {int(url.rpartition(":")[2])}}
        folder = served.run_folders()[0]
        assert folder.stat().st_mode & 0o077 == 0, "the Unix sockets are for this user alone"


def test_channels_over_tcp_listen_on_the_configured_ports_and_nowhere_else(secured: Deployment) -> None:
    http_port = int(secured.wait_ready().rpartition(":")[2])
    listening = secured.listening()
    assert all(ipaddress.ip_address(address).is_loopback for address in listening)
    ports = {port for ports in listening.values() for port in ports} - {http_port}
    assert len(ports) == 4
    assert ports <= set(PORT_RANGE)
    assert {wire_mechanism("127.0.0.1", port) for port in ports} == {"CURVE"}


def test_a_peer_without_keys_gets_nothing_and_disturbs_no_request(secured: Deployment) -> None:
    url = secured.wait_ready()
    ports = _channel_ports(secured)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    subscribers, dealers = [], []
    for port in ports:
        for _ in range(5):
            subscribers.append(make_socket(context, zmq.XSUB, topics=(GROUP_TOPIC, LOAD_TOPIC)))
            dealers.append(make_socket(context, zmq.DEALER, identity=b"unknown"))
            connect(subscribers[-1], f"tcp://127.0.0.1:{port}")
            connect(dealers[-1], f"tcp://127.0.0.1:{port}")
            dealers[-1].send(b"x" * 1000)
    eventually(lambda: chat(url) == "length" and secured.stderr.count("refused a peer") >= len(ports))
    assert not any(socket.poll(0) for socket in (*subscribers, *dealers))
    context.destroy(linger=0)
    assert secured.stderr.count("refused a peer") == len(ports), "once per channel"
    eventually(lambda: {rank["state"] for rank in ranks_of(url).values()} == {"ready"})


def test_keys_are_in_no_argument_no_environment_no_file_and_no_log(secured: Deployment) -> None:
    """Keys are drawn inside; if a spec had been written anywhere, the names of its fields would be found there."""
    secured.wait_ready()
    texts = [secured.stderr, secured.stdout]
    for process in secured.processes():
        texts += [*process.cmdline(), *process.environ().values()]
    files = {path.name: path.read_text() for path in secured.run_folders()[0].rglob("*") if path.is_file()}
    assert "run.json" in files
    found = "\n".join([*texts, *files.values()])
    assert not any(field in found for field in WireSecurity.__struct_fields__)


def test_with_keys_too_every_process_can_be_lost_and_its_successor_connects() -> None:
    with deployment(*TCP) as served:
        url = served.wait_ready()
        ports = _channel_ports(served)
        _lose(served, "lb.coordinator")
        # That the rank was replaced is known through the new coordinator alone.
        os.kill(ranks_of(url)[1]["pid"], signal.SIGKILL)
        eventually(lambda: rank_is(url, 1, "1.2"))
        assert chat(url, data_parallel_rank=1) == "length"
        _lose(served, "orchestrator.api")
        eventually(lambda: httpx.get(f"{url}/ready", timeout=60).status_code == httpx.codes.OK)
        assert chat(url, data_parallel_rank=0) == chat(url, data_parallel_rank=1) == "length"
        assert len(_channel_ports(served)) == len(ports), "no port of a dead process is left"


def _lose(served: Deployment, module: str) -> None:
    """Kill the process that runs a module, and wait for its successor."""
    (process,) = served.processes(module)
    process.kill()
    eventually(lambda: [p.pid for p in served.processes(module)] not in ([], [process.pid]))


def _channel_ports(served: Deployment) -> set[int]:
    return {port for port in set().union(*served.listening().values()) if port in PORT_RANGE}
