"""Packaging and chores: the wheel, the versions, the installed command and the words of the Makefile."""

import ast
import re
import subprocess
import sys
from importlib.metadata import EntryPoint, packages_distributions
from pathlib import Path

import pytest

from tests.house.repository import PACKAGES, ROOT, pyproject, tracked_files

CHORES = ("setup", "demo", "test", "lint", "types", "bench", "chaos")


def requirements() -> list[str]:
    project = pyproject()["project"]
    return [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]


def test_the_wheel_lists_its_packages_one_by_one() -> None:
    included = pyproject()["tool"]["setuptools"]["packages"]["find"]["include"]
    assert sorted(included) == sorted(pattern for package in PACKAGES for pattern in (package, f"{package}.*"))


def test_ranges_are_open_and_the_constraints_alone_pin() -> None:
    assert not [line for line in requirements() if "==" in line or "~=" in line]
    constraints = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in constraints if not re.fullmatch(r"[\w-]+==[\d.]+", line)] == []
    assert "torch" in {line.partition("==")[0] for line in constraints}, "later ones than the CPU build pull in CUDA"


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


def test_what_is_imported_is_declared() -> None:
    """Each import names a distribution of its own: what merely comes along with another one may go away with it."""
    declared = {normal(re.split(r"[><=\[ ]", line)[0]) for line in requirements()}
    ours = {*PACKAGES, "tests", "bench"}
    imported = {
        name.partition(".")[0]
        for path in tracked_files()
        if path.suffix == ".py"
        for name in imports_of(path)
        if name.partition(".")[0] not in ours | sys.stdlib_module_names
    }
    distributions = packages_distributions()
    assert {name for name in imported if declared.isdisjoint(map(normal, distributions[name]))} == set()


def normal(distribution: str) -> str:
    return distribution.lower().replace("_", "-")


def imports_of(path: Path) -> set[str]:
    """Return the modules a file names, also inside functions."""
    nodes = list(ast.walk(ast.parse((ROOT / path).read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def test_the_command_calls_a_function_that_exists() -> None:
    (target,) = pyproject()["project"]["scripts"].values()
    assert callable(EntryPoint("shoal", target, "console_scripts").load())
