"""A deployment without processes: actions take effect when the test lets them, or something else happens."""

from dataclasses import dataclass, replace
from random import Random

from engine.wire.states import ReplicaState
from orchestrator.scaling.observed_state import (
    Action,
    ActionKind,
    GroupStage,
    ObservedRank,
    ObservedState,
    PlacementState,
)
from orchestrator.scaling.operation import ScaleOperation
from orchestrator.scaling.plan import ScaleLimits, ScaleRequest, plan_scale
from orchestrator.scaling.steps import Phase, ScaleDeadlines

DEADLINES = ScaleDeadlines(reserve_s=5, spawn_s=5, load_s=10, handshake_s=5, group_s=10, migrate_s=5, stop_s=3)
SERVING = ObservedRank(PlacementState.HELD, ReplicaState.ALIVE, 1.0, is_reached=True, num_sequences=3)


@dataclass
class Flags:
    """What was done to a replica."""

    cordoned: bool = False
    moving: bool = False
    leaving: bool = False
    dismissed: bool = False
    temporary: bool = False


class World:
    """Carries actions out, at once or later. is_lockstep: the group follows the requests by itself."""

    def __init__(self, ranks: tuple[int, ...], is_lockstep: bool = False) -> None:
        self.ranks = dict.fromkeys(ranks, replace(SERVING, is_member=is_lockstep))
        self.flags = {rank: Flags() for rank in ranks}
        self.actions: list[Action] = []
        self.healing: tuple[int, ...] = ()
        self.is_served = True
        self.is_lockstep = is_lockstep
        self.stage = GroupStage.OLD if is_lockstep else GroupStage.SWITCHED

    def observed(self) -> ObservedState:
        return ObservedState(dict(self.ranks), self.healing, self.stage, self.is_served)

    def of(self, rank: int) -> ObservedRank:
        return self.ranks.get(rank, ObservedRank())

    def set(self, rank: int, **changes: object) -> None:
        self.ranks[rank] = replace(self.of(rank), **changes)  # type: ignore[arg-type]

    def take(self, action: Action) -> None:
        self.actions.append(action)
        rank = action.rank
        flags = self.flags.setdefault(rank, Flags())
        match action.kind:
            case ActionKind.RESERVE:
                self.set(rank, placement=PlacementState.ASKED)
            case ActionKind.SPAWN:
                flags.temporary = True
                self.set(rank, engine=ReplicaState.STARTING)
            case ActionKind.CORDON:
                flags.cordoned = True
            case ActionKind.MIGRATE:
                flags.moving = True
            case ActionKind.LEAVE:
                flags.leaving = True
            case ActionKind.STOP:
                flags.dismissed = True
            case ActionKind.RESTORE:
                self.flags[rank] = Flags()
                if self.of(rank).engine is ReplicaState.DEAD:
                    self.set(rank, engine=ReplicaState.ALIVE, reason="")
            case ActionKind.ADMIT:
                flags.temporary = False
            case ActionKind.KILL:
                self.set(rank, engine=ReplicaState.DEAD, reason="killed")
            case ActionKind.RELEASE:
                assert self.of(rank).is_over, "a place is given back only when nothing lives there"
                del self.ranks[rank], self.flags[rank]

    def settle(self, rank: int, now_ready: bool = True) -> None:
        """Let the actions on one rank have their next effect."""
        known, flags = self.of(rank), self.flags.get(rank, Flags())
        if known.placement is PlacementState.ASKED:
            self.set(rank, placement=PlacementState.HELD)
        elif known.engine is ReplicaState.STARTING and now_ready:
            self.set(rank, engine=ReplicaState.ALIVE, progress=1.0, is_member=self.is_lockstep)
        elif known.engine is ReplicaState.ALIVE and not known.is_reached:
            self.set(rank, is_reached=True, num_sequences=2)
        elif flags.moving or (flags.cordoned and known.num_sequences == 0):
            self.set(rank, num_sequences=0, is_empty=True, is_member=known.is_member and not flags.leaving)
            if flags.dismissed:
                self.set(rank, engine=ReplicaState.DEAD, reason="exit status 0")
        elif flags.dismissed:
            self.set(rank, engine=ReplicaState.DEAD, reason="exit status 0")
        elif flags.cordoned:
            self.set(rank, num_sequences=known.num_sequences - 1)

    def settle_group(self, is_asked: bool) -> None:
        if is_asked and self.stage < GroupStage.SWITCHED:
            self.stage = GroupStage(self.stage + 1)
        if self.stage is GroupStage.SWITCHED:
            for rank, flags in self.flags.items():
                if flags.leaving:
                    self.set(rank, is_member=False)


class Run:
    """One operation in a world, with a clock of its own."""

    def __init__(self, ranks: tuple[int, ...], request: ScaleRequest, is_lockstep: bool = False) -> None:
        self.now = 100.0
        self.world = World(ranks, is_lockstep)
        plan = plan_scale(request, dict.fromkeys(ranks, True), ScaleLimits())
        self.operation = ScaleOperation("scale-1", None, request, plan, is_lockstep, DEADLINES, self.now)

    def turn(self, passed_s: float = 0.1) -> list[Action]:
        """Let the operation observe once; carry out its actions."""
        self.now += passed_s
        actions = self.operation.advance(self.world.observed(), self.now)
        for action in actions:
            self.check(action)
            self.world.take(action)
        return actions

    def check(self, action: Action) -> None:
        """Nobody but new ranks, and behind the point of no return those that leave, is ever stopped."""
        plan = self.operation.plan
        assert action.rank in (*plan.joining, *plan.leaving)
        if action.kind in (ActionKind.STOP, ActionKind.KILL, ActionKind.RELEASE) and action.rank in plan.leaving:
            assert self.operation.is_committed

    def settle_all(self) -> None:
        for rank in list(self.world.ranks):
            self.world.settle(rank)
        self.settle_group()

    def settle_group(self) -> None:
        self.world.settle_group(self.operation.phase in (Phase.PREPARE, Phase.COMMIT, Phase.SWITCH))

    def finish(self, chance: Random | None = None) -> None:
        """Let every action take effect, in any order, until the operation is over."""
        for _ in range(400):
            self.turn()
            if self.operation.is_over:
                return
            for rank in list(self.world.ranks):
                if chance is None or chance.random() < 0.5:
                    self.world.settle(rank)
            self.settle_group()
        raise AssertionError(f"never over: {self.operation.phase}, waiting for {self.operation.blocking_ranks}")

    def assert_consistent_end(self) -> None:
        """Check that either all was done or nothing, and that nothing is left behind."""
        plan, world = self.operation.plan, self.world
        is_done = self.operation.phase == "done"
        assert is_done == (self.operation.error is None and self.operation.phase != "cancelled")
        gone = plan.leaving if is_done else plan.joining
        assert not set(gone) & set(world.ranks)
        assert len(world.ranks) == (plan.size_after if is_done else plan.size_before)
        assert all(known.placement is PlacementState.HELD for known in world.ranks.values())
        assert all(flags == Flags() for flags in world.flags.values())
