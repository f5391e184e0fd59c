"""The process of one engine: its I/O threads, which live before the core does, and the busy loop around the core."""

import logging
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import zmq

from engine.config.engine_spec import EngineSpec
from engine.core.ready import describe
from engine.interfaces.engine_core import EngineCore
from engine.proc.input import InputThread
from engine.proc.mailbox import Mailbox
from engine.proc.output import OutputThread
from engine.proc.pause_controller import PauseController
from engine.proc.shared import ClientGone, ClientStalled, Intake, Received, SharedState
from engine.wire.control import ClusterSettings
from engine.wire.messages import (
    AbortRequest,
    AddRequest,
    EEPNotification,
    EngineCoreOutput,
    EngineReady,
    FinishReason,
    UtilityOutput,
    UtilityRequest,
)
from engine.wire.process import set_log_level

if TYPE_CHECKING:
    from engine.proc.group_inbox import GroupInbox

FLUSH_S = 2.0
"""Time the clients have to take the last outputs of an engine that ends."""

_JOINED = (EEPNotification.NEW_CORE_ENGINES_INIT_READY, EEPNotification.NEW_CORE_ENGINES_WEIGHTS_INIT_READY)

log = logging.getLogger(__name__)


class EngineIO:
    """The I/O side of an engine process: both threads, and what they share with the busy loop.

    Its life: ``start``, so that the coordinator hears of the engine while it still loads; then ``close`` by the busy
    loop that served, or ``abandon`` when no core came to be.
    """

    def __init__(self, spec: EngineSpec, inbox: "GroupInbox | None" = None) -> None:
        """Make both threads. inbox: of a lockstep rank; None for an independent one."""
        self.spec = spec
        self.node = spec.node or socket.gethostname()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._mailbox = Mailbox()
        self.shared = SharedState(spec.engine_id, self.node, on_change=self._mailbox.wake)
        self.output = OutputThread(self._context, spec.engine_id, self.shared, security=spec.security)
        self.input = InputThread(self._context, spec, self._mailbox, self.shared, self.output, inbox)

    def start(self) -> None:
        """Start both threads."""
        self.shared.see_settings(self.spec.settings)
        self.output.start()
        self.input.start()

    def on_progress(self, detail: str, progress: float) -> None:
        """Report what a loading engine does. detail: a few words. progress: 0..1.

        Raises:
            SystemExit: the engine was dismissed meanwhile; loading on would only delay the exit.
        """
        if self.shared.stop_reason is not None:
            raise SystemExit(0)
        self.shared.set_progress(detail, progress)

    def stop(self, reason: str) -> None:
        """Let the busy loop end as if the engine had been dismissed; safe in a signal handler and in any thread."""
        # Not in here: the main thread, which runs the handler, may hold the lock of ``shared``.
        self._mailbox.post(self.shared.request_stop, reason)

    def abandon(self, reason: str) -> None:
        """End an engine that never served: send the reason in a last report and close everything."""
        self.shared.set_stopping(reason)
        self.close()

    def close(self) -> None:
        """Flush outputs, send the last report, and leave no thread and no socket behind."""
        self.input.finish()
        self.output.finish(FLUSH_S)
        self._context.destroy()  # also what a thread that failed left open
        self._mailbox.close()


class EngineCoreProc:
    """The busy loop of an engine. It owns the core and is the only one to touch it.

    It takes what arrived between two steps, and sleeps on a condition when there is neither work nor anything new, so
    an idle engine costs nothing but its reports.
    """

    def __init__(self, io: EngineIO, core: EngineCore) -> None:
        """Make the loop of a loaded core. io: started."""
        self._io = io
        self._core = core
        self._spec = io.spec
        self._shared = io.shared
        self._output = io.output
        self._pause_controller = PauseController(core, io.spec.engine_id.rank)

    def serve(self) -> int:
        """Serve until asked to stop, then close everything.

        Return the exit status: 0, or 1 after a crash, whose reason every client is sent.
        """
        try:
            self._admit(self._shared.take_rest())  # the settings: in force before anybody can send a request
            self._shared.set_loaded(self._core.limits.device)
            self._begin()
            self._loop()
            self._shut_down()
        except Exception as error:
            log.exception("engine %s dies", self._spec.engine_id)
            self._shared.set_stopping(f"died: {error}")
            self._output.put_last_words(f"{type(error).__name__}: {error}")
            return 1
        finally:
            self._io.close()  # first: clients are waiting for last words, and closing a device may take long
            self._core.close()
        log.info("engine %s stopped: %s", self._spec.engine_id, self._shared.stop_reason)
        return 0

    def _begin(self) -> None:
        """Let requests come."""
        self._io.input.announce(self._describe(), _JOINED if self._spec.is_joining else ())

    def _describe(self) -> EngineReady:
        spec = self._spec
        return describe(self._core, spec.engine_id, spec.engine, spec.build_id, spec.config_hash, self._io.node)

    def _loop(self) -> None:
        while (intake := self._shared.take(self._pause_controller.has_work)) is not None:
            if intake:
                self._admit(intake)
            if self._pause_controller.has_work:
                self._step()
            elif intake and not self._pause_controller.may_step:
                self._flush()

    # --- a step -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        # A report sent while the step takes its time must not count those that run as waiting.
        outputs = self._core.step(time.monotonic(), on_planned=self._publish)
        # The number first: a frame names a report that shows its step, so that a client never counts the step twice.
        report_seq = self._publish()
        self._output.put(outputs, report_seq)

    def _flush(self) -> None:
        """Send what there is to send without a step: ends of aborted and of impossible requests."""
        self._output.put(self._core.scheduler.flush(), self._shared.next_report_seq)

    def _publish(self, num_added: int = 0) -> int:
        """Let the next report show the core's counters, and return its number."""
        core = self._core
        return self._shared.commit(core.load(), core.has_work(), num_added, self._pause_controller.applied_settings)

    # --- what arrives -----------------------------------------------------------------------------------------------

    def _admit(self, intake: Sequence[Intake]) -> None:
        num_added = sum(map(self._handle, intake))
        self._publish(num_added)

    def _handle(self, item: Intake) -> bool:
        """Hand one item to the core; True when it was a sequence, which so leaves the count of the queued."""
        core = self._core
        match item:
            case Received(AddRequest() as request, received_at):
                if self._shared.turns_away or self._pause_controller.is_cordoned:
                    self._reroute(request)
                else:
                    core.add_request(request, received_at)
                return True
            case Received(AbortRequest() as abort):
                core.abort_requests([((abort.request_id, abort.sample_index), abort.attempt)])
            case Received(UtilityRequest() as call):
                self._output.put_utility(call.client_id, self._call(call), self._shared.next_report_seq)
            case ClientGone(client_id):
                core.scheduler.free_client(client_id)
            case ClientStalled(client_id, is_stalled=True):
                core.scheduler.stall_client(client_id)
            case ClientStalled(client_id):
                core.scheduler.resume_client(client_id)
            case ClusterSettings() as settings:
                self._apply(settings)
        return False

    def _apply(self, settings: ClusterSettings) -> None:
        """Bring settings into force; an engine that is about to end does not load its weights for that."""
        if self._shared.stop_reason is not None:
            return
        self._shared.freeze()  # a report sent while weights are loaded must not look like a hang
        log.info("settings %d: pause %s, sleep level %d", settings.seq, settings.pause.name, settings.sleep_level)
        set_log_level(settings.log_level or self._spec.log_level)
        self._pause_controller.apply(settings, self._shared.set_progress)
        self._shared.set_progress("", 1.0)

    def _reroute(self, request: AddRequest) -> None:
        """Ask the client to pick another engine; not terminal, and not counted as a request of this one."""
        output = EngineCoreOutput(
            request.request_id,
            request.sample_index,
            request.attempt,
            len(request.output_token_ids),
            [],
            FinishReason.REROUTE,
        )
        self._output.put({request.client_id: [output]}, self._shared.next_report_seq)

    def _call(self, call: UtilityRequest) -> UtilityOutput:
        try:
            if call.method == "line_statistics":
                return UtilityOutput(call.call_id, self._io.input.statistics() | self._output.statistics())
            return UtilityOutput(call.call_id, msgspec.to_builtins(self._core.call(call.method, call.args)))
        except Exception as error:  # the caller gets it, and a traceback only what is not the caller's own fault
            log.warning("utility %s failed", call.method, exc_info=not isinstance(error, ValueError))
            return UtilityOutput.of_error(call.call_id, error)

    def _shut_down(self) -> None:
        """Give every sequence back to its client, those in the core and those not yet taken: they go on elsewhere."""
        self._shared.set_stopping(self._shared.stop_reason or "")
        self._core.scheduler.give_back_all()
        self._admit(self._shared.take_rest())  # new requests among these are rerouted: a stop turns them away
        self._flush()
        self._output.put_notice(EEPNotification.SHUTDOWN_COMPLETE, self._shared.next_report_seq)
