"""A scale operation goes all the way or all the way back, whatever happens in between."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire.states import ReplicaState
from orchestrator.scaling.observed_state import ActionKind, GroupStage, PlacementState
from orchestrator.scaling.plan import RefusalKind, ScaleRefusedError, ScaleRequest
from orchestrator.scaling.steps import Phase
from tests.unit.scaling.world import Run

GROW = ((0, 1), ScaleRequest(size=4))
SHRINK = ((0, 1, 2, 3), ScaleRequest(remove=(0, 3), drain_timeout_s=30.0))
REPLACE = ((0, 1), ScaleRequest(size=2, remove=(0,), drain_timeout_s=30.0))
REPLACE_AT_ONCE = ((0, 1), ScaleRequest(size=2, remove=(0,), drain_timeout_s=0.0))


def phases(run: Run) -> list[str]:
    return [str(record.phase) for record in run.operation.history]


def run_to(phase: Phase, ranks: tuple[int, ...], request: ScaleRequest, *, is_lockstep: bool = False) -> Run:
    run = Run(ranks, request, is_lockstep)
    for index in range(100):
        run.turn(0.1 if index % 2 else 0.0)
        if run.operation.phase is phase:
            return run
        if index % 2:
            run.settle_all()
    raise AssertionError(f"{phase} was never reached")


def test_growing_reserves_all_before_it_starts_any() -> None:
    run = Run(*GROW)
    assert [action.kind for action in run.turn()] == [ActionKind.RESERVE] * 2
    run.world.settle(2)
    assert run.turn() == []
    assert run.operation.blocking_ranks == (3,)
    run.world.settle(3)
    assert [action.kind for action in run.turn()] == [ActionKind.SPAWN] * 2
    run.finish()
    assert phases(run) == ["reserve", "spawn", "load", "handshake", "done"]
    assert [action.kind for action in run.world.actions][-2:] == [ActionKind.ADMIT] * 2
    run.assert_consistent_end()


def test_shrinking_waits_for_what_runs_and_then_stops() -> None:
    run = Run(*SHRINK)
    run.finish()
    assert phases(run) == ["drain", "move", "stop", "release", "done"]
    assert sorted(run.world.ranks) == [1, 2]
    run.assert_consistent_end()


def test_new_ranks_serve_before_those_they_replace_go() -> None:
    run = run_to(Phase.DRAIN, *REPLACE)
    assert run.world.of(2).is_reached
    assert run.world.of(0).num_sequences
    run.finish()
    assert sorted(run.world.ranks) == [1, 2]


def test_what_is_left_at_the_drain_timeout_moves() -> None:
    run = run_to(Phase.DRAIN, *SHRINK)
    assert run.turn(29.0) == []
    assert {action.kind for action in run.turn(1.0)} == {ActionKind.MIGRATE}
    assert phases(run) == ["drain", "move"]
    run.finish()
    run.assert_consistent_end()


def test_what_does_not_even_move_is_dismissed_and_what_does_not_go_is_killed() -> None:
    run = run_to(Phase.MIGRATE, (0, 1), ScaleRequest(size=1, drain_timeout_s=0.0))
    assert [action.kind for action in run.turn(6.0)] == [ActionKind.STOP]
    assert run.turn(2.0) == []
    assert [action.kind for action in run.turn(1.0)] == [ActionKind.KILL]
    run.finish()
    assert run.operation.phase is Phase.DONE


def test_a_lockstep_group_switches_between_draining_and_stopping() -> None:
    run = Run(*REPLACE, is_lockstep=True)
    run.finish()
    assert phases(run)[4:] == ["drain", "move", "prepare", "commit", "switch", "publish", "stop", "release", "done"]
    run.assert_consistent_end()


def test_a_group_that_never_gets_ready_goes_on_as_it_was() -> None:
    run = run_to(Phase.PREPARE, *SHRINK, is_lockstep=True)
    assert run.world.stage is GroupStage.OLD
    run.turn(11.0)
    assert run.operation.error == "phase prepare is not over after 10 s"
    run.finish()
    run.assert_consistent_end()


def test_what_died_is_replaced_before_anybody_leaves() -> None:
    run = Run(*SHRINK)
    run.world.healing = (2,)
    for _ in range(5):
        assert run.turn(60.0) == []
    assert run.operation.blocking_ranks == (2,)
    run.world.healing = ()
    run.finish()
    assert run.operation.phase is Phase.DONE


def test_while_nobody_else_serves_the_leaving_ranks_do() -> None:
    run = run_to(Phase.MIGRATE, (0, 1), ScaleRequest(remove=(0,), drain_timeout_s=0.0))
    run.world.healing, run.world.is_served = (1,), False
    assert [action.kind for action in run.turn()] == [ActionKind.RESTORE]
    assert not run.world.flags[0].cordoned
    assert run.turn(60.0) == []
    run.world.healing, run.world.is_served = (), True
    run.finish()
    assert phases(run) == ["drain", "move", "drain", "move", "stop", "release", "done"]
    assert [action.kind for action in run.world.actions].count(ActionKind.CORDON) == 2


def test_no_place_ends_it_before_anything_is_started() -> None:
    run = Run(*GROW)
    run.turn()
    run.world.settle(2)
    run.world.set(3, placement=PlacementState.REFUSED, reason="needs 1 CPU, the cluster has none free")
    run.finish()
    assert run.operation.phase is Phase.FAILED
    assert "rank 3: needs 1 CPU" in str(run.operation.error)
    assert ActionKind.SPAWN not in {action.kind for action in run.world.actions}
    run.assert_consistent_end()


def test_a_new_rank_that_dies_while_it_loads_undoes_all() -> None:
    run = run_to(Phase.LOAD, *GROW)
    run.world.settle(2)
    run.world.set(3, engine=ReplicaState.DEAD, reason="exit status 1: no memory")
    run.finish()
    assert "rank 3 ended: exit status 1: no memory" in str(run.operation.error)
    run.assert_consistent_end()


def test_a_new_rank_that_is_never_ready_is_given_up_at_the_deadline() -> None:
    run = run_to(Phase.LOAD, *GROW)
    run.world.settle(2)
    run.turn(9.0)
    assert run.operation.blocking_ranks == (3,)
    run.turn(1.0)
    assert run.operation.error == "phase load is not over after 10 s (--start-timeout): it waits for rank 3"
    run.finish()
    run.assert_consistent_end()


@pytest.mark.parametrize("phase", [Phase.RESERVE, Phase.SPAWN, Phase.LOAD, Phase.HANDSHAKE, Phase.DRAIN, Phase.MIGRATE])
def test_a_cancel_before_the_point_of_no_return_undoes_all(phase: Phase) -> None:
    ask = REPLACE_AT_ONCE if phase is Phase.MIGRATE else REPLACE
    run = Run(*ask) if phase is Phase.RESERVE else run_to(phase, *ask)
    run.operation.cancel()
    run.operation.cancel()
    run.finish()
    assert run.operation.phase is Phase.CANCELLED
    run.assert_consistent_end()


def test_a_new_rank_that_gives_no_sign_is_not_waited_for_on_the_way_back() -> None:
    run = run_to(Phase.HANDSHAKE, *GROW)
    run.world.set(3, is_silent=True)
    run.operation.cancel()
    ordered = [(action.rank, action.kind) for action in run.turn()]
    assert ordered == [(2, ActionKind.CORDON), (2, ActionKind.MIGRATE), (2, ActionKind.LEAVE), (3, ActionKind.KILL)]
    run.finish()
    run.assert_consistent_end()


@pytest.mark.parametrize("phase", [Phase.STOP, Phase.RELEASE, Phase.DONE])
def test_a_cancel_behind_it_is_refused(phase: Phase) -> None:
    run = run_to(phase, *REPLACE)
    with pytest.raises(ScaleRefusedError) as refused:
        run.operation.cancel()
    assert refused.value.kind is RefusalKind.CONFLICT
    run.finish()
    assert run.operation.phase is Phase.DONE


def test_progress_only_rises_and_the_rest_is_guessed_from_it() -> None:
    run, seen = Run(*REPLACE), list[float]()
    while not run.operation.is_over:
        run.turn()
        seen.append(run.operation.progress)
        run.settle_all()
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0.0, 1.0)
    assert run.operation.eta_s(run.now) == 0.0
    assert sum(record.duration_s or 0.0 for record in run.operation.history) == pytest.approx(
        run.operation.elapsed_s(run.now)
    )


def test_nothing_to_do_is_done_at_once() -> None:
    run = Run((0, 1), ScaleRequest(size=2))
    assert run.operation.is_over
    assert run.operation.progress == 1.0
    assert run.turn() == []


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([GROW, SHRINK, REPLACE, ((0, 1, 2), ScaleRequest(size=3, remove=(0, 2), drain_timeout_s=1.0))]),
    st.booleans(),
    st.integers(0, 2**32),
    st.sampled_from(["", "cancel", "refuse", "die", "stall"]),
    st.integers(0, 40),
)
def test_it_goes_all_the_way_or_all_the_way_back(
    ask: tuple[tuple[int, ...], ScaleRequest], is_lockstep: bool, seed: int, fault: str, at: int
) -> None:
    run, chance = Run(*ask, is_lockstep), Random(seed)
    for index in range(at + 1):
        run.turn(chance.choice([0.0, 0.1, 1.0]))
        for rank in list(run.world.ranks):
            if chance.random() < 0.4:
                run.world.settle(rank, now_ready=fault != "stall")
        if chance.random() < 0.4:
            run.settle_group()
        if index == at:
            _break(run, fault, chance)
    run.finish(chance)
    run.assert_consistent_end()


def _break(run: Run, fault: str, chance: Random) -> None:
    operation, world = run.operation, run.world
    joining = [rank for rank in operation.plan.joining if rank in world.ranks]
    if fault == "cancel" and not operation.is_over and not operation.is_committed:
        operation.cancel()
    if fault == "refuse" and joining and world.of(joining[0]).placement is PlacementState.ASKED:
        world.set(joining[0], placement=PlacementState.REFUSED, reason="none")
    anybody = [rank for rank, known in world.ranks.items() if not known.is_over]
    if fault == "die" and not operation.is_committed and anybody:
        rank = chance.choice([*joining, *operation.plan.leaving] or anybody)
        if rank in world.ranks and not world.of(rank).is_over and rank in (*joining, *operation.plan.leaving):
            world.set(rank, engine=ReplicaState.DEAD, reason="killed by SIGKILL", is_empty=False, is_member=False)
