"""The host of engine processes, as a protocol: the same behaviour on Ray and as plain local processes."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.config.engine_spec import EngineSpec
from engine.wire.ids import EngineId
from orchestrator.processes.exits import ProcessExit


def _future() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


@dataclass(frozen=True, slots=True, eq=False)
class EngineHandle:
    """A started engine.

    exited: resolved once with the end of its process; never fails, never cancelled by the host. out_of_reach: resolved
    when the host of the process answers no more, which is no death: its reports show whether it goes on. From then on
    nothing but ``kill`` may bring about ``exited``.
    """

    engine_id: EngineId
    exited: "asyncio.Future[ProcessExit]"
    out_of_reach: "asyncio.Future[None]" = field(default_factory=_future)


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much room there is for more ranks.

    num_free: further ranks that fit now; None where nobody keeps count. text: what there is, for people. resources: the
    same as numbers.
    """

    num_free: int | None
    text: str
    resources: dict[str, float]


class EngineHost(Protocol):
    """Starts engine processes, reports their ends, and kills those that do not end when they are dismissed."""

    def capacity(self) -> Capacity:
        """Return how many more ranks there is room for, as far as can be known beforehand."""

    async def reserve(self, rank: int) -> None:
        """Reserve a placement group for one more rank; cancelled, it leaves none behind.

        Raises:
            StartupError: naming what is missing.
        """

    async def release(self, rank: int) -> None:
        """Give up the placement group of a rank whose engine has ended, and all that is kept there for the next one."""

    async def start(self, spec: EngineSpec) -> EngineHandle:
        """Start one engine and return as soon as its process has been ordered; it may still fail: see ``exited``.

        Waits until there is a place for it that no predecessor holds any more.
        """

    def kill(self, engine_id: EngineId) -> None:
        """End an engine's process at once; no effect on one that has ended.

        ``exited`` follows once it is gone, or at the latest when its host was out of reach for a while.
        """

    async def stop(self, force_stop: "asyncio.Future[Any]") -> list[str]:
        """End what is left, give the resources back, and return one line for each thing that is left behind.

        force_stop: once it is done, nobody is waited for any more.
        """


@dataclass(frozen=True, slots=True)
class Site:
    """Where the engines of a deployment will run, with a placement group for each of the first ranks.

    device: what engines are configured with. address: address of this host that every engine's host reaches; None when
    they all run on this host, where Unix sockets will do.
    """

    host: EngineHost
    device: str
    address: str | None


OpenHost = Callable[[int, str], Awaitable[Site]]
"""Reserves a placement group for each of so many ranks. The device is as the user asked, ``auto`` included.

Raises ``StartupError``, naming what is missing; then, and when it is cancelled, nothing is left behind.
"""
