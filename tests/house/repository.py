"""The repository as the house tests see it: what git tracks, and the packages of the wheel."""

import subprocess
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("orchestrator", "client", "lb", "engine", "metrics")
ROOMS = (*PACKAGES, "deploy", "bench", "tests")


def tracked_files() -> list[Path]:
    """Return what git tracks and is there, relative to the root."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True, timeout=30)
    return [Path(name) for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def product_files() -> list[Path]:
    """Return the modules of the wheel, relative to the root."""
    return [path for path in tracked_files() if path.suffix == ".py" and path.parts[0] in PACKAGES]


def texts() -> dict[Path, str]:
    """Return the text of every tracked file."""
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in tracked_files()}


def pyproject() -> dict[str, Any]:
    """Return the parsed pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())
