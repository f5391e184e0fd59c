"""The output thread alone, with a client that has stopped taking anything."""

import tempfile
from pathlib import Path

import zmq

from engine.proc.output import OutputThread
from engine.proc.shared import ClientGone, SharedState
from engine.wire.codec import output_decoder
from engine.wire.ids import ClientId, EngineId
from engine.wire.messages import EngineCoreOutput
from engine.wire.sockets import bind, ipc_endpoint, make_socket

CLIENT = ClientId(0, 1)


def test_a_dead_client_loses_its_sequences_and_sees_the_gap_when_it_wakes() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    shared = SharedState(EngineId(0, 1), "here", lambda: None)
    thread = OutputThread(context, EngineId(0, 1), shared, client_dead_s=0.05)
    pull = make_socket(context, zmq.PULL, high_water_mark=1)
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        endpoint = bind(pull, ipc_endpoint(Path(folder), "outputs"))
        thread.start()
        thread.open(CLIENT, endpoint)
        position = 0
        while not (taken := shared.take(core_has_work=True)):
            thread.put({CLIENT: [EngineCoreOutput(1, 0, 0, position, [7])]}, report_seq=1)
            position += 1
        assert taken == [ClientGone(CLIENT)]
        decode = output_decoder().decode
        numbers = [decode(pull.recv()).out_seq]
        while numbers[-1] == numbers[0] + len(numbers) - 1:
            numbers.append(decode(pull.recv()).out_seq)
        assert numbers[-1] > numbers[-2] + 1
        thread.finish(flush_s=1.0)
        pull.close()
        context.term()
