"""One of four lockstep ranks is killed or frozen under 32 open streams, twenty times: no stream notices.

Ten rounds a deployment: a replica whose engine ends again and again is made to wait longer each time.
"""

import pytest

from tests.chaos.rounds import Fault, kill_engine, run_rounds, stop_engine
from tests.chaos.streams import mixed_asks
from tests.integration.lockstep import wait_whole
from tests.integration.serving import deployment

SIM = (
    *("--engine", "sim", "--executor", "local", "--data-parallel-size", "4", "--enable-expert-parallel"),
    *("--sim-step-ms", "10", "--stall-timeout", "3", "--max-restarts", "100", "--num-redundant-experts", "2"),
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


@pytest.mark.parametrize("fault", [kill_engine, stop_engine], ids=["kill", "stop"])
@pytest.mark.parametrize("seed", [1, 2])
def test_twenty_rounds_cost_no_stream_anything(fault: Fault, seed: int) -> None:
    with deployment(*SIM) as served:
        wait_whole(served.wait_ready(), 4)
        run_rounds(served, mixed_asks(32, 150), [fault] * 10, seed=seed)
        wait_whole(served.wait_ready(), 4)
        served.end()
