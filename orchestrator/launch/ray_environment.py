"""What an embedded Ray reads from the environment, and only while it is imported: call this before."""

import os
import secrets
from pathlib import Path


def prepare_environment(folder: Path) -> None:
    """Give the Ray that this process will start a token of its own in ``folder``, and no usage reports.

    Left alone, Ray would write a token into the home directory and leave it there.
    """
    token = folder / "ray-token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
