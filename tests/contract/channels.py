"""Every way from a client to its engines, behind one set of names, so that one suite runs over all of them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from enum import Enum
from typing import Any, Protocol

from client.inproc_client import InprocClient
from client.sync_mp_client import SyncMPClient
from engine.config.engine_config import EngineConfig
from engine.loading import load_rank
from engine.wire.ids import ClientId, EngineId, RequestIds
from engine.wire.messages import AddRequest, EngineCoreOutputs
from lb.views.engine_view import EngineView
from tests.contract.deployment import DEADLINE_S, Deployment, Transport, started


class Channel(Enum):
    """Which client, and what its line runs over; None: threads of this process."""

    INPROC = ("inproc", None)
    IPC = ("zmq-ipc", Transport.IPC)
    TCP = ("zmq-tcp", Transport.TCP)
    CURVE = ("zmq-tcp-curve", Transport.CURVE)
    SYNC = ("sync-zmq-ipc", Transport.IPC)

    @property
    def transport(self) -> Transport | None:
        """Return what it runs over."""
        transport: Transport | None = self.value[1]
        return transport


class Client(Protocol):
    """What every client of several engines can do."""

    client_id: ClientId
    request_ids: RequestIds

    async def add_request_async(self, request: AddRequest, data_parallel_rank: int | None = None) -> EngineId: ...

    async def abort_requests_async(self, request_ids: Sequence[int], sample_index: int | None = None) -> None: ...

    async def get_output_async(self) -> EngineCoreOutputs: ...

    async def call_utility_async(self, method: str, *args: Any) -> dict[int, Any]: ...

    async def aclose(self) -> None: ...

    def engine_views(self) -> list[EngineView]: ...

    def statistics(self) -> dict[str, int]: ...


class Deployments:
    """Deployments by what their lines run over; those that are not named here are started when first asked for."""

    def __init__(self, stack: ExitStack, num_engines: int, engine: EngineConfig, *transports: Transport) -> None:
        self.num_engines = num_engines
        self.engine = engine
        self._stack = stack
        self._started: dict[Transport, Deployment] = {}
        for transport in transports:
            self.over(transport)

    def over(self, transport: Transport) -> Deployment:
        """Return the deployment over this transport."""
        if transport not in self._started:
            group = started(self.num_engines, self.engine, transport)
            self._started[transport] = self._stack.enter_context(group)
        return self._started[transport]


@asynccontextmanager
async def open_client(channel: Channel, deployments: Deployments) -> AsyncIterator[Client]:
    """Yield a client of ready engines that is closed at the end."""
    if channel.transport is None:
        inproc = InprocClient(_loading(deployments.engine), deployments.num_engines)
        try:
            yield inproc
        finally:
            await inproc.aclose()
    elif channel is Channel.SYNC:
        client = SyncMPClient(deployments.over(channel.transport).client_config())
        try:
            await asyncio.to_thread(client.wait_ready, DEADLINE_S, deployments.num_engines)
            yield Awaited(client)
        finally:
            await asyncio.to_thread(client.close)
    else:
        async with deployments.over(channel.transport).client(deployments.num_engines) as wired:
            yield wired


def _loading(engine: EngineConfig) -> Callable[[EngineId], Any]:
    return lambda engine_id: load_rank(engine, engine_id, lambda _doing, _progress: None)


class Awaited:
    """A ``SyncMPClient`` whose calls wait in threads."""

    def __init__(self, client: SyncMPClient) -> None:
        self.client_id = client.client_id
        self.request_ids = client.request_ids
        self._client = client

    async def add_request_async(self, request: AddRequest, data_parallel_rank: int | None = None) -> EngineId:
        return await asyncio.to_thread(self._client.add_request, request, data_parallel_rank)

    async def abort_requests_async(self, request_ids: Sequence[int], sample_index: int | None = None) -> None:
        await asyncio.to_thread(self._client.abort_requests, request_ids, sample_index)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await asyncio.to_thread(self._client.get_output, DEADLINE_S)

    async def call_utility_async(self, method: str, *args: Any) -> dict[int, Any]:
        return await asyncio.to_thread(self._client.call_utility, method, *args)

    async def aclose(self) -> None:
        await asyncio.to_thread(self._client.close)

    def engine_views(self) -> list[EngineView]:
        return self._client.engine_views()

    def statistics(self) -> dict[str, int]:
        return self._client.statistics()
