"""The state that the threads of one engine share: the inbox of the busy loop, and what the next report says."""

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from engine.proc.pause_controller import AppliedSettings
from engine.wire.control import ClusterSettings
from engine.wire.errors import EngineDeadError
from engine.wire.ids import ClientId, EngineId
from engine.wire.load import Load
from engine.wire.messages import AddRequest, ChannelMessage, EngineReport
from engine.wire.states import EnginePhase


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a request channel, and when it came (monotonic seconds)."""

    message: ChannelMessage
    received_at: float


@dataclass(frozen=True, slots=True)
class ClientGone:
    """A client is no longer listed, or takes nothing any more; its sequences are to be freed."""

    client_id: ClientId


@dataclass(frozen=True, slots=True)
class ClientStalled:
    """A client has taken nothing for a while (``is_stalled``), or takes again; each stall is followed by its end."""

    client_id: ClientId
    is_stalled: bool


Intake = Received | ClientGone | ClientStalled | ClusterSettings


class SharedState:
    """The inbox of the busy loop and the numbers of the report, under one lock.

    A report must never show a message as applied without its sequence in one of the counts, nor count it twice: so
    ``receive`` raises *applied* and *queued* together, and ``commit`` moves sequences from *queued* to the core's own
    counts in one go. That is why both are in one class. Sections below name the thread that calls.
    """

    def __init__(self, engine_id: EngineId, node: str, on_change: Callable[[], None]) -> None:
        """Begin as LOADING.

        node: name for people. on_change: called with the lock held when the next report will differ from the last;
        must not block.
        """
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._on_change = on_change
        self._changed = True
        self._inbox: deque[Intake] = deque()
        self._stop_reason: str | None = None
        self._failure: str | None = None
        self._num_queued = 0
        self._core_load = Load()
        self._core_has_work = False
        self._applied_settings = AppliedSettings()
        self._settings_seen = 0
        self._is_woken = False
        self._member_phase: EnginePhase | None = None  # of a lockstep rank: it may have work and yet not step
        self._applied: dict[ClientId, int] = {}
        self._count_collectives: Callable[[], int] = lambda: 0
        self._is_draining = False
        self._report = EngineReport(
            engine_id, 0, 0, 0, 0, 0, EnginePhase.LOADING, 0, False, {}, self._core_load, node=node, pid=os.getpid()
        )

    # --- any thread -------------------------------------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        """Tell whether the next report will differ from the last one in more than its number."""
        return self._changed

    @property
    def stop_reason(self) -> str | None:
        """Return why the engine was asked to stop, or None."""
        return self._stop_reason

    @property
    def turns_away(self) -> bool:
        """Tell whether new requests are to go to another engine."""
        return self._is_draining or self._stop_reason is not None

    @property
    def next_report_seq(self) -> int:
        """Return the number of the first report that shows what is true now."""
        with self._lock:
            return self._report.report_seq + 1

    def applied(self, client_id: ClientId) -> int:
        """Return the last contiguous ``channel_seq`` received from a client."""
        with self._lock:
            return self._applied.get(client_id, 0)

    def free_client(self, client_id: ClientId) -> None:
        """Let the loop free a client's sequences, behind everything received from it."""
        with self._lock:
            self._put(ClientGone(client_id))

    def set_stalled(self, client_id: ClientId, *, is_stalled: bool) -> None:
        """Let the loop give a client's sequences no more compute, or again."""
        with self._lock:
            self._put(ClientStalled(client_id, is_stalled))

    def fail(self, reason: str) -> None:
        """Make the busy loop die of a fault in another thread."""
        with self._lock:
            self._failure = reason
            self._work.notify_all()

    def wake(self) -> None:
        """Let the loop look at what it was left elsewhere (``GroupInbox``), work or no work."""
        with self._lock:
            self._is_woken = True
            self._work.notify_all()

    # --- input thread -----------------------------------------------------------------------------------------------

    def receive(self, message: ChannelMessage, received_at: float) -> None:
        """Apply the next message of a client's request channel."""
        with self._lock:
            self._applied[message.client_id] = message.channel_seq
            self._num_queued += isinstance(message, AddRequest)
            self._put(Received(message, received_at))

    def forget_client(self, client_id: ClientId) -> None:
        """Take a client that is no longer listed out of the report."""
        with self._lock:
            self._applied.pop(client_id, None)
            self._mark_changed()

    def see_epoch(self, epoch: int, max_epoch_seen: int) -> None:
        """Note the group's membership; independent ranks have nothing to switch and adopt an epoch on sight."""
        with self._lock:
            if (epoch, max_epoch_seen) != (self._report.epoch, self._report.max_epoch_seen):
                self._update(epoch=epoch, ready_epoch=epoch, max_epoch_seen=max_epoch_seen)

    def see_draining(self, *, is_draining: bool) -> None:
        """Turn away what the loop has not taken yet and what still comes; or take it again."""
        with self._lock:
            if is_draining != self._is_draining:
                self._is_draining = is_draining
                self._mark_changed()

    def see_settings(self, settings: ClusterSettings) -> None:
        """Let the loop apply settings that are newer than all before."""
        with self._lock:
            if settings.seq > self._settings_seen:  # every state repeats them; the loop is not to be woken for that
                self._settings_seen = settings.seq
                self._put(settings)

    def request_stop(self, reason: str) -> None:
        """Let the loop end between two steps; the first reason stays."""
        with self._lock:
            self._stop_reason = self._stop_reason or reason  # the inbox stays: see ``take_rest``
            self._work.notify_all()

    def take_report(self) -> EngineReport:
        """Return the next report, with its number drawn."""
        with self._lock:
            self._changed = False
            report = self._report
            # Work in the inbox counts: the loop may be in a long step. Frozen is no work, or it would look like a hang.
            has_work = (self._core_has_work or bool(self._inbox)) and not self._applied_settings.is_frozen
            phase = report.phase
            if phase in (EnginePhase.IDLE, EnginePhase.RUNNING, EnginePhase.PARKED):  # loaded, and not stopping
                phase = self._member_phase or (EnginePhase.RUNNING if has_work else EnginePhase.IDLE)
            self._report = replace(
                report,
                report_seq=report.report_seq + 1,
                phase=phase,
                has_work=has_work,
                applied=dict(self._applied),  # a copy: it is encoded without the lock
                load=replace(self._core_load, num_queued=self._num_queued),
                coll_seq=self._count_collectives(),
                settings_seq=self._applied_settings.settings_seq,
                is_sleeping=self._applied_settings.is_sleeping,
                is_draining=self._is_draining,
            )
            return self._report

    # --- main thread ------------------------------------------------------------------------------------------------

    def set_progress(self, detail: str, progress: float) -> None:
        """Report what a loading engine is doing and how far it is, 0..1."""
        with self._lock:
            self._update(detail=detail, progress=progress)

    def set_loaded(self, device: str) -> None:
        """Report that requests can come; from here on the phase follows the work."""
        with self._lock:
            self._update(phase=EnginePhase.IDLE, device=device, detail="", progress=1.0)

    def set_stopping(self, detail: str) -> None:
        """Report that the engine takes nothing more."""
        with self._lock:
            self._update(phase=EnginePhase.STOPPING, detail=detail)

    def watch_collectives(self, count: Callable[[], int]) -> None:
        """Report how many collectives a lockstep rank has begun. count: called by the input thread."""
        self._count_collectives = count

    def show_member(self, phase: EnginePhase, **fields: Any) -> None:
        """Report where a lockstep rank is in its group. fields: of ``EngineReport``."""
        with self._lock:
            if phase is not self._member_phase or any(getattr(self._report, key) != fields[key] for key in fields):
                self._member_phase = phase
                self._update(**fields)

    def freeze(self) -> None:
        """Report that no step runs for now, and that this is no hang: settings are being applied."""
        with self._lock:
            applied = self._applied_settings
            self._applied_settings = AppliedSettings(applied.settings_seq, applied.is_sleeping, is_frozen=True)
            self._mark_changed()

    def take(self, core_has_work: bool, wait_s: float | None = None) -> list[Intake] | None:
        """Return what arrived, waiting while there is nothing to do; None when asked to stop.

        wait_s: at most so long; None waits without a time limit.

        Raises:
            EngineDeadError: an I/O thread failed.
        """
        with self._work:
            while not (core_has_work or self._inbox or self._is_woken or self._stop_reason or self._failure):
                if not self._work.wait(wait_s):
                    break  # time is up: with nothing to take the loop looks at its own deadlines
            self._is_woken = False
            if self._failure is not None:
                raise EngineDeadError(self._failure)
            return None if self._stop_reason is not None else self._drain()

    def take_rest(self) -> list[Intake]:
        """Return what arrived before the stop and was not taken."""
        with self._lock:
            return self._drain()

    def commit(
        self, load: Load, has_work: bool, num_taken: int = 0, applied_settings: AppliedSettings | None = None
    ) -> int:
        """Publish the core's counters; return the number of the first report that reflects them.

        num_taken: sequences taken from the inbox that these counters include for the first time. applied_settings: how
        far the settings are in force; None when that is as before.
        """
        with self._lock:
            self._num_queued -= num_taken
            applied_settings = applied_settings or self._applied_settings
            state = (load, has_work, applied_settings)
            # Compared, so that a loop that turns without any change does not wake the input thread each time.
            if state != (self._core_load, self._core_has_work, self._applied_settings) or num_taken:
                self._core_load, self._core_has_work, self._applied_settings = state
                self._mark_changed()
            return self._report.report_seq + 1

    # --- with the lock held -----------------------------------------------------------------------------------------

    def _put(self, item: Intake) -> None:
        self._inbox.append(item)
        self._work.notify()
        self._mark_changed()

    def _drain(self) -> list[Intake]:
        items = list(self._inbox)
        self._inbox.clear()
        return items

    def _update(self, **changes: Any) -> None:
        self._report = replace(self._report, **changes)
        self._mark_changed()

    def _mark_changed(self) -> None:
        if not self._changed:  # once per report: the input thread looks again when it has sent that
            self._changed = True
            self._on_change()
