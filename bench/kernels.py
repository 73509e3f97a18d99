"""Measure kernels against the device's copy bandwidth, plain torch and vLLM's kernels.

    python -m bench kernels [--only verify] [--device cuda | cpu]

Each operation is checked first and not measured if the check fails. Figures are medians with cold caches: a
buffer larger than the caches is written before each run. On CUDA, events time a run that the host submits
while that buffer is still being written. Needs torch and triton, and vLLM's files for comparisons
(docs/kernels.md). Writes bench/results/kernels-DEVICE.json; operations that were not chosen keep their
figures.
"""

from __future__ import annotations

import importlib
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.options import options
from harness.stats import median, save, saved

OPERATIONS = ["kv_pack", "ngram_match", "verify"]
MIB = 1 << 20
BUFFER = {"cuda": 512 * MIB, "cpu": 64 * MIB}  # larger than an H200's L2 of 50 MiB and most CPU caches
RUNS = {"cuda": 50, "cpu": 7}


@dataclass(frozen=True)
class Case:
    """A shape of an operation, with functions that are bound to inputs.

    `run` and each of `against` can be called repeatedly: they do the same work each time, never wait on the
    host, and leave their inputs unchanged.
    """

    name: str  # unique among the operation's cases
    shape: dict[str, int | str]
    bytes_moved: int  # the minimum for any implementation
    run: Callable[[], object]
    against: Mapping[str, Callable[[], object]] = field(default_factory=dict)


class Device:
    """A device and its copy bandwidth."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.runs = RUNS[kind]
        self._buffer = torch.zeros(BUFFER[kind], dtype=torch.uint8, device=kind)
        self._other = torch.zeros_like(self._buffer)
        self.name = torch.cuda.get_device_name() if kind == "cuda" else platform.processor() or "CPU"
        copied = self.time(lambda: self._other.copy_(self._buffer))
        self.copy_gb_s = 2 * len(self._buffer) / copied / 1e9

    def time(self, run: Callable[[], object]) -> float:
        """Return the median seconds of a run."""
        for _ in range(3):
            run()
        return median([self._once(run) for _ in range(self.runs)])

    def _once(self, run: Callable[[], object]) -> float:
        self._buffer.fill_(1)
        if self.kind == "cpu":
            began = time.process_time()  # ignores other work on the machine
            run()
            return time.process_time() - began
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def measure(device: Device, case: Case) -> dict[str, Any]:
    ours = device.time(case.run)
    gb_s = case.bytes_moved / ours / 1e9
    against = {name: device.time(run) for name, run in case.against.items()}
    return {
        "case": case.name,
        "shape": case.shape,
        "us": round(1e6 * ours, 2),
        "bytes": case.bytes_moved,
        "gb_s": round(gb_s, 2),
        "of_copy": round(gb_s / device.copy_gb_s, 3),
        "against": {
            name: {"us": round(1e6 * one, 2), "ratio": round(one / ours, 2)} for name, one in against.items()
        },
    }


def line(row: dict[str, Any]) -> str:
    others = "; ".join(
        f"{name} {one['us']:.1f} us ({one['ratio']:.2f} x)" for name, one in row["against"].items()
    )
    return f"{row['us']:>10.1f}  {row['gb_s']:>8.1f}  {row['of_copy']:>7.1%}  {row['case']:<44}  {others}"


def main(arguments: list[str]) -> None:
    given = options(
        __doc__,
        arguments,
        only=([str], "operations to measure", OPERATIONS),
        device=("cuda" if torch.cuda.is_available() else "cpu", None, list(RUNS)),
    )
    modules = {name: importlib.import_module(f"bench.kernels_{name}") for name in given.only or OPERATIONS}
    wrong = []
    device = Device(given.device)
    found: dict[str, Any] = saved(f"kernels-{given.device}").get("operations", {})
    for name, module in modules.items():
        try:
            module.check(given.device)
        except Exception as error:  # noqa: BLE001 (reported; the other operations continue)
            wrong.append(name)
            print(f"{name} is wrong on {given.device} and not measured: {error!r}", file=sys.stderr)
            continue
        print(f"{name} on {device.name}, which copies {device.copy_gb_s:.0f} GB/s")
        print(f"{'us':>10}  {'GB/s':>8}  {'of copy':>7}  {'case':<44}  against")
        rows = []
        for case in module.cases(given.device):
            rows.append(measure(device, case))
            print(line(rows[-1]), flush=True)
        found[name] = {"device": device.name, "copy_gb_s": round(device.copy_gb_s, 1), "cases": rows}
        print(f"written to {save(f'kernels-{given.device}', {'operations': found})}", flush=True)
    if wrong:
        sys.exit(f"wrong on {given.device}: {', '.join(wrong)}")
