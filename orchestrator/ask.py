"""Asking a running deployment from the command line: where it answers, with which key, and what went wrong."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from engine.wire.errors import ShoalError
from orchestrator.run_dir import live_runs

ADMIN_KEY_VARIABLE = "SHOAL_ADMIN_API_KEY"
API_KEY_VARIABLE = "SHOAL_API_KEY"

_CONNECT_S = 10.0


def find_url(run_dir: Path | None) -> str:
    """Return where the one deployment of this machine answers.

    Raises:
        ShoalError: there is none, or more than one.
    """
    runs = list(live_runs(run_dir))
    if not runs:
        raise ShoalError("no deployment is ready on this machine; start one with shoal serve, or give --url")
    if len(runs) > 1:
        urls = ", ".join(run.url for run in runs)
        raise ShoalError(f"{len(runs)} deployments run on this machine: {urls}; choose one with --url")
    return runs[0].url


def find_key(given: str | None, environment: Mapping[str, str]) -> str | None:
    """Return the key to name: the one given, else the admin key of the environment, else its first API key."""
    return given or environment.get(ADMIN_KEY_VARIABLE) or environment.get(API_KEY_VARIABLE, "").split(",")[0] or None


def ask(method: str, url: str, key: str | None, timeout_s: float, body: Any = None) -> Any:
    """Send one request and return the JSON of its answer.

    Raises:
        ShoalError: no answer, an error answer (with its message), or not an answer of Shoal.
    """
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        answer = httpx.request(method, url, headers=headers, json=body, timeout=timeout_s, trust_env=False)
        content = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ShoalError(f"{url} does not answer like a deployment of Shoal: {error}") from error
    if answer.is_error:
        raise ShoalError(_reason(content) or f"{url} answers with status {answer.status_code}")
    return content


class Asker:
    """One deployment and the key it is asked with."""

    def __init__(self, url: str | None, run_dir: Path | None, key: str | None, environment: Mapping[str, str]) -> None:
        """Find it: at ``url``, else on this machine.

        Raises:
            ShoalError: there is none, or more than one.
        """
        self._base = (url or find_url(run_dir)).rstrip("/")
        self._key = find_key(key, environment)

    def ask(self, method: str, path: str, timeout_s: float, body: Any = None) -> Any:
        """Send one request, see ``ask``."""
        return ask(method, f"{self._base}{path}", self._key, timeout_s, body)

    def lines(self, path: str) -> Iterator[str]:
        """Yield the lines of an answer that does not end by itself.

        Raises:
            ShoalError: no answer, or one that says no.
        """
        headers = {} if self._key is None else {"authorization": f"Bearer {self._key}"}
        timeout = httpx.Timeout(_CONNECT_S, read=None)
        url = f"{self._base}{path}"
        try:
            with httpx.stream("GET", url, headers=headers, timeout=timeout, trust_env=False) as answer:
                if answer.is_error:
                    raise ShoalError(_reason(_json(answer.read())) or f"{url} answers with {answer.status_code}")
                yield from answer.iter_lines()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ShoalError(f"{url} does not answer like a deployment of Shoal: {error}") from error


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _reason(content: Any) -> str:
    error = content.get("error") if isinstance(content, dict) else None
    return str(error.get("message", "")) if isinstance(error, dict) else ""
