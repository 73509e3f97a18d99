"""`python -m bench shapes [NAME ...]`: engines of every shape hand over to each other and to plain ones.

A shape is how many engines and ranks compute a model together. Each case runs on a prefill worker, on a
decode worker and on both; the other worker is a plain engine. The same prompts are sent greedily, one at a
time and four at a time, and the answers are compared with those of one mixed worker without speculation.
Cases that are not named keep their results.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.services.config import EngineSettings
from bench.options import options
from bench.speculation_table import MAX_TOKENS, ROWS, Row, compared
from harness.netns import Host, Network
from harness.speculation.fleets import MODEL_NAME, Deployment, measure
from harness.stats import save, saved
from harness.workers import Worker, fleet, router, wait_for

STEP = 32  # tokens, so that most prompts take two steps
WHOLE = {"mtp-deepseek-v3"}  # MLA cannot prefill a prompt in chunks on CPUs
PLAIN: dict[str, Any] = {}
SHAPES: dict[str, dict[str, Any]] = {  # settings of `engine`
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
    "DP 2 + EP": {"data_parallel_size": 2, "expert_parallel": True},
    "DP 2 x TP 2 + EP": {"data_parallel_size": 2, "tensor_parallel_size": 2, "expert_parallel": True},
    "TP 2 on two machines": {"tensor_parallel_size": 2, "nodes": 2},
}
SIDES = {
    "prefill": (True, False),
    "decode": (False, True),
    "both": (True, True),
}  # prefill, decode


@dataclass(frozen=True)
class Case:
    row: Row
    shape: str
    drafts: bool = True

    @property
    def name(self) -> str:
        return f"{self.row.name}, {self.shape}"

    def engine(self) -> dict[str, Any]:
        engine = {**self.row.engine(), "served_model_name": MODEL_NAME}
        return engine if self.row.architecture in WHOLE else engine | {"max_num_batched_tokens": STEP}


_BY_NAME = {row.name: row for row in ROWS}
_LOOKUP = {"num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
_TP = [
    *("EAGLE", "MTP, demo model", "MTP, GLM-4-MoE", "MTP, DeepSeek-V3", "n-gram"),
    *("n-gram, Gemma 3 (windows)", "EAGLE-3, gpt-oss (windows)"),
]
CASES = [
    *(Case(_BY_NAME[name], "TP 2") for name in _TP),
    # vLLM's model runner V1, which a CPU needs, cannot draft in a pipeline.
    Case(Row("Qwen2", "eagle"), "PP 2", drafts=False),
    Case(Row("DeepSeek-V3", "mtp-deepseek-v3"), "PP 2", drafts=False),
    Case(Row("Gemma 3 (windows)", "ngram-gemma3"), "PP 2", drafts=False),
    *(Case(_BY_NAME[name], "DP 2 + EP") for name in ("MTP, GLM-4-MoE", "MTP, DeepSeek-V3")),
    Case(_BY_NAME["EAGLE-3, gpt-oss (windows)"], "DP 2 + EP"),
    Case(Row("n-gram, GLM-4-MoE", "mtp-glm4-moe", {"method": "ngram", **_LOOKUP}), "DP 2 + EP"),
    Case(
        Row("suffix, GLM-4-MoE", "mtp-glm4-moe", {"method": "suffix", "num_speculative_tokens": 4}),
        "DP 2 + EP",
    ),
    *(Case(_BY_NAME[name], "DP 2 x TP 2 + EP") for name in ("MTP, GLM-4-MoE", "MTP, DeepSeek-V3")),
    *(Case(_BY_NAME[name], "TP 2 on two machines") for name in ("EAGLE", "MTP, DeepSeek-V3")),
]


@contextmanager
def deployed(
    case: Case, shapes: dict[str, dict[str, Any]], folder: Path
) -> Iterator[tuple[Deployment, list[Worker]]]:
    """Start a place of each role with its shape. Yield the deployment and the workers of all places.

    A single mixed worker does not draft. Several machines are network namespaces of this one; meanwhile
    this thread opens its sockets in the first.
    """
    engine = case.engine()
    scheduler = {"worker_lease_s": 25.0, "idle_decode_tokens": 0}
    if case.drafts and "mixed" not in shapes:
        engine["speculative_config"] = case.row.spec()
    folder.mkdir()
    cores = itertools.cycle(map(str, sorted(os.sched_getaffinity(0))))
    with ExitStack() as stack:
        hosts = stack.enter_context(_hosts(max(shape.get("nodes", 1) for shape in shapes.values()), folder))
        workers = stack.enter_context(fleet(Path(engine["model"]), folder, scheduler, hosts[0]))
        own_scheduler = {**scheduler, "address": workers.scheduler}
        url = stack.enter_context(router(folder, engine, own_scheduler, hosts[0]))
        limbs = []
        for role, shape in shapes.items():
            asked = EngineSettings(**engine | shape)
            for rank in range(asked.members):
                own: dict[str, Any] = {"gang": f"{role}/{rank}"} if asked.members > 1 else {}
                one = workers.start(
                    role,
                    host=hosts[rank // asked.local_members],
                    engine={**engine, **shape},
                    scheduler=scheduler,
                    handoff={"staging_mib": 64},
                    worker=own if asked.local_ranks > 1 else own | {"cpu": next(cores)},
                    security={"insecure": len(hosts) > 1, "plain_ranks": asked.nodes > 1},
                )
                limbs += [one] if rank % asked.spread else []
        wait_for(workers.workers, url)
        heads = [worker for worker in workers.workers if worker not in limbs]
        yield Deployment(url, [worker.metrics.removesuffix("/metrics") for worker in heads]), heads


@contextmanager
def _hosts(number: int, folder: Path) -> Iterator[list[Host | None]]:
    """Make hosts. A single host is this machine itself."""
    if number == 1:
        yield [None]
        return
    with Network(folder / "hosts") as network:
        yield [network.host(f"host-{each}", shm_mib=512) for each in range(number)]


def measured(case: Case, sides: Sequence[str], folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure a case with its shape on each side; yield each side's cell."""
    with deployed(case, {"mixed": PLAIN}, folder / "mixed") as (one, _):
        expected = measure(one, case.row.prompts(), MAX_TOKENS)
    for side in sides:
        shapes = [SHAPES[case.shape] if shaped else PLAIN for shaped in SIDES[side]]
        roles = dict(zip(("prefill", "decode"), shapes, strict=True))
        with deployed(case, roles, folder / side) as (one, workers):
            cell = compared(measure(one, case.row.prompts(), MAX_TOKENS), expected)
            cell["by_worker"] = _handed(workers)
        print(f"{case.name:<40} {side:<8} {cell}", flush=True)
        yield side, cell


def _handed(workers: Sequence[Worker]) -> dict[str, int]:
    names = {"prefill": "saved", "decode": "loaded"}
    return {
        worker.name: int(worker.figure(f"baton_worker_handoffs_{names[worker.name.split('-')[0]]}_total"))
        for worker in workers
    }


def main(arguments: list[str]) -> None:
    sides = (list(SIDES), "which workers have the shape", list(SIDES))
    given = options(__doc__, arguments, "cases to measure", sides=sides)
    cases = {case.name: case for case in CASES}
    if unknown := sorted(set(given.names) - set(cases)):
        raise SystemExit(f"no case {'; '.join(unknown)}; cases: {'; '.join(cases)}")
    found = saved("shapes").get("cases", {})
    for name in given.names or cases:
        with tempfile.TemporaryDirectory() as folder:
            for side, cell in measured(cases[name], given.sides, Path(folder)):
                found.setdefault(name, {})[side] = cell
                save("shapes", {"cases": found})
