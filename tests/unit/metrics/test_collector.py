"""Which series a scrape shows, and that Prometheus's own linter and the documentation agree with it."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import metrics
from engine.wire.ids import EngineId
from engine.wire.load import Load
from engine.wire.replicas import ReplicaInfo
from engine.wire.states import EngineState, ReplicaState
from lb.views.totals import Totals
from metrics.collector import render
from metrics.stats import ServingStats
from tests.unit.metrics.rendering import full_registry, registry_of, samples_of, view

README = Path(metrics.__file__).parent / "README.md"
DOCUMENTED = re.compile(r"^\| `(shoal_\w+)` \| (\w+) \| ([^|]*)\|", re.MULTILINE)


def busy_stats() -> ServingStats:
    stats = ServingStats()
    for rank in (0, 1):
        stats.on_accepted(100)
        stats.on_picked(rank)
        stats.on_first_token(rank, 0.02, 0.001)
        stats.on_tokens(rank, 5)
        stats.on_inter_token(rank, 0.010, 4)
        stats.on_finished(rank, "length", 0.5, 100)
    stats.on_rejected("429")
    return stats


def ranks_of(samples: dict[tuple[str, str], float], name: str) -> set[str]:
    return {labels for sample, labels in samples if sample == name}


def families() -> dict[str, tuple[str, frozenset[str]]]:
    """Return family -> (type, label names), of a scrape with something in every family."""
    text, _ = render(full_registry(busy_stats()))
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = (family.type, frozenset(labels))
    return found


def test_the_readme_documents_exactly_the_families_there_are() -> None:
    documented = {
        name: (kind, frozenset(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in DOCUMENTED.findall(README.read_text())
    }
    assert documented == families()


def test_promtool_finds_nothing_to_say() -> None:
    text, _ = render(full_registry(busy_stats()))
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=30)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_every_per_rank_family_has_a_series_for_a_rank_without_requests() -> None:
    samples = samples_of(registry_of(ServingStats(), [view(0), view(3, state=EngineState.LOADING)]))
    per_rank = {name for name, (_, labels) in families().items() if "engine" in labels}
    for family in per_rank:
        sample = f"{family}_count" if f"{family}_count" in {name for name, _ in samples} else family
        ranks = {rank.partition(",")[0] for rank in ranks_of(samples, sample)}
        assert ranks == {"engine=0", "engine=3"}, family
    assert samples["shoal_engine_up", "engine=0"] == 1
    assert samples["shoal_engine_up", "engine=3"] == 0


def test_gauges_are_the_engines_own_report() -> None:
    load = Load(num_queued=2, num_waiting=3, num_running=4, num_waiting_tokens=70, kv_usage=0.25)
    samples = samples_of(registry_of(ServingStats(), [view(0, load=load)]))
    assert samples["shoal_requests_waiting", "engine=0"] == 5
    assert samples["shoal_requests_running", "engine=0"] == 4
    assert samples["shoal_kv_cache_usage_ratio", "engine=0"] == 0.25
    assert samples["shoal_waiting_tokens", "engine=0"] == 70


def test_the_engines_own_counters_are_those_of_all_lives_of_the_rank() -> None:
    samples = samples_of(
        registry_of(ServingStats(), [view(0, 2, load=Load(), totals=Totals(1, 2, 3, 4, 5, 6, 7, 8.5))])
    )
    names = [
        *("engine_steps", "engine_prompt_tokens", "engine_generation_tokens", "engine_preemptions"),
        *("prefix_cache_queried_tokens", "prefix_cache_hit_tokens"),
        *("engine_empty_steps", "engine_collective_seconds"),
    ]
    assert [samples[f"shoal_{name}_total", "engine=0"] for name in names] == [1, 2, 3, 4, 5, 6, 7, 8.5]


def test_restarts_are_counted_by_rank_and_by_how_the_engine_before_ended() -> None:
    replica = ReplicaInfo(EngineId(0, 4), ReplicaState.ALIVE, restarts={"hung": 2, "signal": 1})
    samples = samples_of(registry_of(ServingStats(), [replace(view(0, 4), replica=replica)]))
    restarts = {labels: value for (name, labels), value in samples.items() if name == "shoal_engine_restarts_total"}
    assert restarts == {
        "engine=0,reason=exit": 0,
        "engine=0,reason=signal": 1,
        "engine=0,reason=lost": 0,
        "engine=0,reason=hung": 2,
    }


def test_a_dead_rank_loses_every_series_and_is_counted_as_dead() -> None:
    views = [view(0), view(1)]
    registry = registry_of(busy_stats(), views)
    assert ("shoal_picks_total", "engine=1") in samples_of(registry)
    views[1] = view(1, state=EngineState.DEAD)
    samples = samples_of(registry)
    assert not [key for key in samples if "engine=1" in key[1]]
    assert samples["shoal_engines", "state=dead"] == 1
    assert samples["shoal_engines", "state=ready"] == 1


def test_a_suspect_rank_keeps_its_series_but_is_not_up() -> None:
    samples = samples_of(registry_of(busy_stats(), [view(0), view(1, state=EngineState.SUSPECT)]))
    assert samples["shoal_engines", "state=suspect"] == samples["shoal_engines", "state=ready"] == 1
    assert (samples["shoal_engine_up", "engine=0"], samples["shoal_engine_up", "engine=1"]) == (1, 0)
    assert ("shoal_picks_total", "engine=1") in samples


def test_a_removed_rank_is_gone_and_counters_go_on_when_it_comes_back() -> None:
    stats = busy_stats()
    views = [view(0), view(1)]
    registry = registry_of(stats, views)
    del views[1]
    assert ("shoal_picks_total", "engine=1") not in samples_of(registry)
    views.append(view(1, incarnation=2))
    stats.on_picked(1)
    assert samples_of(registry)["shoal_picks_total", "engine=1"] == 2


def test_no_snapshot_yet_is_infinitely_old() -> None:
    assert samples_of(registry_of(ServingStats(), [], None))["shoal_snapshot_age_seconds", "api_server=0"] == float(
        "inf"
    )


def test_two_registries_do_not_disturb_each_other() -> None:
    first, second = registry_of(busy_stats(), [view(0)]), registry_of(ServingStats(), [view(0)])
    assert samples_of(first)["shoal_picks_total", "engine=0"] == 1
    assert samples_of(second)["shoal_picks_total", "engine=0"] == 0


def test_a_lockstep_group_shows_its_membership_and_what_its_experts_have_to_do() -> None:
    samples = samples_of(full_registry(ServingStats()))
    names = ("epoch", "wave", "members", "reforming", "load_imbalance_ratio")
    assert [samples[f"shoal_group_{name}", ""] for name in names] == [4, 2, 2, 0, pytest.approx(4 / 3)]
    assert [samples["shoal_expert_tokens_total", f"expert={expert}"] for expert in range(3)] == [30, 20, 10]


def test_independent_ranks_have_no_series_of_a_group() -> None:
    samples = samples_of(registry_of(ServingStats(), [view(0)]))
    assert not [name for name, _ in samples if name.startswith(("shoal_group_", "shoal_expert_"))]
