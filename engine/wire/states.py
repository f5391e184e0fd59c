"""The states of a rank: one set, seen from four points of view. Pure.

| enum | who decides it | from what | who acts on it |
|---|---|---|---|
| ``EnginePhase`` | the engine, of itself | its busy loop | coordinator, clients: in every EngineReport |
| ``LockstepState`` | a lockstep rank, of itself | GroupStates, step exchanges | its busy loop; a phase in reports |
| ``ReplicaState`` | the supervisor, of an engine | its host, scale operations | coordinator, clients: in GroupStates |
| ``EngineState`` | one client, of one engine | connection, replica, suspects | people: ``/v1/cluster``, metrics |

Beside its state a replica has flags: what is being done with it (``is_draining``, ``is_migrating`` in ``ReplicaInfo``)
and whether it shows progress (``Suspect``). They are no states, because each holds beside any of them.
"""

from enum import Enum, IntEnum, StrEnum


class EnginePhase(IntEnum):
    """The phase of an engine. LOADING covers everything before it can take a request.

    PARKED: its lockstep group broke, and it waits for the next one. STOPPING: its last report.
    """

    LOADING = 0
    IDLE = 1
    RUNNING = 2
    PARKED = 3
    STOPPING = 4


class LockstepState(Enum):
    """The state of a rank in its lockstep group.

    OUTSIDE: in no group, before it joins or after it left. PARKED: its group broke.
    """

    OUTSIDE = "outside"
    IDLE = "idle"
    RUNNING = "running"
    PARKED = "parked"

    @property
    def phase(self) -> EnginePhase:
        """Return what a report shows of it: outside a group an engine is idle."""
        return EnginePhase.IDLE if self is LockstepState.OUTSIDE else EnginePhase[self.name]


class ReplicaState(IntEnum):
    """The state of a replica's engine, as far as the supervisor knows.

    STARTING: ordered, not loaded yet. LEAVING: a scale operation or the end of the deployment takes it away.
    DEAD: its host has confirmed that it is gone.
    """

    STARTING = 0
    ALIVE = 1
    LEAVING = 2
    DEAD = 3


class EngineState(StrEnum):
    """The state of an engine for one client.

    LOADING: no handshake yet. READY: takes requests. SUSPECT: gives no sign of progress, so it gets no new ones.
    LEAVING: finishes what it has. DEAD: gone, and not replaced yet.
    """

    LOADING = "loading"
    READY = "ready"
    SUSPECT = "suspect"
    LEAVING = "leaving"
    DEAD = "dead"
