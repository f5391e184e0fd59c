"""The HTTP client of the commands: finds a running deployment, names a key to it, and turns failures into errors."""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.wire.errors import ShoalError
from orchestrator.supervisor.run_dir import live_runs

ADMIN_KEY_VARIABLE = "SHOAL_ADMIN_API_KEY"
API_KEY_VARIABLE = "SHOAL_API_KEY"

_CONNECT_S = 10.0


def add_address(
    parser: argparse.ArgumentParser,
    key_flag: str = "--admin-api-key",
    key_help: str = "the admin key; default: SHOAL_ADMIN_API_KEY",
) -> None:
    """Add the options that name a deployment and the key for it."""
    parser.add_argument("--url", help="base URL of the deployment, e.g. http://127.0.0.1:8000")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="where to look for deployments of this machine")
    parser.add_argument(key_flag, dest="key", metavar="KEY", help=key_help)


class DeploymentClient:
    """Calls one deployment. url: its base, without a slash at the end."""

    def __init__(self, url: str | None, run_dir: Path | None, key: str | None, environment: Mapping[str, str]) -> None:
        """Find it: at ``url``, else on this machine.

        key: the one to name; None takes the environment's admin key, or its first API key.

        Raises:
            ShoalError: there is none, or more than one.
        """
        self.url = (url or _find_url(run_dir)).rstrip("/")
        key = key or _key_of(environment)
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    def call(self, method: str, path: str, timeout_s: float, body: Any = None) -> Any:
        """Send one request and return the JSON of its answer.

        Raises:
            ShoalError: no answer, an error answer (with its message), or not an answer of Shoal.
        """
        import httpx  # takes longer to import than --help runs

        url = f"{self.url}{path}"
        try:
            answer = httpx.request(method, url, headers=self._headers, json=body, timeout=timeout_s, trust_env=False)
            content = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise _no_answer(url, error) from error
        if answer.is_error:
            raise _refusal(url, answer.status_code, content)
        return content

    def stream_lines(self, path: str) -> Iterator[str]:
        """Yield the lines of an answer that does not end by itself.

        Raises:
            ShoalError: no answer, or an error answer.
        """
        import httpx

        url = f"{self.url}{path}"
        timeout = httpx.Timeout(_CONNECT_S, read=None)
        try:
            with httpx.stream("GET", url, headers=self._headers, timeout=timeout, trust_env=False) as answer:
                if answer.is_error:
                    raise _refusal(url, answer.status_code, _json(answer.read()))
                yield from answer.iter_lines()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _no_answer(url, error) from error


def _find_url(run_dir: Path | None) -> str:
    runs = list(live_runs(run_dir))
    if not runs:
        raise ShoalError("no deployment is ready on this machine; start one with shoal serve, or give --url")
    if len(runs) > 1:
        urls = ", ".join(run.url for run in runs)
        raise ShoalError(f"{len(runs)} deployments run on this machine: {urls}; choose one with --url")
    return runs[0].url


def _key_of(environment: Mapping[str, str]) -> str | None:
    return environment.get(ADMIN_KEY_VARIABLE) or environment.get(API_KEY_VARIABLE, "").split(",")[0] or None


def _no_answer(url: str, error: Exception) -> ShoalError:
    return ShoalError(f"{url} does not answer like a deployment of Shoal: {error}")


def _refusal(url: str, status: int, content: Any) -> ShoalError:
    error = content.get("error") if isinstance(content, dict) else None
    message = str(error.get("message", "")) if isinstance(error, dict) else ""
    return ShoalError(message or f"{url} answers with status {status}")


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None
