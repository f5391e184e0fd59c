"""How other threads ask an I/O thread for something: calls posted to a queue, and a descriptor that wakes it."""

import contextlib
import os
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import ParamSpec

P = ParamSpec("P")


class Mailbox:
    """Calls that run on the thread that owns the mailbox. ``post`` never blocks and is safe in a signal handler.

    A pipe wakes the owner out of its poll: unlike an inproc socket it may be written by any thread.
    """

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)

    def post(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Let the owner run ``call(*args)`` soon, after everything posted before."""
        self._calls.append(partial(call, *args, **kwargs))
        self.wake()

    def wake(self) -> None:
        """Make the owner's poll return."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups already
            os.write(self._write_fd, b"\0")

    def run_posted(self) -> None:
        """Run what was posted; only the owner calls this, when ``fd`` is readable."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)
        while self._calls:
            self._calls.popleft()()

    def close(self) -> None:
        """Close the pipe; nobody may post any more."""
        os.close(self.fd)
        os.close(self._write_fd)
