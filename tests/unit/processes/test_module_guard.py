"""The start-up guard against other people's modules of the same names."""

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from engine.wire.errors import StartupError
from orchestrator.processes.module_guard import PACKAGES, check_packages


def spec_of(name: str, home: Path) -> ModuleSpec:
    spec = ModuleSpec(name, None, origin=str(home / name / "__init__.py"), is_package=True)
    spec.submodule_search_locations = [str(home / name)]
    return spec


def test_the_packages_of_this_installation_pass() -> None:
    check_packages()


def test_a_module_file_of_the_same_name_is_named(tmp_path: Path) -> None:
    def find(name: str) -> ModuleSpec:
        if name == "client":
            return ModuleSpec(name, None, origin=str(tmp_path / "elsewhere" / "client.py"))
        return spec_of(name, tmp_path)

    with pytest.raises(StartupError, match=f"'client' is not Shoal's: it resolves to {tmp_path}/elsewhere/client.py"):
        check_packages(tmp_path, find)


def test_a_foreign_package_is_named(tmp_path: Path) -> None:
    other = tmp_path / "other"
    with pytest.raises(StartupError, match=f"it resolves to {other}/engine, Shoal is in {tmp_path}"):
        check_packages(tmp_path, lambda name: spec_of(name, other if name == "engine" else tmp_path))


def test_a_folder_without_init_file_is_named(tmp_path: Path) -> None:
    def find(name: str) -> ModuleSpec:
        spec = spec_of(name, tmp_path / "here" if name == "metrics" else tmp_path)
        spec.origin = None
        return spec

    with pytest.raises(StartupError, match=f"it resolves to {tmp_path}/here/metrics"):
        check_packages(tmp_path, find)


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=f"{PACKAGES[0]!r} is not Shoal's: it resolves to nothing"):
        check_packages(tmp_path, lambda _: None)
