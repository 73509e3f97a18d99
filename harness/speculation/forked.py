"""A whole deployment, run by a forked process as by `baton up`; see harness/zygote.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.handoff.memory.host import HostBlockCache
from baton.handoff.records import Bytes
from baton.kernels.kv_pack import KVTable
from baton.services.config import Settings
from baton.services.fleet import devices, supervisor


def run(fleet: dict[str, int], settings: dict[str, Any], logs: str, withhold: int) -> None:
    """Serve until a signal; no KV of the last `withhold` layers is handed over."""
    # One core a worker, aggregated or not: on a machine with other work two threads that wait for each other
    # crawl.
    devices.assign = _one_core_each
    _withhold(withhold)
    supervisor.supervise(Settings(**settings), supervisor.Fleet(**fleet), logs, _Log())


def _one_core_each(gpus: Sequence[int], named: Sequence[str] | None = None) -> list[devices.Devices]:
    del named
    cores = devices._cpus(max(len(gpus), 2))
    return cores[: len(gpus)]


class _Log:
    """The supervisor's observer: what a reader of the log waits for."""

    def begun(self, log_dir: object) -> None:
        del log_dir

    def step(self, since_start_s: float, name: str, text: str) -> None:
        print(f"[{since_start_s:5.1f} s] {name} {text}", flush=True)

    def ready(self) -> None:
        print("Ready.", flush=True)

    def ending(self, drain_s: float) -> None:
        del drain_s
        print("ending", flush=True)

    def ended(self) -> None:
        print("ended", flush=True)


def _withhold(layers: int) -> None:
    """Load zeros as the KV of the last layers, the drafter's of a model with one group, as if not carried."""
    if not layers:
        return
    scatter = HostBlockCache.scatter

    def scatter_without(
        self: HostBlockCache,
        group: int,
        records: Bytes,
        block_ids: Sequence[int],
        table: KVTable | None = None,
    ) -> None:
        records = records.copy()
        records[:, -sum(layer.block_bytes for layer in self.layers[-layers:]) :] = 0
        scatter(self, group, records, block_ids, table)

    HostBlockCache.scatter = scatter_without  # type: ignore[method-assign]
