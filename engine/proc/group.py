"""What the coordinator's state means for one engine."""

from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import ClientInfo, ClusterSettings, GroupState, Seat, SeatState


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
        seat = next((seat for seat in state.seats if seat.engine_id.rank == self._engine_id.rank), None)
        self.is_dismissed = self._engine_id in state.dismissed or self._has_lost_its_seat(seat)
        self.is_draining = seat is not None and seat.engine_id == self._engine_id and _is_draining(seat)
        self.is_member = self._engine_id in state.committed.members
        self.settings = state.settings
        return True

    def _has_lost_its_seat(self, seat: Seat | None) -> bool:
        """Tell whether this engine was declared dead while its host was out of reach: it must not live on beside."""
        if seat is None:
            return False
        if seat.engine_id == self._engine_id:
            return seat.state is SeatState.DEAD
        return seat.engine_id.incarnation > self._engine_id.incarnation


def _is_draining(seat: Seat) -> bool:
    return seat.state is SeatState.LEAVING or seat.is_draining or seat.is_vacating
