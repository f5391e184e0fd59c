"""A real Prometheus server, from its Debian package, as a process of a test."""

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.integration.serving import eventually

_STOP_TIMEOUT_S = 60.0

_SCRAPE = """
global: {{scrape_interval: 500ms, scrape_timeout: 400ms}}
scrape_configs: [{{job_name: shoal, static_configs: [{{targets: ["{target}"]}}]}}]
"""


class Prometheus:
    """The query API of one Prometheus server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return (labels, value) of an instant query; nothing while the server starts."""
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"{self._url}/api/v1/query", params={"query": expression})
            if answer.status_code == httpx.codes.OK:
                return [(series["metric"], float(series["value"][1])) for series in answer.json()["data"]["result"]]
        return []

    def wait_scraped(self) -> None:
        """Wait for a scrape that began after this call: what has been counted before is then stored."""
        now = time.time()
        eventually(lambda: any(at > now for _, at in self.query("timestamp(up)")))


@contextlib.contextmanager
def prometheus(target_url: str) -> Iterator[Prometheus]:
    """Scrape that deployment twice a second."""
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        address = f"127.0.0.1:{chosen.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "prometheus.yml"
        config.write_text(_SCRAPE.format(target=target_url.removeprefix("http://")))
        options = [f"--config.file={config}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
        process = subprocess.Popen(["prometheus", "--log.level=error", *options])
        try:
            yield Prometheus(f"http://{address}")
        finally:
            process.terminate()
            process.wait(_STOP_TIMEOUT_S)
