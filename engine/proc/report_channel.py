"""The engine's line to the coordinator."""

import zmq

from engine.proc.reports import DelayQueue, ReportPacer
from engine.proc.shared import SharedState
from engine.wire.codec import encode
from engine.wire.endpoints import WireSecurity
from engine.wire.sockets import connect, make_socket, send_nowait
from engine.wire.states import EnginePhase

_HIGH_WATER_MARK = 64
_LINGER_MS = 200


class ReportChannel:
    """Sends whole, numbered reports when they are due. A full pipe drops one: the next says everything again."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        shared: SharedState,
        delay_s: float,
        security: WireSecurity | None = None,
    ) -> None:
        """delay_s: test option; reports leave this much later, negative sends none after the first ready one."""
        self._socket = make_socket(context, zmq.PUSH, high_water_mark=_HIGH_WATER_MARK, security=security)
        connect(self._socket, endpoint)
        self._shared = shared
        self._pacer = ReportPacer()
        self._delayed: DelayQueue[bytes] = DelayQueue(max(0.0, delay_s))
        self._mute_when_ready = delay_s < 0
        self._is_mute = False

    def wait_s(self, now: float) -> float:
        """Return the seconds until there is something to send."""
        return min(self._pacer.wait_s(self._shared.changed, now), self._delayed.wait_s(now))

    def send_due(self, now: float) -> None:
        """Send what is due."""
        if self._pacer.wait_s(self._shared.changed, now) <= 0:
            self.send_now(now)
        for frame in self._delayed.take_due(now):
            send_nowait(self._socket, [frame])

    def send_now(self, now: float) -> None:
        """Make a report, due or not, and let it go as the delay says."""
        report = self._shared.take_report()
        self._pacer.sent(now)
        if not self._is_mute:
            self._delayed.put(encode(report), now)
        self._is_mute = self._mute_when_ready and report.phase is not EnginePhase.LOADING

    def close(self) -> None:
        """Send a last report and close; a coordinator that is not there holds this up for 0.2 s at most."""
        self.send_now(float("inf"))
        self.send_due(float("inf"))
        self._socket.close(linger=_LINGER_MS)
