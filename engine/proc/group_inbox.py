"""What the threads of a lockstep rank hand to its busy loop, and what the loop shows in the report."""

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.parallel.group_member import DPGroupMember, leaves_below
from engine.proc.shared import SharedState
from engine.wire.control import MemberStatus
from engine.wire.ids import EngineId
from engine.wire.messages import GroupState
from engine.wire.replicas import ReplicaInfo, any_has_ended, replicas_by_rank

if TYPE_CHECKING:
    from engine.parallel.epoch import EpochGroup


class GroupInbox:
    """Newest state of the coordinator and prepared groups in; the member's standing out.

    Only the newest state counts, so one slot holds it. ``must_leave`` is asked from inside collectives, while the loop
    cannot take a state: it looks at what the input thread noted on arrival, which groups are over and the replicas.

    failed_epoch, num_empty_steps, collective_s: written by the loop. heard_at: monotonic seconds of the coordinator's
    last word.
    """

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared
        self._lock = threading.Lock()
        self._state: GroupState | None = None
        self._prepared: list[tuple[int, EpochGroup | None]] = []
        self._leaves_below = 0
        self._replicas: dict[int, ReplicaInfo] = {}
        self._position: tuple[int, Sequence[EngineId]] = (0, ())  # epoch and peers; written by the loop
        self.failed_epoch = 0
        self.num_empty_steps = 0
        self.collective_s = 0.0
        self.heard_at = time.monotonic()

    def see(self, state: GroupState) -> None:
        """Take a state that is newer than all before; input thread."""
        with self._lock:
            self._leaves_below = max(self._leaves_below, leaves_below(state))
            self._state = state
            self._replicas = replicas_by_rank(state.replicas)
            self.heard_at = time.monotonic()
        self._shared.wake()

    def post_prepared(self, epoch: int, group: "EpochGroup | None") -> None:
        """Hand over a group, or the news that it could not be prepared; a preparing thread."""
        with self._lock:
            self._prepared.append((epoch, group))
        self._shared.wake()

    def must_leave(self, epoch: int) -> bool:
        """Tell whether whoever waits in a collective of this epoch shall leave it; any thread."""
        if self._leaves_below > epoch or self._shared.stop_reason is not None:
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

    def publish(self, member: DPGroupMember, num_experts: int, store_address: str, expert_loads: list[int]) -> None:
        """Let the next report show where the member stands."""
        self._position = member.epoch, member.peers
        self._shared.show_member(
            member.lockstep_state.phase,
            epoch=member.epoch,
            ready_epoch=member.ready_epoch,
            max_epoch_seen=member.max_epoch_seen,
            wave=member.wave,
            member=MemberStatus(
                num_experts,
                store_address,
                member.committed,
                self.failed_epoch,
                expert_loads,
                self.num_empty_steps,
                self.collective_s,
                member.broken_epoch,
            ),
        )
