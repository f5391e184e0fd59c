"""The inbox of a lockstep rank's busy loop: the newest state of the coordinator, and prepared groups."""

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.parallel.group_member import leaves_below
from engine.wire.ids import EngineId
from engine.wire.messages import GroupState
from engine.wire.replicas import ReplicaInfo, any_has_ended, replicas_by_rank

if TYPE_CHECKING:
    from engine.parallel.epoch import EpochGroup


class GroupInbox:
    """What other threads leave for the loop of a lockstep rank; whoever leaves something wakes the loop afterwards.

    Only the newest state counts, so one slot holds it. ``must_leave`` is asked from inside collectives, while the loop
    cannot take a state: it goes by what the input thread noted on arrival, which groups are over and the replicas.

    heard_at: monotonic seconds when the newest state came.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state: GroupState | None = None
        self._prepared: list[tuple[int, EpochGroup | None]] = []
        self._leaves_below = 0
        self._replicas: dict[int, ReplicaInfo] = {}
        self._position: tuple[int, Sequence[EngineId]] = (0, ())  # one value, so that readers need no lock
        self.heard_at = time.monotonic()

    def see(self, state: GroupState) -> None:
        """Take a state that is newer than all before; input thread."""
        with self._lock:
            # It only rises: for a proposal that was withdrawn other members may have left their group already.
            self._leaves_below = max(self._leaves_below, leaves_below(state))
            self._state = state
            self._replicas = replicas_by_rank(state.replicas)
            self.heard_at = time.monotonic()

    def post_prepared(self, epoch: int, group: "EpochGroup | None") -> None:
        """Hand over a group, or None when it could not be prepared; a preparing thread."""
        with self._lock:
            self._prepared.append((epoch, group))

    def note_position(self, epoch: int, peers: Sequence[EngineId]) -> None:
        """Note the group that the loop steps in and its members; busy loop."""
        self._position = epoch, peers

    def must_leave(self, epoch: int) -> bool:
        """Tell whether to leave a collective of this epoch: the group is over, or a member has ended; any thread."""
        if self._leaves_below > epoch:
            return True
        own_epoch, peers = self._position
        return own_epoch == epoch and any_has_ended(peers, self._replicas)

    def take_state(self) -> GroupState | None:
        """Return the newest state if it was not taken yet."""
        with self._lock:
            state, self._state = self._state, None
            return state

    def take_prepared(self) -> "list[tuple[int, EpochGroup | None]]":
        """Return what was prepared since the last time."""
        with self._lock:
            prepared, self._prepared = self._prepared, []
            return prepared
