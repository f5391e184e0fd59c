"""The graph of imports between the folders of the product, which ``python -m tests.house.folders`` prints as JSON.

It runs in a process of its own, because the packages that it looks at are those of its working directory.
"""

import json
import sys
from collections.abc import Iterator

import grimp

from tests.house.repository import PACKAGES


def imports() -> Iterator[tuple[str, str]]:
    """Yield (importer, imported) of all modules, imports inside functions and for type checkers included."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    for module in sorted(graph.modules):
        for imported in sorted(graph.find_modules_directly_imported_by(module)):
            yield _folder(graph, module), _folder(graph, imported)


def _folder(graph: grimp.ImportGraph, module: str) -> str:
    """Return the package that a module stands in; a package stands in itself."""
    return module if graph.find_children(module) else module.rpartition(".")[0]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(sorted(set(imports()))))
