"""Scrapes of a real deployment by a real Prometheus server."""

import os
import re
import signal
import subprocess
from collections import defaultdict
from collections.abc import Iterator

import httpx
import pytest

from metrics.stats import ServingStats
from tests.integration.prometheus_server import Prometheus, prometheus
from tests.integration.serving import chat, deployment, eventually, ranks_of
from tests.unit.metrics.rendering import registry_of, samples_of, view

SIM = ("--engine=sim", "--executor=local", "--data-parallel-size=2", "--sim-step-ms=2")
NUM_REQUESTS = 20
MAX_TOKENS = 7

PER_RANK = {name for name, labels in samples_of(registry_of(ServingStats(), [view(0)])) if "engine=" in labels}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with deployment(*SIM) as served:
        yield served.wait_ready()
        served.send_signal(signal.SIGTERM)
        assert served.wait_exit() == 0


@pytest.fixture(scope="module")
def scraper(url: str) -> Iterator[Prometheus]:
    with prometheus(url) as server:
        yield server


def ranks_by_name(scraper: Prometheus) -> dict[str, set[str]]:
    """Return sample name -> ranks that Prometheus has stored it for."""
    found = defaultdict(set)
    for labels, _ in scraper.query('group by (__name__, engine) ({__name__=~"shoal_.+", engine!=""})'):
        found[labels["__name__"]].add(labels["engine"])
    return dict(found)


def test_every_per_rank_family_has_both_engine_labels_before_the_first_request(scraper: Prometheus) -> None:
    assert eventually(lambda: ranks_by_name(scraper)) == {name: {"0", "1"} for name in PER_RANK}


def test_counters_in_prometheus_are_those_of_the_requests_sent(url: str, scraper: Prometheus) -> None:
    for _ in range(NUM_REQUESTS):
        assert chat(url, max_tokens=MAX_TOKENS) == "length"
    scraper.wait_scraped()
    assert scraper.query("sum(shoal_generation_tokens_total)")[0][1] == NUM_REQUESTS * MAX_TOKENS
    assert scraper.query('shoal_requests_total{reason="length"}')[0][1] == NUM_REQUESTS
    assert scraper.query("sum(shoal_e2e_request_latency_seconds_count)")[0][1] == NUM_REQUESTS
    picks = {labels["engine"]: value for labels, value in scraper.query("shoal_picks_total")}
    assert picks == {"0": NUM_REQUESTS / 2, "1": NUM_REQUESTS / 2}


def test_a_repeated_prompt_is_seen_to_hit_the_prefix_cache(url: str) -> None:
    """Whole blocks of 16 tokens are found again, all but the one that holds the last token of the prompt."""
    before = eventually(lambda: settled(url))
    body = {"model": "sim", "prompt": "x" * 100, "max_tokens": MAX_TOKENS, "data_parallel_rank": 1, "ignore_eos": True}
    for _ in range(3):
        httpx.post(f"{url}/v1/completions", json=body).raise_for_status()
    expected = {
        "engine_prompt_tokens": 300,
        "engine_generation_tokens": 3 * MAX_TOKENS,
        "engine_steps": 3 * MAX_TOKENS,
        "engine_preemptions": 0,
        "engine_empty_steps": 0,
        "engine_collective_seconds": 0,
        "prefix_cache_queried_tokens": 300,
        "prefix_cache_hit_tokens": 2 * 96,
    }
    eventually(lambda: counted(url)["engine_generation_tokens"] == before["engine_generation_tokens"] + 3 * MAX_TOKENS)
    assert {name: count - before[name] for name, count in counted(url).items()} == expected


def counted(url: str, families: str = "(?:engine|prefix_cache)_\\w+") -> dict[str, float]:
    """Return the counters of rank 1's engine itself: family without prefix and suffix -> value."""
    text = httpx.get(f"{url}/metrics").text
    found = re.findall(rf'^shoal_({families})_total{{engine="1"}} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def settled(url: str) -> dict[str, float] | None:
    """Return ``counted``, once rank 1's report covers every token that this API process has got from it."""
    own = counted(url)
    return own if own["engine_generation_tokens"] == counted(url, "generation_tokens")["generation_tokens"] else None


def test_promtool_accepts_a_live_scrape_without_remarks(url: str) -> None:
    chat(url)
    text = httpx.get(f"{url}/metrics").content
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=30)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_the_series_of_a_killed_rank_are_gone_and_it_is_counted_as_dead() -> None:
    with deployment(*SIM, "--max-restarts=0") as served:
        url = served.wait_ready()
        chat(url)
        os.kill(ranks_of(url)[1]["pid"], signal.SIGKILL)
        eventually(lambda: 'engine="1"' not in httpx.get(f"{url}/metrics").text)
        text = httpx.get(f"{url}/metrics").text
        assert 'shoal_engines{state="dead"} 1.0' in text
        assert 'shoal_engine_up{engine="0"} 1.0' in text
        served.send_signal(signal.SIGTERM)
        assert served.wait_exit() == 0


def test_the_counters_of_a_rank_go_on_when_its_engine_is_replaced() -> None:
    with deployment(*SIM) as served:
        url = served.wait_ready()
        chat(url, data_parallel_rank=1, max_tokens=MAX_TOKENS)
        before = eventually(lambda: (own := settled(url)) and own["engine_generation_tokens"] and own)
        os.kill(ranks_of(url)[1]["pid"], signal.SIGKILL)
        eventually(lambda: ranks_of(url)[1]["incarnation"] == 2 and ranks_of(url)[1]["state"] == "ready")
        assert counted(url) == before
        chat(url, data_parallel_rank=1, max_tokens=MAX_TOKENS)
        eventually(lambda: counted(url)["engine_generation_tokens"] == 2 * MAX_TOKENS)
        assert counted(url)["engine_steps"] == 2 * before["engine_steps"]
        served.send_signal(signal.SIGTERM)
        assert served.wait_exit() == 0
