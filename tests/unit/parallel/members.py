"""Members of a group as threads of one process: what each does, side by side, and never for ever."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from engine.parallel.store import StoreServer
from engine.parallel.transport import Transport, form_transports

T = TypeVar("T")

JOIN_S = 60.0
HOST = "127.0.0.1"


class Company:
    """Members that meet in a store of their own. When one fails, all are ordered to leave, and its error is raised."""

    def __init__(self, num_members: int) -> None:
        self.num_members = num_members
        self.is_over = threading.Event()
        self._store = StoreServer(HOST)

    def meet(
        self, index: int, prefix: str = "1/1", must_leave: Callable[[], bool] | None = None
    ) -> tuple[Transport, Transport]:
        """Return a member's transports for headers and for rows."""
        leave = must_leave or self.is_over.is_set
        return form_transports(
            self._store.endpoint, prefix, index, self.num_members, torch.device("cpu"), leave, host=HOST
        )

    def run(self, act: Callable[[int], T]) -> list[T]:
        """Let each member act in a thread of its own; return what each ends with. The company is over then."""
        try:
            return run_members(self.num_members, act, on_error=self.is_over.set)
        finally:
            self.close()

    def close(self) -> None:
        """Close the store; those who have met need it no more."""
        self._store.close()


def run_members(num_members: int, act: Callable[[int], T], *, on_error: Callable[[], None] = lambda: None) -> list[T]:
    """Call ``act`` with each index, in threads; return the results in order, or raise the first error."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = act(index)
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread that runs the test
            errors.append(error)
            on_error()

    threads = [threading.Thread(target=run, args=(index,), name=f"member-{index}") for index in range(num_members)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + JOIN_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    hanging = [thread.name for thread in threads if thread.is_alive()]
    on_error()  # whoever still waits shall not wait for ever
    if errors:
        raise errors[0]
    assert not hanging, f"still running: {hanging}"
    return [results[index] for index in range(num_members)]
