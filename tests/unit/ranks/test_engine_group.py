"""Engines are replaced: the real group on a host whose engines end when the test says so."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from engine.wire.control import Membership
from engine.wire.errors import StartupError
from engine.wire.ids import EngineId
from engine.wire.messages import GroupState
from engine.wire.replicas import Suspect
from engine.wire.states import EnginePhase
from orchestrator.processes.exits import ProcessExit
from orchestrator.processes.restarts import MAX_PAUSE_S, RestartRule
from orchestrator.ranks.engine_group import EngineGroup
from orchestrator.ranks.events import EventKind
from orchestrator.ranks.replica_table import Replica
from tests.contract.deployment import eventually
from tests.unit.ranks.puppet_host import PuppetHost, make_group
from tests.unit.ranks.reports import report

RULE = RestartRule(max_in_row=2, first_pause_s=0.0)
GONE = ProcessExit(-9, "killed by SIGKILL")


def group_state(seq: int, *suspects: Suspect) -> GroupState:
    return GroupState(1, seq, Membership(0, []), None, False, [], 0, [], [], suspects=list(suspects))


async def started(
    host: PuppetHost,
    on_death: Callable[[Replica], None],
    num_ranks: int = 1,
    rule: RestartRule = RULE,
    load_timeout_s: float | None = None,
) -> EngineGroup:
    group = make_group(host, num_ranks, rule, on_death, load_timeout_s)
    await group.start()
    group.start_replacing()
    return group


async def test_an_engine_that_ends_gets_a_successor_until_the_restarts_are_used_up() -> None:
    host, deaths = PuppetHost(), list[tuple[EngineId, float | None]]()
    group = await started(host, lambda replica: deaths.append((replica.engine_id, replica.replacement_in_s)))
    for incarnation in (1, 2, 3):
        engine_id = EngineId(0, incarnation)
        await eventually(partial(host.handles.get, engine_id))
        host.end(engine_id)
    await eventually(lambda: len(deaths) == 3)
    assert deaths == [(EngineId(0, 1), 0.0), (EngineId(0, 2), 0.0), (EngineId(0, 3), None)]
    assert group.replicas.all_lost
    assert await group.stop(asyncio.get_running_loop().create_future()) == []
    assert host.num_starts == 3


async def test_a_replica_whose_engine_cannot_be_started_is_tried_again_with_the_reason() -> None:
    host, reasons = PuppetHost(), list[str]()
    group = await started(host, lambda replica: reasons.append(replica.end_reason))
    host.refusals = [StartupError("no place")]
    host.end(EngineId(0, 1))
    await eventually(lambda: EngineId(0, 3) in host.handles)
    assert reasons == ["killed by SIGKILL", "could not be started: no place"]
    await group.stop(asyncio.get_running_loop().create_future())


async def test_what_hangs_is_killed_through_its_host_once_and_replaced() -> None:
    host, reasons = PuppetHost(), list[str]()
    group = await started(host, lambda replica: reasons.append(replica.end_reason), num_ranks=2)
    hung = Suspect(EngineId(1, 1), True, "no step for 3.1 s (behind step 8)")
    for seq in (1, 2):
        group.on_group_state(group_state(seq, hung))
    await eventually(partial(host.handles.get, EngineId(1, 2)))
    assert host.killed == [EngineId(1, 1)]
    assert reasons == ["hung: no step for 3.1 s (behind step 8), killed"]
    await group.stop(asyncio.get_running_loop().create_future())


async def test_a_replacement_that_does_not_load_in_time_is_killed_and_tried_again() -> None:
    host, reasons = PuppetHost(), list[str]()
    group = await started(host, lambda replica: reasons.append(replica.end_reason), load_timeout_s=0.0)
    assert host.killed == []  # the start of the deployment has a deadline of its own
    host.end(EngineId(0, 1))
    await eventually(lambda: group.replicas.all_lost)
    assert host.killed == [EngineId(0, 2), EngineId(0, 3)]
    assert reasons[1:] == ["hung: not loaded within 0 s (--start-timeout), killed"] * 2
    assert [event.kind for event in group.events.after(0)].count(EventKind.RANK_HUNG) == 2
    await group.stop(asyncio.get_running_loop().create_future())


async def test_a_replacement_that_loads_is_not_timed_any_more() -> None:
    host = PuppetHost()
    group = await started(host, lambda _: None, load_timeout_s=3600.0)
    host.end(EngineId(0, 1))
    await eventually(partial(host.handles.get, EngineId(0, 2)))
    (filling,) = [task for task in asyncio.all_tasks() if task.get_name() == "start the engine of rank 0"]
    group.on_report(report(EngineId(0, 2), 1, EnginePhase.LOADING))
    group.on_report(report(EngineId(0, 2), 2))
    await asyncio.wait_for(filling, 5.0)
    assert host.killed == []
    await group.stop(asyncio.get_running_loop().create_future())


@pytest.mark.parametrize("silent_first", [True, False])
async def test_an_engine_that_is_silent_on_a_host_out_of_reach_is_given_up_at_once(silent_first: bool) -> None:
    host = PuppetHost()
    group = await started(host, lambda _: None, num_ranks=2)
    lost = host.handles[EngineId(1, 1)]
    silent = Suspect(EngineId(1, 1), False, "silent for 1.1 s", is_silent=True)
    events: list[Callable[[], None]] = [
        partial(group.on_group_state, group_state(1, silent)),
        partial(lost.out_of_reach.set_result, None),
    ]
    for event in events if silent_first else reversed(events):
        assert host.killed == []
        event()
    await eventually(lambda: host.killed == [EngineId(1, 1)])
    await group.stop(asyncio.get_running_loop().create_future())


async def test_an_engine_that_reports_lives_on_although_its_host_is_out_of_reach() -> None:
    host = PuppetHost()
    group = await started(host, lambda _: None, num_ranks=2)
    host.handles[EngineId(1, 1)].out_of_reach.set_result(None)
    await asyncio.sleep(0)
    group.on_group_state(group_state(1, Suspect(EngineId(1, 1), False, "no step for 1.1 s")))
    assert host.killed == []
    await group.stop(asyncio.get_running_loop().create_future())


async def test_a_stop_ends_a_pause_before_a_restart_and_starts_nothing_more() -> None:
    host, deaths = PuppetHost(), list[Replica]()
    group = await started(host, deaths.append, num_ranks=2, rule=RestartRule(max_in_row=2, first_pause_s=3600.0))
    host.end(EngineId(0, 1))
    await eventually(lambda: EngineId(0, 2) in host.handles)
    host.end(EngineId(0, 2))
    await eventually(lambda: len(deaths) == 2)
    assert await group.stop(asyncio.get_running_loop().create_future()) == ["rank 1 was killed"]
    assert host.num_starts == 3
    assert host.killed == [EngineId(1, 1)]
    assert len(deaths) == 2


async def test_a_new_rank_that_ends_stays_empty_and_a_rank_that_stays_is_filled_again() -> None:
    host, deaths = PuppetHost(), list[Replica]()
    group = await started(host, deaths.append)
    group.actions.add(1)
    await eventually(partial(host.handles.get, EngineId(1, 1)))
    group.actions.cordon(0)
    for rank in (0, 1):
        host.end(EngineId(rank, 1))
    await eventually(lambda: all(replica.exit is not None for replica in group.replicas))
    group.actions.remove(1)
    group.actions.keep(0)
    await eventually(partial(host.handles.get, EngineId(0, 2)))
    assert deaths == []
    assert [replica.engine_id for replica in group.replicas] == [EngineId(0, 2)]
    kinds = [str(event.kind) for event in group.events.after(0)]
    assert kinds == ["rank_joining", "rank_dead", "rank_dead", "rank_left", "rank_refill"]
    await group.stop(asyncio.get_running_loop().create_future())


async def test_an_engine_is_killed_also_while_it_is_being_started_and_a_cordon_ends_a_pause_before_a_restart() -> None:
    host = PuppetHost()
    group = await started(host, lambda _: None, num_ranks=2, rule=RestartRule(max_in_row=3, first_pause_s=3600.0))
    group.actions.add(2)
    group.actions.kill(2)
    replica = group.replicas.at(2)
    assert replica is not None
    assert replica.end_reason == "given up while it was started"
    for incarnation in (1, 2):
        await eventually(partial(host.handles.get, EngineId(1, incarnation)))
        host.end(EngineId(1, incarnation))
    await eventually(lambda: group.replicas.at(1).replacement_in_s == MAX_PAUSE_S)  # type: ignore[union-attr]
    group.actions.cordon(1)
    assert group.replicas.at(1).replacement_in_s is None  # type: ignore[union-attr]
    assert (host.num_starts, host.killed) == (3, [])
    await group.stop(asyncio.get_running_loop().create_future())
