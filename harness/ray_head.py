"""Run Ray on this machine, apart from other Ray clusters: a single node, or a head with an autoscaler.

    with ray_autoscaler(tmp_path, nodes=2) as cluster:
        ...  # `baton ray up --address` cluster.address

The autoscaler uses Ray's fake multi-node provider: each node is a raylet with its own resources on this
machine. Ray 2.60's own `AutoscalingCluster` reads a file that its wheel lacks, stops every Ray on the machine
and uses a fixed port.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness import ray_forks
from harness.support import CALL_S, PYTHON, ROOT, free_port, listening, running

# Without RAY_AUTH_MODE, Ray would write a token into the home folder.
RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_raylet_start_wait_time_s": "240",  # a busy machine takes longer than the 30 s that are the default
    "RAY_worker_niceness": "0",
    # Leave out what no test needs.
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",  # none
}
STORE_BYTES = 80_000_000  # about the minimum
# Leave out processes that no test needs.
LESS = (f"--object-store-memory={STORE_BYTES}", "--include-log-monitor=false")
LESS_HEAD = ("--include-dashboard=false", "--no-monitor")
_COMMANDS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
IDLE_S = 3.0  # the autoscaler removes a node that is unused for this long
ENVIRONMENT = {
    **RAY,
    "RAY_FAKE_CLUSTER": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}


@dataclass(frozen=True)
class RayHead:
    process: subprocess.Popen[bytes]
    address: str  # host:port
    environment: dict[str, str]  # set for commands that use it
    folder: Path

    def parts(self) -> dict[str, psutil.Process]:
        """Return Baton's running parts by name."""
        return ray_forks.parts(self.folder)


@contextmanager
def ray_folder() -> Iterator[Path]:
    """Yield a folder for Ray's files with a short path, as sockets need."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_head(*options: str) -> Iterator[RayHead]:
    """Run `ray start --head` with further options during the block. Its nodes fork Baton's parts."""
    with ray_folder() as folder:
        command = [str(PYTHON.with_name("ray")), "start", "--head", "--block", "--port=0"]
        command += [*LESS, *LESS_HEAD, f"--temp-dir={folder}", "--node-ip-address=127.0.0.1", *options]
        whole = {**os.environ, **RAY, "RAY_TMPDIR": str(folder), **ray_forks.environment(folder)}
        address = folder / "ray_current_cluster"

        def started() -> bool:
            return address.is_file() and ":" in address.read_text()

        with running(command, started, 30, folder / "start.log", env=whole, cwd=ROOT) as process:
            yield RayHead(process, address.read_text().strip(), whole, folder)


@dataclass(frozen=True)
class RayCluster:
    address: str
    folder: Path  # Ray's files and logs
    environment: dict[str, str]  # set for processes that connect to it


@contextmanager
def ray_autoscaler(folder: Path, *, nodes: int, head_cpus: int = 0) -> Iterator[RayCluster]:
    """Run a head and an autoscaler that adds up to `nodes` nodes with one CPU each."""
    port = free_port()
    config = folder / "autoscaler.json"
    config.write_text(json.dumps(_config(f"127.0.0.1:{port}", nodes, head_cpus)))
    command = [str(PYTHON.with_name("ray")), "start", "--head", "--block", f"--port={port}"]
    command += [f"--autoscaling-config={config}", f"--num-cpus={head_cpus}"]
    command += ["--include-dashboard=false", *LESS]
    # Random ports for the rest: the default range of worker ports may contain ours.
    command += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    command += [f"--ray-client-server-port={free_port()}", "--disable-usage-stats"]
    with ray_folder() as own:
        cluster = RayCluster(f"127.0.0.1:{port}", own, {**os.environ, **ENVIRONMENT})
        command.append(f"--temp-dir={own}")
        options: dict[str, Any] = {"env": cluster.environment, "cwd": ROOT}
        with running(command, lambda: listening(port), 60, folder / "ray.log", **options) as process:
            try:
                yield cluster
            finally:
                _end(process.pid, own)


def _config(address: str, nodes: int, head_cpus: int) -> dict[str, object]:
    """Return the autoscaler's configuration, after Ray's example for its fake provider."""
    worker = {"CPU": 1, "object_store_memory": STORE_BYTES}
    return {
        "cluster_name": "fake",
        "max_workers": nodes,
        "upscaling_speed": 100,
        "idle_timeout_minutes": IDLE_S / 60,
        "docker": {},
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "launch_multiple": True,
            "use_node_id_as_ip": True,  # all nodes share one address
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": head_cpus}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": worker, "node_config": {}, "min_workers": 0, "max_workers": nodes},
        },
        "head_node_type": "ray.head.default",
        "file_mounts_sync_continuously": False,
        **{key: {} for key in ("auth", "file_mounts")},
        **{key: [] for key in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        **{f"{key}_commands": [] for key in _COMMANDS},
    }


def _end(pid: int, ray_folder: Path) -> None:
    """Kill the head, its descendants, and remaining nodes, whose command lines contain its folder."""
    found = []
    with suppress(psutil.NoSuchProcess):
        head = psutil.Process(pid)
        found = [head, *head.children(recursive=True)]
    for one in psutil.process_iter(["cmdline"]):
        if any(str(ray_folder) in word for word in one.info["cmdline"] or ()):
            found.append(one)
    for one in found:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(found, CALL_S)
