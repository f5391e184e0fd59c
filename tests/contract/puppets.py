"""A coordinator and engines on the real wire that do exactly what the test tells them, and nothing by themselves."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import zmq
from msgspec.structs import replace

from client.config import ClientConfig
from client.dplb_async_mp_client import DPLBAsyncMPClient
from client.mp_client import MPClient
from client.sync_mp_client import SyncMPClient
from engine.wire.codec import channel_decoder, encode, report_decoder
from engine.wire.control import Membership
from engine.wire.endpoints import ipc_endpoint
from engine.wire.ids import ClientId, EngineId
from engine.wire.load import Load
from engine.wire.messages import (
    GROUP_TOPIC,
    LOAD_TOPIC,
    AddRequest,
    ChannelMessage,
    ClientInfo,
    ClientReport,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineReady,
    EngineReport,
    FinishReason,
    GroupState,
    LoadSnapshot,
    UtilityOutput,
)
from engine.wire.replicas import ReplicaInfo
from engine.wire.sampling import SamplingParams
from engine.wire.sockets import HIGH_WATER_MARK, bind, connect, make_socket
from engine.wire.states import EnginePhase

DEADLINE_S = 20.0
BUILD_ID = "0.1+abc"
CONFIG_HASH = "0123456789abcdef"

T = TypeVar("T")


async def eventually(look: Callable[[], T | None]) -> T:
    """Return what ``look`` returns as soon as that is true."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        seen = look()
        if seen:
            return seen
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.002)


def ledger_loads(client: DPLBAsyncMPClient) -> list[int]:
    """Return the load of every engine as the client's picks compare it, in the order of the ranks."""
    connections = sorted(client._engines.connections.values(), key=lambda connection: connection.engine_id)
    return [connection.ledger.load(client.num_clients) for connection in connections]


def make_request(client: MPClient | SyncMPClient, sample_index: int = 0) -> AddRequest:
    """Return a request of one sample, as the facade builds it."""
    sampling = SamplingParams(max_tokens=8)
    return AddRequest(client.client_id, 0, client.request_ids.draw(), sample_index, 0, [1, 2], [], sampling)


def make_output(request: AddRequest, reason: FinishReason | None = None, *tokens: int, at: int = 0) -> EngineCoreOutput:
    """Return an output of a request from position ``at``, its end when there is a reason."""
    return EngineCoreOutput(request.request_id, request.sample_index, request.attempt, at, list(tokens), reason)


class PuppetEngine:
    """One engine's two sockets to one client."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        engine_id: EngineId,
        info: ClientInfo,
        high_water_mark: int = HIGH_WATER_MARK,
    ) -> None:
        """Connect. high_water_mark: messages of the line that may wait in here."""
        self.engine_id = engine_id
        self.client_id = info.client_id
        identity = engine_id.to_identity()
        self.channel = make_socket(context, zmq.DEALER, identity=identity, high_water_mark=high_water_mark)
        connect(self.channel, info.request_endpoint)
        self.outputs = make_socket(context, zmq.PUSH)
        connect(self.outputs, info.output_endpoint)
        self.received: list[ChannelMessage] = []
        self._decode = channel_decoder().decode
        self._out_seq = 0

    def ready(self) -> EngineReady:
        """Return what it says of itself."""
        return EngineReady(self.engine_id, BUILD_ID, CONFIG_HASH, 1000, 256, 10_000, 8, "cpu", "none", "here", 1)

    def say_ready(self, **changes: Any) -> None:
        """Shake hands."""
        self.channel.send(encode(replace(self.ready(), **changes)))

    async def next_message(self) -> Any:
        """Return the next message of the line."""
        return await eventually(self._receive)

    def say(
        self,
        *outputs: EngineCoreOutput,
        applied: int | None = None,
        utility: UtilityOutput | None = None,
        dead: str | None = None,
        report_seq: int = 1,
    ) -> None:
        """Send one output frame; by default everything received is applied."""
        self._out_seq += 1
        if applied is None:
            applied = max((message.channel_seq for message in self.received), default=0)
        frame = EngineCoreOutputs(
            self.engine_id, self.client_id, self._out_seq, applied, report_seq, list(outputs), utility, dead
        )
        self.outputs.send(encode(frame))

    def close(self) -> None:
        """Close both sockets."""
        self.channel.close()
        self.outputs.close()

    def receive_frames(self) -> list[bytes] | None:
        """Return the frames of the next message of the line as they came, if there is one."""
        try:
            return self.channel.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _receive(self) -> ChannelMessage | None:
        try:
            message = self._decode(self.channel.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None
        self.received.append(message)
        return message


class Puppets:
    """The group around one client: what the coordinator would publish, and engines on demand."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.config = ClientConfig(
            client_id=ClientId(0, 1),
            report_endpoint=ipc_endpoint(folder, "reports"),
            state_endpoint=ipc_endpoint(folder, "states"),
            request_bind=ipc_endpoint(folder, "requests"),
            output_bind=ipc_endpoint(folder, "outputs"),
            build_id=BUILD_ID,
            config_hash=CONFIG_HASH,
        )
        self.reports = make_socket(self.context, zmq.PULL)
        bind(self.reports, self.config.report_endpoint)
        self.states = make_socket(self.context, zmq.XPUB)
        bind(self.states, self.config.state_endpoint)
        self.info = ClientInfo(self.config.client_id, self.config.request_bind, self.config.output_bind)
        self.engines: dict[EngineId, PuppetEngine] = {}
        self._seq = 0

    def open_engine(self, rank: int = 0, incarnation: int = 1, high_water_mark: int = HIGH_WATER_MARK) -> PuppetEngine:
        """Connect an engine; it says nothing yet."""
        engine = PuppetEngine(self.context, EngineId(rank, incarnation), self.info, high_water_mark)
        self.engines[engine.engine_id] = engine
        return engine

    async def join(self, client: DPLBAsyncMPClient, num_ranks: int = 1) -> list[PuppetEngine]:
        """Connect engines and wait until the client knows them."""
        engines = [self.open_engine(rank) for rank in range(num_ranks)]
        for engine in engines:
            engine.say_ready()
        await client.wait_ready(DEADLINE_S, num_ranks)
        return engines

    async def next_report(self) -> ClientReport:
        """Return the next report of the client."""
        report = report_decoder().decode(await eventually(self._receive_report))
        assert isinstance(report, ClientReport)
        return report

    async def subscribed(self) -> None:
        """Wait until the client hears the state channel."""
        topics = {await eventually(self._receive_subscription) for _ in range(2)}
        assert topics == {b"\x01" + GROUP_TOPIC, b"\x01" + LOAD_TOPIC}

    def publish_group(self, *replicas: ReplicaInfo, seq: int | None = None, **changes: Any) -> None:
        """Publish a GroupState with these replicas."""
        self._seq += 1
        group = self.group_state(*replicas, seq=self._seq if seq is None else seq, **changes)
        self.states.send_multipart([GROUP_TOPIC, encode(group)])

    def group_state(self, *replicas: ReplicaInfo, **changes: Any) -> GroupState:
        """Return a GroupState with these replicas."""
        group = GroupState(
            generation=1,
            seq=1,
            committed=Membership(1, list(self.engines)),
            proposal=None,
            direct=False,
            dismissed=[],
            wave_started=0,
            clients=[self.info],
            replicas=list(replicas),
        )
        return replace(group, **changes)

    def publish_loads(self, *reports: EngineReport, generation: int = 1) -> None:
        """Publish a LoadSnapshot."""
        self._seq += 1
        self.states.send_multipart([LOAD_TOPIC, encode(LoadSnapshot(generation, self._seq, list(reports)))])

    def engine_report(self, engine_id: EngineId, seq: int, applied: int, **load: Any) -> EngineReport:
        """Return a report of a serving engine."""
        by_client = {self.config.client_id: applied}
        return EngineReport(engine_id, seq, 1, 1, 1, 0, EnginePhase.RUNNING, 0, True, by_client, Load(**load))

    def close(self) -> None:
        """Close every socket."""
        self.context.destroy(linger=0)

    def _receive_report(self) -> bytes | None:
        return self._receive(self.reports)

    def _receive_subscription(self) -> bytes | None:
        return self._receive(self.states)

    def _receive(self, socket: "zmq.Socket[bytes]") -> bytes | None:
        try:
            return socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None


@asynccontextmanager
async def puppets() -> AsyncIterator[Puppets]:
    """Yield a group without a client; its sockets are closed at the end."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        group = Puppets(Path(folder))
        try:
            yield group
        finally:
            group.close()


@asynccontextmanager
async def puppet_client(num_ranks: int = 1) -> AsyncIterator[tuple[DPLBAsyncMPClient, Puppets, list[PuppetEngine]]]:
    """Yield a client, its group, and engines that have shaken hands."""
    async with puppets() as group:
        client = DPLBAsyncMPClient(group.config)
        try:
            engines = await group.join(client, num_ranks)
            await group.subscribed()
            yield client, group, engines
        finally:
            await client.aclose()
