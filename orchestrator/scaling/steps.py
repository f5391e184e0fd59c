"""The steps of a scale operation, in order: the action of each, when it is done, how long it may take. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from engine.wire.states import ReplicaState
from orchestrator.config.defaults import START_TIMEOUT_S
from orchestrator.scaling.observed_state import (
    Action,
    ActionKind,
    GroupStage,
    ObservedRank,
    ObservedState,
    PlacementState,
)
from orchestrator.scaling.plan import ScalePlan


class Phase(StrEnum):
    """What a scale operation is doing. The words are part of the API."""

    RESERVE = "reserve"
    SPAWN = "spawn"
    LOAD = "load"
    HANDSHAKE = "handshake"
    DRAIN = "drain"
    MIGRATE = "move"
    PREPARE = "prepare"
    COMMIT = "commit"
    SWITCH = "switch"
    PUBLISH = "publish"
    STOP = "stop"
    RELEASE = "release"
    ROLL_BACK = "roll_back"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDS = (Phase.DONE, Phase.FAILED, Phase.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDeadlines:
    """How long each wait of an operation may take, in seconds.

    load_s: for a new rank to load. group_s: for a lockstep group to prepare. migrate_s: for the sequences of a rank to
    continue elsewhere; longer than a client that takes nothing keeps its sequences. stop_s: for a dismissed engine to
    end by itself.
    """

    reserve_s: float = 20.0
    spawn_s: float = 60.0
    load_s: float = START_TIMEOUT_S
    handshake_s: float = 30.0
    group_s: float = 120.0
    migrate_s: float = 35.0
    stop_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step: its action is taken once for each of its ranks, then what is observed of them decides when it is done.

    is_done: of one rank. is_group_done: of the whole. limit_s: None waits for ever. option: the flag that sets it, if
    there is one. continues_at_limit: at the limit the next step begins, else the operation fails. waits_for_healing: no
    action is taken and no time is counted while a staying rank is being replaced. weight: its share of the progress.
    """

    phase: Phase
    ranks: tuple[int, ...] = ()
    kind: ActionKind | None = None
    is_done: Callable[[ObservedRank], bool] = lambda _: True
    is_group_done: Callable[[ObservedState], bool] = lambda _: True
    limit_s: float | None = None
    option: str = ""
    continues_at_limit: bool = False
    waits_for_healing: bool = False
    weight: float = 1.0

    @property
    def actions(self) -> list[Action]:
        """Return the actions with which it begins."""
        return [] if self.kind is None else [Action(self.kind, rank) for rank in self.ranks]


def steps_of(plan: ScalePlan, is_lockstep: bool, drain_s: float, deadlines: ScaleDeadlines) -> tuple[Step, ...]:
    """Return the steps of a plan, in order."""
    # Draining precedes the switch of a group, which is the point of no return: a drain takes minutes and has to be
    # cancellable, a switch takes milliseconds.
    changes = bool(plan.joining or plan.leaving)
    return (
        *(_joining(plan.joining, deadlines) if plan.joining else ()),
        *(_draining(plan.leaving, drain_s, deadlines) if plan.leaving else ()),
        *(_switching(plan.leaving, deadlines) if is_lockstep and changes else ()),
        *(_stopping(plan.leaving) if plan.leaving else ()),
    )


def _joining(joining: tuple[int, ...], deadlines: ScaleDeadlines) -> tuple[Step, ...]:
    return (
        Step(
            phase=Phase.RESERVE,
            ranks=joining,
            kind=ActionKind.RESERVE,
            is_done=lambda rank: rank.placement is PlacementState.HELD,
            limit_s=deadlines.reserve_s,
        ),
        Step(
            phase=Phase.SPAWN,
            ranks=joining,
            kind=ActionKind.SPAWN,
            is_done=lambda rank: rank.engine is not None,
            limit_s=deadlines.spawn_s,
        ),
        Step(
            phase=Phase.LOAD,
            ranks=joining,
            is_done=lambda rank: rank.engine is ReplicaState.ALIVE,
            limit_s=deadlines.load_s,
            option="--start-timeout",
            weight=10.0,
        ),
        Step(
            phase=Phase.HANDSHAKE,
            ranks=joining,
            is_done=lambda rank: rank.is_reached,
            limit_s=deadlines.handshake_s,
        ),
    )


def _draining(leaving: tuple[int, ...], drain_s: float, deadlines: ScaleDeadlines) -> tuple[Step, ...]:
    return (
        Step(
            phase=Phase.DRAIN,
            ranks=leaving,
            kind=ActionKind.CORDON,
            is_done=_holds_nothing,
            limit_s=drain_s,
            continues_at_limit=True,
            waits_for_healing=True,
            weight=5.0,
        ),
        # At its limit the engine is stopped all the same: what it still has, its clients requeue as after a death.
        Step(
            phase=Phase.MIGRATE,
            ranks=leaving,
            kind=ActionKind.MIGRATE,
            is_done=_holds_nothing,
            limit_s=deadlines.migrate_s,
            continues_at_limit=True,
            waits_for_healing=True,
        ),
    )


def _switching(leaving: tuple[int, ...], deadlines: ScaleDeadlines) -> tuple[Step, ...]:
    return (
        Step(
            phase=Phase.PREPARE,
            ranks=leaving,
            kind=ActionKind.LEAVE,
            is_group_done=lambda observed: observed.group >= GroupStage.PREPARED,
            limit_s=deadlines.group_s,
            waits_for_healing=True,
            weight=3.0,
        ),
        Step(
            phase=Phase.COMMIT,
            is_group_done=lambda observed: observed.group >= GroupStage.COMMITTED,
            limit_s=deadlines.group_s,
            waits_for_healing=True,
        ),
        # No limits from here on: a committed membership cannot be taken back, so there is nothing to fail to.
        Step(phase=Phase.SWITCH, is_group_done=lambda observed: observed.group >= GroupStage.SWITCHED),
        Step(phase=Phase.PUBLISH, ranks=leaving, is_done=lambda rank: not rank.is_member),
    )


def _stopping(leaving: tuple[int, ...]) -> tuple[Step, ...]:
    return (
        Step(phase=Phase.STOP, ranks=leaving, kind=ActionKind.STOP, is_done=lambda rank: rank.is_over),
        Step(
            phase=Phase.RELEASE,
            ranks=leaving,
            kind=ActionKind.RELEASE,
            is_done=lambda rank: rank.placement is PlacementState.NONE,
        ),
    )


def _holds_nothing(rank: ObservedRank) -> bool:
    return rank.is_empty or rank.is_over
