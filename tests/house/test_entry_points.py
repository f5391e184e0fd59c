"""Entry points of light processes: each is imported in a process of its own, and brings none of the heavy packages."""

import subprocess
import sys

import pytest

from tests.house.repository import ROOT

HEAVY = {"torch", "ray", "transformers"}

FORBIDDEN = {
    "lb.coordinator.__main__": HEAVY | {"numpy", "pydantic", "fastapi", "prometheus_client", "client", "orchestrator"},
    "client.dplb_async_mp_client": HEAVY | {"numpy", "orchestrator", "metrics"},
    "client.inproc_client": HEAVY | {"numpy", "orchestrator", "metrics"},
    "orchestrator.api.__main__": HEAVY,
    "orchestrator.llm.offline": HEAVY,
    "orchestrator.cli.main": HEAVY,
    "metrics.collector": HEAVY | {"client", "orchestrator"},
    "engine.main": HEAVY | {"client", "lb", "metrics", "orchestrator"},
    "engine.parallel.sim": {"transformers", "ray"},
    "engine.proc.lockstep": {"transformers", "ray"},  # a sim rank needs torch's collectives and nothing else of it
    "engine.wire.messages": HEAVY | {"numpy", "zmq", "lb", "client", "metrics", "orchestrator"},
}


@pytest.mark.parametrize("module", FORBIDDEN)
def test_an_entry_point_does_not_import_what_its_process_has_no_room_for(module: str) -> None:
    script = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    imported = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert set(imported.stdout.split()) & FORBIDDEN[module] == set()
