"""Reading the bodies of requests: whole, bounded one by one and together, and in time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from orchestrator.api.base.errors import ApiError
from orchestrator.api.serving.admission import BodyReader, CallerGoneError

Receive = Callable[[], Awaitable[Any]]


def part(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def sending(*messages: dict[str, Any], then: asyncio.Event | None = None) -> Receive:
    """Return a caller that sends these messages, and after them nothing until ``then`` is set."""
    left = iter(messages)

    async def receive() -> dict[str, Any]:
        for message in left:
            return message
        assert then is not None, "nobody may ask for more"
        await then.wait()
        return {"type": "http.disconnect"}

    return receive


async def test_parts_are_joined() -> None:
    assert await BodyReader().read(sending(part(b"ab", more=True), part(b"", more=True), part(b"c"))) == b"abc"


async def test_a_caller_who_hangs_up_is_no_request() -> None:
    with pytest.raises(CallerGoneError):
        await BodyReader().read(sending(part(b"ab", more=True), {"type": "http.disconnect"}))


async def test_a_body_larger_than_the_limit_is_refused_before_its_end() -> None:
    with pytest.raises(ApiError, match="larger than 3 bytes") as refused:
        await BodyReader(max_bytes=3).read(sending(part(b"ab", more=True), part(b"cd", more=True)))
    assert refused.value.status == 413


async def test_a_body_that_does_not_come_is_not_waited_for_for_ever() -> None:
    with pytest.raises(ApiError, match="did not arrive within") as refused:
        await BodyReader(timeout_s=0.0).read(sending(part(b"{", more=True), then=asyncio.Event()))
    assert refused.value.status == 408


async def test_unfinished_bodies_together_are_bounded_and_give_their_room_back() -> None:
    reader = BodyReader(max_unread_bytes=4)
    hang_up = asyncio.Event()
    slow = asyncio.create_task(reader.read(sending(part(b"abc", more=True), then=hang_up)))
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as refused:
        await reader.read(sending(part(b"de", more=True)))
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
    hang_up.set()
    with pytest.raises(CallerGoneError):
        await slow
    assert await reader.read(sending(part(b"defg"))) == b"defg"
