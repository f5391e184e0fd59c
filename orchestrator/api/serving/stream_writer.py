"""The stream writer: writes a response from the callback that brings its text, without waking a task.

A task wake-up per stream and token costs as much as everything else together. With uvicorn's httptools protocol the
request's own cycle is reachable, so a chunk goes straight to the transport, framed as uvicorn would frame it. Start and
end still pass through ASGI's ``send``, which keeps uvicorn's own state right. What this leans on is checked when the
process starts (``server/uvicorn_guard.py``).

When the transport is full, or the server is another one, a task that awaits ``send`` takes over until nothing is left
to send; what comes meanwhile is merged.
"""

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from orchestrator.api.base.asgi import Message, Receive, Send
from orchestrator.api.serving.response_builders import ResponseBuilder

logger = logging.getLogger(__name__)

CHUNK = b"%x\r\n%b\r\n"
"""A chunk of a body whose length is not known, of (length, bytes): HTTP/1.1's chunked transfer coding."""


class StreamWriter:
    """Writes one response. ``on_update`` is the callback; ``run`` is the request's own task, which mostly sleeps."""

    def __init__(self, builder: ResponseBuilder, receive: Receive, send: Send) -> None:
        self._builder = builder
        self._receive = receive
        self._send = send
        owner = getattr(send, "__self__", None)
        self._cycle = owner if isinstance(owner, RequestResponseCycle) else None
        self._started = False
        self._pump: asyncio.Task[None] | None = None  # the task that has taken over; it alone sends while it is there
        self._ended = asyncio.Event()  # only for ``run`` on a server that is not uvicorn

    def on_update(self) -> None:
        """Write what is new, now if the transport takes it. Never blocks."""
        if self._pump is not None:
            return  # it looks again before it ends
        cycle = self._cycle
        if cycle is None or cycle.flow.write_paused:
            self._pump = asyncio.create_task(self._pump_out(b""), name="response-pump")
        elif not cycle.disconnected and (body := self._builder.take()):
            if self._started and not self._builder.finished:
                cycle.transport.write(CHUNK % (len(body), body))
            else:
                self._write_edge(cycle, body)

    def send_part(self, body: bytes) -> bool:
        """Write a part between the first and the last at once; False when that cannot be done now."""
        cycle = self._cycle
        # A task that has taken over sends alone: what it has not sent yet comes first.
        if cycle is None or self._pump is not None or cycle.flow.write_paused or cycle.disconnected:
            return False
        cycle.transport.write(CHUNK % (len(body), body))
        return True

    async def run(self) -> None:
        """Wait until the response is sent or the caller has gone away."""
        if self._cycle is not None:
            # uvicorn says "disconnect" for both, so one wait in this very task is enough
            await self._until_disconnected()
            return
        gone = asyncio.create_task(self._until_disconnected(), name="response-disconnect")
        ended = asyncio.create_task(self._ended.wait(), name="response-ended")
        try:
            done, _ = await asyncio.wait({gone, ended}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # ``receive`` may have failed
        finally:
            await _cancel(gone, ended)

    async def aclose(self) -> None:
        """Stop the pump if one runs; idempotent."""
        if self._pump is not None:
            await _cancel(self._pump)

    def _write_edge(self, cycle: RequestResponseCycle, body: bytes) -> None:
        """Write the first or last part of a response, or both at once."""
        if not self._started:
            self._started = True
            run_through(self._send(self._builder.start))
        if not self._builder.finished:
            cycle.transport.write(CHUNK % (len(body), body))
        elif cycle.flow.write_paused:
            # the start has filled the transport: ``send`` would wait, and nobody may wait in a callback
            self._pump = asyncio.create_task(self._pump_out(body), name="response-pump")
        else:
            run_through(self._send(_body_message(body, last=True)))

    async def _pump_out(self, body: bytes) -> None:
        """Send this body, if any, and whatever else there is."""
        try:
            while body := body or self._builder.take():
                if not self._started:
                    self._started = True
                    await self._send(self._builder.start)
                # before the wait in ``send``: it belongs to this body, and what comes meanwhile may be the last part
                last = self._builder.finished
                await self._send(_body_message(body, last=last))
                body = b""
                if last:
                    self._ended.set()
        except Exception:
            logger.exception("a response could not be sent")
            self._ended.set()
        finally:
            self._pump = None

    async def _until_disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def run_through(coroutine: Any) -> Any:
    """Run a coroutine that has nothing to wait for and return its result.

    uvicorn's ``send`` waits only while writing is paused.

    Raises:
        RuntimeError: it wanted to wait.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise RuntimeError("send wanted to wait although the transport was writable")


def _body_message(body: bytes, *, last: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not last}


async def _cancel(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
