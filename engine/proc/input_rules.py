"""The rules of the input thread, pure: which messages of a client count, and what the group's state asks for."""

from enum import Enum

from engine.wire.control import ClusterSettings
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import ClientInfo, GroupState
from engine.wire.newest import NewestState
from engine.wire.replicas import ReplicaInfo, has_ended
from engine.wire.states import ReplicaState


class SequenceCheck(Enum):
    """What a number says about its message."""

    NEXT = "next"
    DUPLICATE = "duplicate"
    GAP = "gap"


class SequencedChannel:
    """The receiving end of one client's numbered request channel.

    applied: the last contiguous ``channel_seq``. It stays where it is at a gap, and the client sends again from behind
    it, in order; messages beyond a gap are not kept, because they all come again.
    """

    def __init__(self) -> None:
        self.applied = 0

    def accept(self, channel_seq: int) -> SequenceCheck:
        """Judge one message; only ``NEXT`` may be acted on, and it has raised ``applied``."""
        if channel_seq == self.applied + 1:
            self.applied = channel_seq
            return SequenceCheck.NEXT
        return SequenceCheck.DUPLICATE if channel_seq <= self.applied else SequenceCheck.GAP


class GroupView:
    """The newest GroupState, as it concerns one engine. Older and repeated states change nothing.

    clients: every client to be connected to. epoch, is_member: of the committed membership. max_epoch_seen: no epoch up
    to here may be used for another attempt. is_dismissed: the engine must exit. is_draining: it is to take nothing new.
    settings: of the operator, with a number of their own.
    """

    def __init__(self, engine_id: EngineId) -> None:
        self._engine_id = engine_id
        self._newest = NewestState()
        self.clients: dict[ClientId, ClientInfo] = {}
        self.epoch = 0
        self.max_epoch_seen = 0
        self.is_dismissed = False
        self.is_draining = False
        self.is_member = False
        self.settings = ClusterSettings()

    def update(self, state: GroupState) -> bool:
        """Take a state in; True when it is newer than all before it."""
        if not self._newest.accept(state.generation, state.seq):
            return False
        self.clients = {info.client_id: info for info in state.clients}
        self.epoch = state.committed.epoch
        proposed = state.proposal.epoch if state.proposal is not None else 0
        self.max_epoch_seen = max(self.max_epoch_seen, self.epoch, proposed)
        replica = next((replica for replica in state.replicas if replica.engine_id.rank == self._engine_id.rank), None)
        # Declared dead while its host was out of reach, it must not live on beside its successor.
        is_superseded = replica is not None and has_ended(self._engine_id, replica)
        self.is_dismissed = self._engine_id in state.dismissed or is_superseded
        self.is_draining = replica is not None and replica.engine_id == self._engine_id and _is_draining(replica)
        self.is_member = self._engine_id in state.committed.members
        self.settings = state.settings
        return True


def _is_draining(replica: ReplicaInfo) -> bool:
    return replica.state is ReplicaState.LEAVING or replica.is_draining or replica.is_migrating
