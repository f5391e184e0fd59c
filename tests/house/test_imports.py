"""The import contracts hold, and each of them would catch the import it forbids."""

import re
import subprocess
import sys
from pathlib import Path

from tests.house.repository import ROOT

# What a hasty change might write, and the contract it must run into.
PLANTED = {
    "lb/views/planted.py": ("import client", "requests go one way: orchestrator -> client -> lb -> engine"),
    "engine/scheduler/planted.py": ("import engine.core.native", "the rooms of the engine are layers"),
    "orchestrator/ranks/planted.py": ("import orchestrator.api.admin.app", "the rooms of the orchestrator are layers"),
    "orchestrator/api/admin/planted.py": (
        "import orchestrator.api.serving.generation",
        "the rooms of the HTTP API are layers",
    ),
    "lb/routing/planted.py": (
        "import lb.coordinator.state",
        "picks, views and the coordinator know nothing of each other",
    ),
    "lb/routing/planted_too.py": ("import time", "what decides is pure"),
    "client/planted.py": (
        "import engine.interfaces.plan",
        "above the engine only its wire, its configuration and the names of model files are known",
    ),
    "lb/views/planted_too.py": ("import engine.config.engine_config", "lb and metrics know no engine configuration"),
    "engine/core/planted.py": ("import metrics.stats", "metrics is said by the orchestrator alone"),
    "metrics/planted.py": ("import client.config", "metrics sees only engine.wire and lb"),
    "engine/wire/planted.py": ("def lazy():\n    import engine.config.engine_config", "engine.wire stands alone"),
    "orchestrator/supervisor/planted.py": ("import ray", "ray is imported only in orchestrator.launch"),
    "engine/proc/planted.py": (
        "def lazy():\n    import torch",
        "torch is imported only in engine.runner, engine.model and engine.parallel",
    ),
}
VERDICT = re.compile(r"^(.+?) (KEPT|BROKEN)\b.*$", re.MULTILINE)


def lint(root: Path) -> tuple[int, dict[str, str]]:
    """Return import-linter's exit status and contract -> verdict for the packages under ``root``."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    linted = subprocess.run(
        [*command, "--no-cache"], cwd=root, env={"COLUMNS": "200"}, capture_output=True, text=True, timeout=120
    )
    return linted.returncode, dict(VERDICT.findall(linted.stdout))


def test_every_contract_holds_and_has_its_planted_violation() -> None:
    status, verdicts = lint(ROOT)
    assert verdicts == {contract: "KEPT" for _, contract in PLANTED.values()}
    assert status == 0


def test_planted_violations_break_every_contract(copy_of_the_tree: Path) -> None:
    for path, (text, _) in PLANTED.items():
        (copy_of_the_tree / path).write_text(f"{text}\n")
    status, verdicts = lint(copy_of_the_tree)
    assert status == 1
    assert [contract for contract, verdict in verdicts.items() if verdict == "KEPT"] == []


def test_one_planted_violation_breaks_its_contract_alone(copy_of_the_tree: Path) -> None:
    text, expected = PLANTED["orchestrator/supervisor/planted.py"]
    (copy_of_the_tree / "orchestrator/supervisor/planted.py").write_text(f"{text}\n")
    _, verdicts = lint(copy_of_the_tree)
    assert [contract for contract, verdict in verdicts.items() if verdict == "BROKEN"] == [expected]
