"""The actions of a scale operation on replicas: each changes the table, the engine where needed, and is published."""

import asyncio

from orchestrator.ranks.engine_launcher import EngineLauncher
from orchestrator.ranks.events import EventKind
from orchestrator.ranks.publisher import ReplicaPublisher
from orchestrator.ranks.replica_table import Replica, ReplicaTable


class ReplicaActions:
    """Adds, drains and removes replicas, by rank. Nothing in here waits: effects show in the table later."""

    def __init__(self, replicas: ReplicaTable, launcher: EngineLauncher, publisher: ReplicaPublisher) -> None:
        self._replicas = replicas
        self._launcher = launcher
        self._publisher = publisher

    def add(self, rank: int) -> None:
        """Start an engine for a new rank. If it ends it is not replaced, until the replica is kept or removed."""
        replica = self._replicas.open(rank)
        self._publisher.note(EventKind.RANK_JOINING, replica)
        self._publisher.publish()
        self._launcher.start_soon(replica)

    def cordon(self, rank: int) -> None:
        """Let a rank get no new requests, and have no replacement if its engine ends."""
        replica = self._replica(rank)
        replica.is_draining = True
        # A restart that waits for its pause would bring the rank back that is to go.
        if replica.replacement_in_s is not None:
            self._launcher.cancel_start(rank)
            replica.replacement_in_s = None
        self._publisher.publish()

    def migrate(self, rank: int) -> None:
        """Let every sequence of a rank continue on another one."""
        self._replica(rank).is_migrating = True
        self._publisher.publish()

    def leave(self, rank: int) -> None:
        """Let the lockstep group continue without a rank."""
        self._replica(rank).is_leaving = True
        self._publisher.publish()

    def dismiss(self, rank: int) -> None:
        """Ask the engine of a rank to end."""
        self._replica(rank).dismissed = True
        self._publisher.publish()

    def kill(self, rank: int) -> None:
        """End the engine of a rank at once, also while it is being started."""
        self._launcher.kill(self._replica(rank))

    def keep(self, rank: int) -> None:
        """Make the replica of a rank like any other, and replace its engine if that ended meanwhile."""
        pause_s = self._replicas.keep(rank, asyncio.get_running_loop().time())
        self._publisher.publish()
        if pause_s is not None:
            self._launcher.replace_later(rank, pause_s)

    def remove(self, rank: int) -> None:
        """Remove the replica of a rank whose engine has ended, if it has one."""
        replica = self._replicas.at(rank)
        if replica is None:  # its placement group was given up before an engine was ever started
            return
        self._replicas.close(rank)
        self._launcher.forget(rank)
        self._publisher.note(EventKind.RANK_LEFT, replica, reason=replica.end_reason)
        self._publisher.publish()

    def _replica(self, rank: int) -> Replica:
        replica = self._replicas.at(rank)
        assert replica is not None, "actions are for ranks there are"
        return replica
