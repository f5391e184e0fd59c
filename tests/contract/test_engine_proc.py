"""One real engine process (sim core) between a hand-written coordinator and hand-written clients, over real sockets."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.wire.codec import encode
from engine.wire.messages import GROUP_TOPIC, FinishReason, LoadSnapshot, UtilityRequest
from engine.wire.states import EnginePhase
from tests.contract.engine_peers import ENGINE_ID, Peers, engine_process, peers_in

CRASH, HANG, FAIL = 1, 2, 3


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a short path: a socket's is limited to 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as path:
        yield Path(path)


@pytest.fixture
def peers(folder: Path) -> Iterator[Peers]:
    """Peers of one running engine that knows nobody yet."""
    with peers_in(folder) as peers:
        spec = peers.spec(crash_on_token=CRASH, hang_on_token=HANG, fail_on_token=FAIL)
        with engine_process(spec, folder / "stderr") as peers.process:
            yield peers


def test_the_first_message_on_a_line_says_what_the_engine_is(peers: Peers) -> None:
    client = peers.add_client()
    peers.coordinator.wait_subscribed()
    peers.publish()
    ready = client.wait_ready()
    spec = peers.spec(crash_on_token=CRASH, hang_on_token=HANG, fail_on_token=FAIL)
    assert (ready.engine_id, ready.build_id, ready.config_hash) == (ENGINE_ID, spec.build_id, spec.config_hash)
    assert (ready.max_model_len, ready.vocab_size, ready.device) == (8192, 256, "sim")
    assert ready.pid == peers.process.pid


def test_the_first_message_is_repeated_until_the_client_says_something(peers: Peers) -> None:
    client = peers.add_client()
    peers.coordinator.wait_subscribed()
    peers.publish()
    first = client.wait_ready()
    assert first.channel_number == 1
    assert client.wait_ready() == first
    client.finish(client.add(max_tokens=1))
    later = peers.add_client()
    peers.publish()
    assert later.wait_ready().channel_number == 2
    assert later.wait_ready().channel_number == 2
    assert not client.requests.poll(0), "a client that has sent something gets no more handshakes"


def test_tokens_arrive_in_order_and_the_frame_says_what_was_applied(peers: Peers) -> None:
    client = peers.introduce()
    request = client.add(max_tokens=20)
    tokens, last = client.finish(request)
    assert len(tokens) == 20
    assert last.finish_reason is FinishReason.LENGTH
    assert {frame.applied for frame in client.frames} == {1}
    first_report = peers.coordinator.wait_report(lambda r: r.report_seq >= client.frames[-1].report_seq)
    assert first_report.load.num_generation_tokens == 20


def test_a_stream_resumed_in_the_middle_is_the_unbroken_stream(peers: Peers) -> None:
    client = peers.introduce()
    whole, _ = client.finish(client.add(max_tokens=20, seed=5))
    rest, _ = client.finish(client.add(max_tokens=20, seed=5, output_token_ids=whole[:8], attempt=1))
    assert rest == whole[8:]


def test_an_abort_ends_the_request_and_frees_its_cache(peers: Peers) -> None:
    client = peers.introduce()
    request = client.add(max_tokens=8000)
    client.wait_token(request)
    client.abort(request)
    _, last = client.finish(request)
    assert last.finish_reason is FinishReason.ABORT
    report = peers.coordinator.wait_report(lambda r: r.applied.get(client.client_id) == 2 and not r.has_work)
    assert (report.load.num_running, report.load.kv_usage) == (0, 0.0)


def test_an_abort_of_an_unknown_request_is_applied_alike(peers: Peers) -> None:
    client = peers.introduce()
    client.abort(client.request(channel_seq=0))
    peers.coordinator.wait_report(lambda r: r.applied.get(client.client_id) == 1 and not r.has_work)


def test_a_mass_abort_is_seen_in_the_next_reports_without_another_request(peers: Peers) -> None:
    client = peers.introduce()
    requests = [client.add(max_tokens=8000) for _ in range(50)]
    peers.coordinator.wait_report(lambda r: r.load.num_running == 50)
    for request in requests:
        client.abort(request)
    peers.coordinator.wait_report(lambda r: r.applied.get(client.client_id) == 100)
    loads = [peers.coordinator.next_report().load for _ in range(2)]
    assert any((load.num_queued, load.num_waiting, load.num_running, load.kv_usage) == (0, 0, 0, 0.0) for load in loads)


def test_a_beginning_computed_before_is_served_from_the_cache_of_the_same_salt(peers: Peers) -> None:
    client = peers.introduce()
    prompt = b"the quick brown fox jumps over the lazy dog"
    cached = []
    for salt in (None, None, "tenant", "tenant"):
        client.finish(client.add(prompt, cache_salt=salt, max_tokens=1))
        cached.append(client.frames[-1].outputs[0].num_cached_tokens)
    assert cached == [0, 32, 0, 32]
    assert client.call("reset_prefix_cache").result is True
    client.finish(client.add(prompt, max_tokens=1))
    assert client.frames[-1].outputs[0].num_cached_tokens == 0
    load = client.call("get_load").result
    assert (load["num_prefix_query_tokens"], load["num_prefix_hit_tokens"]) == (5 * len(prompt), 64)


def test_duplicates_are_dropped_and_a_gap_waits_for_the_missing_message(peers: Peers) -> None:
    client = peers.introduce()
    first, second, third = (client.request(max_tokens=2) for _ in range(3))
    for request in (first, first, third):
        client.send(request)
    client.finish(first)
    client.send(second)
    client.finish(second)
    assert client.frames[-1].applied == 2
    client.send(third)
    client.finish(third)
    assert client.frames[-1].applied == 3
    assert client.call("line_statistics").result == {
        "clients": 1,
        "duplicate": 1,
        "gap": 1,
        "pending_messages": 0,
    }
    # tokens, not outputs: what one frame finds waiting of a sequence is one output
    assert sum(len(output.new_token_ids) for frame in client.frames for output in frame.outputs) == 6


def test_garbage_on_every_socket_is_counted_and_survived(peers: Peers) -> None:
    client = peers.introduce()
    identity = ENGINE_ID.to_identity()
    foreign = UtilityRequest(peers.add_client().client_id, 1, 1, "echo", [])
    for frames in ([b""], [b"\xc1"], [b"\x93\x01\x02\x03"], [b"a", b"b"], [encode(7)], [encode(foreign)]):
        client.requests.send_multipart([identity, *frames])
    snapshot = encode(LoadSnapshot(1, 99, []))
    for frames in ([], [b"\xc1"], [snapshot], [b"a", b"b"], [encode({"a": 1})]):
        peers.coordinator.state_socket.send_multipart([GROUP_TOPIC, *frames])
    tokens, _ = client.finish(client.add(max_tokens=3))
    assert len(tokens) == 3
    statistics = client.call("line_statistics").result
    assert (statistics["malformed message"], statistics["foreign message"]) == (5, 1)
    peers.publish()
    peers.coordinator.wait_report(lambda r: r.applied.get(client.client_id) == client.channel_seq)


def test_one_odd_request_fails_alone(peers: Peers) -> None:
    client = peers.introduce()
    good = client.add(max_tokens=30)
    faults = {
        client.add(bytes([FAIL])).request_id: "makes its request fail",
        client.add(b"").request_id: "prompt is empty",
        client.add(b"x" * 9000).request_id: "max_model_len",
        client.add(max_tokens=-1).request_id: "max_tokens",
    }
    tokens, _ = client.finish(good)
    assert len(tokens) == 30
    errors = {request_id: end.error for request_id, end in client.ends.items() if end.error is not None}
    assert errors.keys() == faults.keys()
    assert all(words in (errors[request_id] or "") for request_id, words in faults.items())


def test_an_idle_engine_runs_no_step_and_still_reports(peers: Peers) -> None:
    client = peers.introduce()
    client.finish(client.add(max_tokens=3))
    first = peers.coordinator.wait_report(lambda r: r.phase is EnginePhase.IDLE and r.load.num_steps > 0)
    reports = [peers.coordinator.next_report() for _ in range(4)]
    assert [r.report_seq for r in reports] == [first.report_seq + i for i in range(1, 5)]
    assert {(r.phase, r.load) for r in reports} == {(EnginePhase.IDLE, first.load)}


def test_a_hanging_step_does_not_silence_the_reports_and_shows_new_requests(peers: Peers) -> None:
    client = peers.introduce()
    client.add(bytes([HANG]))
    peers.coordinator.wait_report(lambda r: r.load.num_running == 1)
    client.add()
    report = peers.coordinator.wait_report(lambda r: r.applied == {client.client_id: 2})
    assert (report.load.num_queued, report.load.num_waiting, report.load.num_running) == (1, 0, 1)
    assert {peers.coordinator.next_report().load.num_steps for _ in range(3)} == {0}


def test_a_crash_leaves_last_words_a_traceback_and_exit_status_1(peers: Peers, folder: Path) -> None:
    first = peers.introduce()
    second = peers.add_client()
    peers.publish()
    second.wait_ready()
    running = first.add(max_tokens=8000)
    first.wait_token(running)
    second.add(bytes([CRASH]))
    while (frame := first.next_frame()).dead is None:
        pass
    assert "SimulatedCrashError" in frame.dead
    assert second.next_frame().dead == frame.dead
    assert peers.process.wait(10) == 1
    assert "Traceback" in (folder / "stderr").read_text()
    peers.coordinator.wait_report(lambda r: r.phase is EnginePhase.STOPPING and "died" in r.detail)


@pytest.mark.parametrize("how", ["dismissed", "SIGTERM"])
def test_an_engine_told_to_stop_gives_every_request_back_and_exits_0(peers: Peers, how: str) -> None:
    client = peers.introduce()
    request = client.add(max_tokens=8000)
    client.wait_token(request)
    if how == "dismissed":
        peers.publish(dismissed=True)
    else:
        peers.process.terminate()
    tokens, last = client.finish(request)
    assert (last.finish_reason, last.first_position + len(last.new_token_ids)) == (FinishReason.REROUTE, len(tokens))
    assert peers.process.wait(10) == 0
    peers.coordinator.wait_report(lambda r: r.phase is EnginePhase.STOPPING and r.detail == how)


def test_a_leaving_engine_finishes_its_own_and_sends_new_requests_elsewhere(peers: Peers) -> None:
    client = peers.introduce()
    running = client.add(max_tokens=300)
    client.wait_token(running)
    peers.publish(leaving=True)
    while not any(o.finish_reason is FinishReason.REROUTE for o in client.frames[-1].outputs):
        client.add(output_token_ids=[101, 102], max_tokens=3)
        client.next_frame()
    turned_away = next(o for o in client.frames[-1].outputs if o.finish_reason is FinishReason.REROUTE)
    assert (turned_away.first_position, turned_away.new_token_ids) == (2, [])
    assert client.finish(running)[1].finish_reason is FinishReason.LENGTH
    report = peers.coordinator.wait_report(lambda r: r.is_draining and not r.load.num_running)
    assert (report.load.num_queued, report.load.num_waiting) == (0, 0)
    peers.publish()
    peers.coordinator.wait_report(lambda r: not r.is_draining)


def test_a_client_no_longer_listed_is_freed_and_others_go_on(peers: Peers) -> None:
    staying = peers.introduce()
    leaving = peers.add_client()
    peers.publish()
    leaving.wait_ready()
    leaving.add(max_tokens=8000)
    leaving.next_frame()
    peers.remove_client(leaving)
    peers.publish()
    report = peers.coordinator.wait_report(lambda r: r.load.num_running == 0 and r.load.num_steps > 0)
    assert leaving.client_id not in report.applied
    tokens, _ = staying.finish(staying.add(max_tokens=3))
    assert len(tokens) == 3


def test_utility_calls_are_answered_and_a_wrong_one_says_what_there_is(peers: Peers) -> None:
    client = peers.introduce()
    assert client.call("echo", {"a": [1, 2]}).result == {"a": [1, 2]}
    assert client.call("statistics").result["num_running"] == 0
    assert "echo, get_load" in client.call("shutdown").error
    assert "argument" in client.call("echo").error
    client.finish(client.add())
