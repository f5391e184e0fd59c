"""The table is published with every change, and loads are received only while they bring something new."""

from engine.wire.ids import EngineId
from orchestrator.processes.restarts import RestartRule
from orchestrator.ranks.events import EventKind
from orchestrator.ranks.publisher import ReplicaPublisher
from orchestrator.ranks.replica_table import ReplicaTable
from tests.unit.ranks.puppet_host import SilentChannel
from tests.unit.ranks.reports import report


async def test_loads_are_received_while_a_replica_changes_or_somebody_watches() -> None:
    table, channel = ReplicaTable([EngineId(0, 1)], RestartRule(max_in_row=0)), SilentChannel()
    publisher, listening = ReplicaPublisher(table, channel), list[bool]()
    publisher.publish()
    listening.append(channel.is_listening)
    table.on_report(report(EngineId(0, 1), 1), 0.0)
    publisher.publish()
    listening.append(channel.is_listening)
    for wanted in (True, False):
        publisher.watch_loads(wanted=wanted)
        listening.append(channel.is_listening)
    assert listening == [True, False, True, False]
    assert channel.num_published == 2


async def test_what_happens_to_a_replica_is_noted_with_its_rank_and_engine() -> None:
    table = ReplicaTable([EngineId(3, 2)], RestartRule(max_in_row=0))
    publisher = ReplicaPublisher(table, SilentChannel())
    publisher.note(EventKind.RANK_DEAD, next(iter(table)), reason="lost")
    (event,) = publisher.events.after(0)
    assert (event.kind, event.facts) == ("rank_dead", {"rank": 3, "engine_id": "3.2", "reason": "lost"})
