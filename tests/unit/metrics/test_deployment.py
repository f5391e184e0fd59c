"""Several API processes, as objects that share memory: what any of them shows of all."""

import time
from collections.abc import Iterator

import pytest

from engine.wire.ids import EngineId
from engine.wire.load import Load
from lb.views.totals import RankTotals
from metrics.collector import make_registry
from metrics.deployment import DeploymentStats
from metrics.shared_status import StatsMemory
from tests.unit.metrics.rendering import report, samples_of, view


@pytest.fixture
def memory() -> Iterator[StatsMemory]:
    shared = StatsMemory.make(3)
    yield shared
    shared.close()


def processes(memory: StatsMemory) -> list[DeploymentStats]:
    return [DeploymentStats(index, 1, memory) for index in range(3)]


def serve(process: DeploymentStats, rank: int, num_tokens: int = 5, reason: str = "stop") -> None:
    """Account for one request from its pick to its end."""
    process.stats.on_accepted(10)
    process.stats.on_picked(rank)
    process.stats.on_first_token(rank, 0.02, 0.001)
    process.stats.on_tokens(rank, num_tokens)
    process.stats.on_inter_token(rank, 0.01, num_tokens - 1)
    process.stats.on_finished(rank, reason, 0.1, 10)


def scrape(process: DeploymentStats) -> dict[tuple[str, str], float]:
    return samples_of(make_registry(process.read, lambda: [view(0), view(1)]))


def counters(samples: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    ends = ("_total", "_bucket", "_count", "_sum")
    return {key: value for key, value in samples.items() if key[0].endswith(ends)}


def test_every_process_tells_the_sums_of_all_at_once(memory: StatsMemory) -> None:
    all_three = processes(memory)
    for number, process in enumerate(all_three):
        for _ in range(number + 1):
            serve(process, rank=number % 2)
        scrapes = [counters(scrape(asked)) for asked in all_three]
        assert scrapes[0] == scrapes[1] == scrapes[2]
    samples = scrape(all_three[0])
    assert samples["shoal_requests_total", "reason=stop"] == 6
    assert samples["shoal_picks_total", "engine=0"] == 4
    assert samples["shoal_generation_tokens_total", "engine=1"] == 10
    assert samples["shoal_time_to_first_token_seconds_count", "engine=0"] == 4
    assert samples["shoal_e2e_request_latency_seconds_sum", "engine=1"] == pytest.approx(0.2)
    assert samples["shoal_request_prompt_tokens_count", ""] == 6


def test_what_a_dead_process_counted_stays_and_what_it_showed_goes(memory: StatsMemory) -> None:
    first, second, _ = processes(memory)
    serve(second, 0)
    second.row.num_open = 4
    second.on_heartbeat(0.1, 0.2, [view(0)])
    before = scrape(first)
    assert before["shoal_open_requests", "api_server=1"] == 4
    memory.rows()[1].clear()
    after = scrape(first)
    assert counters(after) == counters(before)
    assert {key for key in after if key[1] == "api_server=1"} == {("shoal_api_server_starts_total", "api_server=1")}


def test_a_successor_goes_on_and_begins_with_nothing_open(memory: StatsMemory) -> None:
    first, second, _ = processes(memory)
    serve(second, 0)
    second.row.num_open = 4
    memory.rows()[1].clear()
    successor = DeploymentStats(1, 2, memory)
    serve(successor, 0)
    samples = scrape(first)
    assert samples["shoal_picks_total", "engine=0"] == 2
    assert samples["shoal_api_server_starts_total", "api_server=1"] == 2
    assert samples["shoal_open_requests", "api_server=1"] == 0
    assert first.read().servers[1].incarnation == 2


def test_what_engines_count_is_not_multiplied_by_the_processes(memory: StatsMemory) -> None:
    all_three = processes(memory)
    for number, process in enumerate(all_three):
        load = Load(num_steps=100 + number)
        RankTotals(process.totals_record).on_reports([report(EngineId(0, 1), load)])
    assert [scrape(process)["shoal_engine_steps_total", "engine=0"] for process in all_three] == [102] * 3


def test_a_restarted_process_keeps_what_engines_of_former_lives_counted(memory: StatsMemory) -> None:
    """The only process dies, meanwhile an engine is replaced: its successor must not begin again at 0."""
    RankTotals(DeploymentStats(0, 1, memory).totals_record).on_reports([report(EngineId(0, 1), Load(num_steps=100))])
    successor = DeploymentStats(0, 2, memory)
    RankTotals(successor.totals_record).on_reports([report(EngineId(0, 2), Load(num_steps=7))])
    assert scrape(successor)["shoal_engine_steps_total", "engine=0"] == 107


def test_sequences_in_flight_are_those_of_living_processes(memory: StatsMemory) -> None:
    first, second, third = processes(memory)
    for process, num_in_flight in ((first, 1), (second, 2), (third, 4)):
        process.on_heartbeat(0.0, None, [view(0, num_in_flight=num_in_flight)])
    assert first.read().in_flight == {0: 7}
    memory.rows()[1].clear()
    assert first.read().in_flight == {0: 5}
    third.on_heartbeat(0.0, None, [])
    assert first.read().in_flight == {0: 1}


def test_a_process_that_does_not_turn_is_seen_to_lag_and_not_awake(memory: StatsMemory) -> None:
    first, second, _ = processes(memory)
    second.on_heartbeat(0.002, 0.1, [])
    now = time.monotonic()
    assert first.siblings[0].is_awake(now)
    assert first.siblings[0].lag_seen_s(now) == 0.002
    assert not first.siblings[0].is_awake(now + 5)
    assert first.siblings[0].lag_seen_s(now + 5) == pytest.approx(4.75, abs=0.05)
    assert first.siblings[0].is_there


def test_a_process_alone_needs_no_memory() -> None:
    alone = DeploymentStats()
    serve(alone, 0)
    alone.on_heartbeat(0.1, None, [view(0, num_in_flight=2)])
    samples = scrape(alone)
    assert samples["shoal_picks_total", "engine=0"] == 1
    assert samples["shoal_event_loop_lag_seconds", "api_server=0"] == pytest.approx(0.1)
    assert alone.read().in_flight == {0: 2}
