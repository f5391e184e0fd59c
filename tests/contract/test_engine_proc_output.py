"""The output thread alone, with a client that has stopped taking anything."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from engine.proc.output import OutputThread
from engine.proc.pacing import HEARTBEAT_FIRST_GAP_S, HEARTBEAT_NEXT_GAP_S
from engine.proc.shared import ClientGone, ClientStalled, Intake, SharedState
from engine.wire.codec import output_decoder
from engine.wire.endpoints import ipc_endpoint
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import EngineCoreOutput
from engine.wire.sockets import bind, make_socket

CLIENT = ClientId(0, 1)


class DeafClient:
    """A client's PULL socket that nobody reads, behind a real output thread; ``take_one`` reads one frame."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", folder: Path, **slow_client_detector: Any) -> None:
        self.shared = SharedState(EngineId(0, 1), "here", lambda: None)
        self.thread = OutputThread(context, EngineId(0, 1), self.shared, **slow_client_detector)
        self.pull = make_socket(context, zmq.PULL, high_water_mark=1)
        self._position = 0
        self._decode = output_decoder().decode
        endpoint = bind(self.pull, ipc_endpoint(folder, "outputs"))
        self.thread.start()
        self.thread.open(CLIENT, endpoint)

    def fill_until_told(self) -> list[Intake]:
        """Send tokens until the thread has something to say to the loop."""
        while not (taken := self.shared.take(core_has_work=True)):
            self.thread.put({CLIENT: [EngineCoreOutput(1, 0, 0, self._position, [7])]}, report_seq=1)
            self._position += 1
        return taken

    def take_one(self) -> int:
        """Return the number of the next frame."""
        return self._decode(self.pull.recv()).out_seq

    def take_into(self, tokens: dict[int, list[int]], numbers: list[int]) -> None:
        """Read one frame: its tokens behind those of each sequence, its number behind the others."""
        frame = self._decode(self.pull.recv())
        numbers.append(frame.out_seq)
        for output in frame.outputs:
            assert output.first_position == len(tokens[output.request_id])
            tokens[output.request_id] += output.new_token_ids


@contextmanager
def deaf_client(**slow_client_detector: float) -> Iterator[DeafClient]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        client = DeafClient(context, Path(folder), **slow_client_detector)
        try:
            yield client
        finally:
            client.thread.finish(flush_s=0.2)
            context.destroy()


def test_a_dead_client_loses_its_sequences_and_sees_the_gap_when_it_wakes() -> None:
    with deaf_client(client_dead_s=0.05) as client:
        assert client.fill_until_told() == [ClientGone(CLIENT)]
        numbers = [client.take_one()]
        while numbers[-1] == numbers[0] + len(numbers) - 1:
            numbers.append(client.take_one())
        assert numbers[-1] > numbers[-2] + 1


def test_a_client_that_takes_nothing_is_stalled_until_it_takes_again() -> None:
    with deaf_client(client_stall_s=0.05) as client:
        assert client.fill_until_told() == [ClientStalled(CLIENT, is_stalled=True)]
        assert client.shared.take_rest() == []
        while client.pull.poll(timeout=200):  # until the thread has nothing left to send
            client.take_one()
        assert client.shared.take_rest() == [ClientStalled(CLIENT, is_stalled=False)]


def test_behind_the_last_frame_come_empty_ones_so_that_a_lost_one_is_noticed() -> None:
    with deaf_client() as client:
        client.thread.put({CLIENT: [EngineCoreOutput(1, 0, 0, 0, [7])]}, report_seq=1)
        numbers = []
        for gap_s in (0.0, HEARTBEAT_FIRST_GAP_S, HEARTBEAT_NEXT_GAP_S):
            assert client.pull.poll(int(1000 * (gap_s + 5)))
            numbers.append(client.take_one())
        assert numbers == [1, 2, 3]


def test_a_slow_client_gets_every_token_once_and_in_order_while_steps_go_on() -> None:
    """Steps come while frames are under way, refused and merged: the loop and the thread share one queue."""
    num_steps = 20_000
    with deaf_client() as client:
        tokens: dict[int, list[int]] = {1: [], 2: []}
        numbers: list[int] = []
        for step in range(num_steps):
            client.thread.put({CLIENT: [EngineCoreOutput(i, 0, 0, step, [step]) for i in tokens]}, report_seq=step + 1)
            if step % 3 == 0 and client.pull.poll(0):
                client.take_into(tokens, numbers)
        while len(tokens[2]) < num_steps:
            assert client.pull.poll(5_000), "nothing came"
            client.take_into(tokens, numbers)
    assert tokens == {request_id: list(range(num_steps)) for request_id in tokens}
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) < num_steps, "nothing was merged: the pipe never was full"


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_stall_ends_with_its_line(is_closed: bool) -> None:
    with deaf_client(client_stall_s=0.05) as client:
        client.fill_until_told()
        if is_closed:
            client.thread.close(CLIENT)
    assert client.shared.take_rest() == [ClientStalled(CLIENT, is_stalled=False)]
