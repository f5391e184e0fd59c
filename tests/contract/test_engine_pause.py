"""Pause, sleep and cordon on one real engine process: what the operator wants comes with the group's state."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.wire.control import ClusterSettings, PauseMode
from engine.wire.messages import EngineReport, FinishReason
from engine.wire.states import EnginePhase
from tests.contract.engine_peers import Peers, engine_process, peers_in


@pytest.fixture
def peers() -> Iterator[Peers]:
    """Peers of one running engine that knows nobody yet."""
    with (
        tempfile.TemporaryDirectory(prefix="shoal-") as path,
        peers_in(Path(path)) as peers,
        engine_process(peers.spec(), Path(path) / "stderr") as peers.process,
    ):
        yield peers


def in_force(peers: Peers, settings: ClusterSettings) -> EngineReport:
    """Publish settings and wait until the engine's report shows them."""
    peers.publish(settings=settings)
    return peers.coordinator.wait_report(lambda r: r.settings_seq == settings.seq)


def num_steps_of_next_reports(peers: Peers, first: EngineReport) -> set[int]:
    return {first.load.num_steps} | {peers.coordinator.next_report().load.num_steps for _ in range(3)}


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.WAIT, PauseMode.KEEP])
def test_once_a_pause_is_in_force_no_step_runs_and_new_requests_wait_for_its_end(peers: Peers, mode: PauseMode) -> None:
    client = peers.introduce()
    earlier = client.add(max_tokens=200)
    client.wait_token(earlier)
    report = in_force(peers, ClusterSettings(1, mode))
    new_request = client.add(max_tokens=3)
    assert len(num_steps_of_next_reports(peers, report)) == 1
    waiting = peers.coordinator.wait_report(lambda r: r.load.num_waiting == 1)
    assert (waiting.load.num_running, waiting.has_work) == (mode is PauseMode.KEEP, False)
    assert new_request.request_id not in client.ends
    in_force(peers, ClusterSettings(2))
    assert len(client.finish(new_request)[0]) == 3
    tokens, last = client.finish(earlier)
    assert last.finish_reason is (FinishReason.ABORT if mode is PauseMode.ABORT else FinishReason.LENGTH)
    assert mode is PauseMode.ABORT or len(tokens) == 200


def test_an_abort_during_a_pause_is_answered_during_the_pause(peers: Peers) -> None:
    client = peers.introduce()
    in_force(peers, ClusterSettings(1, PauseMode.KEEP))
    request = client.add(max_tokens=5)
    client.abort(request)
    assert client.finish(request)[1].finish_reason is FinishReason.ABORT


def test_a_sleeping_engine_says_so_holds_no_cache_and_wakes_up(peers: Peers) -> None:
    client = peers.introduce()
    request = client.add(max_tokens=300)
    client.wait_token(request)
    report = in_force(peers, ClusterSettings(1, sleep_level=1))
    assert (report.is_sleeping, report.has_work, report.load.kv_usage) == (True, False, 0.0)
    assert client.call("echo", "still here").result == "still here"
    report = in_force(peers, ClusterSettings(2))
    assert not report.is_sleeping
    assert len(client.finish(request)[0]) == 300


def test_a_cordoned_engine_finishes_what_it_has_and_sends_new_requests_elsewhere(peers: Peers) -> None:
    client = peers.introduce()
    earlier = client.add(max_tokens=100)
    client.wait_token(earlier)
    in_force(peers, ClusterSettings(1, cordoned=[0]))
    new_request = client.add(max_tokens=3)
    assert client.finish(new_request)[1].finish_reason is FinishReason.REROUTE
    assert client.finish(earlier)[1].finish_reason is FinishReason.LENGTH
    in_force(peers, ClusterSettings(2))
    assert client.finish(client.add(max_tokens=3))[1].finish_reason is FinishReason.LENGTH


def test_a_coordinator_that_does_not_know_the_settings_yet_changes_nothing(peers: Peers) -> None:
    peers.introduce()
    in_force(peers, ClusterSettings(5, PauseMode.KEEP))
    other = peers.add_client()
    peers.publish(settings=ClusterSettings())
    other.wait_ready()  # so that state was seen
    assert peers.coordinator.next_report().settings_seq == 5
    in_force(peers, ClusterSettings(6))


def test_a_refilled_rank_has_the_settings_before_it_says_that_it_is_ready() -> None:
    with tempfile.TemporaryDirectory(prefix="shoal-") as path, peers_in(Path(path)) as peers:
        spec = msgspec.structs.replace(peers.spec(), settings=ClusterSettings(7, PauseMode.KEEP, 1, [0]))
        with engine_process(spec, Path(path) / "stderr") as peers.process:
            report = peers.coordinator.wait_report(lambda r: r.phase is not EnginePhase.LOADING)
            assert (report.settings_seq, report.is_sleeping) == (7, True)
            assert all(r.settings_seq == 7 for r in peers.coordinator.reports if r.phase is EnginePhase.IDLE)


def test_a_refilled_rank_logs_at_the_level_that_is_wanted_until_it_is_wanted_no_more() -> None:
    """Settings are logged, at INFO and at the level there was before them."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as path, peers_in(Path(path)) as peers:
        spec = msgspec.structs.replace(peers.spec(), settings=ClusterSettings(1, log_level="error"))
        stderr = Path(path) / "stderr"
        with engine_process(spec, stderr) as peers.process:
            peers.introduce()
            for settings in (ClusterSettings(2, log_level="error"), ClusterSettings(3), ClusterSettings(4)):
                in_force(peers, settings)
            assert [number for number in (2, 3, 4) if f"settings {number}: " in stderr.read_text()] == [4]
