"""What the coordinator's state means for one engine."""

from engine.wire.control import ClusterSettings
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import ClientInfo, GroupState
from engine.wire.replicas import ReplicaInfo, has_ended
from engine.wire.states import ReplicaState


class GroupView:
    """The newest GroupState, read for one engine; pure. Older and repeated states change nothing."""

    def __init__(self, engine_id: EngineId) -> None:
        self._engine_id = engine_id
        self._newest = (-1, -1)
        self.clients: dict[ClientId, ClientInfo] = {}
        self.epoch = 0
        self.max_epoch_seen = 0
        self.is_dismissed = False
        self.is_draining = False
        self.is_member = False
        self.settings = ClusterSettings()

    def update(self, state: GroupState) -> bool:
        """Take a state in; True when it is newer than all before it."""
        number = (state.generation, state.seq)
        if number <= self._newest:
            return False
        self._newest = number
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
