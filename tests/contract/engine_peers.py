"""A coordinator and a client written by hand on ``engine.wire``, to talk to one real engine."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from engine.config.engine_config import EngineConfig, EngineKind, SimConfig
from engine.config.engine_spec import EngineSpec
from engine.wire.build import build_id, config_hash
from engine.wire.codec import encode, output_decoder, ready_decoder, report_decoder
from engine.wire.control import ClusterSettings, Membership
from engine.wire.endpoints import ipc_endpoint
from engine.wire.ids import ClientId, EngineId, RequestIds
from engine.wire.messages import (
    GROUP_TOPIC,
    AbortRequest,
    AddRequest,
    ClientInfo,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineReady,
    EngineReport,
    GroupState,
    UtilityRequest,
)
from engine.wire.process import child_environment
from engine.wire.replicas import ReplicaInfo
from engine.wire.sampling import SamplingParams
from engine.wire.sockets import bind, make_socket
from engine.wire.states import ReplicaState

ENGINE_ID = EngineId(0, 1)
DEADLINE_S = 20

Socket = zmq.Socket[bytes]


class Coordinator:
    """Publishes group states and collects reports; nothing happens between two calls."""

    def __init__(self, context: "zmq.Context[Socket]", folder: Path) -> None:
        self.report_endpoint = ipc_endpoint(folder, "reports")
        self.state_endpoint = ipc_endpoint(folder, "state")
        self.reports_socket = make_socket(context, zmq.PULL)
        self.state_socket = make_socket(context, zmq.XPUB)
        bind(self.reports_socket, self.report_endpoint)
        bind(self.state_socket, self.state_endpoint)
        self.reports: list[EngineReport] = []
        self._seq = 0
        self._settings = ClusterSettings()
        self._decode = report_decoder().decode

    def publish(
        self,
        clients: list[ClientInfo],
        *,
        dismissed: bool = False,
        leaving: bool = False,
        settings: ClusterSettings | None = None,
    ) -> None:
        """Publish a whole state; the engine must have subscribed (any report proves that it tries to).

        settings: stay published until others are given.
        """
        self._seq += 1
        self._settings = settings or self._settings
        replica = ReplicaInfo(ENGINE_ID, ReplicaState.LEAVING if leaving else ReplicaState.ALIVE)
        gone = [ENGINE_ID] if dismissed else []
        group = Membership(1, [ENGINE_ID])
        state = GroupState(1, self._seq, group, None, False, gone, 0, clients, [replica], self._settings)
        self.state_socket.send_multipart([GROUP_TOPIC, encode(state)])

    def wait_subscribed(self) -> None:
        """Wait until the engine listens to the group's state."""
        assert self.state_socket.poll(DEADLINE_S * 1000), "the engine never subscribed"
        assert self.state_socket.recv() == b"\x01" + GROUP_TOPIC

    def wait_report(self, wanted: Callable[[EngineReport], bool]) -> EngineReport:
        """Return the first report from now on that is as wanted."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            report = self.next_report()
            if wanted(report):
                return report
        raise AssertionError(f"no such report; the last one is {self.reports[-1]}")

    def next_report(self) -> EngineReport:
        """Return the next report."""
        assert self.reports_socket.poll(DEADLINE_S * 1000), "the engine is silent"
        report = self._decode(self.reports_socket.recv())
        assert isinstance(report, EngineReport)
        self.reports.append(report)
        return report


class Client:
    """One client's two bound sockets, with the numbers of its line counted by hand."""

    def __init__(self, context: "zmq.Context[Socket]", folder: Path, index: int = 0) -> None:
        self.client_id = ClientId(index, 1)
        self.info = ClientInfo(
            self.client_id, ipc_endpoint(folder, f"requests{index}"), ipc_endpoint(folder, f"outputs{index}")
        )
        self.requests = make_socket(context, zmq.ROUTER)
        self.outputs = make_socket(context, zmq.PULL)
        bind(self.requests, self.info.request_endpoint)
        bind(self.outputs, self.info.output_endpoint)
        self.ids = RequestIds(self.client_id)
        self.channel_seq = 0
        self.frames: list[EngineCoreOutputs] = []
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, EngineCoreOutput] = {}
        self._num_resumed: dict[int, int] = {}
        self._decode = output_decoder().decode

    def wait_ready(self) -> EngineReady:
        """Return the engine's first message on the request channel."""
        assert self.requests.poll(DEADLINE_S * 1000), "the engine never said that it is ready"
        identity, frame = self.requests.recv_multipart()
        assert EngineId.from_identity(identity) == ENGINE_ID
        return ready_decoder().decode(frame)

    def next_channel_seq(self) -> int:
        """Draw the next number of the line."""
        self.channel_seq += 1
        return self.channel_seq

    def send(self, message: Any) -> None:
        """Send one message to the engine, whatever its number."""
        self.requests.send_multipart([ENGINE_ID.to_identity(), encode(message)])

    def request(self, prompt: bytes = b"hello", channel_seq: int | None = None, **changes: Any) -> AddRequest:
        """Return an ADD with the next number of the line, unless one is given."""
        output_token_ids = changes.pop("output_token_ids", [])
        attempt = changes.pop("attempt", 0)
        cache_salt = changes.pop("cache_salt", None)
        sampling = SamplingParams(**({"max_tokens": 8, "seed": 7} | changes))
        number = self.next_channel_seq() if channel_seq is None else channel_seq
        request_id = self.ids.draw()
        self.tokens[request_id] = []
        self._num_resumed[request_id] = len(output_token_ids)
        return AddRequest(
            self.client_id,
            number,
            request_id,
            0,
            attempt,
            list(prompt),
            list(output_token_ids),
            sampling,
            cache_salt=cache_salt,
        )

    def add(self, prompt: bytes = b"hello", **changes: Any) -> AddRequest:
        """Send an ADD and return it."""
        request = self.request(prompt, **changes)
        self.send(request)
        return request

    def abort(self, request: AddRequest) -> None:
        """Send an ABORT of a request."""
        self.send(AbortRequest(self.client_id, self.next_channel_seq(), request.request_id, 0, request.attempt))

    def call(self, method: str, *args: Any) -> Any:
        """Call a utility method; return the answer's message."""
        call_id = self.next_channel_seq()
        self.send(UtilityRequest(self.client_id, call_id, call_id, method, list(args)))
        while (answer := self.next_frame().utility_output) is None or answer.call_id != call_id:
            pass
        return answer

    def next_frame(self) -> EngineCoreOutputs:
        """Return the next output frame; its number must be the next of this line."""
        assert self.outputs.poll(DEADLINE_S * 1000), "no output came"
        frame = self._decode(self.outputs.recv())
        self.frames.append(frame)
        assert (frame.engine_id, frame.client_id) == (ENGINE_ID, self.client_id)
        assert frame.out_seq == len(self.frames)
        for output in frame.outputs:
            self._take(output)
        return frame

    def wait_token(self, request: AddRequest) -> None:
        """Wait for the first new token of a request."""
        while not self.tokens[request.request_id]:
            self.next_frame()

    def finish(self, request: AddRequest) -> tuple[list[int], EngineCoreOutput]:
        """Wait for the end of a request; return its new tokens and its last output."""
        while request.request_id not in self.ends:
            self.next_frame()
        return self.tokens[request.request_id], self.ends[request.request_id]

    def _take(self, output: EngineCoreOutput) -> None:
        """Collect an output, which must continue its request without a hole and come before its end."""
        tokens = self.tokens[output.request_id]
        assert output.request_id not in self.ends
        assert output.first_position == self._num_resumed[output.request_id] + len(tokens)
        tokens += output.new_token_ids
        if output.finish_reason is not None:
            self.ends[output.request_id] = output


class Peers:
    """One coordinator, and clients on demand, in one folder."""

    def __init__(self, context: "zmq.Context[Socket]", folder: Path) -> None:
        self._context = context
        self._folder = folder
        self.coordinator = Coordinator(context, folder)
        self.clients: list[Client] = []
        self.process: subprocess.Popen[bytes]

    def spec(self, **sim: Any) -> EngineSpec:
        """Return the spec of a sim engine that reports here; steps take 1 ms unless told otherwise."""
        config = EngineConfig(kind=EngineKind.SIM, sim=SimConfig(**({"step_s": 0.001} | sim)))
        return EngineSpec(
            engine_id=ENGINE_ID,
            engine=config,
            report_endpoint=self.coordinator.report_endpoint,
            state_endpoint=self.coordinator.state_endpoint,
            build_id=build_id(),
            config_hash=config_hash(config),
            node="here",
        )

    def add_client(self) -> Client:
        """Bind a client; ``publish`` makes the engine know it."""
        self.clients.append(Client(self._context, self._folder, len(self.clients)))
        return self.clients[-1]

    def remove_client(self, client: Client) -> None:
        """Close a client; ``publish`` makes the engine forget it."""
        self.clients.remove(client)
        client.requests.close()
        client.outputs.close()

    def publish(self, **changes: Any) -> None:
        """Publish the group's state with every client."""
        self.coordinator.publish([client.info for client in self.clients], **changes)

    def introduce(self) -> Client:
        """Bind the first client and wait until the engine is ready for it."""
        client = self.add_client()
        self.coordinator.wait_subscribed()
        self.publish()
        client.wait_ready()
        return client


@contextmanager
def peers_in(folder: Path) -> Iterator[Peers]:
    """Yield peers whose sockets are closed at the end."""
    context: zmq.Context[Socket] = zmq.Context()
    try:
        yield Peers(context, folder)
    finally:
        context.destroy(linger=0)


@contextmanager
def engine_process(spec: EngineSpec, stderr: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start ``python -m engine.main``; whatever is left at the end is killed."""
    with stderr.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.main"], stdin=subprocess.PIPE, stderr=log, env=child_environment()
        )
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(spec))
        process.stdin.close()
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
