"""Every expert is held, members hold as many each, load is even, and as little as possible moves."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.coordinator.expert_placement import Placement, max_redundant, num_moved, place_experts

_LOADS = st.floats(0, 1000, allow_nan=False)


@st.composite
def groups(draw: st.DrawFn, *, with_loads: bool = False) -> tuple[int, int, int, list[float] | None]:
    """Draw (experts, members, redundant experts, load of each expert)."""
    num_experts = draw(st.integers(1, 24))
    num_members = draw(st.integers(1, 6))
    num_redundant = draw(st.integers(0, min(6, num_experts * (num_members - 1))))
    loads = st.lists(_LOADS, min_size=num_experts, max_size=num_experts)
    return num_experts, num_members, num_redundant, draw(loads if with_loads else st.none() | loads)


def new_group(num_members: int) -> Placement:
    return [[] for _ in range(num_members)]


def assert_sound(placement: Placement, num_experts: int, num_redundant: int) -> None:
    sizes = [len(held) for held in placement]
    assert set().union(*map(set, placement)) == set(range(num_experts)), "an expert is held by nobody"
    assert sum(sizes) == num_experts + num_redundant
    assert max(sizes) - min(sizes) <= 1
    assert all(held == sorted(set(held)) for held in placement), "a member holds an expert twice"


def member_loads(placement: Placement, loads: Sequence[float]) -> list[float]:
    copies = Counter(expert for held in placement for expert in held)
    return [sum(loads[expert] / copies[expert] for expert in held) for held in placement]


@given(groups())
def test_every_expert_is_held_and_members_hold_as_many_each(
    group: tuple[int, int, int, list[float] | None],
) -> None:
    num_experts, num_members, num_redundant, loads = group
    assert_sound(place_experts(num_experts, new_group(num_members), num_redundant, loads), num_experts, num_redundant)


@given(groups(), st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.booleans()), max_size=6))
def test_it_stays_so_through_any_history_of_joins_and_leaves(
    group: tuple[int, int, int, list[float] | None], history: list[tuple[bool, int, bool]]
) -> None:
    num_experts, num_members, num_redundant, loads = group
    placement = place_experts(num_experts, new_group(num_members), num_redundant)
    for joins, leaving, by_load in history:
        if joins:
            placement = [*placement, []]
        elif len(placement) > 1:
            placement = [held for member, held in enumerate(placement) if member != leaving % len(placement)]
        placement = place_experts(num_experts, placement, num_redundant, loads if by_load else None)
        assert_sound(placement, num_experts, max_redundant(num_experts, len(placement), num_redundant))


@given(groups())
def test_the_same_arguments_give_the_same_placement(group: tuple[int, int, int, list[float] | None]) -> None:
    num_experts, num_members, num_redundant, loads = group
    once, again = (place_experts(num_experts, new_group(num_members), num_redundant, loads) for _ in range(2))
    assert once == again


@given(groups())
def test_a_placement_that_is_good_stays(group: tuple[int, int, int, list[float] | None]) -> None:
    num_experts, num_members, num_redundant, loads = group
    placement = place_experts(num_experts, new_group(num_members), num_redundant, loads)
    assert place_experts(num_experts, placement, num_redundant, loads) == placement


@given(st.integers(1, 24), st.integers(1, 6))
def test_one_that_joins_takes_its_share_and_nothing_else_moves(num_experts: int, num_members: int) -> None:
    before = place_experts(num_experts, new_group(num_members))
    after = place_experts(num_experts, [*before, []])
    assert num_moved([*before, []], after) == len(after[-1]) == num_experts // (num_members + 1)


@given(st.integers(1, 24), st.integers(2, 6), st.data())
def test_of_one_that_leaves_its_experts_move_and_nothing_else(
    num_experts: int, num_members: int, data: st.DataObject
) -> None:
    before = place_experts(num_experts, new_group(num_members))
    leaving = data.draw(st.integers(0, num_members - 1))
    left = [held for member, held in enumerate(before) if member != leaving]
    after = place_experts(num_experts, left)
    assert num_moved(left, after) == len(before[leaving])


def test_a_replica_of_what_a_dead_member_held_stays_where_it_is() -> None:
    before = place_experts(4, new_group(4), num_redundant=4)
    for dead in range(4):
        left = [held for member, held in enumerate(before) if member != dead]
        after = place_experts(4, left)
        assert num_moved(left, after) == 0, "every expert had a second copy"
        assert_sound(after, 4, 0)


@given(groups(with_loads=True))
def test_no_member_is_busier_than_a_fair_share_by_more_than_one_expert(
    group: tuple[int, int, int, list[float]],
) -> None:
    num_experts, num_members, num_redundant, loads = group
    placement = place_experts(num_experts, new_group(num_members), num_redundant, loads)
    copies = Counter(expert for held in placement for expert in held)
    busy = member_loads(placement, loads)
    assert max(busy) <= 1.02 * sum(busy) / num_members + max(loads[e] / copies[e] for e in copies)


@given(groups(with_loads=True))
def test_measured_loads_never_make_the_busiest_member_busier(group: tuple[int, int, int, list[float]]) -> None:
    num_experts, num_members, _, loads = group
    before = place_experts(num_experts, new_group(num_members))
    after = place_experts(num_experts, before, 0, loads)
    assert max(member_loads(after, loads)) <= max(member_loads(before, loads)) * (1 + 1e-9)


def test_two_busy_experts_on_one_member_are_parted_by_one_exchange() -> None:
    before = [[0, 1, 2], [3, 4, 5]]
    after = place_experts(6, before, 0, [90, 90, 1, 1, 1, 1])
    assert {0, 1} - set(after[0]), "both busy ones stayed together"
    assert num_moved(before, after) == 2


def test_a_difference_not_worth_a_move_moves_nothing() -> None:
    before = [[0, 1], [2, 3]]
    assert place_experts(4, before, 0, [100.0, 100.4, 100.1, 100.0]) == before


def test_replicas_are_given_to_the_busiest_experts() -> None:
    placement = place_experts(4, new_group(3), 2, [5, 80, 5, 10])
    assert Counter(expert for held in placement for expert in held) == {0: 1, 1: 3, 2: 1, 3: 1}


def test_there_may_be_more_members_than_experts() -> None:
    placement = place_experts(2, new_group(5), 1)
    assert sorted(map(len, placement)) == [0, 0, 1, 1, 1]


def test_a_group_without_members_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one member"):
        place_experts(4, [])


def test_more_replicas_than_members_can_hold_are_left_out() -> None:
    assert place_experts(4, new_group(2), num_redundant=5) == [[0, 1, 2, 3], [0, 1, 2, 3]]
