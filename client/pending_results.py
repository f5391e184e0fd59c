"""Everything the callers of one client wait for; it ends together."""

import asyncio

from client.mailbox import Mailbox
from client.tasks import log_failure
from client.utility_calls import UtilityCalls
from engine.wire.errors import EngineDeadError
from engine.wire.ids import EngineId
from engine.wire.messages import EngineCoreOutputs


class PendingResults:
    """Batches for ``get_output_async`` and results of utility calls. Holds no reference to the client.

    engines_changed: set whenever an engine came, went or changed, and at the end; ``wait_ready`` clears it.
    """

    def __init__(self, utility_calls: UtilityCalls) -> None:
        self.outputs: Mailbox[EngineCoreOutputs] = Mailbox()
        self.engines_changed = asyncio.Event()
        self._utility_calls = utility_calls

    def ensure_open(self) -> None:
        """Raise ``EngineDeadError`` once the end has come."""
        if self.outputs.error is not None:
            raise self.outputs.error.with_traceback(None)

    def end(self, reason: str, engine_id: EngineId | None = None) -> None:
        """Let everybody who waits, and everybody who comes later, have ``EngineDeadError``."""
        self.outputs.close(EngineDeadError(reason, engine_id))
        self._utility_calls.fail_all(reason)
        self.engines_changed.set()

    def on_task_done(self, task: "asyncio.Task[None]") -> None:
        """Note that a task of the client ended: without it nothing would come any more, so nobody may go on waiting.

        A task that returned did so because the client is gone, and with it everybody who could wait.
        """
        log_failure(task)
        if task.cancelled():
            self.end(f"the task {task.get_name()!r} was cancelled")
        elif (error := task.exception()) is not None:
            self.end(f"the task {task.get_name()!r} failed: {error!r}")
