"""Mailboxes on one event loop: arrivals for a client's output task, batches and results for its callers."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

from client.calls import UtilityCalls
from client.connection_table import Gone
from client.tasks import log_failure
from engine.wire.errors import EngineDeadError
from engine.wire.ids import EngineId
from engine.wire.messages import EngineCoreOutputs
from engine.wire.tensors import Frames

T = TypeVar("T")

OutputHandler = Callable[[EngineCoreOutputs], None]
"""Takes one batch of outputs, on the event loop; must not wait."""


class Mailbox(Generic[T]):
    """A first-in first-out queue between callbacks and tasks, which can be closed with an error.

    ``put`` never waits; ``get`` waits for an item, or raises once the box is closed and empty. Unlike with
    ``asyncio.Queue`` the error is not an item: every later ``get`` raises it again, so a second reader does not wait
    for ever. The box may be made before any loop runs. Whoever puts watches ``len`` to stay bounded.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._filled = asyncio.Event()
        self._error: EngineDeadError | None = None

    def __len__(self) -> int:
        return len(self._items)

    @property
    def error(self) -> EngineDeadError | None:
        """Return why the box was closed, or None while it is open."""
        return self._error

    def put(self, item: T) -> None:
        """Append an item."""
        self._items.append(item)
        if not self._filled.is_set():
            self._filled.set()

    def close(self, error: EngineDeadError) -> None:
        """Let every ``get`` raise once the items are gone; the first error stays."""
        if self._error is None:
            self._error = error
            self._filled.set()

    async def get(self) -> T:
        """Wait for the next item.

        Raises:
            EngineDeadError: the box is closed and empty.
        """
        while not self._items:
            if self._error is not None:
                # Without the traceback, which would grow with every reader that it was raised in.
                raise self._error.with_traceback(None)
            await self.wait()
        return self._items.popleft()

    async def wait(self) -> None:
        """Return when there is an item, or at once when the box is closed."""
        if not self._items and self._error is None:
            self._filled.clear()
            await self._filled.wait()

    async def wait_closed(self) -> None:
        """Return once the box is closed; for a box that nothing is put into meanwhile."""
        while self._error is None:
            self._filled.clear()
            await self._filled.wait()

    def drain(self) -> Iterator[T]:
        """Yield the items there are, taking each out just before it is handed over.

        So whoever fails with one leaves those behind it in the box.
        """
        while self._items:
            yield self._items.popleft()


class HandshakeFrames(NamedTuple):
    """Frames that came on the request channel, where engines send nothing but handshakes."""

    frames: Frames


Arrival = Frames | HandshakeFrames | Gone
"""What waits for the output task. Bare frames are those of the output channel, the only ones that are many.

News of an engine's death is queued behind the frames that came before it, so none of those is wasted.
"""


class PendingResults:
    """Everything the callers of one client wait for; it ends together. Holds no reference to the client.

    outputs: batches for ``get_output_async``. calls: utility calls. engines_changed: set whenever an engine came, went
    or changed, and at the end; ``wait_ready`` clears it.
    """

    def __init__(self, calls: UtilityCalls) -> None:
        self.outputs: Mailbox[EngineCoreOutputs] = Mailbox()
        self._handler: OutputHandler | None = None
        self.calls = calls
        self.engines_changed = asyncio.Event()

    def deliver(self, outputs: EngineCoreOutputs) -> bool:
        """Give the consumer a batch: the one way to it, from engines and from here.

        Returns whether it was handled; else it waits for ``get_output_async``.
        """
        if self._handler is None:
            self.outputs.put(outputs)
            return False
        self._handler(outputs)
        return True

    async def consume(self, handler: OutputHandler) -> None:
        """Let ``handler`` have every batch from where it arrives, in place of ``get_output_async``.

        Two task switches less for each batch. What came before is the caller's to hand over.

        Raises:
            EngineDeadError: nothing more will come. Whatever ``handler`` raised: it gets no batch any more.
        """
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def handle(outputs: EngineCoreOutputs) -> None:
            try:
                handler(outputs)
            except Exception as error:  # noqa: BLE001 - the consumer's, not of whoever brought the batch
                self._handler = None
                failed.set_exception(error)

        self._handler = handle
        closed = asyncio.ensure_future(self.outputs.wait_closed())
        try:
            await asyncio.wait([failed, closed], return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
            self.ensure_open()
        finally:
            self._handler = None
            failed.cancel()
            closed.cancel()

    def ensure_open(self) -> None:
        """Raise ``EngineDeadError`` once the end has come."""
        if self.outputs.error is not None:
            raise self.outputs.error.with_traceback(None)

    def end(self, reason: str, engine_id: EngineId | None = None) -> None:
        """Let everybody who waits, and everybody who comes later, have ``EngineDeadError``."""
        self.outputs.close(EngineDeadError(reason, engine_id))
        self.calls.fail_all(reason)
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
