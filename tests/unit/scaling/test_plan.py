"""Who comes and who goes."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.scaling.plan import RefusalKind, ScaleLimits, ScaleRefusedError, ScaleRequest, plan_scale

LIMITS = ScaleLimits(1, 8)


def alive(*ranks: int) -> dict[int, bool]:
    return dict.fromkeys(ranks, True)


@pytest.mark.parametrize(
    ("wanted", "ranks", "joining", "leaving"),
    [
        (ScaleRequest(size=4), alive(0, 1), (2, 3), ()),
        (ScaleRequest(size=2), alive(0, 1, 2, 3), (), (2, 3)),
        (ScaleRequest(remove=(0,)), alive(0, 1, 2, 3), (), (0,)),
        (ScaleRequest(size=4), alive(1, 2, 3), (0,), ()),
        (ScaleRequest(size=2, remove=(0,)), alive(0, 1), (2,), (0,)),
        (ScaleRequest(size=1, remove=(2,)), alive(0, 1, 2), (), (1, 2)),
        (ScaleRequest(size=2), {0: False, 1: True, 2: True}, (), (0,)),
        (ScaleRequest(size=2), alive(0, 1), (), ()),
        (ScaleRequest(), alive(0, 1), (), ()),
    ],
)
def test_the_lowest_free_ranks_come_and_the_lost_and_the_highest_go(
    wanted: ScaleRequest, ranks: Mapping[int, bool], joining: tuple[int, ...], leaving: tuple[int, ...]
) -> None:
    plan = plan_scale(wanted, ranks, LIMITS)
    assert (plan.joining, plan.leaving) == (joining, leaving)


@pytest.mark.parametrize(
    ("wanted", "ranks", "field", "named"),
    [
        (ScaleRequest(size=0), alive(0), "size", "too few"),
        (ScaleRequest(size=9), alive(0), "size", "--max-data-parallel-size"),
        (ScaleRequest(remove=(5,)), alive(0, 1), "remove", "valid: 0, 1"),
        (ScaleRequest(remove=(1, 1)), alive(0, 1), "remove", "twice"),
        (ScaleRequest(remove=(0, 1)), alive(0, 1), "remove", "too few"),
        (ScaleRequest(remove=(1,)), {0: False, 1: True}, "remove", "no rank that serves"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_field(
    wanted: ScaleRequest, ranks: Mapping[int, bool], field: str, named: str
) -> None:
    with pytest.raises(ScaleRefusedError, match=named) as refused:
        plan_scale(wanted, ranks, LIMITS)
    assert (refused.value.kind, refused.value.field) == (RefusalKind.INVALID, field)


@given(
    st.dictionaries(st.integers(0, 12), st.booleans(), min_size=1, max_size=8),
    st.none() | st.integers(0, 9),
    st.lists(st.integers(0, 12), max_size=3).map(tuple),
)
def test_a_plan_ends_at_the_size_that_was_asked_for(
    ranks: dict[int, bool], size: int | None, remove: tuple[int, ...]
) -> None:
    try:
        plan = plan_scale(ScaleRequest(size=size, remove=remove), ranks, LIMITS)
    except ScaleRefusedError:
        return
    after = (set(ranks) - set(plan.leaving)) | set(plan.joining)
    assert len(after) == plan.size_after == (len(ranks) - len(remove) if size is None else size)
    assert set(remove) <= set(plan.leaving) <= set(ranks)
    assert not set(plan.joining) & set(ranks)
    assert not plan.leaving or plan.joining or any(ranks[rank] for rank in after)
