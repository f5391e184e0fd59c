"""The start of an engine process, and the reason it gives when it cannot start."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.wire.messages import FinishReason
from engine.wire.states import EnginePhase
from tests.contract.engine_peers import Peers, engine_process, peers_in


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="shoal-") as path:
        yield Path(path)


@pytest.fixture
def peers(folder: Path) -> Iterator[Peers]:
    with peers_in(folder) as peers:
        yield peers


def test_a_loading_engine_reports_its_progress(peers: Peers, folder: Path) -> None:
    with engine_process(peers.spec(load_s=0.5), folder / "stderr"):
        report = peers.coordinator.wait_report(lambda r: r.progress > 0)
        assert (report.phase, report.detail) == (EnginePhase.LOADING, "pretending to load weights")
        ready = peers.coordinator.wait_report(lambda r: r.phase is EnginePhase.IDLE)
        assert (ready.device, ready.node, ready.detail) == ("sim", "here", "")


@pytest.mark.parametrize("how", ["dismissed", "SIGTERM"])
def test_an_engine_told_to_stop_while_it_loads_exits_0_at_once(peers: Peers, folder: Path, how: str) -> None:
    with engine_process(peers.spec(load_s=10.0), folder / "stderr") as process:
        peers.coordinator.wait_subscribed()
        peers.coordinator.wait_report(lambda r: r.detail != "")
        if how == "dismissed":
            peers.publish(dismissed=True)
        else:
            process.terminate()
        assert process.wait(10) == 0
        peers.coordinator.wait_report(lambda r: r.phase is EnginePhase.STOPPING)


def test_an_engine_that_cannot_load_says_why_and_exits_1(peers: Peers, folder: Path) -> None:
    with engine_process(peers.spec(vocab_size=10), folder / "stderr") as process:
        assert process.wait(10) == 1
        report = peers.coordinator.wait_report(lambda r: r.phase is EnginePhase.STOPPING)
        assert "vocab_size" in report.detail
        assert "vocab_size" in (folder / "stderr").read_text()


def test_an_engine_of_another_build_refuses_to_start(peers: Peers, folder: Path) -> None:
    spec = msgspec.structs.replace(peers.spec(), build_id="0.0.0+other")
    with engine_process(spec, folder / "stderr") as process:
        assert process.wait(10) == 1
    assert "0.0.0+other" in (folder / "stderr").read_text()


def test_an_engine_that_cannot_reach_the_line_exits_1(peers: Peers, folder: Path) -> None:
    spec = msgspec.structs.replace(peers.spec(), report_endpoint="nowhere")
    with engine_process(spec, folder / "stderr") as process:
        assert process.wait(10) == 1
    assert "cannot connect to nowhere" in (folder / "stderr").read_text()


def test_a_spec_that_is_none_is_refused_in_one_line(folder: Path) -> None:
    result = subprocess.run([sys.executable, "-m", "engine.main"], input=b'{"a": 1}', capture_output=True, timeout=20)
    assert result.returncode == 1
    assert result.stderr.startswith(b"engine: standard input holds no valid EngineSpec")
    assert result.stderr.count(b"\n") == 1


def test_a_sim_engine_never_imports_torch() -> None:
    code = "import sys, engine.main; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=20).returncode == 0


def test_an_engine_whose_reports_are_muted_serves_all_the_same(peers: Peers, folder: Path) -> None:
    with engine_process(peers.spec(report_delay_s=-1.0), folder / "stderr"):
        client = peers.introduce()
        peers.coordinator.wait_report(lambda r: r.phase is not EnginePhase.LOADING)
        tokens, _ = client.finish(client.add(max_tokens=30))
        assert len(tokens) == 30
        assert not peers.coordinator.reports_socket.poll(400)


def test_no_step_waits_for_a_client_that_takes_nothing(peers: Peers, folder: Path) -> None:
    num_tokens = 15_000
    spec = peers.spec(step_s=0.0, prefill_s_per_token=0.0, max_model_len=20_000)
    with engine_process(spec, folder / "stderr"):
        client = peers.introduce()
        request = client.add(max_tokens=num_tokens)
        peers.coordinator.wait_report(lambda r: r.load.num_generation_tokens == num_tokens)
        tokens, _ = client.finish(request)
        assert len(tokens) == num_tokens
        assert len(client.frames) < num_tokens


def test_a_client_that_takes_nothing_gets_no_more_compute_until_it_takes_again(peers: Peers, folder: Path) -> None:
    # steps fast enough to fill the pipe soon, and far too many tokens to come to their end before the stall
    spec = peers.spec(step_s=0.000_2, prefill_s_per_token=0.0, max_model_len=260_000)
    with engine_process(spec, folder / "stderr"):
        client = peers.introduce()
        request = client.add(max_tokens=250_000)
        stalled = peers.coordinator.wait_report(lambda r: r.load.num_steps > 0 and r.load.num_running == 0).load
        assert (stalled.num_waiting, stalled.kv_usage) == (1, 0.0)
        other = peers.add_client()
        peers.publish()
        other.wait_ready()
        assert len(other.finish(other.add(max_tokens=5))[0]) == 5
        while len(client.tokens[request.request_id]) <= stalled.num_generation_tokens:
            client.next_frame()
        client.abort(request)
        assert client.finish(request)[1].finish_reason is FinishReason.ABORT
