"""A Ray cluster of this machine whose autoscaler adds and removes nodes: Ray's fake multi-node provider.

    with ray_autoscaler(tmp_path, nodes=2) as cluster:
        ...  # `baton ray up --address` cluster.address

Each node is a raylet with its own resources; all share the machine. It does as `AutoscalingCluster` of Ray
2.60, as that reads a file which Ray's wheel lacks, ends every Ray of the machine, and fixes its port.
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

import psutil

from harness.support import CALL_S, PYTHON, ROOT, eventually, free_port, listening

OBJECT_STORE_BYTES = 80_000_000
_COMMANDS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
IDLE_S = 3.0  # after which an unused node goes
# Without RAY_AUTH_MODE Ray would write a token into the home folder.
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_FAKE_CLUSTER": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}


@dataclass(frozen=True)
class RayCluster:
    address: str
    folder: Path  # Ray's own, with its logs
    environment: dict[str, str]  # for processes that connect to it


@contextmanager
def ray_autoscaler(folder: Path, *, nodes: int, head_cpus: int = 0) -> Iterator[RayCluster]:
    """Run a head, to which Ray adds up to `nodes` nodes of one CPU as it needs them."""
    port = free_port()
    # Sockets below Ray's folder need short names.
    ray_folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    cluster = RayCluster(f"127.0.0.1:{port}", ray_folder, {**os.environ, **ENVIRONMENT})
    config = folder / "autoscaler.json"
    config.write_text(json.dumps(_config(cluster.address, nodes, head_cpus)))
    command = [str(PYTHON.with_name("ray")), "start", "--head", "--block", f"--port={port}"]
    command += [f"--autoscaling-config={config}", f"--num-cpus={head_cpus}", f"--temp-dir={ray_folder}"]
    command += ["--include-dashboard=false", f"--object-store-memory={OBJECT_STORE_BYTES}"]
    # Any port for the rest: the default range of workers might contain ours.
    command += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    command += [f"--ray-client-server-port={free_port()}", "--disable-usage-stats"]
    with (folder / "ray.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=cluster.environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
    try:

        def answers() -> bool:
            assert process.poll() is None, (folder / "ray.log").read_text()
            return listening(port)

        eventually(answers, 60, "Ray's head answers")
        yield cluster
    finally:
        _end(process.pid, ray_folder)
        process.wait(CALL_S)
        shutil.rmtree(ray_folder, ignore_errors=True)


def _config(address: str, nodes: int, head_cpus: int) -> dict[str, object]:
    """Return the autoscaler's configuration, with the keys of Ray's example for its fake provider."""
    worker = {"CPU": 1, "object_store_memory": OBJECT_STORE_BYTES}
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
            "use_node_id_as_ip": True,  # all nodes have one address
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
    """Kill the head, its descendants, and nodes that outlived it, whose commands name its folder."""
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
