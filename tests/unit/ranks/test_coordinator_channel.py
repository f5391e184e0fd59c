"""The supervisor's line, against plain sockets in the coordinator's place."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zmq

from engine.wire.codec import encode, report_decoder
from engine.wire.control import Membership
from engine.wire.endpoints import ipc_endpoint
from engine.wire.ids import EngineId
from engine.wire.messages import GROUP_TOPIC, LOAD_TOPIC, EngineReport, GroupState, LoadSnapshot, SupervisorReport
from engine.wire.sockets import bind, make_socket
from orchestrator.processes.restarts import RestartRule
from orchestrator.ranks.coordinator_channel import CoordinatorChannel
from orchestrator.ranks.replica_table import ReplicaTable
from tests.contract.deployment import eventually
from tests.unit.ranks.reports import report

DEADLINE_MS = 10_000


@dataclass
class Coordinator:
    """Both sockets of a coordinator, and what the line has handed on."""

    reports: "zmq.Socket[bytes]"
    state: "zmq.Socket[bytes]"
    endpoints: tuple[str, str]
    received: list[EngineReport] = field(default_factory=list)
    states: list[GroupState] = field(default_factory=list)

    def channel(self) -> CoordinatorChannel:
        table = ReplicaTable([EngineId(0, 1)], RestartRule(max_in_row=0))
        return CoordinatorChannel(*self.endpoints, table.to_report, self.received.append, self.states.append)

    def next_report(self) -> SupervisorReport:
        assert self.reports.poll(DEADLINE_MS)
        message = report_decoder().decode(self.reports.recv())
        assert isinstance(message, SupervisorReport)
        return message

    def next_subscription(self) -> bytes:
        assert self.state.poll(DEADLINE_MS)
        return self.state.recv()


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with tempfile.TemporaryDirectory(prefix="st", dir="/tmp") as folder:
        reports, state = make_socket(context, zmq.PULL), make_socket(context, zmq.XPUB)
        endpoints = bind(reports, ipc_endpoint(Path(folder), "r")), bind(state, ipc_endpoint(Path(folder), "s"))
        yield Coordinator(reports, state, endpoints)
        context.destroy(linger=0)


async def test_each_published_report_has_a_higher_number(coordinator: Coordinator) -> None:
    channel = coordinator.channel()
    channel.publish()
    channel.publish()
    assert [coordinator.next_report().report_seq for _ in range(2)] == [1, 2]
    channel.close()
    channel.close()


async def test_the_report_is_repeated_without_being_asked(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.ranks.coordinator_channel.REPEAT_S", 0.0)
    channel = coordinator.channel()
    channel.publish()
    await eventually(lambda: coordinator.reports.poll(0) and coordinator.next_report().report_seq >= 3)
    channel.close()


async def test_engine_reports_of_a_snapshot_are_handed_on_and_other_bytes_dropped(coordinator: Coordinator) -> None:
    channel = coordinator.channel()
    assert {coordinator.next_subscription(), coordinator.next_subscription()} == {
        b"\x01" + GROUP_TOPIC,
        b"\x01" + LOAD_TOPIC,
    }
    sent = report(EngineId(0, 1), 4)
    for frames in ([LOAD_TOPIC, b"\xc1"], [LOAD_TOPIC], [LOAD_TOPIC, encode(LoadSnapshot(1, 1, [sent]))]):
        coordinator.state.send_multipart(frames)
    await eventually(lambda: coordinator.received)
    assert coordinator.received == [sent]
    for wanted in (False, False, True):
        channel.listen(wanted)
    assert coordinator.next_subscription() == b"\x00" + LOAD_TOPIC
    assert coordinator.next_subscription() == b"\x01" + LOAD_TOPIC
    channel.close()


async def test_newer_group_states_are_handed_on_and_a_new_coordinator_gets_the_replicas_at_once(
    coordinator: Coordinator,
) -> None:
    channel = coordinator.channel()
    assert [coordinator.next_subscription() for _ in range(2)]
    for number in ((1, 5), (1, 4), (1, 6), (2, 1), (1, 7)):
        state = GroupState(*number, Membership(0, []), None, False, [], 0, [], [])
        coordinator.state.send_multipart([GROUP_TOPIC, encode(state)])
    await eventually(lambda: len(coordinator.states) == 3)
    assert [(state.generation, state.seq) for state in coordinator.states] == [(1, 5), (1, 6), (2, 1)]
    assert [coordinator.next_report().report_seq for _ in range(2)] == [1, 2]
    assert not coordinator.reports.poll(0)
    channel.close()
