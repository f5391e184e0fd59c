"""The supervisor's channel to the coordinator: replicas go out, the group's state and, on demand, loads come in."""

import asyncio
import itertools
import logging
from collections.abc import Callable

import zmq

from engine.wire.codec import encode, state_decoder
from engine.wire.drop_counter import DropCounter
from engine.wire.endpoints import WireSecurity
from engine.wire.errors import MalformedMessageError
from engine.wire.messages import GROUP_TOPIC, LOAD_TOPIC, EngineReport, GroupState, SupervisorReport
from engine.wire.newest import NewestState
from engine.wire.sockets import AsyncReceiver, connect, make_socket, send_nowait
from engine.wire.tensors import Frames

_LOG = logging.getLogger(__name__)

REPEAT_S = 1.0
"""The report is repeated this often, so that a lost one or a new coordinator needs no other rule."""

_SUBSCRIBE, _UNSUBSCRIBE = b"\x01", b"\x00"


class CoordinatorChannel:
    """Two sockets and one timer on the running loop. Nothing in here ever blocks or fails the caller."""

    def __init__(
        self,
        report_endpoint: str,
        state_endpoint: str,
        make_report: Callable[[int], SupervisorReport],
        on_engine_report: Callable[[EngineReport], None],
        on_group_state: Callable[[GroupState], None],
        security: WireSecurity | None = None,
    ) -> None:
        """Connect to both endpoints of the coordinator; publish nothing yet.

        make_report: called with the number of each report. on_engine_report: called with every report of a snapshot,
        while loads are listened to. on_group_state: called with each state that is newer than all before it.
        """
        self._make_report = make_report
        self._on_engine_report = on_engine_report
        self._on_group_state = on_group_state
        self._newest = NewestState()
        self._generation = -1  # of the newest state
        self._numbers = itertools.count(1)
        self._decoder = state_decoder()
        self._drop_counter = DropCounter()
        self._timer: asyncio.TimerHandle | None = None
        self._is_listening = True
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._push = make_socket(self._context, zmq.PUSH, security=security)
        self._state = make_socket(self._context, zmq.XSUB, topics=(GROUP_TOPIC, LOAD_TOPIC), security=security)
        connect(self._push, report_endpoint)
        connect(self._state, state_endpoint)
        self._receiver = AsyncReceiver(self._state, self._on_state)

    def publish(self) -> None:
        """Send the whole report now, and again every ``REPEAT_S``."""
        if self._timer is not None:
            self._timer.cancel()
        send_nowait(self._push, [encode(self._make_report(next(self._numbers)))])
        self._timer = asyncio.get_running_loop().call_later(REPEAT_S, self.publish)

    def listen(self, wanted: bool) -> None:
        """Subscribe to the loads, or unsubscribe: between changes they cost this process CPU and bring nothing new."""
        if wanted != self._is_listening:
            self._is_listening = wanted
            self._state.send((_SUBSCRIBE if wanted else _UNSUBSCRIBE) + LOAD_TOPIC)
            self._receiver.poke()  # a send may consume the wake-up of what has arrived meanwhile

    def close(self) -> None:
        """Close both sockets; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._receiver.close()
        self._context.destroy(linger=0)

    def _on_state(self, frames: Frames) -> None:
        try:
            message = self._decoder.decode_frames(frames[1:])
        except MalformedMessageError as error:
            self._drop_counter.drop("malformed_states", "the state channel", error)
            return
        if isinstance(message, GroupState):
            self._take_group_state(message)
        else:
            # Not only the newest snapshot: each report in it is numbered, and the table drops those it has.
            for report in message.reports:
                self._on_engine_report(report)

    def _take_group_state(self, state: GroupState) -> None:
        if not self._newest.accept(state.generation, state.seq):
            return
        if state.generation > self._generation:
            self._generation = state.generation
            self.publish()  # a new coordinator starts from reports alone, and ours is the one that names the replicas
        self._on_group_state(state)
