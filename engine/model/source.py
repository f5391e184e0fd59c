"""How a model is named to the loading library, and what the library's failures say to a user."""

import textwrap
from typing import Any

from engine.model.names import KNOWN_MODELS, ResolvedModel
from engine.wire.errors import StartupError

_MAX_REASON = 300


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
