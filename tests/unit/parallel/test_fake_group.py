"""The fake collective moves what the real one moves, and fails where the real one would hang."""

import pytest
import torch

from engine.parallel.transport import all_to_all
from tests.unit.parallel.fake_group import FakeGroup, FakeTransport, OutOfStepError
from tests.unit.parallel.members import run_members


def one_each(transport: FakeTransport) -> torch.Tensor:
    return all_to_all(transport, torch.zeros(2, 1), [1, 1], [1, 1])


def test_rows_go_where_they_are_sent() -> None:
    group = FakeGroup(2)
    sizes = [[1, 2], [0, 1]]

    def act(index: int) -> list[int]:
        _, rows = group.transports(index)
        mine = torch.arange(sum(sizes[index])).view(-1, 1) + 10 * index
        return all_to_all(rows, mine, sizes[index], [sent[index] for sent in sizes]).flatten().tolist()

    assert run_members(2, act) == [[0], [1, 2, 10]]
    group.assert_even()


def test_members_in_different_exchanges_fail() -> None:
    group = FakeGroup(2)
    with pytest.raises(OutOfStepError, match="differ in channel"):
        run_members(2, lambda index: one_each(group.transports(index)[index]))


def test_sizes_that_do_not_fit_fail() -> None:
    group = FakeGroup(2)

    def act(index: int) -> None:
        all_to_all(group.transports(index)[1], torch.zeros(2, 1), [1, 1], [1, 1 + index])

    with pytest.raises(OutOfStepError, match="sends 1 rows to 1, who expects 2"):
        run_members(2, act)


def test_who_enters_more_than_the_others_fails() -> None:
    group = FakeGroup(2)

    def act(index: int) -> None:
        _, rows = group.transports(index)
        for _ in range(1 + index):
            one_each(rows)
        rows.close()

    with pytest.raises(OutOfStepError, match="member 1 waits alone in rows"):
        run_members(2, act)
    with pytest.raises(AssertionError):
        group.assert_even()
