"""Ranks whose KV cache is used up by a few long sequences, among ranks that run many short ones."""

import statistics
from functools import partial

import pytest

from engine.wire.ids import EngineId
from engine.wire.load import Load
from lb.routing import picker
from lb.routing.ledger import EngineLedger
from lb.routing.picker import RotatingPicker
from tests.unit.lb.simulator import Group, SimClient

NUM_REQUESTS = 1500
SEEDS = (1, 2)
SHORT, LONG = (100, 0.1), (10_000, 2.0)  # tokens, seconds


def _ledger(rank: int, **load: float) -> EngineLedger:
    ledger = EngineLedger(EngineId(rank, 1))
    ledger.on_report(1, 0, Load(**load), now=0.0)  # type: ignore[arg-type]
    return ledger


def _picks(*ledgers: EngineLedger) -> set[int]:
    rotating = RotatingPicker(0)
    return {rotating.pick(ledgers, 1).engine_id.rank for _ in range(8)}


def test_a_rank_that_queues_for_its_cache_gets_nothing_while_another_has_room() -> None:
    full = _ledger(0, num_waiting=1, num_running=3, kv_usage=0.97)
    busy = _ledger(1, num_running=30, kv_usage=0.3)
    assert _picks(full, busy) == {1}
    assert _picks(full) == {0}, "whoever names it gets it"


def test_without_room_anywhere_loads_decide_among_all() -> None:
    full = _ledger(0, num_waiting=1, num_running=3, kv_usage=0.97)
    queueing = _ledger(1, num_waiting=9, num_running=30, kv_usage=0.3)
    assert _picks(full, queueing) == {0}


@pytest.mark.parametrize("load", [{"num_waiting": 1, "kv_usage": 0.5}, {"num_running": 3, "kv_usage": 0.97}])
def test_a_queue_or_a_full_cache_alone_leaves_nobody_out(load: dict[str, float]) -> None:
    assert _picks(_ledger(0, **load), _ledger(1, num_running=30, kv_usage=0.3)) == {0}


def test_what_was_reported_before_the_reports_stopped_counts_no_more() -> None:
    full, busy = _ledger(0, num_waiting=1, num_running=3, kv_usage=0.97), _ledger(1, num_running=30)
    full.stale = True
    assert _picks(full, busy) == {0}


def _serve(seed: int) -> tuple[int, float]:
    """Send short prompts, and a long one in twenty, at most of what 4 ranks can take.

    Return how many went to a rank that queued for its cache while another had room, and the mean wait in seconds.
    """
    group = Group(num_clients=2, kv_tokens=31_000, seed=seed)
    num_wrong = 0

    def add(client: SimClient, size: tuple[int, float]) -> None:
        nonlocal num_wrong
        ledgers = client.ledgers
        is_full = {engine_id: ledger.is_full for engine_id, ledger in ledgers.items()}
        has_room = any(ledger.has_room for ledger in ledgers.values())
        num_wrong += is_full[client.add(size[1], size[0])] and has_room

    for number in range(NUM_REQUESTS):
        size = LONG if group.rng.random() < 0.05 else SHORT
        group.clock.at(0.5 + number / 100, partial(add, group.clients[number % 2], size))
    group.clock.run(30.0)
    waits = [wait for engine in group.engines for wait in engine.waits_s]
    assert len(waits) == NUM_REQUESTS
    return num_wrong, statistics.mean(waits)


def test_of_mixed_prompts_none_goes_to_a_rank_that_queues_for_its_cache_while_another_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = [_serve(seed) for seed in SEEDS]
    monkeypatch.setattr(picker, "leave_out_full", lambda candidates: candidates)
    by_load_alone = [_serve(seed) for seed in SEEDS]
    assert [num_wrong for num_wrong, _ in ours] == [0] * len(SEEDS)
    assert all(num_wrong > 0 for num_wrong, _ in by_load_alone), "the case comes up"
    assert all(wait < without for (_, wait), (_, without) in zip(ours, by_load_alone, strict=True))
