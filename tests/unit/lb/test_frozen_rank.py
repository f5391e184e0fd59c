"""Ranks whose reports, or whose work, stop."""

from functools import partial

from engine.wire.ids import EngineId
from tests.unit.lb.simulator import Group

_SERVICE_S = 0.2
_NUM_STREAMS = 40


def _closed_loop(group: Group) -> None:
    """Keep 40 requests in flight: each end starts the next."""
    for client in group.clients:
        client.on_end = lambda job: job.client.add(_SERVICE_S * group.rng.uniform(0.5, 1.5))
    for i in range(_NUM_STREAMS):
        client = group.clients[i % len(group.clients)]
        group.clock.at(0.2 + 0.001 * i, partial(client.add, _SERVICE_S))


def test_without_reports_picks_stay_balanced_from_the_ledger() -> None:
    group = Group(num_clients=2, snapshot_s=None, seed=3)
    _closed_loop(group)
    group.clock.run(10.0)
    assert sum(group.num_received) > 1500
    assert group.spread() < 0.05 * sum(group.num_received)


def test_a_rank_that_stops_working_gets_little_new_work() -> None:
    group = Group(num_clients=2, num_slots=16, seed=4)
    _closed_loop(group)
    group.clock.run(1.0)
    before = list(group.num_received)
    group.engines[2].is_frozen = True
    group.clock.run(6.0)
    new = [after - earlier for after, earlier in zip(group.num_received, before, strict=True)]
    assert new[2] < 0.10 * sum(new)


def test_a_hot_rank_whose_reports_stop_with_its_work_gets_little_new_work() -> None:
    group = Group(num_clients=2, num_slots=16, seed=5)
    _closed_loop(group)
    group.clock.run(1.0)
    before = list(group.num_received)
    group.engines[0].is_frozen = True
    group.muted.add(EngineId(0, 1))
    group.clock.run(2.0)
    for client in group.clients:  # what the client does when reports of an engine stopped
        client.ledgers[EngineId(0, 1)].stale = True
    group.clock.run(6.0)
    new = [after - earlier for after, earlier in zip(group.num_received, before, strict=True)]
    assert new[0] < 0.10 * sum(new)


def test_a_rank_whose_reports_alone_stop_keeps_its_share() -> None:
    group = Group(num_clients=1, seed=6)
    _closed_loop(group)
    group.clock.run(1.0)
    group.muted.add(EngineId(1, 1))
    group.clients[0].ledgers[EngineId(1, 1)].stale = True
    before = list(group.num_received)
    group.clock.run(6.0)
    new = [after - earlier for after, earlier in zip(group.num_received, before, strict=True)]
    assert 0.20 < new[1] / sum(new) < 0.30
