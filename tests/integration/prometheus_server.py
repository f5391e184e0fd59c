"""A real deployment and a real Prometheus that scrapes it, as processes of a test."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

DEADLINE_S = 60.0

_SCRAPE = """
global: {{scrape_interval: 500ms, scrape_timeout: 400ms}}
scrape_configs: [{{job_name: shoal, static_configs: [{{targets: ["{target}"]}}]}}]
"""


def eventually(condition: Callable[[], T]) -> T:
    """Return the condition's value as soon as it is true; a refused connection counts as false."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            if value := condition():
                return value
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s"
        threading.Event().wait(0.05)


def get(url: str, body: Any = None) -> bytes:
    """Return the body of a GET, or of a POST of JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return bytes(answer.read())


@contextlib.contextmanager
def deployment(num_ranks: int) -> Iterator[str]:
    """Serve the sim engine with ``shoal serve`` and local processes; yield the base URL once it is ready."""
    shoal = str(Path(sys.executable).with_name("shoal"))
    command = [shoal, "serve", "--engine=sim", "--executor=local", f"--data-parallel-size={num_ranks}", "--port=0"]
    with subprocess.Popen(
        [*command, "--sim-step-ms=2", "--log-level=error"], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            announced = (re.search(r"API +(http://\S+)/v1$", line.rstrip()) for line in process.stdout)
            yield next(found[1] for found in announced if found)
        finally:
            _stop(process)


@contextlib.contextmanager
def prometheus(target_url: str) -> Iterator["Prometheus"]:
    """Scrape that deployment twice a second with the Debian package's Prometheus."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as chosen:
        config = Path(folder) / "prometheus.yml"
        config.write_text(_SCRAPE.format(target=target_url.removeprefix("http://")))
        address = f"127.0.0.1:{chosen.getsockname()[1]}"
        chosen.close()
        options = [f"--config.file={config}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
        with subprocess.Popen(["prometheus", "--log.level=error", *options]) as process:
            try:
                yield Prometheus(f"http://{address}")
            finally:
                _stop(process)


class Prometheus:
    """The query API of one Prometheus server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return (labels, value) of an instant query."""
        answer = json.loads(get(f"{self._url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"))
        return [(series["metric"], float(series["value"][1])) for series in answer["data"]["result"]]


def _stop(process: "subprocess.Popen[Any]") -> None:
    process.terminate()
    try:
        process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
