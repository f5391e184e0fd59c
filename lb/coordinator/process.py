"""The coordinator process: two sockets and one loop around ``CoordinatorState``."""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

import zmq

from engine.wire.codec import encode, report_decoder
from engine.wire.curve import ZapAuthenticator
from engine.wire.drop_counter import DropCounter
from engine.wire.errors import MalformedMessageError
from engine.wire.messages import GROUP_TOPIC, LOAD_TOPIC
from engine.wire.process import set_log_level
from engine.wire.sockets import SendOutcome, bind, make_socket, send_nowait
from lb.coordinator.config import CoordinatorSpec
from lb.coordinator.state import CoordinatorState

_log = logging.getLogger(__name__)

_MAX_MESSAGES_PER_TURN = 1000
_NOBLOCK, _POLLIN = int(zmq.NOBLOCK), int(zmq.POLLIN)
_STATE_HIGH_WATER_MARK = 100  # whole states: a subscriber that is this far behind wants the next one only


class PublishRateLimiter:
    """Publishes a change soon, a state that is not observed yet often, and an unchanged one now and then.

    All gaps are seconds since the last publication. min_gap_s: also a change waits this long, so that a storm of
    changes costs a bounded number of messages. repeat_gap_s: while not everybody has observed the state.
    max_gap_s: when all is quiet.
    """

    def __init__(self, *, min_gap_s: float, max_gap_s: float, repeat_gap_s: float | None = None) -> None:
        self._min_gap_s = min_gap_s
        self._max_gap_s = max_gap_s
        self._repeat_gap_s = max_gap_s if repeat_gap_s is None else repeat_gap_s
        self._published_at = float("-inf")
        self._published_version = -1

    def due_at(self, version: int, *, observed: bool = True) -> float:
        """Return when the state of this version is due; at or before now means now."""
        if version != self._published_version:
            return self._published_at + self._min_gap_s
        return self._published_at + (self._max_gap_s if observed else self._repeat_gap_s)

    def on_published(self, version: int, now: float) -> None:
        """Note that the state of this version went out."""
        self._published_version = version
        self._published_at = now

    def on_new_subscriber(self) -> None:
        """Make the state due as if it had changed: somebody subscribed who has nothing yet."""
        self._published_version = -1


class Coordinator:
    """Wakes for messages and deadlines only. Any bytes on any socket are counted and dropped."""

    def __init__(self, spec: CoordinatorSpec) -> None:
        self._state = CoordinatorState(spec.generation, spec.client_silence_s, spec.stall_timeout_s, spec.lockstep)
        self._decoder = report_decoder()
        self._log_level = spec.log_level
        self._group = PublishRateLimiter(min_gap_s=0.005, repeat_gap_s=0.1, max_gap_s=1.0)
        self._load = PublishRateLimiter(min_gap_s=0.05, max_gap_s=1.0)
        self._publish_from = time.monotonic() + (spec.settle_s if spec.generation > 1 else 0.0)
        self._drop_counter = DropCounter()
        self._authenticator: ZapAuthenticator | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            make = partial(make_socket, self._context, security=spec.security)
            self._reports = make(zmq.PULL)
            self._publisher = make(zmq.XPUB, high_water_mark=_STATE_HIGH_WATER_MARK)
            self._publisher.set(zmq.XPUB_VERBOSE, 1)  # every new subscriber is heard, not only the first of a topic
            if spec.security is not None:
                sockets = {"reports": self._reports, "state": self._publisher}
                self._authenticator = ZapAuthenticator(self._context, spec.security, sockets)
            self.report_endpoint = bind(self._reports, spec.report_endpoint)
            self.state_endpoint = bind(self._publisher, spec.state_endpoint)
        except BaseException:
            self.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._reports, zmq.POLLIN)
        self._poller.register(self._publisher, zmq.POLLIN)

    def run(self) -> None:
        """Serve until an exception (the stop signal's) ends it."""
        while True:
            now = time.monotonic()
            wait_s = max(0.0, self._next_deadline(now) - now)
            # In whole ms; waking just before the deadline would spin.
            for readable, _ in self._poller.poll(int(wait_s * 1000) + 1):
                if readable is self._reports:
                    self._take_reports()
                else:
                    self._take_subscriptions()
            now = time.monotonic()
            self._state.expire(now)
            self._publish(now)

    def statistics(self) -> Counter[str]:
        """Return what was dropped, by kind."""
        num_refused = self._authenticator.refused.total() if self._authenticator is not None else 0
        return self._state.dropped + self._drop_counter.counts + Counter(refused_peers=num_refused)

    def close(self) -> None:
        """Close the sockets; idempotent."""
        self._context.destroy(linger=0)

    def _next_deadline(self, now: float) -> float:
        group = self._group.due_at(self._state.group_version, observed=self._state.is_observed())
        load = self._load.due_at(self._state.load_version)
        # Before it may publish nothing can be due: to wake for an overdue state would spin.
        return max(self._publish_from, min(group, load, self._state.next_expiry(now)))

    def _take_reports(self) -> None:
        for frames in _messages(self._reports):
            self._take_report(frames)

    def _take_report(self, frames: list[bytes]) -> None:
        try:
            report = self._decoder.decode_frames(frames)
        except MalformedMessageError as error:
            # A PULL does not know who sent what, so all senders of such bytes are one peer.
            self._drop_counter.drop("malformed_reports", "the report channel", error)
            return
        before = self._state.log_level
        self._state.on_report(report, time.monotonic())
        if self._state.log_level != before:
            set_log_level(self._state.log_level or self._log_level)

    def _take_subscriptions(self) -> None:
        for frames in _messages(self._publisher):
            if frames == [b"\x01" + GROUP_TOPIC]:
                self._group.on_new_subscriber()
            elif frames == [b"\x01" + LOAD_TOPIC]:
                self._load.on_new_subscriber()

    def _publish(self, now: float) -> None:
        if now < self._publish_from:
            return
        version = self._state.group_version
        if self._group.due_at(version, observed=self._state.is_observed()) <= now:
            self._send(GROUP_TOPIC, encode(self._state.group_state()))
            self._group.on_published(version, now)
        version = self._state.load_version
        if self._load.due_at(version) <= now:
            self._send(LOAD_TOPIC, encode(self._state.load_snapshot()))
            self._load.on_published(version, now)

    def _send(self, topic: bytes, payload: bytes) -> None:
        outcome = send_nowait(self._publisher, [topic, payload])
        assert outcome is SendOutcome.ACCEPTED, "a publisher drops for slow subscribers and never refuses"


def _messages(socket: "zmq.Socket[bytes]") -> Iterator[list[bytes]]:
    """Yield the messages of a readable socket, so many that a flood cannot keep the states from going out."""
    for _ in range(_MAX_MESSAGES_PER_TURN):
        if not int(socket.getsockopt(zmq.EVENTS)) & _POLLIN:  # cheaper than to receive until it raises Again
            return
        yield socket.recv_multipart(_NOBLOCK)
