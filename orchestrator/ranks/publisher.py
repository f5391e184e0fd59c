"""The publisher of the replicas: their table goes to the coordinator, what happens to them into the event log."""

from collections.abc import Callable
from typing import Any, Protocol

from engine.wire.messages import EngineReport, GroupState, SupervisorReport
from orchestrator.ranks.events import EventKind, EventLog
from orchestrator.ranks.replica_table import Replica, ReplicaTable


class Channel(Protocol):
    """The channel to the coordinator; see ``CoordinatorChannel``."""

    def publish(self) -> None:
        """Send the whole table now, and repeat it from now on."""

    def listen(self, wanted: bool) -> None:
        """Receive every report of every engine beside the state of the group, or that alone."""

    def close(self) -> None:
        """Send and receive nothing more."""


Connect = Callable[
    [Callable[[int], SupervisorReport], Callable[[EngineReport], None], Callable[[GroupState], None]], Channel
]
"""Opens a channel. It gets what makes a report, and what takes reports of engines and states of the group."""


class ReplicaPublisher:
    """Publishes a table of replicas after each change of it. events: what happened to the ranks."""

    def __init__(self, replicas: ReplicaTable, channel: Channel) -> None:
        self.events = EventLog()
        self._replicas = replicas
        self._channel = channel
        self._watches_loads = False

    def publish(self) -> None:
        """Send the table as it is now."""
        self._channel.publish()
        self._listen_as_needed()

    def note(self, kind: EventKind, replica: Replica, **facts: Any) -> None:
        """Note what happened to a replica. facts: plain data."""
        self.events.add(kind, rank=replica.engine_id.rank, engine_id=str(replica.engine_id), **facts)

    def watch_loads(self, *, wanted: bool) -> None:
        """Receive every report of every engine, or only those of replicas that change, which costs less."""
        self._watches_loads = wanted
        self._listen_as_needed()

    def close(self) -> None:
        """Publish nothing more."""
        self._channel.close()

    def _listen_as_needed(self) -> None:
        # Loads arrive all the time from every engine; while nothing changes this process needs none of them.
        self._channel.listen(self._watches_loads or not self._replicas.is_settled)
