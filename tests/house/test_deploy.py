"""The examples in deploy/ are true: promtool accepts them, every metric they name exists, the configuration loads."""

import json
import re
import subprocess
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

from metrics.collector import render
from metrics.stats import ServingStats
from orchestrator.config.sources import load
from tests.house.repository import ROOT
from tests.unit.metrics.rendering import full_registry

DEPLOY = ROOT / "deploy"
NAME = re.compile(r"\bshoal_[a-z0-9_]+\b")

RANKS = """
rule_files: [{rules}]
evaluation_interval: 10s
tests:
  - interval: 10s
    input_series:
      - {{series: 'shoal_engines{{state="dead", instance="a"}}', values: '0 0 1 1 1 1 1 1'}}
      - {{series: 'shoal_engines{{state="suspect", instance="a"}}', values: '0 2 2 2 2 0 0 0'}}
    alert_rule_test:
      - {{eval_time: 20s, alertname: ShoalRankDead}}
      - eval_time: 60s
        alertname: ShoalRankDead
        exp_alerts:
          - exp_labels: {{severity: warning, state: dead, instance: a}}
            exp_annotations: {{summary: "Dead ranks of a: 1; shoal status names them and why"}}
      - {{eval_time: 20s, alertname: ShoalRankSuspect}}
      - eval_time: 40s
        alertname: ShoalRankSuspect
        exp_alerts:
          - exp_labels: {{severity: warning, state: suspect, instance: a}}
            exp_annotations:
              summary: "Ranks of a without a sign of progress: 2; they get nothing new and are killed after
                --stall-timeout; shoal status names them and why"
      - {{eval_time: 60s, alertname: ShoalRankSuspect}}
"""


def promtool(*arguments: str) -> None:
    checked = subprocess.run(["promtool", *arguments], cwd=DEPLOY, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def families() -> set[str]:
    stats = ServingStats()
    stats.on_rejected("429")
    text, _ = render(full_registry(stats))
    return {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in text_string_to_metric_families(text.decode())
    }


def named_in(text: str) -> set[str]:
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in NAME.findall(text)}


def test_prometheus_accepts_the_configuration_with_its_rules() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", "alerts.yml")


def test_a_dead_and_a_suspect_rank_raise_their_alarms(tmp_path: Path) -> None:
    test_file = tmp_path / "test.yml"
    test_file.write_text(RANKS.format(rules=DEPLOY / "alerts.yml"))
    promtool("test", "rules", str(test_file))


def test_every_metric_of_a_rule_exists() -> None:
    rules = [rule for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
    assert rules
    assert named_in(" ".join(rule["expr"] for rule in rules)) <= families()


def test_the_dashboard_shows_exactly_the_metrics_there_are() -> None:
    panels = json.loads((DEPLOY / "dashboard.json").read_text())["panels"]
    assert named_in(" ".join(target["expr"] for panel in panels for target in panel["targets"])) == families()


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    panels = json.loads((DEPLOY / "dashboard.json").read_text())["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels) == len({panel["id"] for panel in panels})


def test_the_example_configuration_loads() -> None:
    config = load({}, {}, DEPLOY / "shoal.toml")
    assert (config.model, config.data_parallel_size, config.kv_cache_memory) == ("smollm2-135m", 2, 512 * 2**20)
