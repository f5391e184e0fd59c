"""One engine in a thread of this process, and the bounded queue that brings its outputs back to the event loop."""

import asyncio
import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from engine.wire.codec import channel_decoder
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import (
    AbortRequest,
    AddRequest,
    ChannelMessage,
    EngineCoreOutput,
    EngineCoreOutputs,
    UtilityOutput,
    UtilityRequest,
)
from engine.wire.tensors import Frames

_log = logging.getLogger(__name__)

NO_REPORT = -1
"""``report_seq`` of an engine that sends no reports: its one client counts for itself."""

T = TypeVar("T")


class Core(Protocol):
    """What a thread needs of an engine; it alone touches the engine once it runs."""

    def add_request(self, request: AddRequest, received_at: float) -> None:
        """Queue one sequence. An impossible one is not raised: it ends with an ERROR output of the next step."""

    def abort_requests(self, keys: Sequence[tuple[tuple[int, int], int]]) -> None:
        """End sequences, each named by ((request_id, sample_index), attempt)."""

    def has_work(self) -> bool:
        """Tell whether the next step has anything to do or to send."""

    def step(self, now: float) -> Mapping[ClientId, list[EngineCoreOutput]]:
        """Run one step and return the outputs of each client."""

    def call(self, method: str, args: Sequence[Any]) -> Any:
        """Run a registered utility method."""

    def close(self) -> None:
        """Free the device."""


class CoreThread:
    """Takes frames from any thread, steps while there is work, and hands batches over; sleeps otherwise.

    Messages come as frames of the wire: the engine shares no object with the client that goes on changing, and what
    cannot travel fails here as it would there. What the core raises out of a step is its death, sent as last words.

    ended: resolved when the core is closed and nothing more will be delivered.
    """

    def __init__(
        self, engine_id: EngineId, core: Core, client_id: ClientId, deliver: Callable[[EngineCoreOutputs], None]
    ) -> None:
        """Start. deliver: called in this thread with every batch; may wait. It must not hold the client."""
        self._engine_id = engine_id
        self._core = core
        self._client_id = client_id
        self._deliver = deliver
        self._decoder = channel_decoder()
        self._work = threading.Condition()
        self._inbox: deque[Frames] = deque()
        self._stopping = False
        self._applied = 0
        self._out_seq = 0
        self.ended: Future[None] = Future()
        # A daemon: a step that never ends must not keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._run, name=f"engine {engine_id}", daemon=True)
        self._thread.start()

    def post(self, frames: Frames) -> None:
        """Hand over one numbered message; never waits."""
        with self._work:
            self._inbox.append(frames)
            self._work.notify()

    def stop(self) -> None:
        """Let the thread end after the step it is in."""
        with self._work:
            self._stopping = True
            self._work.notify()

    def join(self, timeout_s: float) -> None:
        """Wait for the end after ``stop``; a step that does not end in time is left behind, and logged."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.error("engine %s is in a step that does not end; its thread is left behind", self._engine_id)

    def _run(self) -> None:
        try:
            while (messages := self._take()) is not None:
                for frames in messages:
                    self._handle(self._decoder.decode_frames(frames))
                if self._core.has_work():
                    self._step()
        except Exception as error:  # noqa: BLE001 - the thread ends here, with last words
            _log.exception("engine %s dies", self._engine_id)
            self._send([], dead=f"{type(error).__name__}: {error}")
        finally:
            self._core.close()
            self.ended.set_result(None)

    def _take(self) -> list[Frames] | None:
        """Return what arrived, waiting while there is nothing to do; None when asked to stop."""
        with self._work:
            while not (self._stopping or self._inbox or self._core.has_work()):
                self._work.wait()
            messages = list(self._inbox)
            self._inbox.clear()
            return None if self._stopping else messages

    def _handle(self, message: ChannelMessage) -> None:
        self._applied = message.channel_seq
        match message:
            case AddRequest():
                self._core.add_request(message, time.monotonic())
            case AbortRequest():
                self._core.abort_requests([((message.request_id, message.sample_index), message.attempt)])
            case UtilityRequest():
                self._send([], utility_output=self._call(message))

    def _step(self) -> None:
        outputs = self._core.step(time.monotonic()).get(self._client_id)
        if outputs:
            self._send(outputs)

    def _call(self, call: UtilityRequest) -> UtilityOutput:
        try:
            return UtilityOutput(call.call_id, msgspec.to_builtins(self._core.call(call.method, call.args)))
        except Exception as error:  # noqa: BLE001 - the caller gets it; the engine lives
            return UtilityOutput.of_error(call.call_id, error)

    def _send(self, outputs: list[EngineCoreOutput], **news: Any) -> None:
        self._out_seq += 1
        self._deliver(
            EngineCoreOutputs(
                self._engine_id, self._client_id, self._out_seq, self._applied, NO_REPORT, outputs, **news
            )
        )


class ThreadToLoopQueue(Generic[T]):
    """Takes items in any thread and gives them to one method on the loop, in order.

    At most ``limit`` items are on their way or unread: then ``put`` waits, so engines stand still while nobody takes
    their outputs. Every item that was received is given back with ``release`` once it has been read.
    The receiver is held weakly: a thread that waits here keeps no client alive.
    """

    def __init__(self, receive: Callable[[T], Any], limit: int) -> None:
        """receive: a bound method."""
        self._receive = weakref.WeakMethod(receive)
        self._room = threading.Semaphore(limit)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Name the loop, before anything that is answered is asked for."""
        assert self._loop in (None, loop), "a client lives on one loop"
        self._loop = loop

    def put(self, item: T) -> None:
        """Hand one item over; drops it when nobody is there to receive it."""
        self._room.acquire()
        if self._closed or self._loop is None:
            self._room.release()  # also lets the next one through that waits
            return
        with contextlib.suppress(RuntimeError):  # the loop was closed, and nobody awaits anything of the client
            self._loop.call_soon_threadsafe(self._deliver, item)

    def release(self) -> None:
        """Give back the room of one item that was read."""
        self._room.release()

    def close(self) -> None:
        """Let everybody through who waits; what they hold is dropped. Idempotent, from any thread."""
        self._closed = True
        self._room.release()

    def _deliver(self, item: T) -> None:
        receive = self._receive()
        if receive is not None and not self._closed:
            receive(item)
