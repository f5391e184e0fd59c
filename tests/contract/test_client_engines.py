"""The client against real engine processes and a real coordinator."""


from engine.wire.messages import FinishReason, SeatState
from tests.contract.deployment import deployment, finish, make_request


async def test_a_request_streams_from_the_picked_engine_to_its_end() -> None:
    async with deployment() as group, group.client() as client:
        request = make_request(client, max_tokens=12)
        engine_id = await client.add_request_async(request)
        outputs = (await finish(client, request))[request.request_id]
        assert engine_id in group.engines
        assert sum(len(output.new_token_ids) for output in outputs) == 12
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert client.statistics()["in_flight"] == 0


async def test_a_killed_engine_ends_every_sequence_it_had_exactly_once() -> None:
    async with deployment(2) as group, group.client(2) as client:
        requests = [make_request(client, max_tokens=1000) for _ in range(10)]
        engines = {request.request_id: await client.add_request_async(request) for request in requests}
        (victim,) = {engine_id for engine_id in engines.values() if engine_id.rank == 0}
        lost = [request for request in requests if engines[request.request_id] == victim]
        kept = [request for request in requests if engines[request.request_id] != victim]
        group.kill_engine(victim)
        group.set_seat(victim, SeatState.DEAD, "killed by signal 9")
        outputs = await finish(client, *lost)
        for request in lost:
            end = outputs[request.request_id][-1]
            assert end.finish_reason is FinishReason.ERROR
            assert "killed by signal 9" in (end.error or "")
        await client.abort_requests_async([request.request_id for request in kept])
        outputs = await finish(client, *kept)
        assert all(outputs[r.request_id][-1].finish_reason is FinishReason.ABORT for r in kept)
        assert all(r.request_id not in outputs for r in lost)
