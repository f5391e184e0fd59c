"""Admission control: which requests are taken, and what the others get."""

import asyncio

import pytest

from engine.wire.errors import OverloadedError
from metrics.shared_status import StatusRow
from orchestrator.api.serving.admission import Admission


def test_a_full_deployment_refuses_until_a_request_ends() -> None:
    admission = Admission(1, StatusRow(0))
    admission.enter()
    with pytest.raises(OverloadedError, match="limit"):
        admission.enter()
    admission.leave()
    admission.enter()


def test_a_draining_process_refuses_and_says_when_to_come_back() -> None:
    admission = Admission(1, StatusRow(0))
    admission.drain()
    with pytest.raises(OverloadedError) as caught:
        admission.enter()
    assert caught.value.retry_after_s > 0


async def test_empty_is_seen_by_whoever_waits() -> None:
    admission = Admission(2, StatusRow(0))
    admission.enter()
    admission.enter()
    waiting = asyncio.create_task(admission.wait_empty())
    admission.leave()
    await asyncio.sleep(0)
    assert not waiting.done()
    admission.leave()
    await waiting


def test_the_limit_is_for_all_processes_together() -> None:
    rows = [StatusRow(0), StatusRow(1)]
    first, second = Admission(3, rows[0], rows[1:]), Admission(3, rows[1], rows[:1])
    first.enter()
    first.enter()
    second.enter()
    with pytest.raises(OverloadedError, match="already has 3 requests"):
        second.ensure_room()
    first.leave()
    second.enter()
    rows[1].clear()  # the process is gone, and its requests with it
    first.enter()
