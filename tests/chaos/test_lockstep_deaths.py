"""Deaths and stops of one of four lockstep ranks under 32 open streams, twenty times: no answer changes.

Ten rounds a deployment: the back-off of a replica whose engine ends again and again grows.
"""

import pytest

from tests.chaos.rounds import Fault, kill_engine, run_rounds, stop_engine
from tests.chaos.streams import mixed_requests
from tests.integration.lockstep import wait_whole
from tests.integration.serving import deployment

SIM = (
    *("--engine", "sim", "--executor", "local", "--data-parallel-size", "4", "--enable-expert-parallel"),
    *("--sim-step-ms", "10", "--stall-timeout", "3", "--max-restarts", "100", "--num-redundant-experts", "2"),
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


@pytest.mark.parametrize("fault", [kill_engine, stop_engine], ids=["kill", "stop"])
@pytest.mark.parametrize("seed", [1, 2])
def test_twenty_rounds_change_no_answer(fault: Fault, seed: int) -> None:
    with deployment(*SIM) as served:
        wait_whole(served.wait_ready(), 4)
        run_rounds(served, mixed_requests(32, 150), [fault] * 10, seed=seed)
        wait_whole(served.wait_ready(), 4)
        served.end()
