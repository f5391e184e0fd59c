"""Rows arrive whole and in order; whoever waits can leave, and sees when a peer goes."""

import threading
import time
from typing import Any

import pytest
import torch

from engine.parallel import transport as module
from engine.parallel.transport import GroupBrokenError, Transport, all_to_all
from tests.unit.parallel.members import Company


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64], ids=str)
def test_ragged_rows_arrive_in_the_order_of_the_members(dtype: torch.dtype) -> None:
    sizes = [[1, 2, 0], [0, 0, 3], [4, 0, 1]]  # of sender, to receiver
    company = Company(3)

    def act(index: int) -> Any:
        _, transport = company.meet(index)
        mine = torch.arange(sum(sizes[index]) * 2).view(-1, 2) + 50 * index
        return all_to_all(transport, mine.to(dtype), sizes[index], [sent[index] for sent in sizes])

    received = company.run(act)
    for receiver, rows in enumerate(received):
        parts = [
            (torch.arange(sum(sent) * 2).view(-1, 2) + 50 * sender).split(sent)[receiver]  # type: ignore[no-untyped-call]
            for sender, sent in enumerate(sizes)
        ]
        assert rows.dtype == dtype
        assert torch.equal(rows, torch.cat(parts).to(dtype))


def test_exchanges_in_which_nobody_has_rows_are_exchanges_too() -> None:
    company = Company(2)

    def act(index: int) -> tuple[int, int]:
        _, transport = company.meet(index)
        before = transport.num_entered
        for _ in range(3):
            assert all_to_all(transport, torch.zeros(0, 4), [0, 0], [0, 0]).shape == (0, 4)
        return before, transport.num_entered

    assert company.run(act) == [(1, 4), (1, 4)], "one to try the connections, and three"


def test_an_exchange_may_be_left_under_way_behind_the_next_one() -> None:
    company = Company(2)

    def act(index: int) -> list[list[int]]:
        _, transport = company.meet(index)
        first, second = (transport.begin(torch.full((2, 1), number + index), [1, 1], [1, 1]) for number in (10, 20))
        return [exchange.wait().flatten().tolist() for exchange in (second, first)]

    assert company.run(act) == [[[20, 21], [10, 11]]] * 2


def test_the_time_inside_exchanges_is_counted() -> None:
    company = Company(2)

    def act(index: int) -> bool:
        _, transport = company.meet(index)
        before = transport.collective_s
        all_to_all(transport, torch.zeros(2, 1), [1, 1], [1, 1])
        return 0.0 < before < transport.collective_s

    assert company.run(act) == [True, True]


def test_a_group_of_one_exchanges_with_itself() -> None:
    company = Company(1)
    _, transport = company.meet(0)
    company.close()
    assert all_to_all(transport, torch.tensor([[1.5], [2.5]]), [2], [2]).flatten().tolist() == [1.5, 2.5]


def leaving_s() -> float:
    """Let a member wait in an exchange, tell it to leave, and return how long it took to."""
    company = Company(2)
    is_met, is_waiting, is_told, is_over = (threading.Event() for _ in range(4))
    told_at: list[float] = []
    took_s: list[float] = []

    def must_leave() -> bool:
        if is_met.is_set():
            is_waiting.set()
        return is_told.is_set()

    def wait_until_told(transport: Transport) -> None:
        with pytest.raises(GroupBrokenError, match="ordered to leave"):
            all_to_all(transport, torch.zeros(2, 1), [1, 1], [1, 1])
        took_s.append(time.monotonic() - told_at[0])
        is_over.set()

    def act(index: int) -> None:
        _, transport = company.meet(index, must_leave=must_leave)
        if index == 0:
            is_met.set()
            wait_until_told(transport)
        else:  # stays away, and its connection open
            assert is_waiting.wait(20)
            told_at.append(time.monotonic())
            is_told.set()
            assert is_over.wait(20)
            transport.close()

    company.run(act)
    return took_s[0]


def test_who_is_told_to_leave_leaves_a_waiting_exchange_within_100_ms() -> None:
    assert min(leaving_s() for _ in range(5)) < 0.1, "the quickest of some: the machine has other things to do too"


def test_a_peer_that_goes_away_breaks_the_exchange_of_every_survivor() -> None:
    company = Company(4)
    everybody_waits = threading.Barrier(4)

    def act(index: int) -> str:
        transports = company.meet(index)
        everybody_waits.wait(20)
        if index == 3:
            for transport in transports:
                transport.close()
            return "gone"
        with pytest.raises(GroupBrokenError, match="broke"):
            all_to_all(transports[1], torch.zeros(4, 1), [1] * 4, [1] * 4)
        return "broken"

    assert company.run(act) == ["broken", "broken", "broken", "gone"]


def test_a_group_that_was_left_is_not_entered_again() -> None:
    company = Company(1)
    _, transport = company.meet(0)
    company.close()
    transport.close()
    with pytest.raises(GroupBrokenError, match="left"):
        all_to_all(transport, torch.zeros(1, 1), [1], [1])


def test_an_exchange_under_way_does_not_keep_a_group_that_was_left() -> None:
    company = Company(2)

    def act(index: int) -> None:
        _, transport = company.meet(index)
        exchange = transport.begin(torch.zeros(2, 1), [1, 1], [1, 1])
        if index == 0:
            transport.close()
            with pytest.raises(GroupBrokenError, match="left"):
                exchange.wait()
        else:
            exchange.wait()

    company.run(act)


def test_a_prefix_is_used_once() -> None:
    company = Company(1)
    kept = company.meet(0, prefix="1/7")
    with pytest.raises(GroupBrokenError, match="1/7 was formed before"):
        company.meet(0, prefix="1/7")
    company.meet(0, prefix="1/8")
    assert all(transport.num_entered == 1 for transport in kept)
    company.close()


def test_who_is_told_to_leave_a_meeting_does_not_wait_for_those_who_never_come() -> None:
    company = Company(2)
    is_asked = threading.Event()

    def must_leave() -> bool:
        was_asked = is_asked.is_set()
        is_asked.set()
        return was_asked

    with pytest.raises(GroupBrokenError, match=r"1/1 did not form: .*ordered to leave"):
        company.meet(0, must_leave=must_leave)
    company.close()


def test_groups_of_two_epochs_do_not_meet() -> None:
    company = Company(2)

    def act(index: int) -> list[int]:
        old, new = company.meet(index, prefix="1/1")[1], company.meet(index, prefix="1/2")[1]

        def ask(transport: Transport, number: int) -> int:
            rows = torch.full((2, 1), number + index)
            return int(all_to_all(transport, rows, [1, 1], [1, 1])[1 - index])

        return [ask(new, 20), ask(old, 10), ask(new, 22)]

    assert company.run(act) == [[21, 11, 23], [20, 10, 22]]


def test_who_cannot_reach_the_store_says_which_group_did_not_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RENDEZVOUS_TIMEOUT_S", 0.05)
    with pytest.raises(GroupBrokenError, match="1/1 did not form: no answer"):
        module.form_transports("tcp://127.0.0.1:9", "1/1", 0, 1, torch.device("cpu"), lambda: False, host="127.0.0.1")
