"""The mailbox of an I/O thread: posted calls run in order on their thread, and no wake-up is lost."""

import select
import threading

from engine.proc.mailbox import Mailbox


def is_readable(mailbox: Mailbox) -> bool:
    return bool(select.select([mailbox.fd], [], [], 0)[0])


def test_posted_calls_run_in_order_and_only_when_the_owner_runs_them() -> None:
    mailbox = Mailbox()
    calls: list[int] = []
    mailbox.post(calls.append, 1)
    mailbox.post(calls.append, 2)
    assert calls == []
    mailbox.run_posted()
    assert calls == [1, 2]
    mailbox.close()


def test_waking_never_blocks_however_often() -> None:
    mailbox = Mailbox()
    for _ in range(100_000):
        mailbox.wake()
    mailbox.close()


def test_however_many_wake_ups_end_one_poll_and_the_next_ends_another() -> None:
    mailbox = Mailbox()
    mailbox.wake()
    mailbox.wake()
    assert is_readable(mailbox)
    mailbox.run_posted()
    assert not is_readable(mailbox)
    mailbox.wake()
    assert is_readable(mailbox)
    mailbox.close()


def test_what_is_posted_while_posted_calls_run_is_run_and_wakes_again() -> None:
    mailbox = Mailbox()
    calls: list[str] = []
    mailbox.post(mailbox.post, calls.append, "second")
    mailbox.run_posted()
    assert calls == ["second"]
    assert is_readable(mailbox)
    mailbox.close()


def test_no_call_is_left_behind_by_many_threads_that_post() -> None:
    """The owner sleeps whenever it finds nothing, so that one lost wake-up would leave it asleep."""
    mailbox = Mailbox()
    calls: list[int] = []

    def post_many() -> None:
        for number in range(2_000):
            mailbox.post(calls.append, number)

    threads = [threading.Thread(target=post_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(calls) < 8_000:
        assert select.select([mailbox.fd], [], [], 20)[0], "a wake-up was lost"
        mailbox.run_posted()
    for thread in threads:
        thread.join()
    mailbox.close()
