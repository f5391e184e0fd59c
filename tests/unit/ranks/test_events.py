"""Events are returned in order, also to a caller that comes late."""

import asyncio

from orchestrator.ranks.events import NUM_REMEMBERED, EventKind, EventLog


async def test_who_waits_gets_what_happens_and_who_comes_late_what_is_remembered() -> None:
    log = EventLog()
    waiting = asyncio.create_task(log.wait_after(0, 60.0))
    await asyncio.sleep(0)
    log.add(EventKind.RANK_DEAD, rank=2, reason="killed")
    (event,) = await waiting
    assert (event.number, event.kind, event.facts) == (1, "rank_dead", {"rank": 2, "reason": "killed"})
    assert log.after(0) == [event]
    assert await log.wait_after(1, 0.0) == []


async def test_only_the_newest_are_kept() -> None:
    log = EventLog()
    for _ in range(NUM_REMEMBERED + 5):
        log.add(EventKind.SCALE)
    assert [event.number for event in log.after(0)][:1] == [6]
    assert log.last_number == NUM_REMEMBERED + 5
