"""A copy of the product in which a test may plant what must be found."""

import shutil
from pathlib import Path

import pytest

from tests.house.repository import PACKAGES, ROOT


@pytest.fixture
def copy_of_the_tree(tmp_path: Path) -> Path:
    """Return a folder with the packages of the wheel and the import contracts."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path
