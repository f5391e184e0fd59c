"""Bursts across snapshot boundaries: the client's own counts and the snapshots neither erase nor double each other."""

import statistics
from functools import partial

import pytest

from tests.unit.lb.simulator import Group

_FOREVER = float("inf")


def _spread_after_burst(num_clients: int, seed: int, snapshot_s: float | None = 0.100) -> int:
    """Send 400 requests within 300 ms to 4 ranks; return the difference between the fullest and the emptiest."""
    group = Group(num_clients=num_clients, seed=seed, snapshot_s=snapshot_s)
    for _ in range(400):
        client = group.rng.choice(group.clients)
        group.clock.at(0.5 + group.rng.uniform(0.0, 0.3), partial(client.add, _FOREVER))
    group.clock.run(1.0)
    assert sum(group.num_received) == 400
    return group.spread()


def test_one_client_spreads_a_burst_evenly() -> None:
    assert max(_spread_after_burst(1, seed) for seed in range(100)) <= 1


def test_four_clients_spread_a_burst_nearly_evenly_without_talking_to_each_other() -> None:
    spreads = [_spread_after_burst(4, seed) for seed in range(100)]
    assert statistics.median(spreads) <= 2
    assert max(spreads) <= 4


@pytest.mark.parametrize("num_clients", [1, 4])
def test_without_any_snapshot_each_client_still_balances_its_own(num_clients: int) -> None:
    spreads = [_spread_after_burst(num_clients, seed, snapshot_s=None) for seed in range(20)]
    assert max(spreads) <= num_clients


def test_a_new_request_is_seen_long_before_a_long_step_ends() -> None:
    """A prefill of two seconds hides arrivals from the scheduler, not from the report."""
    group = Group(num_clients=2, step_s=2.0, seed=1)
    sender, watcher = group.clients
    for client in group.clients:
        client.num_clients = 1  # each believes to be alone, so it counts what it hears and nothing more
    group.clock.at(0.5, lambda: [sender.add(_FOREVER) for _ in range(40)])
    group.clock.run(0.5 + 0.150)
    assert [ledger.load(1) for ledger in watcher.ledgers.values()] == [10, 10, 10, 10]
