"""The x-request-id of a call: the caller's own, or a new one."""

import os
import string
from collections.abc import Mapping

_HEADER = b"x-request-id"
_MAX_LENGTH = 128
_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-_.:/+=")


def request_id_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the caller's own id when it is harmless in a header and a log line, else a new one."""
    given = headers.get(_HEADER, b"").decode("latin-1")
    if 0 < len(given) <= _MAX_LENGTH and _CHARACTERS.issuperset(given):
        return given
    return f"req-{random_name()}"


def random_name() -> str:
    """Return 32 hex digits that nobody can guess."""
    return os.urandom(16).hex()
