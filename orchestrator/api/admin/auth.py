"""Authorization: API keys for what generates, the admin key for what changes the deployment.

As soon as any key is set, whatever is neither open nor below ``/v1/`` needs the admin key, so that a route that is
added later is not open by accident.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Any

from metrics.stats import ServingStats
from orchestrator.api.base.asgi import Receive, Send, request_id_of, send_error
from orchestrator.api.base.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"})
"""Probes and scrapers have no key, and none of these holds what callers sent."""

_API_PREFIX = "/v1/"
_ADMIN_PREFIX = "/v1/cluster/"  # below, not the table of ranks itself
_SCHEME = b"bearer "


class KeyRing:
    """Judges one call by its path and its token.

    Keeps digests of the keys and not the keys: what is compared then has one length, and a dump shows none.
    """

    def __init__(self, api_keys: Sequence[str], admin_key: str | None) -> None:
        self._api = [_digest(key.encode()) for key in api_keys]
        self._admin = None if admin_key is None else _digest(admin_key.encode())

    @property
    def is_empty(self) -> bool:
        """Tell whether there are no keys, so that every call is allowed."""
        return not self._api and self._admin is None

    def judge(self, path: str, authorization: bytes | None) -> ApiError | None:
        """Return why a call is refused; None when it may go on. authorization: the header, if there is one."""
        if self.is_empty or path in OPEN_PATHS:
            return None
        is_api, is_admin = self._match(authorization)
        if is_admin:
            return None
        if _is_admin_call(path):
            return self._refuse_admin(is_api=is_api, is_named=authorization is not None)
        return None if is_api or not self._api else _unknown(is_named=authorization is not None)

    def _match(self, authorization: bytes | None) -> tuple[bool, bool]:
        """Tell whether the token is an API key, and the admin key; takes as long whatever it is."""
        given = authorization or b""
        token = _digest(given[len(_SCHEME) :].strip() if given[: len(_SCHEME)].lower() == _SCHEME else b"")
        # all of them, whatever the first comparison gives: time must not tell which key is close
        matches = [hmac.compare_digest(token, key) for key in self._api]
        return any(matches), self._admin is not None and hmac.compare_digest(token, self._admin)

    def _refuse_admin(self, *, is_api: bool, is_named: bool) -> ApiError:
        if self._admin is None:
            message = "admin calls are refused: this server has API keys and no admin key; set --admin-api-key"
            return ApiError(403, message, code="admin_key_not_set")
        if is_api:
            message = "an API key does not do for admin calls: they need the admin key (--admin-api-key)"
            return ApiError(403, message, code="admin_key_required")
        return _unknown(is_named=is_named)


class Guard:
    """An ASGI callable in front of all others: passes calls on, or refuses them before their body is read."""

    def __init__(self, keys: KeyRing, stats: ServingStats, app: Any) -> None:
        self._keys = keys
        self._stats = stats
        self._app = app

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        error = None
        if scope["type"] == "http":
            authorization = next((value for name, value in scope["headers"] if name == b"authorization"), None)
            error = self._keys.judge(scope["path"], authorization)
        if error is None:
            await self._app(scope, receive, send)
            return
        self._stats.on_rejected(str(error.status))
        await send_error(error, request_id_of(dict(scope["headers"])), send)


def _is_admin_call(path: str) -> bool:
    return path.startswith(_ADMIN_PREFIX) or not path.startswith(_API_PREFIX)


def _unknown(*, is_named: bool) -> ApiError:
    if is_named:
        return ApiError(401, "this key is not valid here", code="invalid_api_key")
    return ApiError(401, "this server wants a key, in the header `Authorization: Bearer KEY`", code="missing_api_key")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
