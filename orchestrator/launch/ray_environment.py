"""The environment of an embedded Ray, which it reads only while it is imported: hence a module that imports no ray."""

import os
import secrets
from pathlib import Path


def prepare_environment(folder: Path, *, is_alone: bool = False) -> None:
    """Give the Ray that this process will start a token of its own in ``folder``, and no usage reports.

    Left alone, Ray would write a token into the home directory and leave it there.

    is_alone: no other host will join, so that every part of it listens on loopback. Ray has no option for that: it
    listens on every interface, whatever address it is given, but for a switch by which it spares the firewalls of other
    systems.
    """
    token = folder / "ray-token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ.pop("RAY_AUTH_TOKEN", None)
    if is_alone:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
