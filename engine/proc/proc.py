"""One engine's process around any EngineCore: two I/O threads, and the busy loop in the thread that serves."""

import logging
import socket
import time
from collections.abc import Sequence

import msgspec
import zmq

from engine.config.engine_spec import EngineSpec
from engine.core.ready import describe
from engine.interfaces.engine_core import EngineCore
from engine.proc.input import InputThread
from engine.proc.mailbox import Mailbox
from engine.proc.output import OutputThread
from engine.proc.pause_controller import PauseController
from engine.proc.report_channel import ReportChannel
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

FLUSH_S = 2.0
"""Time the clients have to take the last outputs of an engine that ends."""

_JOINED = (EEPNotification.NEW_CORE_ENGINES_INIT_READY, EEPNotification.NEW_CORE_ENGINES_WEIGHTS_INIT_READY)

log = logging.getLogger(__name__)


class EngineCoreProc:
    """Life of an engine: ``start`` (reports flow, still loading), ``serve`` (until told to stop), or ``abandon``.

    The loop owns the core and is the only one to touch it. It takes what arrived between two steps and sleeps on a
    condition when there is neither work nor news, so an idle engine costs nothing but its reports.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._mailbox = Mailbox()
        self._shared = SharedState(spec.engine_id, spec.node or socket.gethostname(), self._mailbox.wake)
        self._pause_controller: PauseController  # made when the core is there; the loop's alone
        self._output = OutputThread(self._context, spec.engine_id, self._shared, security=spec.security)
        self._input = InputThread(
            self._context,
            spec.engine_id,
            spec.state_endpoint,
            self._mailbox,
            self._shared,
            self._output,
            self._make_report_channel,
            spec.security,
        )

    def start(self) -> None:
        """Start I/O: the coordinator hears of this engine while it still loads."""
        self._shared.see_settings(self._spec.settings)
        self._output.start()
        self._input.start()

    def on_progress(self, detail: str, progress: float) -> None:
        """Report what a loading engine does. detail: a few words. progress: 0..1.

        Raises:
            SystemExit: the engine was dismissed meanwhile; loading on would only delay the exit.
        """
        if self._shared.stop_reason is not None:
            raise SystemExit(0)
        self._shared.set_progress(detail, progress)

    def stop(self, reason: str) -> None:
        """Let ``serve`` end as if the engine had been dismissed; safe in a signal handler and in any thread."""
        self._mailbox.post(self._shared.request_stop, reason)

    def abandon(self, reason: str) -> None:
        """End an engine that never served: say why in a last report and close everything."""
        self._shared.set_stopping(reason)
        self._close()

    def serve(self, core: EngineCore) -> int:
        """Serve until told to stop; return the exit status: 0, or 1 after a crash, told to every client."""
        try:
            self._pause_controller = PauseController(core, self._spec.engine_id.rank)
            self._admit(core, self._shared.take_rest())  # the settings: in force before anybody can send a request
            self._shared.set_loaded(core.limits.device)
            self._begin(core)
            self._loop(core)
            self._shut_down(core)
        except Exception as error:
            log.exception("engine %s dies", self._spec.engine_id)
            self._shared.set_stopping(f"died: {error}")
            self._output.put_last_words(f"{type(error).__name__}: {error}")
            return 1
        finally:
            self._close()
            core.close()
        log.info("engine %s stopped: %s", self._spec.engine_id, self._shared.stop_reason)
        return 0

    def _begin(self, core: EngineCore) -> None:
        """Let requests come."""
        self._input.announce(self._describe(core), _JOINED if self._spec.is_joining else ())

    def _loop(self, core: EngineCore) -> None:
        while (intake := self._shared.take(self._pause_controller.has_work)) is not None:
            if intake:
                self._admit(core, intake)
            if self._pause_controller.has_work:
                self._step(core)
            elif intake and not self._pause_controller.may_step:
                self._flush(core)

    def _admit(self, core: EngineCore, intake: Sequence[Intake]) -> None:
        num_added = sum(self._handle(core, item) for item in intake)
        self._publish(core, num_added)

    def _flush(self, core: EngineCore) -> None:
        """Tell what there is to tell without a step: ends of the aborted and of the impossible."""
        outputs = core.flush()
        if outputs:
            self._output.put(outputs, self._shared.next_report_seq)

    def _step(self, core: EngineCore) -> None:
        # A report sent while the step takes its time must not count those that run as waiting.
        outputs = core.step(time.monotonic(), on_planned=lambda: self._publish(core))
        report_seq = self._publish(core)
        if outputs:
            self._output.put(outputs, report_seq)

    def _publish(self, core: EngineCore, num_added: int = 0) -> int:
        return self._shared.commit(core.load(), core.has_work(), num_added, self._pause_controller.applied_settings)

    def _handle(self, core: EngineCore, item: Intake) -> bool:
        """Hand one item to the core; True when it was a sequence, which so leaves the count of the queued."""
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
                self._output.put_utility(call.client_id, self._call(core, call), self._shared.next_report_seq)
            case ClientGone(client_id):
                core.free_client(client_id)
            case ClientStalled(client_id, is_stalled):
                (core.stall_client if is_stalled else core.resume_client)(client_id)
            case ClusterSettings() as settings:
                self._apply(settings)
        return False

    def _apply(self, settings: ClusterSettings) -> None:
        """Follow the operator; an engine that is about to end does not load its weights for that."""
        if self._shared.stop_reason is not None:
            return
        self._shared.freeze()
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

    def _call(self, core: EngineCore, call: UtilityRequest) -> UtilityOutput:
        try:
            if call.method == "line_statistics":
                return UtilityOutput(call.call_id, self._input.statistics() | self._output.statistics())
            return UtilityOutput(call.call_id, msgspec.to_builtins(core.call(call.method, call.args)))
        except Exception as error:
            log.warning("utility %s failed", call.method, exc_info=not isinstance(error, ValueError))
            return UtilityOutput.of_error(call.call_id, error)

    def _shut_down(self, core: EngineCore) -> None:
        """Give every sequence back to its client, those in the core and those not yet seen: they go on elsewhere."""
        self._shared.set_stopping(self._shared.stop_reason or "")
        core.give_back_all()
        self._admit(core, self._shared.take_rest())
        self._flush(core)
        self._output.put_notice(EEPNotification.SHUTDOWN_COMPLETE, self._shared.next_report_seq)

    def _close(self) -> None:
        """Flush outputs, send the last report, and leave no thread and no socket behind."""
        self._input.finish()
        self._output.finish(FLUSH_S)
        self._context.destroy()  # also what a thread that failed left open
        self._mailbox.close()

    def _make_report_channel(self) -> ReportChannel:
        spec = self._spec
        return ReportChannel(
            self._context, spec.report_endpoint, self._shared, spec.engine.sim.report_delay_s, spec.security
        )

    def _describe(self, core: EngineCore) -> EngineReady:
        spec = self._spec
        node = spec.node or socket.gethostname()
        return describe(core, spec.engine_id, spec.engine, spec.build_id, spec.config_hash, node)
