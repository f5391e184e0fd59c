"""Many starts and stops: leftovers of one cycle that twenty make visible."""

import signal
from pathlib import Path

import pytest

from tests.integration.serving import chat, deployment, ranks_of

pytestmark = [pytest.mark.chaos, pytest.mark.ray, pytest.mark.timeout(1800)]

NUM_CYCLES = 20


def files() -> set[Path]:
    """Return what Ray leaves outside of the run's folder unless configured otherwise."""
    suspects = (Path("/tmp/ray"), Path.home() / ".ray", *Path("/dev/shm").glob("*plasma*"))
    return {path for path in suspects if path.exists()}


@pytest.mark.parametrize("executor", ["local", "ray"])
def test_cycles_leave_no_process_and_no_file(executor: str) -> None:
    before = files()
    for cycle in range(NUM_CYCLES):
        with deployment("--engine", "sim", "--data-parallel-size", "2", "--executor", executor) as served:
            url = served.wait_ready()
            assert chat(url) == "length"
            assert len(ranks_of(url)) == 2
            served.signal_group(signal.SIGINT) if cycle % 2 else served.send_signal(signal.SIGTERM)
            assert served.wait_exit() == 0, served.stderr
            assert "every process ended by itself" in served.stderr
            served.assert_nothing_left()
        assert files() - before == set(), f"after cycle {cycle}"
