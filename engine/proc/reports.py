"""The report channel of an engine: its whole, numbered reports to the coordinator, when they are due."""

import zmq

from engine.proc.pacing import DelayQueue, ReportPacer
from engine.proc.shared import SharedState
from engine.wire.codec import encode
from engine.wire.endpoints import WireSecurity
from engine.wire.sockets import connect, make_socket, send_nowait
from engine.wire.states import EnginePhase

_HIGH_WATER_MARK = 64
_LINGER_MS = 200


class ReportChannel:
    """Sends whole, numbered reports when they are due. A full pipe drops one: the next holds everything again."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        shared: SharedState,
        delay_s: float,
        security: WireSecurity | None = None,
    ) -> None:
        """Connect. delay_s: test option; reports leave this much later, negative sends none after the first ready one.

        Raises:
            AddressError: the endpoint makes no sense.
        """
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
            self._make_report(now)
        for frame in self._delayed.take_due(now):
            send_nowait(self._socket, [frame])

    def close(self) -> None:
        """Send a last report and close; a coordinator that is not there holds this up for 0.2 s at most."""
        self._make_report(float("inf"))  # a time at which the delay of every report is over
        self.send_due(float("inf"))
        self._socket.close(linger=_LINGER_MS)

    def _make_report(self, now: float) -> None:
        report = self._shared.take_report()
        self._pacer.on_sent(now)
        if not self._is_mute:
            self._delayed.put(encode(report), now)
        # Behind the report that shows the engine ready, not before it: else the deployment would never start.
        self._is_mute = self._mute_when_ready and report.phase is not EnginePhase.LOADING
