"""Packaging and chores: what is installed, from which versions, by which words."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.house.repository import PACKAGES, ROOT, pyproject

CHORES = ("setup", "demo", "test", "lint", "types", "bench", "chaos")


def requirements() -> list[str]:
    project = pyproject()["project"]
    return [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]


def test_the_wheel_lists_its_packages_one_by_one() -> None:
    included = pyproject()["tool"]["setuptools"]["packages"]["find"]["include"]
    assert sorted(included) == sorted(pattern for package in PACKAGES for pattern in (package, f"{package}.*"))


def test_ranges_are_open_and_the_constraints_alone_pin() -> None:
    assert not [line for line in requirements() if "==" in line or "~=" in line]
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()


def test_every_pip_call_gets_the_constraints() -> None:
    lines = [line for name in ("Makefile", ".ci/run") for line in (ROOT / name).read_text().splitlines()]
    calls = [line for line in lines if re.search(r"\bpip3? install\b", line)]
    assert calls
    assert [line for line in calls if "-c constraints.txt" not in line] == []


def dry_run(chore: str, venv: Path) -> str:
    """Return the commands that a chore would run with that virtual environment."""
    planned = subprocess.run(
        ["make", "--dry-run", chore, f"VENV={venv}"], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert planned.returncode == 0, planned.stderr
    return planned.stdout


@pytest.mark.parametrize("chore", CHORES)
def test_every_chore_is_one_word_and_installs_first(chore: str, tmp_path: Path) -> None:
    assert "pip install" in dry_run(chore, tmp_path)


def test_setup_does_nothing_when_nothing_changed(tmp_path: Path) -> None:
    (tmp_path / ".installed").touch()
    assert "pip install" not in dry_run("setup", tmp_path)


def test_the_command_is_installed() -> None:
    assert pyproject()["project"]["scripts"] == {"shoal": "orchestrator.cli:main"}
