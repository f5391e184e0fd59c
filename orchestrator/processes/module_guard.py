"""The module guard: refuses to run when one of Shoal's generic package names resolves to a foreign module.

Shoal's folders are called ``client``, ``engine``, ``lb`` and so on, and an editable install puts its finder behind
every other: a ``client.py`` in the current directory would win silently and fail far away. So processes check first.
"""

import importlib.util
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

from engine.wire.errors import StartupError

PACKAGES = ("orchestrator", "client", "lb", "engine", "metrics")

_HOME = Path(__file__).resolve().parents[2]


def check_packages(
    home: Path = _HOME, find_spec: Callable[[str], ModuleSpec | None] = importlib.util.find_spec
) -> None:
    """Check that every package of Shoal comes from the folder this file was installed to.

    home: folder that holds the packages. find_spec: looks a top-level module up without importing it.

    Raises:
        StartupError: one does not, with the path of the foreign module.
    """
    for name in PACKAGES:
        found = _location(find_spec(name))
        if found != home / name:
            raise StartupError(
                f"the module {name!r} is not Shoal's: it resolves to {found or 'nothing'}, Shoal is in {home}; "
                "start from another directory, or take that path out of PYTHONPATH"
            )


def _location(spec: ModuleSpec | None) -> Path | None:
    if spec is None:
        return None
    if spec.origin is not None and Path(spec.origin).name != "__init__.py":
        return Path(spec.origin).resolve()
    # A folder without __init__.py has no origin, only places to search in.
    places = list(spec.submodule_search_locations or ())
    return Path(places[0]).resolve() if places else None
