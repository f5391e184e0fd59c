"""Properties of every file: short, explained, portable."""

import re
from pathlib import Path

import pytest

from tests.house.repository import PACKAGES, ROOMS, ROOT, texts, tracked_files

MAX_LINES = 400
LONG_BY_NATURE = {".md", ".json"}

# Joined here, so that this file does not trip over itself.
REGISTRY_HOSTS = [
    ".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("download", "pytorch", "org"))
]
MACHINE_PATH = re.compile(r"(?<![\w.:/-])/(?:work|root|Users|home/\w+)/")


def packages() -> list[Path]:
    """Return every folder of the wheel that is a package."""
    return sorted(path.parent for path in tracked_files() if path.name == "__init__.py" and path.parts[0] in PACKAGES)


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_has_a_readme(room: str) -> None:
    assert (ROOT / room / "README.md").is_file()


@pytest.mark.parametrize("package", packages(), ids=str)
def test_every_package_has_a_readme_or_stands_in_its_rooms(package: Path) -> None:
    if not (ROOT / package / "README.md").is_file():
        room = (ROOT / package.parts[0] / "README.md").read_text()
        assert f"{'/'.join(package.parts[1:])}/" in room, f"{package} is not explained in {package.parts[0]}/README.md"


def test_no_file_is_long() -> None:
    long = {
        str(path): text.count("\n")
        for path, text in texts().items()
        if path.suffix not in LONG_BY_NATURE and text.count("\n") > MAX_LINES
    }
    assert not long, f"a file with more than {MAX_LINES} lines holds more than one idea"


def test_no_file_names_a_package_registry() -> None:
    assert not [str(path) for path, text in texts().items() for host in REGISTRY_HOSTS if host in text]


def test_no_file_names_a_path_of_one_machine() -> None:
    named = {str(path): found.group() for path, text in texts().items() if (found := MACHINE_PATH.search(text))}
    assert not named


def test_every_relative_link_of_a_readme_leads_somewhere() -> None:
    links = [
        (path, target)
        for path, text in texts().items()
        if path.suffix == ".md"
        for target in re.findall(r"\]\(([^)#:]+)\)", text)
    ]
    assert links
    assert [f"{path}: {target}" for path, target in links if not (ROOT / path.parent / target).exists()] == []


def test_every_file_a_readme_names_is_there() -> None:
    tracked = {str(path) for path in tracked_files()}
    missing = []
    for readme, text in texts().items():
        room = readme.parts[0] if len(readme.parts) > 1 else ""
        for name in re.findall(r"`([\w/-]+(?:/|\.)[\w/-]*\.py|[\w-]+\.py)`", text) if readme.suffix == ".md" else ():
            inside = (path.startswith((room, "tests")) and path.endswith(f"/{name}") for path in tracked)
            if name not in tracked and str(readme.parent / name) not in tracked and not any(inside):
                missing.append(f"{readme}: {name}")
    assert missing == []
