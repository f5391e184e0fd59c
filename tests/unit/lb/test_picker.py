"""Ties, rotation and explicit ranks."""

from collections import Counter

import pytest

from engine.wire.errors import InvalidRequestError, OverloadedError
from engine.wire.ids import EngineId
from engine.wire.load import Load
from lb.routing.ledger import EngineLedger
from lb.routing.picker import RotatingPicker, only_rank


def _ledgers(*ranks: int) -> list[EngineLedger]:
    return [EngineLedger(EngineId(rank, 1)) for rank in ranks]


def _report(ledger: EngineLedger, seq: int, running: int, applied: int = 0) -> None:
    ledger.on_report(seq, applied, Load(num_running=running), now=0.0)


def test_ties_rotate_across_snapshot_resets() -> None:
    """After every 7 picks a snapshot shows all ranks equal again."""
    picker, ledgers, picks = RotatingPicker(0), _ledgers(0, 1, 2, 3), Counter[int]()
    for number in range(1000):
        engine_id = picker.pick(ledgers, 1).engine_id
        picks[engine_id.rank] += 1
        if number % 7 == 6:
            for ledger in ledgers:
                _report(ledger, number, running=5)
    assert max(picks.values()) - min(picks.values()) <= 1


def test_ties_rotate_before_the_first_snapshot() -> None:
    picker, ledgers = RotatingPicker(0), _ledgers(0, 1, 2, 3)
    picks = Counter(picker.pick(ledgers, 1).engine_id.rank for _ in range(1000))
    assert max(picks.values()) - min(picks.values()) <= 1


def test_one_request_at_a_time_visits_every_rank() -> None:
    picker, ledgers, ranks = RotatingPicker(0), _ledgers(0, 1, 2, 3), []
    for channel_seq in range(1, 9):
        engine_id = picker.pick(ledgers, 1).engine_id
        ledger = ledgers[engine_id.rank]
        entry = ledger.add(channel_seq)
        ledger.finish(entry, report_seq=channel_seq)
        ranks.append(engine_id.rank)
    assert ranks == [0, 1, 2, 3, 0, 1, 2, 3]


def test_clients_start_at_different_places_of_the_ring() -> None:
    ledgers = _ledgers(0, 2, 3, 7)
    starts = [RotatingPicker(index).pick(ledgers, 4).engine_id.rank for index in range(4)]
    assert starts == [0, 2, 3, 7]
    assert [RotatingPicker(index).pick(ledgers, 2).engine_id.rank for index in range(2)] == [0, 3]


def test_a_client_index_beyond_the_known_clients_still_finds_a_place() -> None:
    assert RotatingPicker(5).pick(_ledgers(0, 1), 1).engine_id.rank == 0


def test_the_least_loaded_wins_whatever_the_rotation() -> None:
    picker, ledgers = RotatingPicker(0), _ledgers(0, 1, 2)
    for ledger, running in zip(ledgers, (5, 4, 3), strict=True):
        _report(ledger, 1, running)
    assert [picker.pick(ledgers, 1).engine_id.rank for _ in range(3)] == [2, 2, 2]


def test_rotation_goes_on_when_ranks_come_and_go() -> None:
    picker, ledgers = RotatingPicker(0), _ledgers(0, 1, 2, 3)
    ranks = [picker.pick(ledgers, 1).engine_id.rank for _ in range(2)]
    ranks += [picker.pick([ledgers[0], ledgers[3]], 1).engine_id.rank for _ in range(3)]
    ranks += [picker.pick(ledgers, 1).engine_id.rank for _ in range(2)]
    assert ranks == [0, 1, 3, 0, 3, 0, 1]


def test_a_pick_carries_its_scores() -> None:
    ledgers = _ledgers(0, 1)
    _report(ledgers[0], 1, running=2)
    pick = RotatingPicker(0).pick(ledgers, 1)
    assert dict(zip(pick.candidates, pick.scores, strict=True)) == {EngineId(0, 1): 2, EngineId(1, 1): 0}


def test_without_candidates_the_request_is_refused() -> None:
    with pytest.raises(OverloadedError):
        RotatingPicker(0).pick([], 1)


def test_an_explicit_rank_is_kept_and_rank_zero_is_a_rank() -> None:
    ledgers = _ledgers(0, 2)
    assert only_rank(ledgers, 0) == [ledgers[0]]
    assert only_rank(ledgers, 2) == [ledgers[1]]


@pytest.mark.parametrize("rank", [1, -1, 3, "0", 0.0, True, None])
def test_an_explicit_rank_that_does_not_exist_names_the_valid_ones(rank: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"valid: 0, 2") as caught:
        only_rank(_ledgers(0, 2), rank)  # type: ignore[arg-type]
    assert caught.value.field == "data_parallel_rank"


def test_an_explicit_rank_without_any_engine_is_refused_as_such() -> None:
    with pytest.raises(InvalidRequestError, match="none at the moment"):
        only_rank([], 0)
