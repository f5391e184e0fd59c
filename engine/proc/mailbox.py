"""The mailbox of an I/O thread: calls that other threads let it make, and a descriptor that ends its poll."""

import contextlib
import os
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import ParamSpec

P = ParamSpec("P")


class Mailbox:
    """Calls that run on the thread that owns the mailbox, and wake-ups without one.

    ``post`` and ``wake`` never block, take no lock and are safe in a signal handler. The wake-up is a pipe: unlike an
    inproc socket, which belongs to one thread, any thread may write to it.
    """

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._is_woken = False
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)

    def post(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Let the owner run ``call(*args)`` soon, after everything posted before."""
        self._calls.append(partial(call, *args, **kwargs))
        self.wake()

    def wake(self) -> None:
        """Make the owner's poll return; what it is to find must be in place before."""
        if not self._is_woken:
            self._is_woken = True
            os.write(self._write_fd, b"\0")  # never full: at most one byte per writer until the owner has read

    def run_posted(self) -> None:
        """Run what was posted. Only the owner calls this, when ``fd`` is readable, before it looks at anything else."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)
        # In this order: a wake-up that comes before the flag falls has put its things in place, and they are found
        # below; one that comes behind it writes to the empty pipe. The other way round one could be swallowed.
        self._is_woken = False
        while self._calls:
            self._calls.popleft()()

    def close(self) -> None:
        """Close the pipe; nothing may be posted any more."""
        os.close(self.fd)
        os.close(self._write_fd)
