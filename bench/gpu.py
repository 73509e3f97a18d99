"""Measure handoffs on a GPU without an engine: saves, loads, and how much they slow an engine's steps.

    python -m bench gpu                  everything, in some minutes
    python -m bench gpu --device cpu --layers 2 --tokens 512 --width 256 --skip-kernels      to try it

Runs the kernels first (bench/kernels.py), each checked against its CPU form. Then it uses the KV cache of an
8B model, in blocks of 16 tokens, with the product's own classes: staging, saver, landing.

    copy      between pinned memory and the device, one copy at a time: the upper bound
    save      pack, copy and digest a prompt's blocks until the last record is complete in staging; and the
              engine thread's share of that
    load      copy the same records back into other blocks and check their digests
    steps     matrix products on the engine's stream, as long as a decode step: alone, with saves, with
              loads, with both, alternating

Needs torch, triton, numpy, numba, xxhash and protobuf, but not vLLM. Writes bench/results/gpu-DEVICE.json.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from baton.handoff import digests
from baton.handoff.groups import Part
from baton.handoff.memory import segments
from baton.handoff.memory.arena import Arena
from baton.handoff.memory.blocks import block_cache
from baton.handoff.memory.cache import BlockCache
from baton.handoff.memory.views import SaveView
from baton.handoff.save.saver import SaveJob, Saver
from baton.handoff.save.staging import Staging
from bench import kernels
from bench.options import options
from harness.stats import median, percentile, save

BLOCK, KV_HEADS, HEAD = 16, 8, 128
SPREAD = 3  # size of the cache, in prompts
# Prompts that fit in staging: one being loaded, one being saved, and the previous one, whose room is freed
# shortly after its last record is complete.
ROOMS = 3
ROUNDS = 5
STEPS = 50  # per arm, over all rounds
STEP_S = 0.02  # a decode step of a large model
LEASE_S = 60.0
WAIT_S = 60.0
MIB = 1 << 20


class Site:
    """A cache on the device, staging in host memory, and a prompt's blocks in the cache."""

    def __init__(self, device: str, layers: int, tokens: int) -> None:
        self.on = torch.device(device)
        count = tokens // BLOCK
        self.num_blocks = SPREAD * count
        shape = (self.num_blocks, KV_HEADS, BLOCK, 2 * HEAD)
        draw = torch.Generator(self.on).manual_seed(0)
        self.tensors = tensors = {
            f"layers.{number}": torch.randn(shape, generator=draw, device=self.on).bfloat16()
            for number in range(layers)
        }
        self.cache: BlockCache = block_cache(
            tensors, self.num_blocks, row_widths=dict.fromkeys(tensors, HEAD)
        )
        ids = np.random.default_rng(0).permutation(np.arange(1, self.num_blocks))
        self.parts = (Part(0, 0, tuple(ids[:count].tolist())),)
        self.others = (Part(0, 0, tuple(ids[count : 2 * count].tolist())),)
        self.bytes = count * self.cache.record_bytes
        arena = Arena(ROOMS * self.bytes + 64 * MIB, self.cache.record_bytes, pin=self.cache.pin)
        self.staging = Staging(arena, LEASE_S)
        self.saver = Saver(self.cache, self.staging, [], rank=0, address="", chunk_bytes=MIB)
        self._number = 0
        self._attached: segments.Attached | None = None

    def save(self) -> str:
        """Queue a save of the prompt, as the engine thread does after a step. Return its name."""
        self._number += 1
        name = f"r{self._number}"
        saved = self.saver.save(SaveJob(name, 1, self.parts))
        if saved is None or saved.problem is not None:
            raise RuntimeError(f"the save failed: {saved and saved.problem}")
        return name

    def wait(self, name: str) -> None:
        first, stop = 0, len(self.parts[0].block_ids)
        with self.staging.opened(name, 1) as entry:
            while first < stop:
                first = entry.view.wait(first, stop, "KV", lambda: None)

    def load(self, name: str) -> float:
        """Load a save into other blocks, mapped as by another process. Return the seconds it took.

        Raises DigestMismatch.
        """
        part, began = self.others[0], time.perf_counter()
        chunk = max(1, (self.cache.load_bytes or 4 * MIB) // self.cache.record_bytes)
        with self.staging.opened(name, 1) as entry:
            place = entry.place
            if self._attached is None:
                self._attached = segments.attach(place.segment)
            view = SaveView(self._attached.data, place.offset, place.record_bytes, place.runs)
            landing = self.cache.landing(name, digests.seed(name, 1), self.cache.mark())
            try:
                for first, last in view.pieces(0, len(part.block_ids), chunk):
                    if self.cache.device is not None:
                        self._attached.pin(self.cache.device, sum(view.records_of(first, last)))
                    piece = part.within(first, last)
                    landing.take(piece, view.records(first, last), view.digests(first, last))
                landing.finish()
            finally:
                landing.close()
        return time.perf_counter() - began

    def release(self, name: str) -> None:
        self.staging.release(name, 1)

    def close(self) -> None:
        self.cache.close()
        self.staging.close()


class Engine:
    """Steps of fixed work on the device's current stream, about `STEP_S` long."""

    def __init__(self, on: torch.device, width: int) -> None:
        self._on = on
        self._left = torch.randn(width, width, device=on).bfloat16()
        self._right = torch.randn(width, width, device=on).bfloat16()
        self._times = 1
        self.step()  # initializes the libraries
        self._times = max(1, round(STEP_S / max(self.step(), 1e-6)))

    def step(self) -> float:
        """Run one step and return its seconds."""
        began = time.perf_counter()
        for _ in range(self._times):
            torch.mm(self._left, self._right)
        if self._on.type == "cuda":
            torch.cuda.current_stream(self._on).synchronize()
        return time.perf_counter() - began


def copies(on: torch.device, size: int) -> dict[str, float]:
    """Return GB/s of one large copy between pinned host memory and the device, each way."""
    device = torch.empty(size, dtype=torch.uint8, device=on)
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=on.type == "cuda")

    def one(target: torch.Tensor, source: torch.Tensor) -> float:
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if on.type == "cuda":
            torch.cuda.synchronize(on)
        return size / (time.perf_counter() - began) / 1e9

    for _ in range(2):
        one(host, device), one(device, host)
    return {
        "to_host_gb_s": round(median([one(host, device) for _ in range(ROUNDS)]), 2),
        "to_device_gb_s": round(median([one(device, host) for _ in range(ROUNDS)]), 2),
    }


def handoffs(site: Site) -> dict[str, Any]:
    """Time saves and loads alone, after checking that the loaded bytes equal the saved ones."""
    name = site.save()
    site.wait(name)
    site.load(name)
    _compare(site)
    site.release(name)
    queued, whole, loaded = [], [], []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        name = site.save()
        queued.append(time.perf_counter() - began)
        site.wait(name)
        whole.append(time.perf_counter() - began)
        loaded.append(site.load(name))
        site.release(name)
    return {
        "mib": round(site.bytes / MIB),
        "blocks": len(site.parts[0].block_ids),
        "save_ms": round(1e3 * median(whole), 2),
        "save_gb_s": round(site.bytes / median(whole) / 1e9, 2),
        "engine_thread_ms": round(1e3 * median(queued), 3),
        "load_ms": round(1e3 * median(loaded), 2),
        "load_gb_s": round(site.bytes / median(loaded) / 1e9, 2),
    }


def _compare(site: Site) -> None:
    """Check that the loaded blocks equal the saved ones. Raises AssertionError."""
    saved, loaded = (list(part.block_ids) for part in (site.parts[0], site.others[0]))
    if not all(torch.equal(layer[saved], layer[loaded]) for layer in site.tensors.values()):
        raise AssertionError("the loaded blocks differ from the saved ones")


def beside(site: Site, engine: Engine) -> dict[str, Any]:
    """Time the engine's steps alone and during handoffs, alternating. Saves begin on the engine's thread."""
    kept = site.save()  # it is loaded repeatedly
    site.wait(kept)

    def with_save() -> float:
        # The thread that steps queues the save, and the next step starts before it ends, as in an engine.
        began = time.perf_counter()
        name = site.save()
        engine.step()
        took = time.perf_counter() - began
        site.wait(name)
        site.release(name)
        return took

    arms: dict[str, tuple[Callable[[], float], bool]] = {
        "alone": (engine.step, False),
        "beside saves": (with_save, False),
        "beside loads": (engine.step, True),
        "beside both": (with_save, True),
    }
    took: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(ROUNDS):
        for arm, (step, loads) in arms.items():
            with _repeating(lambda: site.load(kept)) if loads else nullcontext():
                took[arm] += [step() for _ in range(STEPS // ROUNDS)]
    site.release(kept)
    alone = median(took["alone"])
    return {
        arm: {
            "p50_ms": round(1e3 * median(steps), 3),
            "p99_ms": round(1e3 * percentile(steps, 0.99), 3),
            "times_alone": round(median(steps) / alone, 3),
        }
        for arm, steps in took.items()
    }


@contextmanager
def _repeating(work: Callable[[], object]) -> Iterator[None]:
    """Repeat `work` on another thread during the block. Raises its error."""
    stop, failed = threading.Event(), []

    def run() -> None:
        try:
            while not stop.is_set():
                work()
        except Exception as error:  # noqa: BLE001 (raised below)
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(WAIT_S)
    if failed:
        raise failed[0]


def main(arguments: list[str]) -> None:
    given = options(
        __doc__,
        arguments,
        device=("cuda" if torch.cuda.is_available() else "cpu", None, ["cuda", "cpu"]),
        layers=(32, "of the model"),
        tokens=([1_024, 8_192], "of the prompts"),
        width=(8_192, "of the matrices of the engine's steps"),
        skip_kernels=(False, "measure the handoff alone"),
    )
    if not given.skip_kernels:
        kernels.main(["--device", given.device])
    on = torch.device(given.device)
    name = torch.cuda.get_device_name() if on.type == "cuda" else "CPU"
    found: dict[str, Any] = {"device": name, "layers": given.layers, "prompts": {}}
    engine = Engine(on, given.width)
    for tokens in given.tokens:
        site = Site(given.device, given.layers, tokens)
        try:
            result = {"copy": copies(on, site.bytes), **handoffs(site), "steps": beside(site, engine)}
        finally:
            site.close()
        found["prompts"][str(tokens)] = result
        print(f"{tokens} tokens on {name}: {result}", flush=True)
    print(f"written to {save(f'gpu-{given.device}', found)}")
