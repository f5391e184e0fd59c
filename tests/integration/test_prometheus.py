"""A real Prometheus scrapes a real deployment."""

import json
import os
import signal
import subprocess
from collections import defaultdict
from collections.abc import Iterator

import pytest

from metrics.stats import ServingStats
from tests.integration.prometheus_server import Prometheus, deployment, eventually, get, prometheus
from tests.unit.metrics.rendering import registry_of, samples_of, view

NUM_RANKS = 2
NUM_REQUESTS = 20
MAX_TOKENS = 7

PER_RANK = {name for name, labels in samples_of(registry_of(ServingStats(), [view(0)])) if "engine=" in labels}


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    with deployment(NUM_RANKS) as url:
        yield url


@pytest.fixture(scope="module")
def scraper(served: str) -> Iterator[Prometheus]:
    with prometheus(served) as server:
        yield server


def ranks_by_name(scraper: Prometheus) -> dict[str, set[str]]:
    """Return sample name -> ranks that Prometheus has stored it for."""
    found = defaultdict(set)
    for labels, _ in scraper.query('group by (__name__, engine) ({__name__=~"shoal_.+", engine!=""})'):
        found[labels["__name__"]].add(labels["engine"])
    return dict(found)


def complete(url: str) -> int:
    """Send one completion; return the output tokens it was billed."""
    body = {"model": "sim", "prompt": "hello", "max_tokens": MAX_TOKENS, "ignore_eos": True}
    return int(json.loads(get(f"{url}/v1/completions", body))["usage"]["completion_tokens"])


def test_every_per_rank_family_has_both_engine_labels_before_the_first_request(scraper: Prometheus) -> None:
    assert eventually(lambda: ranks_by_name(scraper)) == {name: {"0", "1"} for name in PER_RANK}


def test_counters_in_prometheus_are_what_the_api_billed(served: str, scraper: Prometheus) -> None:
    billed = sum(complete(served) for _ in range(NUM_REQUESTS))
    eventually(lambda: scraper.query("sum(shoal_generation_tokens_total)")[0][1] == billed)
    assert scraper.query('shoal_requests_total{reason="length"}')[0][1] == NUM_REQUESTS
    assert scraper.query("sum(shoal_e2e_request_latency_seconds_count)")[0][1] == NUM_REQUESTS
    picks = {labels["engine"]: value for labels, value in scraper.query("shoal_picks_total")}
    assert picks == {"0": NUM_REQUESTS / 2, "1": NUM_REQUESTS / 2}


def test_promtool_finds_nothing_to_say_about_a_live_scrape(served: str) -> None:
    complete(served)
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=get(f"{served}/metrics"), capture_output=True, timeout=30
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_the_series_of_a_killed_rank_are_gone_and_it_is_counted_as_dead() -> None:
    with deployment(NUM_RANKS) as url:
        ranks = json.loads(get(f"{url}/v1/cluster"))["ranks"]
        os.kill(next(rank["pid"] for rank in ranks if rank["rank"] == 1), signal.SIGKILL)
        eventually(lambda: b'engine="1"' not in get(f"{url}/metrics"))
        text = get(f"{url}/metrics").decode()
        assert 'shoal_engines{state="dead"} 1.0' in text
        assert 'shoal_engine_up{engine="0"} 1.0' in text
