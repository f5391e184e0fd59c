"""The stream writer on uvicorn's own request cycle, and on a server that is not uvicorn."""

import asyncio
import logging
from typing import Any, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from orchestrator.api.base.asgi import Message, start_message
from orchestrator.api.serving.response_builders import ResponseBuilder
from orchestrator.api.serving.stream_writer import StreamWriter


class ScriptedBuilder(ResponseBuilder):
    """Hands out what the test put in."""

    def __init__(self) -> None:
        self.start = start_message(200, [(b"content-type", b"text/plain")], "q")
        self.finished = False
        self._parts: list[bytes] = []

    def put(self, part: bytes, *, last: bool = False) -> None:
        self._parts.append(part)
        self.finished = last

    def take(self) -> bytes:
        body = b"".join(self._parts)
        self._parts.clear()
        return body


class RecordingTransport(asyncio.Transport):
    """Takes every write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self._written = asyncio.Event()

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))
        self._written.set()

    async def wait_for(self, count: int) -> None:
        while len(self.writes) < count:
            self._written.clear()
            await self._written.wait()

    def is_closing(self) -> bool:
        return False


class Served:
    """One request on uvicorn's cycle, with a transport that records."""

    def __init__(self) -> None:
        self.transport = RecordingTransport()
        self.flow = FlowControl(self.transport)
        self.cycle = RequestResponseCycle(
            scope=cast(Any, {"type": "http", "method": "POST"}),
            transport=self.transport,
            flow=self.flow,
            logger=logging.getLogger(__name__),
            access_logger=logging.getLogger(__name__),
            access_log=False,
            default_headers=[],
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=True,
            on_response=lambda: None,
        )
        self.builder = ScriptedBuilder()
        self.writer = StreamWriter(self.builder, cast(Any, self.cycle.receive), cast(Any, self.cycle.send))

    def say(self, part: bytes, *, last: bool = False) -> None:
        self.builder.put(part, last=last)
        self.writer.on_update()


def body_of(writes: list[bytes]) -> bytes:
    """Return the body of a chunked response, checking its framing."""
    _, _, rest = b"".join(writes).partition(b"\r\n\r\n")
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            assert rest == b"\r\n"
            return body
        body += rest[:length]
        assert rest[length : length + 2] == b"\r\n"
        rest = rest[length + 2 :]


async def test_every_part_is_written_in_the_callback_itself() -> None:
    served = Served()
    served.say(b"one")
    written = len(served.transport.writes)
    served.say(b"two")
    assert len(served.transport.writes) == written + 1
    served.say(b"three", last=True)
    assert body_of(served.transport.writes) == b"onetwothree"
    await served.writer.run()
    await served.writer.aclose()


async def test_a_response_in_one_part_is_started_and_ended_at_once() -> None:
    served = Served()
    served.say(b"all", last=True)
    assert body_of(served.transport.writes) == b"all"
    await served.writer.run()


async def test_nothing_new_writes_nothing() -> None:
    served = Served()
    served.writer.on_update()
    assert served.transport.writes == []


async def test_a_full_transport_gets_what_was_missed_in_one_piece() -> None:
    served = Served()
    served.say(b"one")
    served.flow.pause_writing()
    for part in (b"two", b"three"):
        served.say(part)
    await asyncio.sleep(0)
    served.say(b"four")
    before = len(served.transport.writes)
    served.flow.resume_writing()
    await served.transport.wait_for(before + 2)
    served.say(b"five", last=True)
    await served.writer.run()
    assert b"\r\ntwothree\r\n" in b"".join(served.transport.writes)
    assert body_of(served.transport.writes) == b"onetwothreefourfive"


async def test_an_end_that_meets_a_full_transport_is_sent_when_it_drains() -> None:
    served = Served()
    served.say(b"one")
    served.flow.pause_writing()
    served.say(b"two", last=True)
    await asyncio.sleep(0)
    served.flow.resume_writing()
    await served.writer.run()
    assert body_of(served.transport.writes) == b"onetwo"


async def test_a_caller_that_hung_up_is_noticed_and_written_no_more() -> None:
    served = Served()
    served.say(b"one")
    written = len(served.transport.writes)
    served.cycle.disconnected = True
    served.cycle.message_event.set()
    await served.writer.run()
    served.say(b"two")
    assert len(served.transport.writes) == written


class OtherServer:
    """An ASGI server that is not uvicorn: ``send`` may wait, and ``receive`` says when the caller is gone."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.gone = asyncio.Event()

    async def send(self, message: Message) -> None:
        await asyncio.sleep(0)
        self.sent.append(message)

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def test_another_server_is_served_through_send() -> None:
    server, builder = OtherServer(), ScriptedBuilder()
    writer = StreamWriter(builder, server.receive, server.send)
    builder.put(b"one")
    writer.on_update()
    running = asyncio.create_task(writer.run())
    await asyncio.sleep(0)
    builder.put(b"two", last=True)
    writer.on_update()
    await running
    await writer.aclose()
    bodies = [message.get("body", b"") for message in server.sent]
    assert b"".join(bodies) == b"onetwo"
    assert [message.get("more_body") for message in server.sent][-1] is False


async def test_another_server_whose_caller_hangs_up_ends_the_wait() -> None:
    server = OtherServer()
    writer = StreamWriter(ScriptedBuilder(), server.receive, server.send)
    server.gone.set()
    await writer.run()
    await writer.aclose()


async def test_a_send_that_fails_ends_the_wait() -> None:
    server, builder = OtherServer(), ScriptedBuilder()

    async def fail(_message: Message) -> None:
        raise OSError("broken pipe")

    writer = StreamWriter(builder, server.receive, fail)
    builder.put(b"one")
    writer.on_update()
    await writer.run()
    await writer.aclose()
