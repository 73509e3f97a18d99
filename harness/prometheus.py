"""Debian's Prometheus and Alertmanager, with the files of deploy/prometheus."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from harness.support import ROOT, free_port, running

FILES = ROOT / "deploy" / "prometheus"
START_S = 20.0
ASK_S = 10.0


def why_not(*programs: str) -> str:
    """Return which of these programs are not installed, or ""."""
    missing = [one for one in programs or ("prometheus", "promtool") if not shutil.which(one)]
    return f"not installed (Debian's packages): {' and '.join(missing)}" if missing else ""


@dataclass
class Firing:
    name: str
    since: float  # when its expression was first true; time.time


@dataclass
class Prometheus:
    url: str

    def query(self, expr: str) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self._get("query", query=expr)["result"]
        return result

    def range(self, expr: str, begin: float, end: float, step_s: float = 5.0) -> list[dict[str, Any]]:
        """Return the series of a query between two times of time.time."""
        span = {"start": str(begin), "end": str(end), "step": str(step_s)}
        result: list[dict[str, Any]] = self._get("query_range", query=expr, **span)["result"]
        return result

    def firing(self) -> list[Firing]:
        return [
            Firing(
                one["labels"]["alertname"],
                datetime.fromisoformat(one["activeAt"].replace("Z", "+00:00")).timestamp(),
            )
            for one in self._get("alerts")["alerts"]
            if one["state"] == "firing"
        ]

    def targets(self) -> dict[str, str]:
        return {one["labels"]["instance"]: one["health"] for one in self._get("targets")["activeTargets"]}

    def _get(self, what: str, **arguments: str) -> dict[str, Any]:
        query = urllib.parse.urlencode(arguments)
        with urllib.request.urlopen(f"{self.url}/api/v1/{what}?{query}", timeout=ASK_S) as answer:
            data: dict[str, Any] = json.load(answer)["data"]
        return data


@contextlib.contextmanager
def prometheus(
    folder: Path, targets: Iterable[str], alertmanager: str = "", scrape_s: int = 0
) -> Iterator[Prometheus]:
    """Run Prometheus with our files, but with these http_sd URLs and this Alertmanager (host:port).

    scrape_s: the scrape interval; 0 keeps ours.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = yaml.safe_load((FILES / "prometheus.yaml").read_text())
    (scrape,) = config["scrape_configs"]
    if scrape_s:
        config["global"] |= {"scrape_interval": f"{scrape_s}s", "scrape_timeout": f"{scrape_s}s"}
    (every,) = scrape["http_sd_configs"]
    scrape["http_sd_configs"] = [{**every, "url": url} for url in targets]
    config["rule_files"] = [str(FILES / one) for one in config["rule_files"]]
    config["alerting"]["alertmanagers"] = (
        [{"static_configs": [{"targets": [alertmanager]}]}] if alertmanager else []
    )
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        *("prometheus", "--config.file", folder / "prometheus.yaml"),
        *("--storage.tsdb.path", folder / "tsdb", "--web.listen-address", f"127.0.0.1:{port}"),
    ]
    one = Prometheus(f"http://127.0.0.1:{port}")
    with running(command, lambda: _ready(one.url), START_S, folder / "prometheus.log"):
        yield one


@dataclass
class Webhook:
    """A receiver of Alertmanager's notifications."""

    url: str
    heard: list[dict[str, Any]] = field(default_factory=list)

    def names(self, status: str = "firing") -> set[str]:
        return {
            alert["labels"]["alertname"]
            for message in list(self.heard)
            for alert in message["alerts"]
            if alert["status"] == status
        }


@contextlib.contextmanager
def webhook() -> Iterator[Webhook]:
    heard: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield Webhook(f"http://127.0.0.1:{server.server_port}/", heard)
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def alertmanager(folder: Path, receiver: str) -> Iterator[str]:
    """Run Alertmanager with our file, but with a webhook's URL as receiver. Yield its host:port."""
    folder.mkdir(parents=True, exist_ok=True)
    config = yaml.safe_load((FILES / "alertmanager.yaml").read_text())
    (only,) = config["receivers"]
    only["webhook_configs"] = [{"url": receiver}]
    (folder / "alertmanager.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        *("prometheus-alertmanager", "--config.file", folder / "alertmanager.yaml"),
        *("--storage.path", folder / "alertmanager", "--cluster.listen-address", ""),
        *("--web.listen-address", f"127.0.0.1:{port}"),
    ]
    ready = partial(_ready, f"http://127.0.0.1:{port}")
    with running(command, ready, START_S, folder / "alertmanager.log"):
        yield f"127.0.0.1:{port}"


def _ready(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=1) as answer:
        return bool(answer.status == 200)
    return False
