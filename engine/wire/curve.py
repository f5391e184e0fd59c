"""CURVE on the channels between hosts: fresh keys, socket options, and the ZAP authenticator of bound sockets."""

import logging
import threading
from collections import Counter
from collections.abc import Mapping

import zmq
from zmq.utils import z85

from engine.wire.endpoints import WireSecurity

_log = logging.getLogger(__name__)

ZAP_DOMAIN = b"shoal"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_NUM_ZAP_FRAMES = 7  # version, request id, domain, address, routing id, mechanism, one credential: the public key

_REFUSALS = int(
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def draw_keys() -> WireSecurity:
    """Return fresh keys for one deployment."""
    server_public, server_secret = zmq.curve_keypair()
    member_public, member_secret = zmq.curve_keypair()
    return WireSecurity(
        server_public=server_public.decode(),
        member_public=member_public.decode(),
        member_secret=member_secret.decode(),
        server_secret=server_secret.decode(),
    )


def secure_server(socket: "zmq.Socket[bytes]", security: WireSecurity) -> None:
    """Make a socket that will bind accept CURVE only, and nobody while no ``ZapAuthenticator`` answers for it."""
    assert security.server_secret is not None, "a process that binds needs the server's secret key"
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, security.server_secret.encode())
    socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_member(socket: "zmq.Socket[bytes]", security: WireSecurity) -> None:
    """Make a socket that will connect use CURVE, with nobody but the deployment's servers."""
    socket.set(zmq.CURVE_SERVERKEY, security.server_public.encode())
    socket.set(zmq.CURVE_PUBLICKEY, security.member_public.encode())
    socket.set(zmq.CURVE_SECRETKEY, security.member_secret.encode())


class ZapAuthenticator:
    """Lets members in at the bound sockets of one context, and counts whom ZeroMQ or it turned away.

    ZeroMQ asks it about each peer that knows the server's key (ZAP, https://rfc.zeromq.org/spec/27/), and the sockets'
    monitors report the handshakes that failed before that. A thread of its own, which sleeps: an event loop that is
    busy, or not running yet, must not keep an engine out. ``zmq.auth`` was left: it polls, and runs a second event
    loop.

    refused: handshakes that failed, by channel. Written by the thread alone.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        security: WireSecurity,
        sockets: "Mapping[str, zmq.Socket[bytes]]",
    ) -> None:
        """Start to answer; call it before the sockets bind. Ends by itself when the context is terminated.

        sockets: name of a channel -> socket that will bind.
        """
        self.refused: Counter[str] = Counter()
        self._member_key = z85.decode(security.member_public.encode())
        # A shadow, whose sockets `context.destroy` in another thread does not touch: the thread closes them itself.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context)
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP_ENDPOINT)
        self._monitors = {self._monitor(name, socket): name for name, socket in sockets.items()}
        self._thread = threading.Thread(target=self._run, name="shoal-zap", daemon=True)
        self._thread.start()

    def _monitor(self, name: str, socket: "zmq.Socket[bytes]") -> "zmq.Socket[bytes]":
        endpoint = f"inproc://refusals-{name}"
        socket.monitor(endpoint, _REFUSALS)
        monitor = self._context.socket(zmq.PAIR)
        monitor.connect(endpoint)
        return monitor

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._zap, *self._monitors):
            poller.register(socket, zmq.POLLIN)
        try:
            while True:
                for socket, _ in poller.poll():
                    if socket is self._zap:
                        self._answer(self._zap.recv_multipart())
                    else:
                        self._note_refusal(self._monitors[socket], socket.recv_multipart())
        except zmq.ContextTerminated:
            pass  # the way to end this thread: a blocked poll wakes for nothing else
        finally:
            for socket in (self._zap, *self._monitors):
                socket.close(linger=0)

    def _answer(self, question: list[bytes]) -> None:
        """Answer one ZAP request. It comes from ZeroMQ itself, so all but what the peer chose is well-formed."""
        is_member = len(question) == _NUM_ZAP_FRAMES and question[5:] == [b"CURVE", self._member_key]
        verdict = (b"200", b"welcome") if is_member else (b"400", b"no member")
        self._zap.send_multipart([_ZAP_VERSION, question[1], *verdict, b"", b""])

    def _note_refusal(self, channel: str, frames: list[bytes]) -> None:
        """Count a failed handshake, the only kind of event that was asked for. frames: the event, the endpoint."""
        self.refused[channel] += 1
        if self.refused[channel] == 1:
            endpoint = frames[-1].decode("utf-8", "replace")
            _log.warning("refused a peer without the deployment's key on the %s channel, at %s", channel, endpoint)
