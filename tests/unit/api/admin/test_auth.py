"""Which key opens which path."""

import pytest

from orchestrator.api.admin.auth import KeyRing

BOTH = KeyRing(("first", "second"), "admin")
API_ONLY = KeyRing(("first",), None)
ADMIN_ONLY = KeyRing((), "admin")

OPEN = ["/health", "/ready", "/metrics", "/version"]
API = ["/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/x", "/v1/cluster", "/v1/no-such-thing"]
ADMIN = [
    "/pause",
    "/resume",
    "/is_paused",
    "/load",
    "/server_info",
    "/collective_rpc",
    "/v1/cluster/ranks/0/cordon",
    "/v1/cluster/scale",
    "/no-such-thing",
    "/health/",
    "/V1/models",
    "//v1/models",
    "",
]


def status(keys: KeyRing, path: str, key: str | None = None) -> int:
    """Return the status of the refusal; 200 when there is none."""
    refusal = keys.judge(path, None if key is None else f"Bearer {key}".encode())
    return 200 if refusal is None else refusal.status


@pytest.mark.parametrize("path", OPEN + API + ADMIN)
def test_without_keys_everything_is_open(path: str) -> None:
    assert KeyRing((), None).is_empty
    assert status(KeyRing((), None), path) == 200
    assert status(KeyRing((), None), path, "whatever") == 200


@pytest.mark.parametrize("keys", [BOTH, API_ONLY, ADMIN_ONLY])
@pytest.mark.parametrize("path", OPEN)
def test_probes_and_scrapers_need_no_key(keys: KeyRing, path: str) -> None:
    assert status(keys, path) == 200


@pytest.mark.parametrize("path", API)
def test_generation_needs_an_api_key_or_the_admin_key(path: str) -> None:
    assert [status(BOTH, path, key) for key in ("first", "second", "admin")] == [200] * 3
    assert [status(BOTH, path, key) for key in (None, "", "third", "firstx", "firs")] == [401] * 5
    assert status(ADMIN_ONLY, path) == 200


@pytest.mark.parametrize("path", ADMIN)
def test_whatever_else_there_is_needs_the_admin_key_as_soon_as_there_is_any_key(path: str) -> None:
    for keys in (BOTH, ADMIN_ONLY):
        assert status(keys, path, "admin") == 200
        assert [status(keys, path, key) for key in (None, "third")] == [401, 401]
    assert status(BOTH, path, "first") == 403
    assert [status(API_ONLY, path, key) for key in (None, "first", "third")] == [403] * 3


def test_a_refusal_says_what_to_do() -> None:
    def message(keys: KeyRing, path: str, key: str | None) -> str:
        refusal = keys.judge(path, None if key is None else key.encode())
        assert refusal is not None
        assert not key or key.split()[-1] not in refusal.message
        return refusal.message

    assert "--admin-api-key" in message(API_ONLY, "/pause", None)
    assert "--admin-api-key" in message(BOTH, "/pause", "Bearer first")
    assert "Authorization: Bearer KEY" in message(BOTH, "/v1/models", None)
    assert "not valid" in message(BOTH, "/v1/models", "Bearer third")


@pytest.mark.parametrize("header", [b"bearer first", b"BEARER first", b"Bearer   first "])
def test_the_scheme_is_read_as_http_means_it(header: bytes) -> None:
    assert BOTH.judge("/v1/models", header) is None


@pytest.mark.parametrize("header", [b"first", b"Basic first", b"Bearer", b"Bearer ", b"\xff\xfe", b"Bearerfirst"])
def test_anything_else_is_no_key(header: bytes) -> None:
    refusal = BOTH.judge("/v1/models", header)
    assert refusal is not None
    assert refusal.status == 401
    assert refusal.headers() == {"www-authenticate": "Bearer"}


def test_the_keys_themselves_are_not_kept() -> None:
    assert "k-secret" not in repr(vars(KeyRing(("k-secret",), "k-secret-too")))
