"""What a scale operation sees of the deployment, and what it can order. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from engine.wire.states import ReplicaState


class PlacementState(StrEnum):
    """Whether the host keeps a place for a rank."""

    NONE = "none"
    ASKED = "asked"
    HELD = "held"
    REFUSED = "refused"


class GroupStage(IntEnum):
    """How far a lockstep group is on its way to the membership that is wanted; each holds once reached.

    Independent ranks are always there.
    """

    OLD = 0
    PREPARED = 1  # all members, old and new, are ready to switch
    COMMITTED = 2  # the switch cannot be taken back
    SWITCHED = 3  # all members step in the new group


@dataclass(frozen=True, slots=True)
class ObservedRank:
    """One rank, as it is now.

    engine: STARTING from the action that starts it, ALIVE once it has loaded, DEAD when it ended; None before.
    progress: of loading, 0..1. is_reached: by every API process. is_empty: it takes nothing new and has nothing left.
    num_sequences: what it has to do. is_member: a lockstep group still counts on it. is_silent: nothing is heard of its
    engine, which so does nothing that it is told.
    reason: why the place was refused or the engine ended.
    """

    placement: PlacementState = PlacementState.NONE
    engine: ReplicaState | None = None
    progress: float = 0.0
    is_reached: bool = False
    is_empty: bool = False
    num_sequences: int = 0
    is_member: bool = False
    is_silent: bool = False
    reason: str = ""

    @property
    def is_over(self) -> bool:
        """Tell whether no engine of this rank lives."""
        return self.engine in (None, ReplicaState.DEAD)


@dataclass(frozen=True, slots=True)
class ObservedState:
    """The deployment, as it is now.

    healing: staying ranks whose engine is being replaced. group: see ``GroupStage``. is_served: some rank that does not
    leave is ready.
    """

    ranks: Mapping[int, ObservedRank] = field(default_factory=dict)
    healing: tuple[int, ...] = ()
    group: GroupStage = GroupStage.SWITCHED
    is_served: bool = True

    def of(self, rank: int) -> ObservedRank:
        """Return what is known of a rank."""
        return self.ranks.get(rank, _NOTHING)


_NOTHING = ObservedRank()


class ActionKind(StrEnum):
    """What can be ordered for a rank. Each takes effect in the facts some time later, or not at all.

    RESERVE: keep a place for it. SPAWN: start its engine, in a replica that nobody fills again. ADMIT: its replica is
    like any other from now on. CORDON: send it nothing new. MOVE: let what it has go on elsewhere. LEAVE: let the group
    go on without it. STOP: dismiss its engine. KILL: end it at once. RELEASE: give its place and its replica up.
    RESTORE: undo CORDON, MOVE and LEAVE.
    """

    RESERVE = "reserve"
    SPAWN = "spawn"
    ADMIT = "admit"
    CORDON = "cordon"
    MIGRATE = "move"
    LEAVE = "leave"
    STOP = "stop"
    KILL = "kill"
    RELEASE = "release"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True)
class Action:
    """One verb for one rank."""

    kind: ActionKind
    rank: int
