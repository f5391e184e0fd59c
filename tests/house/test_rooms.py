"""The folders of the product form no cycle, its files are few, and each module opens with what it is."""

import ast
import graphlib
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.house.repository import PACKAGES, ROOT, product_files, tracked_files

MAX_FILES = 230

# A module that opens with one of these is a riddle: what it is comes in the second sentence, if at all.
RIDDLES = {"what", "who", "whom", "whose", "when", "where", "which", "how", "whether", "why", "everything"}


def folder_imports(root: Path) -> set[tuple[str, str]]:
    """Return (importing folder, imported folder) of the packages under ``root``."""
    printed = subprocess.run(
        [sys.executable, "-m", "tests.house.folders"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # searched after the working directory
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return {(importer, imported) for importer, imported in json.loads(printed.stdout) if importer != imported}


def cycle_in(edges: set[tuple[str, str]]) -> list[str]:
    """Return the folders of one cycle, the first again at the end; nothing where there is none."""
    sorter: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
    for importer, imported in edges:
        sorter.add(importer, imported)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_folders_import_each_other_in_one_direction_only() -> None:
    edges = folder_imports(ROOT)
    assert {importer.partition(".")[0] for importer, _ in edges} == set(PACKAGES)
    assert cycle_in(edges) == []


def test_a_planted_cycle_of_folders_is_found(copy_of_the_tree: Path) -> None:
    (copy_of_the_tree / "engine/wire/planted.py").write_text("def lazy():\n    import engine.scheduler\n")
    assert {"engine.wire", "engine.scheduler"} <= set(cycle_in(folder_imports(copy_of_the_tree)))


def test_a_module_opens_with_what_it_is() -> None:
    benchmarks = [path for path in tracked_files() if path.match("bench/*.py")]
    opened = {str(path): _first_word(path) for path in (*product_files(), *benchmarks)}
    riddles = sorted(path for path, word in opened.items() if word in RIDDLES)
    assert not riddles, f"{len(riddles)} modules open with a riddle"


def _first_word(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
    return docstring.split(maxsplit=1)[0].strip(",:.").lower() if docstring else ""


def test_the_product_has_few_files() -> None:
    """How long each may be is in ``test_tree.py``; a package's own file says in one line what the folder is."""
    modules = [path for path in product_files() if path.name != "__init__.py"]
    assert len(modules) <= MAX_FILES, "a file holds one idea, but an idea does not fill six files"
