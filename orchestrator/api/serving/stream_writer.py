"""Writes an answer from the callback that brings its text, without waking a task.

A task wake-up per stream and token costs as much as everything else together. With uvicorn's httptools protocol the
request's own cycle is reachable, so the chunk goes straight to the transport, framed as uvicorn would frame it. Start
and end still pass through ASGI's ``send``, which keeps uvicorn's own state right. When the transport is full, or the
server is another one, a task that awaits ``send`` takes over until nothing is left to say; what comes meanwhile is
merged.
"""

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from orchestrator.api.asgi import Message, Receive, Send
from orchestrator.api.serving.response_builders import ResponseBuilder

logger = logging.getLogger(__name__)


class StreamWriter:
    """Sends one reply. ``on_update`` is the callback; ``run`` is the request's own task, which mostly sleeps."""

    def __init__(self, builder: ResponseBuilder, receive: Receive, send: Send) -> None:
        self._builder = builder
        self._receive = receive
        self._send = send
        owner = getattr(send, "__self__", None)
        self._cycle = owner if isinstance(owner, RequestResponseCycle) else None
        self._started = False
        self._pump: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    def on_update(self) -> None:
        """Send what is new, now if the transport takes it. Never blocks."""
        if self._pump is not None:
            return  # it looks again before it ends
        cycle = self._cycle
        if cycle is None or cycle.flow.write_paused:
            self._pump = asyncio.create_task(self._pump_out(b""), name="reply-pump")
        elif not cycle.disconnected and (body := self._builder.take()):
            if self._started and not self._builder.finished:
                cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
            else:
                self._push_edge(cycle, body)

    async def run(self) -> None:
        """Wait until the reply is sent or the caller has gone away."""
        if self._cycle is not None:
            # uvicorn says "disconnect" for both, so one wait in this very task is enough
            await self._until_disconnected()
            return
        gone = asyncio.create_task(self._until_disconnected(), name="reply-disconnect")
        ended = asyncio.create_task(self._ended.wait(), name="reply-ended")
        try:
            await asyncio.wait({gone, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(gone, ended)

    async def aclose(self) -> None:
        """Stop the pump if one runs; idempotent."""
        if self._pump is not None:
            await _cancel(self._pump)

    def _push_edge(self, cycle: RequestResponseCycle, body: bytes) -> None:
        """Send the first or last part of a reply, or both at once."""
        if not self._started:
            self._started = True
            _run_through(self._send(self._builder.start))
        if not self._builder.finished:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        elif cycle.flow.write_paused:
            self._pump = asyncio.create_task(self._pump_out(body), name="reply-pump")
        else:
            _run_through(self._send(_body_message(body, last=True)))

    async def _pump_out(self, body: bytes) -> None:
        """Send this body, if any, and whatever else there is."""
        try:
            while body := body or self._builder.take():
                if not self._started:
                    self._started = True
                    await self._send(self._builder.start)
                last = self._builder.finished
                await self._send(_body_message(body, last=last))
                body = b""
                if last:
                    self._ended.set()
        except Exception:
            logger.exception("a reply could not be sent")
            self._ended.set()
        finally:
            self._pump = None

    async def _until_disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _run_through(coroutine: Any) -> None:
    """Run a coroutine that has nothing to wait for: uvicorn's ``send`` waits only while writing is paused."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise RuntimeError("send wanted to wait although the transport was writable")


def _body_message(body: bytes, *, last: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not last}


async def _cancel(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
