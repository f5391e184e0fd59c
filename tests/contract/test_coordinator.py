"""The coordinator as a process: its first output, publication rate on real sockets, hostile bytes, memory, restart."""

import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from engine.wire.codec import encode, state_decoder
from engine.wire.endpoints import ipc_endpoint
from engine.wire.ids import ClientId, EngineId
from engine.wire.load import Load
from engine.wire.messages import (
    GROUP_TOPIC,
    LOAD_TOPIC,
    ClientInfo,
    ClientReport,
    EngineReport,
    GroupState,
    LoadSnapshot,
    SupervisorReport,
)
from engine.wire.process import child_environment
from engine.wire.replicas import ReplicaInfo
from engine.wire.sockets import connect, make_socket
from engine.wire.states import EnginePhase, ReplicaState
from lb.coordinator.config import CoordinatorSpec

DEADLINE_S = 20.0
ENGINE = EngineId(0, 1)
CLIENT = ClientInfo(ClientId(0, 1), "ipc://requests", "ipc://outputs")

Process = subprocess.Popen[bytes]


@contextmanager
def _coordinator(spec: CoordinatorSpec) -> Iterator[tuple[Process, dict[str, str]]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "lb.coordinator"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(spec))
        process.stdin.close()
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class _Peer:
    """Reports what the test wants and collects what the coordinator publishes."""

    def __init__(self, endpoints: dict[str, str]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._decode = state_decoder().decode
        self._reports = make_socket(self._context, zmq.PUSH)
        connect(self._reports, endpoints["report_endpoint"])
        self._states = make_socket(self._context, zmq.XSUB, topics=(GROUP_TOPIC, LOAD_TOPIC))
        connect(self._states, endpoints["state_endpoint"])

    def report(self, *reports: Any) -> None:
        for report in reports:
            self._reports.send(encode(report))

    def next_state(self, kind: type[Any], wanted: Any = lambda state: True) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if self._states.poll(100):
                state = self._decode(self._states.recv_multipart()[1])
                if isinstance(state, kind) and wanted(state):
                    return state
        raise AssertionError(f"no such {kind.__name__} was published")

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def _peer(endpoints: dict[str, str]) -> Iterator[_Peer]:
    peer = _Peer(endpoints)
    try:
        yield peer
    finally:
        peer.close()


def _spec(folder: Path, **changes: Any) -> CoordinatorSpec:
    spec = CoordinatorSpec(
        generation=1, report_endpoint=ipc_endpoint(folder, "r"), state_endpoint=ipc_endpoint(folder, "s")
    )
    return msgspec.structs.replace(spec, **changes)


def _engine(seq: int, phase: EnginePhase = EnginePhase.IDLE, **load: int) -> EngineReport:
    return EngineReport(ENGINE, seq, 0, 0, 0, 0, phase, 0, False, {}, Load(**load))


def test_port_zero_is_published_as_the_real_port_and_reaches_the_coordinator(tmp_path: Path) -> None:
    spec = _spec(tmp_path, report_endpoint="tcp://127.0.0.1:0", state_endpoint="tcp://127.0.0.1:0")
    with _coordinator(spec) as (_, endpoints), _peer(endpoints) as peer:
        assert not endpoints["report_endpoint"].endswith(":0")
        peer.report(ClientReport(1, CLIENT))
        assert peer.next_state(GroupState, lambda group: group.clients).clients == [CLIENT]


def test_a_new_subscriber_gets_the_whole_state_at_once(tmp_path: Path) -> None:
    with _coordinator(_spec(tmp_path)) as (_, endpoints), _peer(endpoints) as first:
        first.report(_engine(1), ClientReport(1, CLIENT))
        first.next_state(GroupState, lambda group: group.clients and group.committed.members)
        with _peer(endpoints) as second:
            group = second.next_state(GroupState)
            assert (group.clients, group.committed.members) == ([CLIENT], [ENGINE])
            assert [report.engine_id for report in second.next_state(LoadSnapshot).reports] == [ENGINE]


def test_an_unobserved_state_is_repeated_and_an_observed_one_falls_silent(tmp_path: Path) -> None:
    with _coordinator(_spec(tmp_path)) as (_, endpoints), _peer(endpoints) as peer:
        peer.report(_engine(1))
        first = peer.next_state(GroupState, lambda group: group.committed.members)
        started = time.monotonic()
        for _ in range(4):
            peer.next_state(GroupState)
        assert time.monotonic() - started < 3.0  # four repeats at the slow pace would take longer
        peer.report(msgspec.structs.replace(_engine(2), max_epoch_seen=first.committed.epoch))
        peer.next_state(GroupState)
        started = time.monotonic()
        peer.next_state(GroupState)
        peer.next_state(GroupState)
        assert time.monotonic() - started > 0.5


def test_a_change_of_load_is_published_at_most_every_50_ms(tmp_path: Path) -> None:
    with _coordinator(_spec(tmp_path)) as (_, endpoints), _peer(endpoints) as peer:
        peer.report(_engine(1))
        peer.next_state(LoadSnapshot, lambda snapshot: snapshot.reports)
        started = time.monotonic()
        for seq in range(2, 200):
            peer.report(_engine(seq, num_running=seq))
        seen = 0
        while peer.next_state(LoadSnapshot).reports[0].report_seq < 199:
            seen += 1
        assert seen <= 2 + (time.monotonic() - started) / 0.05


def test_a_restarted_coordinator_listens_before_it_publishes(tmp_path: Path) -> None:
    """The first state must hold the clients that were there before; engines free the requests of others."""
    with _coordinator(_spec(tmp_path)) as (_, endpoints), _peer(endpoints) as peer:
        peer.report(ClientReport(1, CLIENT))
        peer.next_state(GroupState, lambda group: group.clients)
    with _coordinator(_spec(tmp_path, generation=2)) as (_, endpoints), _peer(endpoints) as peer:
        peer.report(ClientReport(2, CLIENT))
        group = peer.next_state(GroupState)
        assert (group.generation, group.clients) == (2, [CLIENT])


def test_any_bytes_are_survived(tmp_path: Path) -> None:
    rng = random.Random(7)
    spec = _spec(tmp_path, report_endpoint="tcp://127.0.0.1:0", state_endpoint="tcp://127.0.0.1:0")
    with _coordinator(spec) as (process, endpoints), _peer(endpoints) as peer:
        _send_garbage(peer, rng)
        for endpoint in endpoints.values():
            _knock_like_a_scanner(int(endpoint.rsplit(":", 1)[1]), rng)
        newest = EngineId(5, 5)
        peer.report(msgspec.structs.replace(_engine(1), engine_id=newest))
        peer.next_state(GroupState, lambda group: newest in group.committed.members)
        assert process.poll() is None


def _send_garbage(peer: _Peer, rng: random.Random) -> None:
    valid = [encode(_engine(0)), encode(ClientReport(0, CLIENT)), encode(SupervisorReport(0, [], [], []))]
    for _ in range(2000):
        frame = bytearray(rng.choice(valid))
        for _ in range(rng.randint(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        peer._reports.send(bytes(frame[: rng.randint(0, len(frame))]))
    peer._reports.send_multipart([b"", b"x", b""])
    peer._reports.send(bytes(50_000_000))
    peer._states.send(rng.randbytes(100))


def _knock_like_a_scanner(port: int, rng: random.Random) -> None:
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(rng.choice([b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(64), b"\xff" + rng.randbytes(200)]))


def test_garbage_that_decodes_does_not_stay_in_the_way(tmp_path: Path) -> None:
    """A mutated report may be a valid one of somebody else; the supervisor's replicas sort that out."""
    with _coordinator(_spec(tmp_path)) as (_, endpoints), _peer(endpoints) as peer:
        unknown = EngineId(77, 1)
        peer.report(msgspec.structs.replace(_engine(1), engine_id=unknown), _engine(1))
        peer.next_state(GroupState, lambda group: unknown in group.committed.members)
        peer.report(SupervisorReport(1, [ReplicaInfo(ENGINE, ReplicaState.ALIVE)], [], []))
        peer.next_state(GroupState, lambda group: group.committed.members == [ENGINE])


def test_the_process_is_small(tmp_path: Path) -> None:
    with _coordinator(_spec(tmp_path)) as (process, endpoints), _peer(endpoints) as peer:
        peer.report(_engine(1))
        peer.next_state(LoadSnapshot)
        memory = psutil.Process(process.pid).memory_info().rss
        assert memory < 80 * 1024 * 1024


def test_sigterm_ends_it_with_status_0(tmp_path: Path) -> None:
    with _coordinator(_spec(tmp_path)) as (process, _):
        process.terminate()
        assert process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("change", [{"report_endpoint": "ipc:///no/such/folder/r"}, {"state_endpoint": "nonsense"}])
def test_an_endpoint_that_cannot_be_bound_is_one_clear_line(tmp_path: Path, change: dict[str, str]) -> None:
    spec = msgspec.json.encode(_spec(tmp_path, **change))
    result = subprocess.run(
        [sys.executable, "-m", "lb.coordinator"], input=spec, capture_output=True, check=False, timeout=DEADLINE_S
    )
    assert result.returncode == 1
    assert result.stderr.decode().splitlines()[-1].startswith("coordinator: cannot bind")
    assert result.stdout == b""
