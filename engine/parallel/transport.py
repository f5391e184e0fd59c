"""The one collective a lockstep group uses: a ragged all-to-all that can be left.

Every exchange is an all-to-all, on purpose: when a peer dies in the middle of one, every survivor sees it within
milliseconds, while with ring collectives distant ranks wait for the time limit.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as _distributed

from engine.parallel.stopwatch import make_stopwatch
from engine.parallel.store import GroupStore, StoreError
from engine.wire.errors import EngineError

dist: Any = _distributed  # half of what is used here is not declared as exported

_POLL = timedelta(milliseconds=20)
_DEVICE_POLL_S = 0.000_02
_RENDEZVOUS_TIMEOUT_S = 60.0
_COLLECTIVE_TIMEOUT = timedelta(hours=24)
"""In effect none: the coordinator judges which member is slow, and one that is ordered to leave does so at a poll."""


class GroupBrokenError(EngineError):
    """A peer died in a collective, or this rank was ordered to leave it. The step is lost; only a new epoch helps."""


class Exchange(Protocol):
    """An exchange under way."""

    def wait(self) -> torch.Tensor:
        """Return what came, [sum(receive_sizes), width], in the order of the members. To be called once.

        Raises:
            GroupBrokenError: a peer is gone, or this rank was ordered to leave.
        """


class Transport(Protocol):
    """Moves rows between the members of one epoch, in the order of the members.

    Members begin the same exchanges in the same order. Two may be under way at a time, no more.

    num_entered: exchanges begun; written by the thread that exchanges, read by the one that reports.
    """

    num_members: int
    num_entered: int

    @property
    def collective_s(self) -> float:
        """Return the time spent inside exchanges, waiting for peers included; only grows."""

    def begin(self, rows: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Exchange:
        """Begin to send the first ``send_sizes[0]`` rows to member 0, and so on.

        rows: [sum(send_sizes), width], contiguous; not to be changed until the exchange is waited for.

        Raises:
            GroupBrokenError: the group is broken, or was left.
        """

    def close(self) -> None:
        """Close the connections; may take a while, and wakes peers that wait for this rank."""


def all_to_all(
    transport: Transport, rows: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
) -> torch.Tensor:
    """Exchange rows and return what came; see ``Transport.begin`` and ``Exchange.wait``."""
    return transport.begin(rows, send_sizes, receive_sizes).wait()


class TorchTransport:
    """An all-to-all over a process group of its own, so that the default group and other epochs are untouched."""

    def __init__(self, group: Any, num_members: int, device: torch.device, must_leave: Callable[[], bool]) -> None:
        """Wrap a process group.

        device: of the rows. must_leave: polled every 20 ms or more often while a collective is waited for.
        """
        self.num_members = num_members
        self.num_entered = 0
        self._stopwatch = make_stopwatch(device)
        self._wait = _wait_on_device if device.type == "cuda" else _wait_on_host
        self._group: Any | None = group  # None when it was left
        self._must_leave = must_leave

    @property
    def collective_s(self) -> float:
        """See ``Transport``."""
        return self._stopwatch.seconds

    def begin(self, rows: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Exchange:
        """See ``Transport``."""
        group = self._joined()
        self.num_entered += 1
        if self.num_members == 1:
            return _ExchangeWithoutPeers(rows)
        received = rows.new_empty(sum(receive_sizes), *rows.shape[1:])
        width = rows.shape[1:].numel()
        with _failures_as_broken_group(), self._stopwatch.lap():
            work = group.alltoall_base(
                received.view(-1),
                rows.reshape(-1),
                [size * width for size in receive_sizes],
                [size * width for size in send_sizes],
            )
        return _TorchExchange(received, lambda: self._finish(work))

    def _finish(self, work: Any) -> None:
        with _failures_as_broken_group(), self._stopwatch.lap():
            self._wait(self._joined(), work, self._must_leave)

    def _joined(self) -> Any:
        # Nothing else may keep the group: to drop the last reference takes long, and is left to the thread that closes.
        if self._group is None:
            raise GroupBrokenError("the group was left")
        return self._group

    def close(self) -> None:
        """See ``Transport``."""
        self._group = None


class _TorchExchange:
    def __init__(self, received: torch.Tensor, finish: Callable[[], None]) -> None:
        self._received = received
        self._finish = finish

    def wait(self) -> torch.Tensor:
        """See ``Exchange``."""
        self._finish()
        return self._received


class _ExchangeWithoutPeers:
    """The exchange of a group of one: it receives what it sent."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def wait(self) -> torch.Tensor:
        """See ``Exchange``."""
        return self._rows


@contextmanager
def _failures_as_broken_group() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what torch raises for a connection that is gone
        raise GroupBrokenError(f"a collective broke: {error}") from error


def _wait_on_host(_group: Any, work: Any, must_leave: Callable[[], bool]) -> None:
    while True:
        try:
            work.wait(_POLL)
        except RuntimeError:  # out of time, or broken: the library raises the same for both
            if not work.is_completed():
                if must_leave():
                    raise GroupBrokenError("ordered to leave a collective") from None
                continue
            work.wait()  # it has ended meanwhile; this raises what broke it
        return


def _wait_on_device(group: Any, work: Any, must_leave: Callable[[], bool]) -> None:
    # Polled: NCCL takes a wait that runs out of time for the failure of the communicator.
    while not work.is_completed():
        if must_leave():
            group.abort()  # else it never gives up a collective that a peer does not join
            raise GroupBrokenError("ordered to leave a collective")
        time.sleep(_DEVICE_POLL_S)
    work.wait(_POLL)  # raises what went wrong, and puts the current stream behind it


def form_transports(
    store_endpoint: str,
    prefix: str,
    index: int,
    num_members: int,
    device: torch.device,
    must_leave: Callable[[], bool],
    *,
    host: str,
) -> tuple[Transport, Transport]:
    """Connect to the other members and return two transports: for headers, on the CPU, and for rows on ``device``.

    May take until every member has come.

    store_endpoint: of the store all members name. prefix: names this attempt; never used twice.

    Raises:
        GroupBrokenError: not all members came in time, one died, or the prefix was used before.
    """
    store = GroupStore(store_endpoint, _RENDEZVOUS_TIMEOUT_S, must_leave)
    try:
        groups = _form_groups(store, prefix, index, num_members, device, host)
        devices = torch.device("cpu"), device
        headers, rows = (
            TorchTransport(group, num_members, of, must_leave) for group, of in zip(groups, devices, strict=True)
        )
        # Each is used once, so that what is returned works: connections are made at the first exchange.
        for transport, of in ((headers, devices[0]), (rows, devices[1])):
            all_to_all(transport, torch.zeros(num_members, 1, device=of), [1] * num_members, [1] * num_members)
    except (RuntimeError, ValueError, StoreError) as error:
        raise GroupBrokenError(f"the group {prefix} did not form: {error}") from error
    finally:
        store.close()
    return headers, rows


def _form_groups(
    store: GroupStore, prefix: str, index: int, num_members: int, device: torch.device, host: str
) -> tuple[Any, Any]:
    _claim(store, prefix, index)
    headers = _gloo(dist.PrefixStore(f"{prefix}/headers", store), index, num_members, host)
    for_rows = dist.PrefixStore(f"{prefix}/rows", store)
    if device.type == "cuda":
        return headers, _nccl(for_rows, index, num_members)
    return headers, _gloo(for_rows, index, num_members, host)


def _claim(store: GroupStore, prefix: str, index: int) -> None:
    """Refuse a prefix that was used before: its addresses are still in the store, and lead nowhere."""
    if store.add(f"{prefix}/members/{index}", 1) > 1:
        raise GroupBrokenError(f"the group {prefix} was formed before, or member {index} is there twice")


def _gloo(store: Any, index: int, num_members: int, host: str) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = _COLLECTIVE_TIMEOUT
    return dist.ProcessGroupGloo(store, index, num_members, options)


def _nccl(store: Any, index: int, num_members: int) -> Any:
    # Read by the constructor. A rank whose group breaks parks and waits for another epoch; the library would end the
    # process.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _COLLECTIVE_TIMEOUT
    return dist.ProcessGroupNCCL(store, index, num_members, options)
