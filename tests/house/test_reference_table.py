"""The client's README says which test shows each property of the reference description: those tests exist."""

import re
from pathlib import Path

import pytest

from tests.house.repository import ROOT

README = ROOT / "client" / "README.md"
HEADING = "## What the reference description promises"


def table_rows() -> list[str]:
    """Return the rows of the table, without its head."""
    section = README.read_text().split(HEADING)[1].split("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ")][1:]


def shown_by(row: str) -> list[str]:
    """Return what the last column names."""
    return re.findall(r"`([^`]+)`", row.rstrip("| ").rpartition(" | ")[2])


def test_the_table_is_read() -> None:
    assert len(table_rows()) > 20


@pytest.mark.parametrize("row", table_rows(), ids=lambda row: row[2:50].strip("`* "))
def test_a_row_names_tests_that_exist(row: str) -> None:
    names = shown_by(row)
    assert names
    for name in names:
        file, _, function = name.partition("::")
        path = _test_file(file)
        assert path is not None, f"there is no tests/{file}"
        assert not function or re.search(rf"^(async )?def {function}\(", path.read_text(), re.MULTILINE), name


def _test_file(name: str) -> Path | None:
    return next((path for path in (ROOT / "tests" / "contract" / name, ROOT / "tests" / name) if path.is_file()), None)
